"""Putting a version back into a live training, in place, bit for bit.

First everything that can be checked is checked (``check``: classes, groups, names, shapes, dtypes); only then the first
byte changes (``apply``). Values are written with their own dtype, device and layout, never through
``load_state_dict`` of an optimizer, which casts. Order: payload, then objects in ``state``, then optimizer options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lightck.capture import values
from lightck.capture.inventory import Live, ModelView, OptimizerView, is_expanded, is_plain, optimizer_views
from lightck.contents import Contents, OptimizerContents, Source, empty_for, load_tensor, tensor_reader
from lightck.errors import DriftError, LightckError
from lightck.pool.layout import Entry

_Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """How a checkpoint and what it is restored into differ. Names of tensors, and sentences about the rest."""

    missing: tuple[str, ...] = ()
    """The model has it, the checkpoint does not."""
    extra: tuple[str, ...] = ()
    """The checkpoint has it, the model does not."""
    reshaped: tuple[str, ...] = ()
    retyped: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    """Optimizers, groups and objects in ``state`` that do not match."""

    def __bool__(self) -> bool:
        return any((self.missing, self.extra, self.reshaped, self.retyped, self.other))

    def __str__(self) -> str:
        parts = []
        for label in ("missing", "extra", "reshaped", "retyped", "other"):
            items = getattr(self, label)
            if items:
                more = f" and {len(items) - 5} more" if len(items) > 5 else ""
                parts.append(f"{label}: {'; '.join(items[:5])}{more}")
        return " | ".join(parts)


@dataclass(slots=True)
class Plan:
    """What ``apply`` will do: checked, and nothing changed yet."""

    contents: Contents
    drift: Drift
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Entry name -> live tensor to fill."""
    optimizers: list[tuple[OptimizerContents, OptimizerView]] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    declined: frozenset[str] = frozenset()
    """Names in ``state`` that the user said no to."""
    extra: list[tuple[str, nn.Module]] = field(default_factory=list)
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    """Entry name -> the tensor that holds its bytes now, as far as ``apply`` got."""
    unfit: set[str] = field(default_factory=set)
    """Parameters that do not fit: their optimizer state is not taken either."""


def check(
    contents: Contents,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    objects: Mapping[str, Any],
    *,
    strict: bool,
    complete: bool,
) -> Plan:
    """Compare a version with a live training. Raises ``DriftError`` where they differ and ``strict`` is set.

    ``objects``: name -> object, or None for a name that is declined.

    ``complete``: what the version holds and nobody takes (an optimizer, a name in ``state``) is drift too.
    """
    view = ModelView(model)
    names = view.names_by_id()
    opt_views = optimizer_views(optimizers, names)
    plan = Plan(contents, Drift(), declined=frozenset(n for n, o in objects.items() if o is None))
    notes: list[str] = []
    tensors = list(view.tensors(frozenset())) + [live for o in opt_views for live in o.outside()]
    missing, extra, reshaped, retyped = _match_tensors(contents, tensors, plan, notes)
    _match_optimizers(contents, opt_views, plan, notes, complete)
    _match_objects(contents, objects, plan, notes, complete)
    _match_extra(contents, view, plan, notes)
    plan.drift = Drift(missing, extra, reshaped, retyped, tuple(notes))
    if plan.drift and strict:
        raise DriftError(
            f"The checkpoint of step {contents.step} does not fit: {plan.drift}. It was saved from another model, "
            "optimizer or state. Build them as they were, or take what fits with "
            "lightck.recover(path, model, strict=False).",
            plan.drift,
        )
    return plan


def _match_tensors(contents: Contents, lives: list[Live], plan: Plan,
                   notes: list[str]) -> tuple[_Names, _Names, _Names, _Names]:  # fmt: skip
    held = {n: e for n, e in contents.entries.items() if n.startswith(("model/", "outside/"))}
    missing, reshaped, retyped = [], [], []
    for live in lives:
        entry = held.pop(live.name, None)
        if entry is None:
            missing.append(live.name)
            continue
        dtype = values.dtype_from_name(entry.dtype)
        if tuple(live.tensor.shape) != entry.shape or live.tensor.dtype != dtype:
            plan.unfit.add(live.name.removeprefix("model/"))
        if tuple(live.tensor.shape) != entry.shape:
            reshaped.append(f"{live.name}: {list(entry.shape)} saved, {list(live.tensor.shape)} live")
        elif live.tensor.dtype != dtype:
            retyped.append(f"{live.name}: {dtype} saved, {live.tensor.dtype} live")
        elif live.alias is not None and entry.alias is None:
            notes.append(f"{live.name} is tied to {live.alias} live, and had values of its own when it was saved")
        elif live.alias is None:
            plan.tensors.append((entry.alias or live.name, live.tensor))
    return tuple(missing), tuple(held), tuple(reshaped), tuple(retyped)


def _match_optimizers(contents: Contents, views: list[OptimizerView], plan: Plan, notes: list[str],
                      complete: bool) -> None:  # fmt: skip
    left, pairs = _pairs(contents.optimizers, views)
    for saved, live in pairs:
        if live is None:
            if complete:
                notes.append(f"the checkpoint holds the state of {saved.class_name}, and no optimizer takes it")
            continue
        problem = _optimizer_problem(saved, live)
        if problem:
            notes.append(problem)
        else:
            plan.optimizers.append((saved, live))
    notes.extend(f"the checkpoint holds nothing for the live {live.class_name}" for live in left)


_Pair = tuple[OptimizerContents, OptimizerView | None]


def _pairs(saved: Sequence[OptimizerContents], views: Sequence[OptimizerView],
           ) -> tuple[list[OptimizerView], list[_Pair]]:  # fmt: skip
    """Who takes what, by parameters; and the live ones that are left. A wrapper has the parameters of what it wraps, so
    those of the same class come first."""
    left = list(views)
    pairs: list[_Pair] = []
    for same_class in (True, False):
        for one in saved:
            if any(one is known for known, _ in pairs):
                continue
            wanted = set(one.all_names)
            common = {v.index: len(wanted & {n for n, _ in v.params}) for v in left}
            fitting = [v for v in left if not same_class or (v.class_name == one.class_name and common[v.index])]
            live = max(fitting, key=lambda v: common[v.index], default=None)
            if live is not None:
                left.remove(live)
            if live is not None or not same_class:
                pairs.append((one, live))
    return left, pairs


def _optimizer_problem(saved: OptimizerContents, live: OptimizerView) -> str | None:
    if saved.class_name != live.class_name:
        return f"the checkpoint holds the state of {saved.class_name}, and the live optimizer is {live.class_name}"
    if len(saved.names) != len(live.names):
        return f"{live.class_name} has {len(live.names)} parameter groups, the checkpoint {len(saved.names)}"
    for g, (was, now) in enumerate(zip(saved.names, live.names, strict=True)):
        if set(was) != set(now):
            differ = sorted(set(was) ^ set(now))
            return f"group {g} of {live.class_name} holds other parameters ({', '.join(differ[:3])})"
    return None


def _match_objects(contents: Contents, objects: Mapping[str, Any], plan: Plan, notes: list[str],
                   complete: bool) -> None:  # fmt: skip
    for name in contents.state:
        if objects.get(name) is not None:
            plan.objects[name] = objects[name]
        elif complete and name not in plan.declined:
            notes.append(
                f"the checkpoint holds state {name!r}, and nothing live takes it (a scheduler is built before attach; "
                f'others are passed in state={{"{name}": ...}}; None there declines it)'
            )
    asked = objects.keys() - plan.declined - contents.state.keys()
    notes.extend(f"the checkpoint holds nothing for state {name!r}" for name in sorted(asked))


def _match_extra(contents: Contents, view: ModelView, plan: Plan, notes: list[str]) -> None:
    live = dict(view.extra)
    for name in contents.extra.keys() ^ live.keys():
        notes.append(f"extra state {name!r} is on one side only")
    plan.extra = [(name, module) for name, module in view.extra if name in contents.extra]


def apply(plan: Plan, source: Source) -> None:
    """Do it. Raises ``DamagedError`` at a block that does not verify: live tensors may have changed by then, and
    ``plan.held`` names them."""
    with torch.no_grad():
        for name, tensor in plan.tensors:
            plan.held[name] = tensor
            fill(source, name, tensor)
        states = [_optimizer_state(saved, live, plan, source) for saved, live in plan.optimizers]
    read = tensor_reader(source, plan.held)
    rests = [values.unpack(saved.rest, tensor=read) for saved, _ in plan.optimizers]
    objects = {name: values.unpack(plan.contents.state[name], tensor=read) for name in plan.objects}
    extra = {name: values.unpack(plan.contents.extra[name], tensor=read) for name, _ in plan.extra}
    for name, module in plan.extra:
        module.set_extra_state(extra[name])
    for name, obj in plan.objects.items():
        _load(name, obj, objects[name])
    for (saved, live), state, rest in zip(plan.optimizers, states, rests, strict=True):
        _set_optimizer(saved, live, state)
        for key in live.rest():
            del live.optimizer.state[key]
        live.optimizer.state.update(rest)


def _load(name: str, obj: Any, value: Any) -> None:
    try:
        obj.load_state_dict(value)
    except LightckError:
        raise
    except Exception as err:
        raise DriftError(
            f"state[{name!r}] did not take its saved state: {type(err).__name__}: {err}. The object is not built as it "
            "was when it was saved. Build it the same way, then restore again."
        ) from err


def fill(source: Source, name: str, tensor: torch.Tensor) -> None:
    """Verified bytes of one entry into a live tensor: straight into its memory where that has the saved layout."""
    entry = source.entries[name]
    if not tensor.numel():
        return
    if is_plain(tensor) and _same_layout(entry, tensor):
        source.read_into(name, tensor.data_ptr())
    else:
        tensor.copy_(load_tensor(source, name))


def _same_layout(entry: Entry, tensor: torch.Tensor) -> bool:
    return tuple(tensor.stride()) == entry.stride or (tensor.is_contiguous() and _is_contiguous(entry))


def _is_contiguous(entry: Entry) -> bool:
    expected = 1
    for size, step in zip(reversed(entry.shape), reversed(entry.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True


def _optimizer_state(saved: OptimizerContents, live: OptimizerView, plan: Plan,
                     source: Source) -> dict[str, dict[Any, Any]]:  # fmt: skip
    """The state of each parameter, by name: live tensors filled in place where they fit, new ones elsewhere."""
    keys = keys_by_param(plan.contents, saved)
    rest = values.unpack(saved.values, tensor=tensor_reader(source, plan.held))
    params = dict(live.params)
    filled: set[int] = set()
    state: dict[str, Any] = {}
    for name in saved.all_names:
        if name in plan.unfit:
            continue
        p = params[name]
        present = live.optimizer.state.get(p)
        new: dict[Any, Any] = {}
        for key, entry in keys.get(name, {}).items():
            now = present.get(key) if isinstance(present, dict) else None
            new[key] = _state_tensor(now, entry, p.device, plan, source, filled)
        if new or name in rest:
            state[name] = joined(new, rest, name)
    return state


def joined(tensors: dict[Any, Any], rest: Mapping[str, Any], name: str) -> Any:
    """One parameter's state: its tensors and the rest of it, or what it is where it is no dict."""
    other = rest.get(name, {})
    return tensors | other if isinstance(other, dict) else other


def _state_tensor(present: Any, entry: Entry, device: torch.device, plan: Plan, source: Source,
                  filled: set[int]) -> torch.Tensor:  # fmt: skip
    """``filled``: ids of the live tensors that were filled already. One that several parameters share live holds the
    values of one of them only, unless they shared it when it was saved."""
    if entry.alias is not None:
        known = plan.held.get(entry.alias)
        if known is not None:
            return known
        entry = source.entries[entry.alias]
    target = present if _fits(present, entry) and id(present) not in filled else None
    if target is None:
        target = empty_for(entry, "cpu" if entry.device == "cpu" else device)
    filled.add(id(target))
    plan.held[entry.name] = target
    fill(source, entry.name, target)
    return target


def _fits(present: Any, entry: Entry) -> bool:
    if not isinstance(present, torch.Tensor) or present.dtype != values.dtype_from_name(entry.dtype):
        return False
    return tuple(present.shape) == entry.shape and not is_expanded(present)


def keys_by_param(contents: Contents, saved: OptimizerContents) -> dict[str, dict[str, Entry]]:
    """Parameter name -> key -> entry, for state tensors that lie directly in ``optimizer.state[p]``."""
    names = set(saved.all_names) if not saved.wraps else set()
    found: dict[str, dict[str, Entry]] = {}
    for full, entry in contents.entries.items():
        if not full.startswith("optimizer/"):
            continue
        param, _, key = full.removeprefix("optimizer/").rpartition("/")
        if param in names:
            found.setdefault(param, {})[key] = entry
    return found


def _set_optimizer(saved: OptimizerContents, live: OptimizerView, state: dict[str, dict[Any, Any]]) -> None:
    optimizer, params = live.optimizer, dict(live.params)
    taken: dict[int, torch.Tensor] = {}
    for name, p in params.items():
        if name in state:
            optimizer.state[p] = state[name]
        else:
            optimizer.state.pop(p, None)
    for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
        for key, value in options.items():
            group[key] = _option(group.get(key), value, taken)


def _option(now: Any, saved: Any, taken: dict[int, torch.Tensor]) -> Any:
    """A group's option as it was saved. A tensor (a learning rate) stays the tensor that others may hold, unless
    another group shares it and had another value (``taken``: what live tensors were set to)."""
    if not isinstance(saved, torch.Tensor):
        return deepcopy(saved)
    fits = isinstance(now, torch.Tensor) and (now.dtype, now.shape) == (saved.dtype, saved.shape)
    if not fits or is_expanded(now) or not torch.equal(taken.setdefault(id(now), saved), saved):
        device = now.device if isinstance(now, torch.Tensor) else saved.device
        return saved.clone().to(device)
    with torch.no_grad():
        return now.copy_(saved)


def poison(touched: Iterable[torch.Tensor], model: nn.Module) -> None:
    """No version could be restored whole: make sure that nobody trains on a mix."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *touched]:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
