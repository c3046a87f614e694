"""Models of megatron-core, with the adapters of Megatron-Bridge and ms-swift."""
