"""Integrations, one file or folder for each trainer: its own way of bringing weights to the rollout engine is taken
over.

Nothing is imported here: each integration needs its trainer.
"""
