"""Benches and comparisons. Not part of what is installed; run from a checkout."""
