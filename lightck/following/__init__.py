"""What follows a checkpoint in the training: it is recorded beside the checkpoint, and compared after a resume."""
