"""The structures in a pool and their encoding in bytes."""
