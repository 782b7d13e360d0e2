"""Public training programs under SIGKILL, run by hand: see run.py. None of their text is in this repository."""
