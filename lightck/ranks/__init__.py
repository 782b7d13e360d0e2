"""Several ranks that checkpoint together: which checkpoints they have in common, and what each of them must keep."""
