"""One checkpoint of one pool: read, verified, applied."""
