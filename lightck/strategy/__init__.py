"""Strategies: which bytes a checkpoint holds."""
