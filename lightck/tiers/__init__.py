"""Checkpoints that are held, and those that are kept beyond the pool."""
