"""What may be the key of a dict or the item of a set in the small state: what is hashed by its value, to the bottom.

Python's hash of numbers is known, so that anybody can make as many different keys of one hash as he likes, and a dict
of them takes a time that grows with the square of their number. ``collide`` finds them before a dict is made.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

NUMPY_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
NUMPY_SCALARS: dict[type, str] = {np.dtype(code).type: np.dtype(code).str for code in NUMPY_CODES}
PLAIN = frozenset((type(None), bool, float, bytes))
_SCALARS = frozenset((*PLAIN, int, str, *NUMPY_SCALARS))
_GROUPS = frozenset((tuple, frozenset))
COLLIDING_MAX = 100
INT_NBYTES_MAX = 1700
"""Python makes no text of an int of more than 4300 digits, and an error or a report may have to name one."""


def is_key(value: object) -> bool:
    """Whether a value may be a key."""
    kind = type(value)
    return kind in _SCALARS or (kind in _GROUPS and all(map(is_key, value)))  # type: ignore[call-overload]


def collide(keys: Collection[object]) -> bool:
    """Whether so many keys have a hash that another one has too that no program made them by chance."""
    return len(keys) > COLLIDING_MAX and len(keys) - len(set(map(hash, keys))) > COLLIDING_MAX
