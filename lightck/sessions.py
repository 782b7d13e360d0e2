"""Which models have an open session in this process."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_open: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def opened(model: nn.Module, session: Any) -> None:
    _open[model] = weakref.ref(session)


def has_open_session(model: nn.Module) -> bool:
    ref = _open.get(model)
    session = ref() if ref is not None else None
    return session is not None and bool(session.is_open)
