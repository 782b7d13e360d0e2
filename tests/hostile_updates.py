"""Values of updates as a pool would hold them, with something in them replaced: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

from lightck.state import values

SMALL = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=6) | st.just(torch.ones(2))
    | st.sampled_from(["sparse", "indexed", "fused", "cpu", "cuda", "meta"])
)  # fmt: skip
ANY = st.recursive(
    SMALL,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
PACKED = ("names", "options", "implementations", "gradients")


def paths(value: object, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from paths(one, (*before, key))


def opened(value: Any) -> Any:
    """The value, with its packed parts as values, so that something in them can be replaced."""
    steps = [{k: values.unpack(v) if k in PACKED else v for k, v in step.items()} for step in value["steps"]]
    return {**value, "steps": steps}


def closed(value: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
        return value
    steps = [
        {k: values.pack(v, path="") if k in PACKED and not isinstance(v, bytes) else v for k, v in step.items()}
        if isinstance(step, dict)
        else step
        for step in value["steps"]
    ]
    return {**value, "steps": steps}


def hostile(value: dict[str, Any], data: st.DataObject) -> Any:
    """Return the value of an update, with one or two things in it removed or replaced, also in its packed parts."""
    changed = opened(value)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(paths(changed))))
        if not path:
            return data.draw(ANY)
        inner = changed
        for key in path[:-1]:
            inner = inner[key]
        if isinstance(inner, dict) and data.draw(st.booleans()):
            del inner[path[-1]]
        else:
            inner[path[-1]] = data.draw(ANY)
    return closed(changed)
