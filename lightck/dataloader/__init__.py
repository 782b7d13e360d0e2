"""The exact position of a pass over a loader."""
