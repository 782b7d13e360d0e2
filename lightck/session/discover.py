"""Finding what the user did not pass: the optimizers, LR schedulers and GradScaler that drive this model.

The search runs at attach, over the objects that Python's garbage collector tracks. Two candidates for one role are an
error that names the two. Garbage is collected before the search, so that no dead object is a candidate. Later searches,
for objects that were made after attach, first run without a collection of garbage. If such a search finds something,
garbage is collected and the search runs again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightck.dataloader.persistent import draws_once
from lightck.errors import AmbiguousError, LateError, UnsupportedError
from lightck.state.inventory import OptimizerView
from lightck.state.local_tensors import reshard
from lightck.state.optimizer_wrappers import (
    has_hooks,
    inner_of,
    optimizers_to_follow,
    unsaved_tensors,
    wrapped_ids,
    wrapper_roles,
)

log = logging.getLogger("lightck")
T = TypeVar("T")
Objects = Mapping[str, Any]
"""Name -> an object that is saved under it, which has ``state_dict`` and ``load_state_dict``."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a session saves in addition to the model. ``state`` includes the objects that were passed."""

    optimizers: tuple[Optimizer, ...]
    """All optimizers that are followed; a wrapper comes before the optimizers inside it."""
    state: Objects
    classes: Mapping[str, str] = field(default_factory=dict)
    """Name -> class name, of the objects that were found rather than passed."""
    optimizers_were_passed: bool = False
    """Whether ``optimizer=`` was passed (it may be an empty list), so that no optimizer is searched for."""
    persistent: tuple[DataLoader[object], ...] = ()
    """Live DataLoaders with persistent workers."""

    @property
    def passed(self) -> list[Any]:
        """The objects that the user passed in ``state=``."""
        return [self.state[name] for name in self.state.keys() - self.classes.keys()]

    @property
    def has_custom_object(self) -> bool:
        """Whether the class of an object in ``passed`` is not one of torch's. Such an object may hold anything."""
        return any(not type(one).__module__.startswith("torch.") for one in self.passed)


def count_updating(optimizers: Sequence[Optimizer]) -> int:
    """Return the number of optimizers whose ``step`` is an update (see ``WrapperRole.makes_updates``)."""
    return sum(wrapper_role.makes_updates for wrapper_role in wrapper_roles(optimizers))


def unwrap(optimizer: object) -> Optimizer:
    """Return the innermost optimizer in ``optimizer``. (One scheduler refers to a wrapper, another to the optimizer
    inside it: ``unwrap`` makes the two comparable.) Raises ``TypeError`` and ``UnsupportedError``."""
    innermost: Optimizer = optimizers_to_follow([optimizer])[-1]
    return innermost


def param_positions(model: nn.Module) -> dict[int, int]:
    """Id of each parameter -> its index in ``model.parameters()``."""
    return {id(p): i for i, p in enumerate(model.parameters())}


def discover(model: nn.Module, optimizer: object, state: Mapping[str, object] | None) -> Found:
    """Return the objects that were passed, together with those that are found among the live objects. ``optimizer``,
    ``state``: the arguments of ``attach``.

    Raises ``AmbiguousError`` if two live objects could fill one role, and ``TypeError`` or ``UnsupportedError`` for an
    optimizer that cannot be followed.
    """
    reshard(model)  # now the model holds the parameters that optimizers update
    given, params = dict(state or {}), param_positions(model)
    live = LiveObjects()
    if optimizer is None:
        optimizers = _find_optimizers(live, params)
    else:
        optimizers = optimizers_to_follow(optimizer if isinstance(optimizer, (list, tuple)) else [optimizer])
        _refuse_shared(optimizers)
    found = _names(optimizers) if optimizer is None else {}
    for one in optimizers:
        _warn_loose_tensors(one, params, given)
    extra = {**_find_schedulers(live, optimizers, given), **_find_scaler(live, given)}
    found |= {name: type(obj).__name__ for name, obj in extra.items()}
    kept = {name: obj for name, obj in {**given, **extra}.items() if obj is not None}
    persistent = tuple(live.matching(DataLoader, draws_once))
    return Found(optimizers, kept, found, optimizers_were_passed=optimizer is not None, persistent=persistent)


_KINDS: tuple[type, ...] = (Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader)
"""The classes whose live objects are searched for."""


class LiveObjects:
    """A snapshot of the live objects of ``_KINDS``. With ``collect``, garbage is collected first, so that the scaler of
    a finished training is not found."""

    def __init__(self, *, collect: bool = True) -> None:
        if gc.get_freeze_count():
            # gc.get_objects() leaves out frozen objects. They are not frozen again: that would freeze garbage too.
            gc.unfreeze()
        if collect:
            gc.collect()
        # The test is type() and not isinstance(), which would resolve lazy proxies through their __class__. It is a set
        # look-up in one pass, because there are some hundred thousand objects.
        kinds: set[type] = set().union(*map(_with_subclasses, _KINDS))
        self._candidates = [o for o in gc.get_objects() if type(o) in kinds]

    def matching(self, kind: type[T], accept: Callable[[T], bool]) -> list[T]:
        """The objects of class ``kind``, or of a subclass, for which ``accept`` returns True."""
        return [o for o in self._candidates if issubclass(type(o), kind) and accept(o)]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def drives(optimizer: object, params: Mapping[int, int]) -> bool:
    """Whether the optimizer has one of these parameters. ``params``: see ``param_positions``."""
    groups = getattr(optimizer, "param_groups", None) or ()
    try:
        return any(id(p) in params for g in groups for p in g["params"])
    except (TypeError, KeyError):
        return False


def live_optimizers(model: nn.Module) -> tuple[Optimizer, ...]:
    """The live optimizers that have a parameter of this model, without optimizers inside a wrapper. If the search is
    ambiguous or fails, the result is empty, and each optimizer is followed when it first steps."""
    # The first search may find garbage. Collecting garbage is slow, so it is done only if that search finds something.
    # Then the search is repeated.
    for collect in (False, True):
        try:
            found = _find_optimizers(LiveObjects(collect=collect), param_positions(model))
        except (AmbiguousError, UnsupportedError, TypeError):
            return ()
        if not found:
            return ()
    return tuple(o for o, wrapper_role in zip(found, wrapper_roles(found), strict=True) if not wrapper_role.is_wrapped)


def check_late_optimizer(
    optimizer: Optimizer, views: Sequence[OptimizerView], names: Mapping[int, str]
) -> tuple[Optimizer, ...]:
    """Warn about an optimizer that was made after attach, and return the optimizers to follow.

    views: the optimizers that are followed already. names: id -> name of the model's present parameters. Optimizer
    state is saved by parameter name, so two optimizers whose parameters have the same names cannot both be saved.
    Raises ``LateError`` if the new optimizer steps a parameter of a followed optimizer, or a parameter that has
    replaced one of a followed optimizer in the model.
    """
    if _is_stateless_wrapper(optimizer, views):
        return ()
    new = optimizers_to_follow([optimizer])
    params = [p for one in new for g in one.param_groups for p in g["params"]]
    known = {id(p) for view in views for _, p in view.params}
    if any(id(p) in known for p in params):
        raise LateError(
            f"An optimizer ({type(optimizer).__name__}) steps parameters that another optimizer had at attach. lightck "
            "saves only the state of the optimizer that had them at attach. Step them with that optimizer only. Or "
            "close the session before the change, and attach again with the new optimizer to another path (its steps "
            "are counted from 0); a script that is resumed after the change must do so too."
        )
    known_names = {name for view in views for name, _ in view.params}
    replaced = [names[id(p)] for p in params if names.get(id(p)) in known_names]
    if replaced:
        raise LateError(
            f"The parameter {replaced[0]!r} was replaced in the model after attach (as by load_state_dict(..., "
            f"assign=True)), and an optimizer that was made since ({type(optimizer).__name__}) steps the new "
            "parameter. lightck saves the state of the old optimizer under the parameter's name, so the state of the "
            "new optimizer would be lost. Replace parameters and build the optimizer before attach. Or close the "
            "session before the change, and attach again with the new optimizer to another path."
        )
    log.warning(
        "lightck: %s was made after attach, or had no parameter of this model at attach. Its state is saved from now "
        "on. But after a restart attach() restores that state, and fails if the optimizer does not exist yet. Build it "
        "before attach, over this model's parameters",
        type(optimizer).__name__,
    )
    return new


def _is_stateless_wrapper(optimizer: Optimizer, views: Sequence[OptimizerView]) -> bool:
    """Whether this wrapper has no state, and contains only optimizers that are followed already (the user passed these
    as ``optimizer=``, and not the wrapper). Called at each of its steps, because some wrappers make their state later.
    ``views``: the optimizers that are followed."""
    inner = inner_of(optimizer)
    if not inner or not {id(one) for one in inner} <= {id(view.optimizer) for view in views}:
        return False
    params = {id(p) for view in views for _, p in view.params}
    return not getattr(optimizer, "state", None) and not unsaved_tensors(optimizer, params)


def _find_optimizers(live: LiveObjects, params: Mapping[int, int]) -> tuple[Optimizer, ...]:
    driving = live.matching(Optimizer, lambda o: drives(o, params) and (has_hooks(o) or bool(inner_of(o))))
    # The order of live objects is arbitrary. The order of the model's parameters is the same in the next process.
    driving.sort(key=lambda o: min(params.get(id(p), len(params)) for g in o.param_groups for p in g["params"]))
    optimizers = optimizers_to_follow(driving)
    _refuse_shared(optimizers)
    return optimizers


def _refuse_shared(optimizers: Sequence[Optimizer]) -> None:
    """Raise ``AmbiguousError`` if two optimizers have the same parameter and neither wraps the other, because state is
    saved by parameter name."""
    owner: dict[int, Optimizer] = {}
    wrappers = [(id(o), inner) for o in optimizers if (inner := wrapped_ids(o))]
    for opt in optimizers:
        around = {key for key, inner in wrappers if id(opt) in inner}
        for group in opt.param_groups:
            for p in group["params"]:
                other = owner.setdefault(id(p), opt)
                if other is not opt and id(other) not in around:
                    raise AmbiguousError(
                        f"Two optimizers update the same parameters: {_describe(other)} and {_describe(opt)}. State is "
                        "saved by parameter, so lightck saves one optimizer for each parameter. If one of the two is "
                        "unused, pass the other: attach(..., optimizer=opt). Otherwise give each optimizer parameters "
                        "of its own."
                    )


def _describe(optimizer: Optimizer) -> str:
    n = sum(len(g["params"]) for g in optimizer.param_groups)
    return f"{type(optimizer).__name__} ({n} parameters, lr {optimizer.param_groups[0].get('lr')})"


def schedulers_of(live: LiveObjects, optimizers: Iterable[Optimizer]) -> list[LRScheduler]:
    """LR schedulers that drive these optimizers and are not part of another scheduler (SequentialLR, ...)."""
    wanted = {id(o) for o in optimizers}
    found = live.matching(LRScheduler, lambda s: id(_scheduled_by(s)) in wanted)
    parts = {id(part) for s in found for part in getattr(s, "_schedulers", ())}
    return [s for s in found if id(s) not in parts]


def _scheduled_by(scheduler: LRScheduler) -> Optimizer | None:
    """The innermost optimizer that this scheduler drives, or None."""
    optimizer = getattr(scheduler, "optimizer", None)
    try:
        return unwrap(optimizer)
    except (TypeError, UnsupportedError):
        return None


def _find_schedulers(live: LiveObjects, optimizers: tuple[Optimizer, ...], given: Objects) -> dict[str, LRScheduler]:
    """Return name -> scheduler for each optimizer for which no scheduler was passed. Raises ``AmbiguousError``."""
    taken = {id(_scheduled_by(obj)) for obj in given.values() if isinstance(obj, LRScheduler)}
    if not optimizers or given.get("scheduler", 0) is None:  # the caller passed state={"scheduler": None}
        return {}
    alive, found = schedulers_of(live, optimizers), {}
    innermost = [
        o for o, wrapper_role in zip(optimizers, wrapper_roles(optimizers), strict=True) if not wrapper_role.wraps
    ]
    for i, opt in enumerate(innermost):
        name = numbered_name("scheduler", i, len(innermost))
        schedulers = [s for s in alive if _scheduled_by(s) is opt]
        if id(opt) in taken:
            _warn_not_passed([s for s in schedulers if not any(s is obj for obj in given.values())], opt)
            continue
        if not schedulers or name in given:
            continue
        if len(schedulers) > 1:
            raise AmbiguousError(
                f"{len(schedulers)} live LR schedulers drive {_describe(opt)}: "
                f"{', '.join(type(s).__name__ for s in schedulers)}. lightck cannot know which of them your loop "
                'steps. Pass those that it steps, by name: attach(..., state={"warmup": a, "decay": b}).'
            )
        found[name] = schedulers[0]
    return found


def _warn_not_passed(schedulers: Sequence[LRScheduler], optimizer: Optimizer) -> None:
    """Warn about schedulers that are not saved, because another scheduler was passed for their optimizer."""
    if schedulers:
        log.warning(
            "lightck: %s drives %s too, and is not saved: another scheduler was passed. If your loop steps it, "
            'pass it as well: attach(..., state={"warmup": a, "decay": b})',
            ", ".join(type(s).__name__ for s in schedulers),
            _describe(optimizer),
        )


def _find_scaler(live: LiveObjects, given: Objects) -> dict[str, torch.amp.GradScaler]:
    """Return the live scaler under the name ``scaler``, unless one was passed or declined. Raises
    ``AmbiguousError``."""
    kind = torch.amp.GradScaler
    is_declined = given.get("scaler", 0) is None  # the caller passed state={"scaler": None}
    if is_declined or any(isinstance(obj, kind) for obj in given.values()):
        return {}
    scalers = live.matching(kind, lambda s: s.is_enabled())
    if len(scalers) > 1:
        raise AmbiguousError(
            f"{len(scalers)} enabled GradScalers are alive. lightck cannot know which of them scales this training. "
            'Pass it: attach(..., state={"scaler": scaler}), or state={"scaler": None} for none.'
        )
    return {"scaler": scalers[0]} if scalers else {}


def _names(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Name -> class name of each optimizer, for ``Found.classes``. A wrapper and those inside it have one name."""
    around: dict[int, list[str]] = {}
    for optimizer, wrapper_role in zip(optimizers, wrapper_roles(optimizers), strict=True):
        around.setdefault(wrapper_role.outermost, []).append(type(optimizer).__name__)
    joined = [" around ".join([outer, ", ".join(inner)] if inner else [outer]) for outer, *inner in around.values()]
    return {numbered_name("optimizer", i, len(around)): names for i, names in enumerate(joined)}


def _warn_loose_tensors(optimizer: Optimizer, params: Mapping[int, int], given: Objects) -> None:
    """Warn about tensors in attributes of a third-party optimizer, because a checkpoint does not hold them."""
    loose = unsaved_tensors(optimizer, params)
    if loose and not any(obj is optimizer for obj in given.values()):
        name = type(optimizer).__name__
        log.warning(
            "lightck: %s keeps tensors in %s, outside its state and param_groups: they are not saved. Move "
            "them into optimizer.state, or pass an object that saves them: attach(..., state={...})",
            name,
            ", ".join(f"{name}.{key}" for key in loose),
        )


def numbered_name(name: str, index: int, count: int) -> str:
    """The name under which an object is saved: ``name``, followed by ``index`` unless ``count`` is 1."""
    return name if count == 1 else f"{name}.{index}"
