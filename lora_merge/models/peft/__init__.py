"""Models with PEFT's adapters, plain or under FSDP."""
