"""When: torch's calls become events, and which event closes a checkpoint."""
