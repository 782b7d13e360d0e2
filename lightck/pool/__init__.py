"""The pool: where bytes lie, how a version is committed, and how it is read back.

Nothing in this package knows torch: it deals in names, offsets, bytes and generations. docs/format.md draws every
byte; ``format`` holds the same numbers once.
"""
