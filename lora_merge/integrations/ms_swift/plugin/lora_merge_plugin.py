"""What swift's `--external_plugins` imports, in every process that starts a training or loads its data."""

from lora_merge.integrations.ms_swift.kinds import take_over

take_over()
