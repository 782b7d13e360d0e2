"""The global random state: captured, restored, stored, and damaged."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

from lightck.errors import CorruptPoolError
from lightck.state import rng, values


def draws() -> tuple:
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(1).item(),
        torch.randn(1).item(),
    )


@pytest.fixture(autouse=True)
def _leave_no_trace():
    with rng.preserved():
        yield


@pytest.mark.parametrize("odd", [0, 1])  # numpy caches the second normal number of a pair beside the state
def test_restore_gives_the_same_draws(odd):
    for _ in range(odd):
        draws()
    state = rng.capture()
    stored = rng.RngState.from_value(values.unpack(values.pack(state.to_value(), path="rng")))
    first = [draws() for _ in range(3)]
    for one in (state, stored, stored):
        one.restore()
        assert [draws() for _ in range(3)] == first


def test_random_states_are_preserved_also_after_an_error():
    state = rng.capture()
    expected = draws()
    state.restore()
    with contextlib.suppress(KeyError), rng.preserved():
        draws()
        raise KeyError
    assert draws() == expected


def test_another_bit_generator_of_numpy():
    before = np.random.get_bit_generator()
    try:
        for name in ("PCG64", "SFC64", "Philox", "PCG64DXSM"):
            np.random.set_bit_generator(getattr(np.random, name)(3))
            state = values.unpack(values.pack(rng.capture().to_value(), path="rng"))
            expected = draws()
            rng.RngState.from_value(state).restore()
            assert draws() == expected
            np.random.set_bit_generator(np.random.MT19937(5))
            rng.RngState.from_value(state).restore()
            assert draws() == expected, "a training that exchanged it is resumed by a script that has not yet"
    finally:
        np.random.set_bit_generator(before)


def damaged(path: str, value: object) -> dict:
    state = values.unpack(values.pack(rng.capture().to_value(), path="rng"))
    *names, last = path.split(".")
    inner = state
    for name in names:
        inner = inner[int(name) if name.isdigit() else name]
    inner[int(last) if last.isdigit() else last] = value
    return state


DAMAGE = [
    ("python", None),
    ("python.0", b""),
    ("python.0", b"\xff" * 2500),
    ("python.1", "x"),
    ("numpy", []),
    ("numpy.bit_generator", "RandomState"),
    ("numpy.bit_generator", ["MT19937"]),
    ("numpy.bit_generator", "PCG64"),
    ("numpy.state", {}),
    ("numpy.state.pos", 625),
    ("numpy.state.pos", -1),
    ("numpy.state.pos", True),
    ("numpy.state.key", np.zeros(3, np.uint32)),
    ("numpy.state.key", [0] * 624),
    ("numpy.has_gauss", None),
    ("numpy.gauss", "x"),
    ("torch", b"x"),
    ("torch", b"\xff" * 5056),
    ("torch", 3),
    ("cuda", 1),
    ("cuda", [[0]]),
    ("cuda", [[-1, b"x" * 16]]),
    ("cuda", [[0, b"x" * 5000]]),
    ("more", 1),
]


@pytest.mark.parametrize(("path", "value"), DAMAGE)
def test_damage_is_refused_before_anything_is_set(path, value):
    state = rng.capture()
    expected = draws()
    state.restore()
    with pytest.raises(CorruptPoolError, match="random state"):
        rng.RngState.from_value(damaged(path, value)).restore()
    assert draws() == expected


def test_none_is_refused():
    for value in (None, [], {}, {"python": 1}):
        with pytest.raises(CorruptPoolError):
            rng.RngState.from_value(value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda():
    torch.rand(1, device="cuda")
    state = rng.RngState.from_value(rng.capture().to_value())
    expected = torch.rand(4, device="cuda").tolist()
    state.restore()
    assert torch.rand(4, device="cuda").tolist() == expected
    with pytest.raises(CorruptPoolError):
        rng.RngState.from_value(damaged("cuda", [[0, b"x"]])).restore()
