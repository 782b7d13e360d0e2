"""The state that a checkpoint holds: tensors by name, small state as bytes, random states, optimizers and their
wrappers."""
