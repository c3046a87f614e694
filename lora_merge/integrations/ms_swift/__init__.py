"""ms-swift: `swift rlhf --external_plugins $(python -m lora_merge.integrations.ms_swift)`.

Nothing of swift's is imported here.
"""

from pathlib import Path

PLUGIN = Path(__file__).parent / "plugin" / "lora_merge_plugin.py"
"""What `--external_plugins` takes. swift puts its folder first on sys.path, so nothing else may lie there."""
