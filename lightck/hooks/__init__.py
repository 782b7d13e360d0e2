"""When a checkpoint closes: torch's calls become events, and which event closes a checkpoint."""
