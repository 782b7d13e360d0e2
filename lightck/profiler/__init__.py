"""A time line of a training: ``session.trace(path)`` records it, ``lightck trace`` draws and summarizes it."""
