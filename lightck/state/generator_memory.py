"""The states of Python's and numpy's global generators, read from the generators' memory.

``random.getstate()`` and ``numpy.random.get_state()`` build a Python object for each of 624 words. These two calls take
8 and 31 us at each update, which is much if the whole update takes 500 us. The same words lie in one piece in the
memory of the generator, where they are read here. A generator that was not used since the last read gives the same
``Twister`` object again. Python does not document where its words lie, and numpy does not document where its cached
normal number lies. ``_python_place`` and ``_numpy_place`` search for these places once, in generators made for that
purpose. A place is used only if it holds exactly what the public functions return, at several states of the generator.
If no place is found (another interpreter, another version), and for any other kind of generator, the public functions
are called.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

WORDS = 624
"""Words of 32 bits in the state of a Mersenne Twister."""
_KEY = struct.Struct(f"<{WORDS}I")
_INT = struct.Struct("<i")
_GAUSS = struct.Struct("<d")
_READ_NBYTES = _KEY.size + _INT.size
"""Bytes of the words and the position together."""


class Twister(NamedTuple):
    """The state of a Mersenne Twister. ``key``: 624 words of 32 bits. ``position``: index of the next word (624: all
    words are used). ``gauss``: the cached normal number; if ``has_gauss``, the next draw of a normal number returns
    it."""

    key: bytes
    position: int
    has_gauss: bool
    gauss: float | None


class _PythonPlace(NamedTuple):
    """Where a ``random.Random`` keeps its words and its position, which lies right before or right after the words.
    ``begin``: offset of both together, in bytes from the beginning of the object."""

    begin: int
    is_position_first: bool


class _NumpyPlace(NamedTuple):
    """Offsets of the cached normal number and of its flag, in bytes from the beginning of a
    ``numpy.random.RandomState``."""

    has_gauss: int
    gauss: int


class _PythonMemory:
    """The memory of one ``random.Random``."""

    def __init__(self, generator: Any, place: _PythonPlace) -> None:
        self.generator = generator
        self._memory = (ctypes.c_char * _READ_NBYTES).from_address(id(generator) + place.begin)
        self._key_at, self._position_at = (_INT.size, 0) if place.is_position_first else (0, _KEY.size)
        self._last: tuple[bytes, Twister] | None = None
        """The memory that was read last, and its state. One value, because several threads may read."""

    def read(self) -> Twister:
        """Return the state; the same object as before if it is the same state."""
        memory = self._memory.raw  # one copy under the GIL, so that no other thread draws meanwhile
        gauss, last = self.generator.gauss_next, self._last
        if last is not None and last[0] == memory and last[1].gauss is gauss:
            return last[1]
        key = memory[self._key_at : self._key_at + _KEY.size]
        state = Twister(key, _INT.unpack_from(memory, self._position_at)[0], gauss is not None, gauss)
        self._last = memory, state
        return state


class _NumpyMemory:
    """The memory of one ``numpy.random.RandomState`` over an ``MT19937``."""

    def __init__(self, generator: Any, bit_generator: Any, place: _NumpyPlace) -> None:
        self.generator, self.bit_generator, self._lock = generator, bit_generator, bit_generator.lock
        address = bit_generator.ctypes.state_address  # documented by numpy: the words lie there, and then the position
        self._memory = (ctypes.c_char * _READ_NBYTES).from_address(address)
        self._has_gauss = (ctypes.c_char * _INT.size).from_address(id(generator) + place.has_gauss)
        self._gauss = (ctypes.c_char * _GAUSS.size).from_address(id(generator) + place.gauss)
        self._last: tuple[tuple[bytes, bytes, bytes], Twister] | None = None
        """As in ``_PythonMemory``."""

    def read(self) -> Twister:
        """Return the state; the same object as before if it is the same state, bit for bit."""
        with self._lock:  # numpy draws large arrays without the GIL
            found = self._memory.raw, self._has_gauss.raw, self._gauss.raw
        last = self._last
        if last is not None and last[0] == found:
            return last[1]
        memory, has_gauss, gauss = found
        position = _INT.unpack_from(memory, _KEY.size)[0]
        state = Twister(memory[: _KEY.size], position, any(has_gauss), _GAUSS.unpack(gauss)[0])
        self._last = found, state
        return state


_python: _PythonMemory | None = None
_numpy: _NumpyMemory | None = None
"""``_python`` and ``_numpy`` refer to the global generators that were read last, so that these stay alive and no other
object gets their addresses."""


def python_twister() -> Twister | None:
    """Return the state of ``random``'s global generator, or None if it has to be read with ``random.getstate()``."""
    global _python
    generator = getattr(random.getstate, "__self__", None)
    if _python is None or _python.generator is not generator:
        place = _python_place()
        if place is None or type(generator) is not random.Random:
            return None
        _python = _PythonMemory(generator, place)
    return _python.read()


def numpy_twister() -> Twister | None:
    """Return the state of ``numpy.random``'s global generator, or None if it has to be read with
    ``numpy.random.get_state()``."""
    global _numpy
    generator = getattr(np.random.get_state, "__self__", None)
    bit_generator: Any = getattr(generator, "_bit_generator", None)
    if _numpy is None or _numpy.generator is not generator or _numpy.bit_generator is not bit_generator:
        place = _numpy_place()
        if place is None or type(generator) is not np.random.RandomState:
            return None
        if type(bit_generator) is not np.random.MT19937:
            return None
        _numpy = _NumpyMemory(generator, bit_generator, place)
    return _numpy.read()


# -- where the states lie ----------------------------------------------------------------------------------------------


@cache
def _python_place() -> _PythonPlace | None:
    generator = random.Random(1)
    memory = _memory_of(generator, random.Random.__basicsize__)
    key = memory.find(_python_by_call(generator).key)
    for place in (_PythonPlace(key - _INT.size, True), _PythonPlace(key, False)):
        if key >= 0 and 0 <= place.begin <= len(memory) - _KEY.size - _INT.size:
            found = _PythonMemory(generator, place)
            if _agree(found.read, lambda: _python_by_call(generator), lambda: generator.gauss(0, 1)):
                return place
    return None


def _python_by_call(generator: random.Random) -> Twister:
    _, words, gauss = generator.getstate()
    return Twister(_KEY.pack(*words[:WORDS]), words[WORDS], gauss is not None, gauss)


@cache
def _numpy_place() -> _NumpyPlace | None:
    bit_generator = np.random.MT19937(1)
    generator = np.random.RandomState(bit_generator)
    generator.standard_normal()
    memory = _memory_of(generator, np.random.RandomState.__basicsize__)
    gauss = memory.find(_GAUSS.pack(_numpy_by_call(generator).gauss))
    if gauss < _GAUSS.size:
        return None
    # The flag lies before the double. It is an int, padded to the alignment of the double.
    place = _NumpyPlace(gauss - _GAUSS.size, gauss)
    found = _NumpyMemory(generator, bit_generator, place)
    return place if _agree(found.read, lambda: _numpy_by_call(generator), generator.standard_normal) else None


def _numpy_by_call(generator: np.random.RandomState) -> Twister:
    state: Any = generator.get_state(legacy=False)
    return Twister(state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"] != 0, state["gauss"])


def _memory_of(generator: object, nbytes: int) -> bytes:
    """Return the first ``nbytes`` bytes of an object's memory. Return b"" if ``id`` is no address, or if this machine
    is not little-endian, because the words in a pool are little-endian."""
    is_readable = sys.implementation.name == "cpython" and sys.byteorder == "little"
    return ctypes.string_at(id(generator), nbytes) if is_readable else b""


def _agree(read: Callable[[], Twister], call: Callable[[], Twister], draw: Callable[[], object]) -> bool:
    """Whether ``read`` and ``call`` return equal states at several moments: with and without a cached normal number,
    and before and after new words were generated. ``draw``: draws a normal number."""
    for draws in (1, 1, 2, 301, 1000):
        for _ in range(draws):
            draw()
        if read() != call():
            return False
    return True
