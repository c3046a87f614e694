"""The layout of weights that vLLM loads."""
