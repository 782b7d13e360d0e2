"""What follows a checkpoint: recorded beside it, and compared after a resume."""
