"""A row in a process of its own: how it is started, in which folder, and what a result says of machine and code."""
