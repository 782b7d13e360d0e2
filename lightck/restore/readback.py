"""Check after a restore that the optimizers and the objects in ``state`` hold what was restored into them.

Optimizers and objects are read again after the restore, because ``load_state_dict`` is the user's code, and
``optimizer.state`` may be a property that makes a new dict at each access. An object that ignored its saved state
raises an error. An object whose values differ from the saved ones is named in a warning. The following do not count as
differences: the order of keys, additional keys of an object in ``state``, a list instead of a tuple, another number
type or dtype with the same values, values that change at each access (clocks). DataLoaders are not read, because some
draw random numbers in ``state_dict()``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lightck.errors import DriftError, StateValueError, listed
from lightck.restore import tensor_writes
from lightck.restore.tensor_devices import like_live
from lightck.state import rng, values
from lightck.state.device_transfers import bytes_in_order
from lightck.state.inventory import OptimizerView
from lightck.state.storable import is_loader

log = logging.getLogger("lightck")
_SEQUENCES = (list, tuple, deque)
_NUMBERS = (bool, int, float, complex, np.generic)
_SAMPLES = 512
"""The largest number of elements of a large tensor that are compared to see whether the tensor changed."""

_Sketch = tuple[bytes, tuple[bytes, ...]]
"""(packed small values, sampled bytes of each large tensor)."""


class ObjectCheck:
    """Compares one object in ``state`` before and after its ``load_state_dict``: construct the check before
    ``load_state_dict`` is called, and call ``after`` when it has returned."""

    def __init__(self, name: str, obj: object) -> None:
        self._name = name
        self._obj = obj
        self._live = None if is_loader(obj) else state_dict_of(obj)
        self._before = None if is_loader(obj) else _sketch(self._live)

    def on_live_devices(self, saved: object) -> object:
        """Return the saved state with its tensors on the devices of the object's own tensors. To be called once."""
        live, self._live = self._live, None
        return like_live(saved, live)

    def after(self, saved: object) -> None:
        """Compare the object with the saved state, and warn of differences. ``saved``: a new copy of the saved state,
        because ``load_state_dict`` may have changed the copy that it received.

        Raises ``DriftError`` if the object differs and ``load_state_dict`` did not change it."""
        if is_loader(self._obj):
            return
        now = state_dict_of(self._obj)
        if now is None:
            return  # state_dict() raises: the save of the object will raise the same error
        differ = list(_differences(saved, now, ""))
        if differ:
            reread = state_dict_of(self._obj)
            differ = [path for path in differ if not _is_unstable(now, reread, path)]
        if not differ:
            return
        name, kind = self._name, type(self._obj).__name__
        where = listed([path or "all of it" for path in differ])
        if self._before is not None and self._before == _sketch(now):
            raise DriftError(
                f"state[{name!r}] took nothing of its saved state: its load_state_dict() did not change the {kind}. "
                f"The {kind} still differs in {where} from what was saved. Correct its load_state_dict(), or leave "
                f'the object out of the restore: state={{"{name}": None}}.'
            )
        log.warning(
            "lightck: state[%r] differs in %s from what was saved, after its load_state_dict(). The training does not "
            "continue bit-identically. Make the load_state_dict() of %s restore everything that its state_dict() "
            "returns",
            name,
            where,
            kind,
        )


def has_same_keys(obj: object, packed: bytes) -> bool:
    """Whether the ``state_dict()`` of an object has the same keys as the saved state in ``packed``; False if one of
    them is no mapping."""
    now, saved = state_dict_of(obj), values.unpack(packed, tensor=lambda name: torch.empty(0))
    return isinstance(now, Mapping) and isinstance(saved, Mapping) and now.keys() == saved.keys()


def check_optimizer(
    live: OptimizerView, state: Mapping[str, object], rest: Mapping[object, object], groups: list[dict[str, object]]
) -> None:
    """Check that an optimizer holds the state and the options that were set, and warn of differences.

    ``state``: parameter name -> its state. ``rest``: state under keys that are no parameters. ``groups``: the options
    of each group. Raises ``DriftError`` if the optimizer holds nothing of ``state`` and ``rest``."""
    live_state = live.optimizer.state
    # Description -> (key in ``optimizer.state``, value that was put under this key).
    expected: dict[str, tuple[object, object]] = {f"the state of {n}": (p, state.get(n)) for n, p in live.params}
    expected |= {f"state[{key!r}]": (key, value) for key, value in rest.items()}
    differ = [what for what, (key, wanted) in expected.items() if not _holds(live_state, key, wanted)]
    if differ and {what for what, (_, wanted) in expected.items() if not _is_empty(wanted)} <= set(differ):
        raise DriftError(
            f"{live.class_name} keeps nothing of the state that is put into it: {listed(differ)} is not what was "
            "saved. The attribute `state` may be a property that makes a new dict at each access. Keep state in one "
            "dict, as torch.optim.Optimizer does."
        )
    for g, (group, options) in enumerate(zip(live.optimizer.param_groups, groups, strict=True)):
        not_set = [key for key, value in options.items() if _differ(value, group.get(key))]
        differ += [f"{key} of group {g}" for key in not_set]
    if differ:
        log.warning(
            "lightck: %s changed or dropped part of what was restored into it: %s. So the training does not continue "
            "bit-identically. If the class is your own, let its `state` and `param_groups` keep the values that are "
            "put into them; otherwise use another optimizer",
            live.class_name,
            listed(differ),
        )


def _is_empty(state: object) -> bool:
    return state is None or (isinstance(state, Mapping) and not state)


def _holds(live_state: Any, key: object, wanted: object) -> bool:
    """Whether an optimizer's ``state`` has exactly the value ``wanted`` under ``key``: the value must have no further
    keys."""
    now = live_state.get(key)
    if now is wanted or (_is_empty(now) and _is_empty(wanted)):
        return True
    return not _differ(wanted, now, exactly=True)


def state_dict_of(obj: Any) -> object:
    """Return the ``state_dict()`` of an object, or None if it raises. The random states are restored afterwards."""
    with rng.preserved():
        try:
            return obj.state_dict()
        except Exception:
            return None


def _sketch(state: object) -> _Sketch | None:
    """Return the small values of a state and samples of its large tensors, by which a change of the state can be
    detected in little time. Return None if the state cannot be packed."""
    samples: list[bytes] = []

    def large(_path: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        samples.append(bytes_in_order(flat[:: len(flat) // _SAMPLES + 1]).cpu().numpy().tobytes())

    try:
        return values.pack(state, path="", large=large), tuple(samples)
    except (StateValueError, RuntimeError):
        return None


def _differences(saved: object, now: object, path: str, *, exactly: bool = False) -> Iterator[str]:
    """Yield the path of each value in ``saved`` that ``now`` lacks or holds with another value. With ``exactly``, also
    yield the path of each key that only ``now`` has."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        if exactly:
            yield from (_join(path, key) for key in now if key not in saved)
        for key, value in saved.items():
            if key in now:
                yield from _differences(value, now[key], _join(path, key), exactly=exactly)
            else:
                yield _join(path, key)
    elif isinstance(saved, _SEQUENCES) and isinstance(now, _SEQUENCES) and len(saved) == len(now):
        for i, (one, other) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(one, other, _join(path, i), exactly=exactly)
    elif saved is not now and not _same(saved, now):
        yield path


def _differ(saved: object, now: object, *, exactly: bool = False) -> bool:
    return next(_differences(saved, now, "", exactly=exactly), None) is not None


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _is_unstable(now: object, reread: object, path: str) -> bool:
    """Whether the value at a path differs between two reads of the same object."""
    return any(changed == path or changed.startswith(f"{path}/") for changed in _differences(now, reread, ""))


def _same(saved: object, now: object) -> bool:
    """Whether two values are equal after ``now`` is cast to the type of ``saved``; False if they cannot be compared."""
    try:
        if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
            cast = now.detach().to("cpu", saved.dtype)
            return saved.shape == now.shape and tensor_writes.same_bits(saved.detach().cpu(), cast)
        if isinstance(saved, np.ndarray) and isinstance(now, np.ndarray):
            return saved.shape == now.shape and saved.tobytes() == now.astype(saved.dtype).tobytes()
        if isinstance(saved, _NUMBERS) or isinstance(now, _NUMBERS):
            one, other = _number(saved), _number(now)
            return one is not None and other is not None and bool(one == other or (one != one and other != other))
        return values.pack(saved, path="") == values.pack(now, path="")
    except (StateValueError, RuntimeError, TypeError, ValueError, NotImplementedError, OverflowError):
        return False


def _number(value: object) -> object:
    """Return a number, or the single value of a 0-dimensional tensor or array; None for anything else."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.item() if value.ndim == 0 else None
    return value if isinstance(value, _NUMBERS) else None
