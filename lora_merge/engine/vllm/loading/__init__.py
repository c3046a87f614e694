"""How vLLM lays weights out when it loads them."""
