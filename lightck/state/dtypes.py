"""The dtypes that can be stored, and their names. One table (``ITEM_NBYTES``) says which: a dtype that a later torch
brings is refused until it has a line there.
"""

from __future__ import annotations

import torch

from lightck.pool.format.layout import ITEM_NBYTES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_NBYTES if hasattr(torch, name)}
_NAMES = {item: name for name, item in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without ``torch.``, e.g. ``bfloat16``. ValueError for a dtype that cannot be stored."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"{dtype} cannot be stored: its values are not whole bytes; convert it first") from None


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. ValueError if there is no such dtype in this torch."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__} that can be stored") from None


def is_known(dtype: torch.dtype) -> bool:
    return dtype in _NAMES
