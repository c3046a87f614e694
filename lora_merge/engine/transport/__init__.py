"""Bytes from a rank of the trainer to a worker of an engine."""
