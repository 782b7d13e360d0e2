"""Which bytes a checkpoint holds."""
