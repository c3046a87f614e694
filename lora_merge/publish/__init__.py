"""Versions of an adapter in a store: published by a trainer, followed by engines."""
