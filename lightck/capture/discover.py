"""Finding what the user did not pass: the optimizers, LR schedulers and GradScaler that drive this model.

They are looked for once, at attach, among live objects. Nothing is guessed: two candidates for one role are an error
that names both, and garbage that is only waiting for collection is collected before it may count as a candidate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightck.errors import AmbiguousError


@dataclass(frozen=True, slots=True)
class Found:
    """What a session saves beside the model. ``state`` includes what was passed."""

    optimizers: tuple[Optimizer, ...]
    state: Mapping[str, Any]
    found: Mapping[str, str] = field(default_factory=dict)
    """name -> class, for what was found rather than passed."""


def unwrap(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a wrapper (Accelerate's has no hooks of its own)."""
    seen = 0
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer") and seen < 8:
        optimizer, seen = optimizer.optimizer, seen + 1
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer= is of type {type(optimizer).__name__}, which has no step hooks. lightck follows "
            "torch.optim.Optimizer and its subclasses. Pass that object, or the one that it wraps."
        )
    return optimizer


def discover(params: Mapping[int, int], optimizer: Any, state: Mapping[str, Any] | None) -> Found:
    """Join what was passed with what is found. ``params``: id of each parameter of the model -> its position.

    Raises ``AmbiguousError`` where two live objects could fill one role.
    """
    given = dict(state or {})
    live = _LiveObjects()
    if optimizer is None:
        optimizers = _find_optimizers(live, params)
    else:
        many = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = tuple(dict.fromkeys(unwrap(o) for o in many))
        _refuse_shared(optimizers)
    found = {_role("optimizer", i, optimizers): type(o).__name__ for i, o in enumerate(optimizers)}
    if optimizer is not None:
        found = {}
    extra = {**_find_schedulers(live, optimizers, given), **_find_scaler(live, given)}
    found |= {name: type(obj).__name__ for name, obj in extra.items()}
    kept = {name: obj for name, obj in {**given, **extra}.items() if obj is not None}
    return Found(optimizers, kept, found)


_KINDS: tuple[type, ...] = (Optimizer, LRScheduler, torch.amp.GradScaler)


class _LiveObjects:
    """One look at the heap, after a collection: the scaler of a training that is over is not part of this one."""

    def __init__(self, *, collect: bool = True) -> None:
        if gc.get_freeze_count():
            gc.unfreeze()  # gc.freeze() hides what it froze from the search; freezing anew would keep garbage for ever
        if collect:
            gc.collect()
        # type() and not isinstance(): objects with a lying __class__ (lazy proxies) must not be woken up. One pass
        # and a look-up in a set: a heap has some hundred thousand objects.
        kinds: set[type] = set().union(*map(_with_subclasses, _KINDS))
        self._candidates = [o for o in gc.get_objects() if type(o) in kinds]

    def of(self, kind: type, accept: Callable[[Any], bool]) -> list[Any]:
        return [o for o in self._candidates if issubclass(type(o), kind) and accept(o)]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def drives(optimizer: Any, params: Mapping[int, int]) -> bool:
    groups = getattr(optimizer, "param_groups", None) or ()
    try:
        return any(id(p) in params for g in groups for p in g["params"])
    except (TypeError, KeyError):
        return False


def _find_optimizers(live: _LiveObjects, params: Mapping[int, int]) -> tuple[Optimizer, ...]:
    optimizers = live.of(Optimizer, lambda o: hasattr(o, "_optimizer_step_pre_hooks") and drives(o, params))
    # The order of the heap is an accident; that of the model is the same in the next process.
    optimizers.sort(key=lambda o: min(params.get(id(p), len(params)) for g in o.param_groups for p in g["params"]))
    _refuse_shared(optimizers)
    return tuple(optimizers)


def _refuse_shared(optimizers: Iterable[Optimizer]) -> None:
    """State is saved by the name of its parameter, so a parameter has one optimizer."""
    owner: dict[int, Optimizer] = {}
    for opt in optimizers:
        for group in opt.param_groups:
            for p in group["params"]:
                other = owner.setdefault(id(p), opt)
                if other is not opt:
                    raise AmbiguousError(
                        f"Two optimizers update the same parameters: {_describe(other)} and {_describe(opt)}. State is "
                        "saved by parameter, so lightck follows one optimizer for each. If one of them is left over, "
                        "pass the other: attach(..., optimizer=opt); else split their parameters."
                    )


def _describe(optimizer: Optimizer) -> str:
    n = sum(len(g["params"]) for g in optimizer.param_groups)
    return f"{type(optimizer).__name__} ({n} parameters, lr {optimizer.param_groups[0].get('lr')})"


def schedulers_of(optimizers: Iterable[Optimizer], *, collect: bool) -> list[LRScheduler]:
    """Live LR schedulers that drive these optimizers and are not part of another one (SequentialLR, ...).

    ``collect``: collect garbage before they count.
    """
    return _schedulers_among(_LiveObjects(collect=collect), optimizers)


def _schedulers_among(live: _LiveObjects, optimizers: Iterable[Optimizer]) -> list[LRScheduler]:
    wanted = {id(o) for o in optimizers}
    found = live.of(LRScheduler, lambda s: id(_scheduled(s)) in wanted)
    parts = {id(part) for s in found for part in getattr(s, "_schedulers", ())}
    return [s for s in found if id(s) not in parts]


def _scheduled(scheduler: Any) -> Optimizer | None:
    optimizer = getattr(scheduler, "optimizer", None)
    try:
        return unwrap(optimizer)
    except TypeError:
        return None


def _find_schedulers(
    live: _LiveObjects, optimizers: tuple[Optimizer, ...], given: Mapping[str, Any]
) -> dict[str, LRScheduler]:
    taken = {id(_scheduled(obj)) for obj in given.values() if isinstance(obj, LRScheduler)}
    if not optimizers or given.get("scheduler", 0) is None:
        return {}
    by_optimizer: dict[int, list[LRScheduler]] = {}
    for scheduler in _schedulers_among(live, optimizers):
        by_optimizer.setdefault(id(_scheduled(scheduler)), []).append(scheduler)
    found = {}
    for i, opt in enumerate(optimizers):
        name = _role("scheduler", i, optimizers)
        schedulers = by_optimizer.get(id(opt), [])
        if id(opt) in taken or not schedulers or name in given:
            continue
        if len(schedulers) > 1:
            raise AmbiguousError(
                f"{len(schedulers)} live LR schedulers drive {_describe(opt)}: "
                f"{', '.join(type(s).__name__ for s in schedulers)}. lightck cannot know which of them your loop "
                'steps. Pass them by name: attach(..., state={"warmup": a, "decay": b}).'
            )
        found[name] = schedulers[0]
    return found


def _find_scaler(live: _LiveObjects, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = torch.amp.GradScaler
    if given.get("scaler", 0) is None or any(isinstance(obj, kind) for obj in given.values()):
        return {}
    scalers = live.of(kind, lambda s: s.is_enabled())
    if len(scalers) > 1:
        raise AmbiguousError(
            f"{len(scalers)} enabled GradScalers are alive. lightck cannot know which of them scales this training. "
            'Pass it: attach(..., state={"scaler": scaler}), or state={"scaler": None} for none.'
        )
    return {"scaler": scalers[0]} if scalers else {}


def _role(role: str, index: int, optimizers: tuple[Optimizer, ...]) -> str:
    return role if len(optimizers) == 1 else f"{role}.{index}"
