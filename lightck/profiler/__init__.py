"""A picture of a training: ``session.trace(path)`` records it, ``lightck trace`` draws and sums it up."""
