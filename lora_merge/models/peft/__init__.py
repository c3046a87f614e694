"""Models with PEFT's adapters, plain, under FSDP or ZeRO-3."""
