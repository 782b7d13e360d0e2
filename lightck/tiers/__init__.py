"""Checkpoints that stay: held in their slots, or exported to files beside the pool."""
