"""Checkpoints that the training does not overwrite: held in their slots, or exported to files beside the pool."""
