"""Generators that a program makes itself: their states come back, and a damaged one is refused before it is set."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightck.errors import CorruptPoolError
from lightck.state.generator_states import check_state, is_own_generator, set_state, state_of

BITS = (np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64, np.random.MT19937)
KINDS = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "Random": lambda: random.Random(1),
    "RandomState": lambda: np.random.RandomState(1),
    **{bits.__name__: lambda bits=bits: np.random.Generator(bits(1)) for bits in BITS},
    "RandomState of PCG64": lambda: np.random.RandomState(np.random.PCG64(1)),
}


def draws(generator: object) -> list[float]:
    """Numbers of which some leave a rest in the generator: half of a word, the second normal number of a pair."""
    if isinstance(generator, torch.Generator):
        return [*torch.randn(3, generator=generator).tolist(), *torch.rand(2, generator=generator).tolist()]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random(), generator.getrandbits(3)]
    if isinstance(generator, np.random.RandomState):
        return [generator.standard_normal(), generator.randint(9), generator.random_sample()]
    return [generator.standard_normal(), int(generator.integers(9, dtype=np.uint32)), generator.random()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on_from_its_state(kind):
    one, other = KINDS[kind](), KINDS[kind]()
    for _ in range(5):
        draws(one)
    state = state_of(one)
    expected = draws(one)
    check_state(other, state)
    assert draws(other) == draws(KINDS[kind]())  # the check has changed nothing
    set_state(other, state)
    assert draws(other) == expected
    assert torch.equal(state_of(one), state_of(other))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_damaged_state_is_refused_or_harmless(kind, data):
    generator = KINDS[kind]()
    raw = bytearray(state_of(generator).numpy().tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = torch.frombuffer(raw[: data.draw(st.integers(1, len(raw)))], dtype=torch.uint8)
    try:
        check_state(generator, damaged)
    except (RuntimeError, TypeError, CorruptPoolError):
        assert torch.equal(state_of(generator), state_of(KINDS[kind]()))
    else:
        set_state(generator, damaged)
        draws(generator)


def test_global_generators_and_those_without_a_state_are_none_of_these():
    others = (torch.default_generator, np.random.mtrand._rand, random._inst, random.SystemRandom(), np.random, None, 3)
    assert not any(map(is_own_generator, others))
    assert all(is_own_generator(make()) for make in KINDS.values())
