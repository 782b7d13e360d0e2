"""Capture: what the state after step t is, found in a live training and read at the right moments."""
