"""Checkpoints beyond those of the training's slots: held in a slot, exported to files, or sent to a tier, which is a
folder or an object store."""
