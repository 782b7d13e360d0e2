"""Small state that is packed part by part: always the bytes of ``values.pack``, and packed again only if it changed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightck.errors import StateValueError
from lightck.state import small_state, values
from lightck.state.small_state import Packed, StatePacker, join_list

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.just(values.ConstantDict(one=1, two="b")),
        st.just(np.float32(0.5)),
    ),
    max_leaves=8,
)
PARTS = st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=6)


@given(checkpoints=st.lists(PARTS, min_size=1, max_size=6))
def test_the_bytes_are_those_of_pack_at_every_checkpoint(checkpoints):
    packer = StatePacker()
    for parts in [*checkpoints, *checkpoints]:
        assert packer.pack(parts) == values.pack(parts, path="")


@given(parts=PARTS, changed=VALUES, key=st.sampled_from("abcdef"))
def test_a_value_that_changes_in_place_is_packed_again(parts, changed, key):
    packer, holder = StatePacker(), {"x": [0]}
    mutable: dict[str, Any] = {**copy.deepcopy(parts), "holder": holder}
    packer.pack(mutable)
    holder["x"][0] = changed
    mutable[key] = changed
    assert packer.pack(mutable) == values.pack(mutable, path="")


def test_equal_values_of_other_types_are_distinguished():
    packer = StatePacker()
    for value in (1, True, 1.0, 0.0, -0.0, "1", b"1", (1,), [1], None, 1):
        assert packer.pack({"value": value}) == values.pack({"value": value}, path="")


def test_packed_parts_are_stored_as_they_are():
    parts = {"one": Packed(values.pack({"a": (1, 2)}, path="")), "two": Packed(join_list([values.pack(1, path="")]))}
    assert StatePacker().pack(parts) == values.pack({"one": {"a": (1, 2)}, "two": [1]}, path="")


def test_what_does_not_change_is_not_packed_again(monkeypatch):
    packer, names = StatePacker(never_mutated=("names",)), [["weight", "bias"]]
    parts = {"names": names, "options": {"lr": 0.1, "betas": (0.9, 0.99)}, "done": False, "built": b"bytes"}
    first = packer.pack(parts)
    monkeypatch.setattr(values, "pack", lambda *_, **__: pytest.fail("packed again"))
    parts["options"] = copy.deepcopy(parts["options"])
    assert packer.pack(parts) == first


def test_an_error_names_the_path():
    packer = StatePacker("state")
    with pytest.raises(StateValueError, match="state/loader/fn is a function"):
        packer.pack({"loader": {"fn": lambda: None}})
    assert packer.pack({"loader": {"fn": 1}}) == values.pack({"loader": {"fn": 1}}, path="")


def test_large_tensors_inside_a_cached_value_are_collected_each_time():
    tensor, found = torch.zeros(5000), []
    packer = small_state.CachedPacker()
    for _ in range(2):
        packed = packer.pack({"t": tensor}, path="state/x", large=lambda name, t: found.append((name, t)))
    assert packed == values.pack({"t": tensor}, path="state/x", large=lambda *_: None)
    assert [(name, t is tensor) for name, t in found] == [("state/x/t", True)] * 2
