"""vLLM: what runs in its workers (plugin, worker, loader, capture) and what calls its API (control, adapter)."""
