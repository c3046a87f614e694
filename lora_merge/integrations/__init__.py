"""One file or folder a trainer: how its own way of bringing weights to the rollout engine is taken over.

Nothing is imported here: each integration needs its trainer.
"""
