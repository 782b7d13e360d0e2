"""Restore one checkpoint of a pool, or of the pools of a group: read, verify and apply it."""
