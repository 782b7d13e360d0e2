"""Runs a row in a process of its own: the process, its folder, and the facts about machine and code in a result."""
