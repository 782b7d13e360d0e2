"""The states of random generators that a program makes itself: torch's, numpy's and Python's.

Each state is one uint8 tensor on the CPU, so the position of a loader stores all kinds in the same way. Stored states
are untrusted: ``check_state`` runs before ``set_state``.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightck.state import rng, values

OwnGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


def is_own_generator(value: object) -> bool:
    """Whether the object is a random generator whose state can be saved, and none of the global generators of the CPU,
    which ``rng.py`` saves. (A subclass of ``random.Random`` may have no state, as ``SystemRandom``.)"""
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        return value is not np.random.mtrand._rand and rng.is_known_to_numpy(_bit_generator(value))
    return type(value) is random.Random and value is not random._inst


def state_of(generator: OwnGenerator) -> torch.Tensor:
    """Return the state now."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        value: object = rng.python_value(generator.getstate())
    elif isinstance(generator, np.random.RandomState):
        value = generator.get_state(legacy=False)
    else:
        value = generator.bit_generator.state
    return torch.frombuffer(bytearray(values.pack(value, path="generator")), dtype=torch.uint8)


def check_state(generator: OwnGenerator, state: torch.Tensor) -> None:
    """Raise ``RuntimeError``, ``TypeError`` or ``CorruptPoolError`` for a state that the generator refuses. The
    generator is not changed."""
    if isinstance(generator, torch.Generator):
        torch.Generator(generator.device).set_state(state)
    else:
        _read(generator, state)


def set_state(generator: OwnGenerator, state: torch.Tensor) -> None:
    """Set the generator to a state that ``check_state`` has accepted, or that ``state_of`` has returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(_read(generator, state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_read(generator, state))
    else:
        generator.bit_generator.state = _read(generator, state)


def _read(generator: np.random.Generator | np.random.RandomState | random.Random, state: torch.Tensor) -> Any:
    value = values.unpack(state.numpy().tobytes())
    if isinstance(generator, random.Random):
        return rng.read_python(value)
    read = rng.read_numpy(value, is_legacy=isinstance(generator, np.random.RandomState))
    if read["bit_generator"] != _bit_generator(generator):
        raise TypeError(f"the state is that of a {read['bit_generator']}")
    return read


def _bit_generator(generator: np.random.Generator | np.random.RandomState) -> str:
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
    return type(bits).__name__
