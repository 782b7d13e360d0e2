"""After a restore: do the optimizers and the objects in ``state`` hold what was put into them?

``load_state_dict`` is code of the user's, and ``optimizer.state`` may be a property that makes a new dict at each look.
So both are read again. What took nothing at all is an error; what holds other values than were saved is named in a
warning. No difference: another order of keys, keys that were added, a list for a tuple, a number of another type, a
dtype that holds the saved values, values that are another at each look (clocks). Loaders are not asked: some draw
random numbers in order to answer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lightck.errors import DriftError, StateValueError, listed
from lightck.restore import memory
from lightck.state import rng, values
from lightck.state.device_transfers import bytes_in_order
from lightck.state.inventory import OptimizerView
from lightck.state.storable import is_loader

log = logging.getLogger("lightck")
_SEQUENCES = (list, tuple, deque)
_NUMBERS = (bool, int, float, complex, np.generic)
_SAMPLES = 512
"""Elements of a large tensor that are looked at to see whether anything reached it."""

_Sketch = tuple[bytes, tuple[bytes, ...]]


class ObjectCheck:
    """Made before ``load_state_dict`` of one object in ``state``; ``after`` is called behind it."""

    def __init__(self, name: str, obj: object) -> None:
        self._name = name
        self._obj = obj
        self._before = None if is_loader(obj) else _sketch(_state_of(obj))

    def after(self, saved: object) -> None:
        """``saved``: what the checkpoint holds, in objects that nobody else has. Raises ``DriftError`` where the object
        is as it was before, and that is something else."""
        if is_loader(self._obj):
            return
        now = _state_of(self._obj)
        if now is None:
            return  # it refuses to be asked, and will say so when it is saved
        differ = list(_differences(saved, now, ""))
        if differ:
            again = _state_of(self._obj)
            differ = [path for path in differ if not _moves(now, again, path)]
        if not differ:
            return
        name, kind = self._name, type(self._obj).__name__
        where = listed([path or "all of it" for path in differ])
        if self._before is not None and self._before == _sketch(now):
            raise DriftError(
                f"state[{name!r}] took nothing of its saved state: after load_state_dict() the {kind} is as it was "
                f"before, and differs from what was saved in {where}. Mend its load_state_dict(), or say no to it: "
                f'state={{"{name}": None}}.'
            )
        log.warning(
            "lightck: state[%r] differs from what was saved after its load_state_dict(), in %s: the training "
            "does not go on bit-identically from it. Let the load_state_dict() of %s take all that its "
            "state_dict() gives",
            name,
            where,
            kind,
        )


def fits(obj: object, packed: bytes) -> bool:
    """Whether an object's state has the keys of what was saved."""
    now, saved = _state_of(obj), values.unpack(packed, tensor=lambda name: torch.empty(0))
    return isinstance(now, Mapping) and isinstance(saved, Mapping) and now.keys() == saved.keys()


def check_optimizer(
    live: OptimizerView, state: Mapping[str, object], rest: Mapping[object, object], groups: list[dict[str, object]]
) -> None:
    """``state``: by name of the parameter, what was put into the optimizer; ``rest``: under other keys; ``groups``: the
    options. Raises ``DriftError`` where none of the state is there."""
    held = live.optimizer.state
    put: dict[str, tuple[object, object]] = {f"the state of {name}": (p, state.get(name)) for name, p in live.params}
    put |= {f"state[{key!r}]": (key, value) for key, value in rest.items()}
    differ = [what for what, (key, wanted) in put.items() if not _holds(held, key, wanted)]
    if differ and {what for what, (_, wanted) in put.items() if not _is_empty(wanted)} <= set(differ):
        raise DriftError(
            f"{live.class_name} keeps nothing of the state that is put into it: {listed(differ)} is not what was "
            "saved. Its state may be a property that makes a new dict at each look. Keep state in one dict, as "
            "torch.optim.Optimizer does."
        )
    for g, (group, options) in enumerate(zip(live.optimizer.param_groups, groups, strict=True)):
        not_set = [key for key, value in options.items() if _differ(value, group.get(key))]
        differ += [f"{key} of group {g}" for key in not_set]
    if differ:
        log.warning(
            "lightck: %s does not hold what was restored into it: %s. The training does not go on bit-identically",
            live.class_name,
            listed(differ),
        )


def _is_empty(wanted: object) -> bool:
    return wanted is None or (isinstance(wanted, Mapping) and not wanted)


def _holds(held: Any, key: object, wanted: object) -> bool:
    now = held.get(key)
    if now is wanted or (_is_empty(now) and _is_empty(wanted)):
        return True
    return not _differ(wanted, now, exactly=True)


def _state_of(obj: Any) -> object:
    with rng.preserved():
        try:
            return obj.state_dict()
        except Exception:
            return None


def _sketch(state: object) -> _Sketch | None:
    samples: list[bytes] = []

    def large(_path: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().reshape(-1)
        samples.append(bytes_in_order(flat[:: len(flat) // _SAMPLES + 1]).cpu().numpy().tobytes())

    try:
        return values.pack(state, path="", large=large), tuple(samples)
    except (StateValueError, RuntimeError):
        return None


def _differences(saved: object, now: object, path: str, *, exactly: bool = False) -> Iterator[str]:
    """Paths below which ``now`` lacks something of ``saved``. ``exactly``: what was added is a difference too."""
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


def _moves(now: object, again: object, path: str) -> bool:
    """Whether what lies at a path is another at each look."""
    return any(moved == path or moved.startswith(f"{path}/") for moved in _differences(now, again, ""))


def _same(saved: object, now: object) -> bool:
    try:
        if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
            cast = now.detach().to("cpu", saved.dtype)
            return saved.shape == now.shape and memory.same_bits(saved.detach().cpu(), cast)
        if isinstance(saved, np.ndarray) and isinstance(now, np.ndarray):
            return saved.shape == now.shape and saved.tobytes() == now.astype(saved.dtype).tobytes()
        if isinstance(saved, _NUMBERS) or isinstance(now, _NUMBERS):
            one, other = _number(saved), _number(now)
            return one is not None and other is not None and bool(one == other or (one != one and other != other))
        return values.pack(saved, path="") == values.pack(now, path="")
    except (StateValueError, RuntimeError, TypeError, ValueError, NotImplementedError, OverflowError):
        return False


def _number(value: object) -> object:
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.item() if value.ndim == 0 else None
    return value if isinstance(value, _NUMBERS) else None
