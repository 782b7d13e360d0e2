"""Which models have an open session in this process."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_open: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def opened(model: nn.Module, session: Any) -> None:
    _open[model] = weakref.ref(session)


def has_open_session(model: nn.Module) -> bool:
    """Whether an open session saves this module, a part of it, or a module that it is a part of."""
    mine = set(model.modules())
    for other, ref in list(_open.items()):
        session = ref()
        if session is not None and session.is_open and (other in mine or model in set(other.modules())):
            return True
    return False
