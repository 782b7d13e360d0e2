"""The pool: where bytes lie, how a checkpoint is committed, and how it is read back.

Nothing in this package imports torch: it handles names, offsets, bytes and generations. docs/format.md draws every
byte; ``format`` holds the same constants in code.
"""
