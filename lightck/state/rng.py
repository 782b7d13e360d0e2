"""The random state of a process: python, numpy's global generator, torch on the CPU, and torch on every CUDA device, if
the process has used CUDA.

``capture`` runs at every step, so it takes raw bytes where it can (``generator_memory.py``) and converts nothing.
``to_value`` and ``packed`` make the state storable. ``from_value`` checks stored values, so that no global generator
receives a malformed one. Generators that a program creates itself are not included: see ``generator_states.py``.
"""

from __future__ import annotations

import logging
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import eq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightck._native import ffi
from lightck.errors import CorruptPoolError
from lightck.state import small_state, values
from lightck.state.generator_memory import WORDS, Twister, numpy_twister, python_twister

log = logging.getLogger("lightck")
_PYTHON_VERSION = 3
"""The version number in what ``random.getstate()`` returns. It is not stored."""
_PYTHON_WORDS = struct.Struct("<625I")
_PYTHON_POSITION = struct.Struct("<I")
_NUMPY_KEY_DTYPE = np.dtype(np.uint32).str
_MAX_CUDA_BYTES = 4096
_MAX_CUDA_DEVICES = 1024
"""Limits of a stored state: bytes for one CUDA device, and number of CUDA devices. A state that exceeds one of the two
is damaged."""
# Bit generator -> the key of its position, and the largest valid position (None: it has no position).
# numpy's setters do not check a position, and with a wrong one the generator reads beyond its buffer.
_NUMPY_POSITIONS = {
    "MT19937": ("pos", 624),
    "Philox": ("buffer_pos", 4),
    "PCG64": None,
    "PCG64DXSM": None,
    "SFC64": None,
}


class _LastPacked:
    """Remembers the last state of one generator that was packed, and its packed form."""

    def __init__(self, is_same: Callable[[Any, Any], bool]) -> None:
        """``is_same``: whether two states have the same packed form."""
        self._is_same = is_same
        self._last: tuple[object, bytes] | None = None
        """The state and its packed form, assigned together, because several threads may pack."""

    def packed(self, state: object, pack: Callable[[], bytes]) -> bytes:
        """Return the packed form of ``state``. ``pack``: makes it."""
        last = self._last
        if last is not None and self._is_same(last[0], state):
            return last[1]
        packed = pack()
        self._last = state, packed
        return packed


def _have_same_bits(one: object, other: object) -> bool:
    """Whether two states have the same bits. (Floats: 0.0 and -0.0 are equal, and differ in their bits.) False for
    states that are no ``Twister``."""
    if one is other:
        return True
    if not isinstance(one, Twister) or not isinstance(other, Twister):
        return False
    return one == other and (bool(one.gauss) or str(one.gauss) == str(other.gauss))


_packed_python, _packed_numpy = _LastPacked(_have_same_bits), _LastPacked(_have_same_bits)
_packed_torch = _LastPacked(eq)
_PACKED_KEYS = tuple(map(small_state.pair_prefix, ("python", "numpy", "torch", "cuda")))
_NO_DEVICES = small_state.pack_plain([])


class RngState:
    """The state of the global generators at one moment. It is never changed, so ``capture`` may return it again.

    torch: uint8, 1-d, on the CPU. cuda: (device index, uint8 tensor, 1-d, on the CPU) for each device; empty if CUDA
    was not used.
    """

    __slots__ = ("_numpy", "_packed", "_python", "cuda", "torch")

    def __init__(
        self,
        python: Twister | tuple[Any, ...],
        numpy: Twister | dict[str, Any],
        torch: Tensor,
        cuda: tuple[tuple[int, Tensor], ...] = (),
    ) -> None:
        """``python``: a ``Twister``, or what ``random.getstate()`` returns. ``numpy``: a ``Twister``, or what
        ``numpy.random.get_state(legacy=False)`` returns."""
        self._python, self._numpy, self.torch, self.cuda = python, numpy, torch, cuda
        self._packed: bytes | None = None
        """The result of ``packed``; None before its first call."""

    def has_twisters(self, python: object, numpy: object) -> bool:
        """Whether the states of Python's and numpy's generators are these objects."""
        return self._python is python and self._numpy is numpy

    @property
    def python(self) -> tuple[Any, ...]:
        """The state of Python's generator, as ``random.getstate()`` returns it."""
        state = self._python
        if not isinstance(state, Twister):
            return state
        return _PYTHON_VERSION, _PYTHON_WORDS.unpack(_python_bytes(state)), state.gauss

    @property
    def numpy(self) -> dict[str, Any]:
        """The state of numpy's generator, as ``numpy.random.get_state(legacy=False)`` returns it."""
        state = self._numpy
        if not isinstance(state, Twister):
            return state
        key = np.frombuffer(state.key, np.uint32).copy()
        return {
            "bit_generator": "MT19937",
            "state": {"key": key, "pos": state.position},
            "has_gauss": int(state.has_gauss),
            "gauss": state.gauss,
        }

    def restore(self) -> None:
        """Set every global generator to this state. States of devices that this machine does not have are skipped.

        Raises:
            CorruptPoolError: a device refuses its state.
        """
        # CUDA is first, because only a CUDA device can still refuse its state: no CPU generator has changed if it does.
        _restore_cuda(self.cuda)
        random.setstate(self.python)
        _restore_numpy(self.numpy)
        torch.default_generator.set_state(self.torch)

    def to_value(self) -> dict[str, object]:
        """Return the state as data for ``values.pack``: a dict of bytes, ints, floats and small numpy arrays."""
        return {
            "python": self._python_value(),
            "numpy": self.numpy,
            "torch": self.torch.numpy().tobytes(),
            "cuda": [[index, state.numpy().tobytes()] for index, state in self.cuda],
        }

    def packed(self) -> bytes:
        """Return the same bytes as ``values.pack`` for the result of ``to_value``. This runs at every checkpoint, and
        many trainings draw from no generator. So the state of each generator is packed again only if it changed."""
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> bytes:
        if not isinstance(self._numpy, Twister):
            return values.pack(self.to_value(), path="rng")
        state, cuda = _bytes_of(self.torch), [[index, _bytes_of(state)] for index, state in self.cuda]
        parts = (
            _packed_python.packed(self._python, self._pack_python),
            _packed_numpy.packed(self._numpy, self._pack_numpy),
            _packed_torch.packed(state, lambda: small_state.pack_plain(state)),
            small_state.pack_plain(cuda) if cuda else _NO_DEVICES,
        )
        chunks = chain.from_iterable(zip(_PACKED_KEYS, parts, strict=True))
        return small_state.join_dict(len(parts), chunks)

    def _pack_python(self) -> bytes:
        return small_state.pack_plain(self._python_value())

    def _pack_numpy(self) -> bytes:
        numpy = self._numpy
        assert isinstance(numpy, Twister)
        key = small_state.plain_extension(values.ARRAY, [_NUMPY_KEY_DTYPE, [WORDS], numpy.key])
        state = small_state.plain_extension(values.DICT, [["key", key], ["pos", numpy.position]])
        fields = [["state", state], ["has_gauss", int(numpy.has_gauss)], ["gauss", numpy.gauss]]
        return small_state.pack_plain(small_state.plain_extension(values.DICT, [["bit_generator", "MT19937"], *fields]))

    def _python_value(self) -> list[object]:
        """Return the words and the position, as bytes, and the cached normal number or None."""
        state = self._python
        if isinstance(state, Twister):
            return _python_pair(_python_bytes(state), state.gauss)
        return python_value(state)

    @classmethod
    def from_value(cls, value: object) -> RngState:
        """Return the state that `to_value` encoded as ``value``.

        Raises:
            CorruptPoolError: the value is malformed, or a generator would refuse it.
        """
        if type(value) is not dict or set(value) != {"python", "numpy", "torch", "cuda"}:
            raise _corrupt("its parts are not python, numpy, torch and cuda")
        return cls(
            read_python(value["python"]),
            read_numpy(value["numpy"]),
            _read_torch(value["torch"]),
            _read_cuda(value["cuda"]),
        )


_captured: tuple[RngState, bytes] | None = None
"""What ``capture`` returned last, and the bytes of torch's state in it. One value, because several threads may
capture."""


def capture() -> RngState:
    """Return the state of all global generators now, without drawing, starting a CUDA context or waiting for a device.
    If it is the state that was captured last, the same object is returned, so that its parts need not be packed or
    compared again. (Not if CUDA is used, or if a generator could not be read from its memory.)"""
    global _captured
    python, numpy = python_twister() or random.getstate(), numpy_twister() or np.random.get_state(legacy=False)
    state, cuda = torch.default_generator.get_state(), _capture_cuda()
    content, last = _bytes_of(state), _captured
    if last is not None and not cuda and last[1] == content and last[0].has_twisters(python, numpy):
        return last[0]
    found = RngState(python, numpy, state, cuda)
    _captured = None if cuda else (found, content)
    return found


def _bytes_of(state: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU. (This takes a third of the time of ``numpy().tobytes()``.)"""
    return bytes(ffi.buffer(ffi.cast("char *", state.data_ptr()), state.nbytes))


def python_value(state: tuple[Any, ...]) -> list[object]:
    """Return what ``random.getstate()`` returns as data for ``values.pack``, which ``read_python`` reads."""
    return _python_pair(_PYTHON_WORDS.pack(*state[1]), state[2])


def _python_pair(words: bytes, gauss: Any) -> list[object]:
    # random.setstate() also accepts an int for ``gauss``, and gauss() treats it like a float. A pool stores a float.
    return [words, None if gauss is None else float(gauss)]


def is_known_to_numpy(bit_generator: str) -> bool:
    """Whether ``read_numpy`` can check states of this bit generator."""
    return bit_generator in _NUMPY_POSITIONS


def _python_bytes(state: Twister) -> bytes:
    """Return the words of ``random.getstate()``, packed with ``_PYTHON_WORDS``. The last word is the position."""
    return state.key + _PYTHON_POSITION.pack(state.position)


@contextmanager
def preserved() -> Iterator[RngState]:
    """Restore all global generators at the end of the block, even after an exception. Yields the state to restore."""
    before = capture()
    try:
        yield before
    finally:
        before.restore()


def _capture_cuda() -> tuple[tuple[int, Tensor], ...]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return tuple((index, device.get_state()) for index, device in enumerate(torch.cuda.default_generators))


def _restore_cuda(states: tuple[tuple[int, Tensor], ...]) -> None:
    if not states or not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    for index, state in states:
        if index < count:
            try:
                torch.cuda.set_rng_state(state, index)  # torch queues the call if CUDA was not used yet
            except RuntimeError as error:
                raise _corrupt(f"CUDA device {index} refuses its part ({error})") from error


def _restore_numpy(state: dict[str, Any]) -> None:
    """Set numpy's global generator. If the training had exchanged its bit generator, exchange it again."""
    name = state["bit_generator"]
    if type(np.random.mtrand.get_bit_generator()).__name__ != name:
        np.random.mtrand.set_bit_generator(getattr(np.random, name)())
    np.random.set_state(state)


def _corrupt(reason: str) -> CorruptPoolError:
    return CorruptPoolError(f"the saved random state is damaged: {reason}")


def read_python(value: object) -> tuple[Any, ...]:
    """Return a stored state for ``random.setstate()``. Raises ``CorruptPoolError``."""
    if type(value) is not list or len(value) != 2:
        raise _corrupt("python's part is no pair")
    words, gauss = value
    if type(words) is not bytes or len(words) != _PYTHON_WORDS.size or type(gauss) not in (float, type(None)):
        raise _corrupt("python's part has a wrong size")
    state = (_PYTHON_VERSION, _PYTHON_WORDS.unpack(words), gauss)
    try:
        random.Random(0).setstate(state)
    except (ValueError, TypeError, OverflowError) as error:
        raise _corrupt(f"python refuses its part ({error})") from error
    return state


def read_numpy(value: object, *, is_legacy: bool = True) -> dict[str, Any]:
    """Return a stored state for ``numpy.random.set_state()``; with ``is_legacy=False``: for the attribute ``state`` of
    a bit generator, which has no cached normal number. Raises ``CorruptPoolError``."""
    if type(value) is not dict or type(value.get("state")) is not dict:
        raise _corrupt("numpy's part is no dict")
    name = value.get("bit_generator")
    if type(name) is not str or name not in _NUMPY_POSITIONS:
        raise _corrupt("numpy's generator has an unknown name")
    position = _NUMPY_POSITIONS[name]
    if position is not None:
        holder = value["state"] if name == "MT19937" else value
        at = holder.get(position[0])
        if type(at) is not int or not 0 <= at <= position[1]:
            raise _corrupt("numpy's generator stands at an impossible position")
    _try_numpy(name, value if is_legacy else {**value, "has_gauss": 0, "gauss": 0.0})
    return value


def _try_numpy(name: str, value: dict[str, Any]) -> None:
    if name == "MT19937":
        key = value["state"].get("key")
        if type(key) is not np.ndarray or key.shape != (624,) or key.dtype != np.uint32:
            raise _corrupt("numpy's part has a wrong size")
    if type(value.get("has_gauss")) is not int or type(value.get("gauss")) is not float:
        raise _corrupt("numpy's part lacks its cached normal number")
    try:
        np.random.RandomState(getattr(np.random, name)(0)).set_state(value)
    except Exception as error:  # the setters expect trusted input and raise errors of any kind
        raise _corrupt(f"numpy refuses its part ({error})") from error


def _read_torch(value: object) -> Tensor:
    state = _as_tensor(value)
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise _corrupt(f"torch refuses its part ({error})") from error
    return state


def _read_cuda(value: object) -> tuple[tuple[int, Tensor], ...]:
    if type(value) is not list or len(value) > _MAX_CUDA_DEVICES:
        raise _corrupt("CUDA's part is no list of devices")
    out = []
    for item in value:
        if type(item) is not list or len(item) != 2 or type(item[0]) is not int or item[0] < 0:
            raise _corrupt("CUDA's part is no list of pairs")
        state = _as_tensor(item[1])
        if not 0 < state.numel() <= _MAX_CUDA_BYTES:
            raise _corrupt("a CUDA device's part has a wrong size")
        out.append((item[0], state))
    return tuple(out)


def _as_tensor(value: object) -> Tensor:
    if type(value) is not bytes or not value:
        raise _corrupt("a generator's state is empty, or is not bytes")
    return torch.frombuffer(bytearray(value), dtype=torch.uint8).clone()


# -- torch.random.fork_rng() ------------------------------------------------------------------------------------------

_function: object = getattr(torch.random.fork_rng, "__wrapped__", None)
_shared_by_blocks: tuple[object, ...] = (_function, getattr(_function, "__code__", None))
"""The undecorated function ``fork_rng`` and its code object. Each open ``fork_rng`` block adds references to the
two."""


def _references() -> int:
    """Return the number of references to the two objects together."""
    return sum(map(sys.getrefcount, _shared_by_blocks))


class ForkRngWatch:
    """Detects updates inside ``torch.random.fork_rng()``, which discards the random state at its end.

    When a forward closes a checkpoint, the loop has already drawn for the next batch. So the checkpoint holds the
    random state that was read right after the update. If the update was inside a ``fork_rng`` block, the loop goes on
    with another random state, which the checkpoint does not hold. An open block is a suspended call of the Python
    generator function ``fork_rng``, and refers to the function and its code. So the reference counts of the function
    and its code, which are cheap to read, show whether a block is open.

    Create it at attach: a block that is open at attach surrounds the whole training, and is harmless.
    """

    def __init__(self) -> None:
        self._at_attach = _references()
        self._was_in_fork_rng = False
        self._is_reported = False

    def updated(self) -> None:
        """Record whether the update that has just ended was inside a ``fork_rng`` block."""
        self._was_in_fork_rng = _references() > self._at_attach

    def warn_if_in_fork_rng(self) -> None:
        """Warn once if the last update was made inside a ``fork_rng`` block. To be called when a forward or the next
        update closes the checkpoint of the last update, which then holds the random state right after that update."""
        if self._was_in_fork_rng and not self._is_reported:
            self._is_reported = True
            log.warning(
                "lightck: an update was made inside a block of torch.random.fork_rng(). Its checkpoint holds the "
                "random state from inside the block, but the training goes on with the state that fork_rng() puts "
                "back at the end of the block. So a resume would draw other random numbers. Call session.end_step() "
                "after the block, or iterate over session.loader(loader)"
            )
