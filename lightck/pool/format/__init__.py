"""The structures in a pool, each with its bytes."""
