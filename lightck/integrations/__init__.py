"""Frameworks whose training loop is not the user's: one file each, which uses only the public names of lightck.

Each framework is imported only by its own file, so lightck needs none of them.
"""
