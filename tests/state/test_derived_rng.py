"""Random states that follow from a key."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lightck.state import rng, values
from lightck.state.derived_rng import derive_states


@pytest.fixture(autouse=True)
def unchanged():
    with rng.preserved():
        yield


def draws() -> tuple[float, float, float, float]:
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()


def test_the_same_key_gives_the_same_numbers_whatever_was_drawn_before():
    derive_states(rng.capture(), b"key").restore()
    first = draws()
    derive_states(rng.capture(), b"key").restore()
    assert draws() == first


def test_each_key_gives_other_numbers_in_every_generator():
    found = []
    for key in (b"", b"a", b"b", b"key"):
        derive_states(rng.capture(), key).restore()
        found.append(draws())
    for of_generator in zip(*found, strict=True):
        assert len(set(of_generator)) == len(found)


def test_nothing_is_drawn_to_derive():
    before = rng.capture().packed()
    derive_states(rng.capture(), b"key")
    assert rng.capture().packed() == before


@pytest.mark.parametrize("name", ["MT19937", "Philox", "PCG64", "PCG64DXSM", "SFC64"])
def test_the_bit_generator_of_numpy_stays(name):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, name)(3))
        derive_states(rng.capture(), b"key").restore()
        first = draws()
        derive_states(rng.capture(), b"key").restore()
        assert draws() == first
        assert np.random.get_state(legacy=False)["bit_generator"] == name
    finally:
        np.random.set_bit_generator(before)


def test_a_derived_state_is_stored_like_any_other():
    state = derive_states(rng.capture(), b"key")
    value = values.unpack(values.pack(state.to_value(), path="rng"))
    rng.RngState.from_value(value).restore()
    first = draws()
    state.restore()
    assert draws() == first
