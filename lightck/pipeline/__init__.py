"""How a checkpoint is written: from the live tensors of a closed step to its commit record in the pool."""
