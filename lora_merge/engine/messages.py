"""What workers answer to a push, on both ends of the wire."""

ANOTHER_SIZE = "another size: "
"""How a worker's reason begins where a tensor is refused for its size: `[256, 64] here and [256, 128] there`."""
