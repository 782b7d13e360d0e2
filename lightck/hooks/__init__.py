"""When a checkpoint closes: torch's calls are turned into events, and a rule says which event closes a checkpoint."""
