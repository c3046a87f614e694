"""The parts of the integration into verl; what users name is `lora_merge.integrations.verl`."""
