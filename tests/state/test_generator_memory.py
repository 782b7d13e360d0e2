"""The states of the global generators as read from memory: always what the public functions return."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightck.state import generator_memory, rng, values

DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "bits": lambda: random.getrandbits(20_000),
    "seed": lambda: random.seed(7),
    "np.rand": lambda: np.random.rand(3),
    "np.randn": np.random.randn,
    "np.many": lambda: np.random.rand(2000),
    "np.seed": lambda: np.random.seed(7),
    "np.set_state": lambda: np.random.set_state(np.random.get_state()),
}


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    with rng.preserved():
        yield


def by_call() -> rng.RngState:
    return rng.RngState(random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state())


def assert_same(found: rng.RngState, called: rng.RngState) -> None:
    assert found.python == called.python
    assert found.packed() == called.packed() == values.pack(called.to_value(), path="rng")


def test_this_interpreter_and_this_numpy_are_known():
    """Else every step pays 40 us for reading the states by call."""
    assert generator_memory.python_twister() is not None
    assert generator_memory.numpy_twister() is not None


@given(names=st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
def test_the_memory_holds_what_the_public_functions_return(names):
    for name in names:
        DRAWS[name]()
        assert_same(rng.capture(), by_call())


def test_a_captured_state_does_not_change_with_the_generators():
    random.gauss(0, 1)
    np.random.randn()
    state, expected = rng.capture(), by_call().packed()
    for draw in DRAWS.values():
        draw()
    assert state.packed() == expected


@given(names=st.lists(st.sampled_from(sorted(DRAWS)), max_size=4))
def test_a_state_that_has_not_changed_is_the_same_object(names):
    """So that nothing of it is packed again."""
    first = rng.capture()
    assert rng.capture() is first
    before = first.packed()
    for name in names:
        DRAWS[name]()
    torch.rand(len(names))
    now = rng.capture()
    assert rng.capture() is now
    assert (now.packed() == before) == (by_call().packed() == before)


@pytest.mark.parametrize("of", ["random", "numpy"])
def test_zeros_of_both_signs_are_two_states(of):
    """They are equal as numbers, and the next draw returns one of them."""
    random.gauss(0, 1)
    np.random.randn()
    packed = []
    for gauss in (0.0, -0.0, 0.0):
        if of == "random":
            random.setstate((*random.getstate()[:2], gauss))
        else:
            np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": gauss})
        assert_same(rng.capture(), by_call())
        packed.append(rng.capture().packed())
    assert packed[0] == packed[2] != packed[1]


def test_numpy_s_generator_with_other_bits_is_read_by_call():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        assert generator_memory.numpy_twister() is None
        assert_same(rng.capture(), by_call())
        np.random.set_bit_generator(np.random.MT19937(3))
        np.random.randn()
        assert_same(rng.capture(), by_call())
    finally:
        np.random.set_bit_generator(before)
    np.random.randn()
    assert_same(rng.capture(), by_call())


def test_another_layout_is_not_believed(monkeypatch):
    """The words are found, and the position beside them is something else."""
    read = generator_memory._PythonMemory.read
    monkeypatch.setattr(
        generator_memory._PythonMemory, "read", lambda self: read(self)._replace(position=read(self).position + 1)
    )
    generator_memory._python_place.cache_clear()
    try:
        assert generator_memory._python_place() is None
    finally:
        monkeypatch.undo()
        generator_memory._python_place.cache_clear()
    assert generator_memory._python_place() is not None


def test_where_the_layout_is_unknown_the_public_functions_are_called(monkeypatch):
    monkeypatch.setattr(rng, "python_twister", lambda: None)
    monkeypatch.setattr(rng, "numpy_twister", lambda: None)
    assert_same(rng.capture(), by_call())
