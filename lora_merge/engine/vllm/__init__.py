"""vLLM: what runs in its workers (`worker.py`, `loading/`) and in its engine core (`core.py`), and what calls its API
(`sync.py`, `control.py`)."""
