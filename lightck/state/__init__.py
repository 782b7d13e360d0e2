"""What a checkpoint holds: live tensors by name, small state as bytes, random states, optimizers and wrappers."""
