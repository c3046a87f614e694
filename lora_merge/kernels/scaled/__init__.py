"""Results of 8 bits that share scales."""
