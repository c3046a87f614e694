"""Training on the merged weight: forward and backward compute with the bits that are served."""

from .session import Training, train_merged

__all__ = ["Training", "train_merged"]
