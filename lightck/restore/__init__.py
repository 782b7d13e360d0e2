"""Restore one checkpoint of one pool: read, verify and apply it."""
