"""ms-swift: `swift rlhf --external_plugins $(python -m lora_merge.integrations.ms_swift)`.

Nothing of swift's is imported here.
"""

from pathlib import Path

PLUGIN = Path(__file__).parent / "plugin" / "lora_merge_plugin.py"
"""The file for `--external_plugins`. swift puts its folder first on sys.path, so nothing else may lie there."""
