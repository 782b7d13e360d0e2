"""How: a closed checkpoint on its way from live tensors to the pool."""
