"""Restore a checkpoint into a live training, in place, bit for bit.

``check`` compares classes, groups, names, shapes and dtypes, and changes nothing. ``apply`` then writes. Live tensors
keep their dtype, device and memory layout. An optimizer's ``load_state_dict`` is not called, because it casts.
``apply`` writes the tensors of the model and of the optimizers' state first, then buffers that are resized, extra state
of modules, the objects in ``state``, and last all other state and the options of the optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lightck.errors import DriftError, LightckError, listed
from lightck.layout import Layout
from lightck.pool.format.layout import Entry
from lightck.restore import changed_options, tensor_writes
from lightck.restore.contents import Contents, OptimizerContents, Source, load_tensor, tensor_reader, unpack_dict
from lightck.restore.optimizer import read_state, set_state
from lightck.restore.readback import ObjectCheck, check_optimizer, has_same_keys
from lightck.restore.stages import with_ties
from lightck.restore.tensor_devices import like_live
from lightck.restore.tensor_writes import TensorWrites
from lightck.state import values
from lightck.state.inventory import Live, ModelView, OptimizerView, optimizer_views
from lightck.state.local_tensors import local_of, refuse_optimizer_before_dtensors, reshard
from lightck.state.parts import part_of_live, refuse_parts
from lightck.state.rules import assign_parts
from lightck.state.storable import class_name_of, dtype_from_name, refuse_unstorable_tensors

_Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """Differences between a checkpoint and the objects that it is restored into. As a bool it is True if there are
    differences."""

    missing: tuple[str, ...] = ()
    """Names of tensors that only the model has."""
    extra: tuple[str, ...] = ()
    """Names of tensors that only the checkpoint has."""
    reshaped: tuple[str, ...] = ()
    """Texts: the name of a tensor whose shape differs, and its shape in the checkpoint and in the model."""
    retyped: tuple[str, ...] = ()
    """Texts: the name of a tensor whose dtype differs, and its dtype in the checkpoint and in the model."""
    other: tuple[str, ...] = ()
    """Sentences about optimizers, groups, tied tensors, extra state and objects in ``state`` that do not match."""

    def __bool__(self) -> bool:
        return any((self.missing, self.extra, self.reshaped, self.retyped, self.other))

    def __str__(self) -> str:
        labels = {
            "only in the model": self.missing,
            "only in the checkpoint": self.extra,
            "of another shape": self.reshaped,
            "of another dtype": self.retyped,
            "also": self.other,
        }
        parts = []
        for label, items in labels.items():
            if items:
                more = f" and {len(items) - 5} more" if len(items) > 5 else ""
                parts.append(f"{label}: {'; '.join(items[:5])}{more}")
        return " | ".join(parts)


@dataclass(slots=True)
class RestorePlan:
    """What ``apply`` will do; ``check`` returns it."""

    contents: Contents
    drift: Drift
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """(entry name, live tensor to write)."""
    resizable: list[tuple[str | None, Live]] = field(default_factory=list)
    """Buffers that the training added, removed or resized: (entry name, live buffer). The entry name is None for a
    buffer that was None when it was saved. ``Live.owner`` is here the dict of the module that holds the buffer."""
    optimizers: list[tuple[OptimizerContents, OptimizerView]] = field(default_factory=list)
    """(saved optimizer, live optimizer)."""
    objects: dict[str, object] = field(default_factory=dict)
    """Name in ``state`` -> live object to restore."""
    declined: frozenset[str] = frozenset()
    """Names in ``state`` for which the user passed None: what was saved under them is not restored."""
    extra_state: list[tuple[str, nn.Module]] = field(default_factory=list)
    """(name, module) of each module with a saved extra state, to pass to ``set_extra_state``."""
    overridden_options: list[str] = field(default_factory=list)
    """A text for each option to which the script gives another value than at the start of the training. The restore
    sets the value in the checkpoint."""
    restored: dict[str, torch.Tensor] = field(default_factory=dict)
    """Entry name -> tensor that ``apply`` has written or loaded so far."""
    untied: list[str] = field(default_factory=list)
    """A text for each parameter that was tied to another one when it was saved, and is a tensor of its own now."""
    unfit: set[str] = field(default_factory=set)
    """Names of parameters and buffers of another shape or dtype: they and their optimizer state are not restored."""


def check(
    contents: Contents,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    objects: Mapping[str, object],
    *,
    strict: bool,
    unused_is_drift: bool,
    of_rank: bool = False,
    layout: Layout | None = None,
) -> RestorePlan:
    """Compare a checkpoint with live objects, and return the plan of the restore. Raises ``DriftError`` if they differ
    and ``strict`` is True.

    ``objects``: name in ``state`` -> object; None as the object means that what was saved under this name is not
    restored. ``unused_is_drift``: whether it counts as drift if there is no live object for a saved optimizer or for a
    saved name in ``state``. ``of_rank``: whether the checkpoint is that of a rank, so that tensors may be parts.
    ``layout``: says of each plain tensor (no DTensor) which part of its logical tensor it is.
    """
    reshard(model)
    view = ModelView(model, layout)
    names = view.names_by_id()
    opt_views = optimizer_views(optimizers, names)
    plan = RestorePlan(contents, Drift(), declined=frozenset(n for n, o in objects.items() if o is None))
    notes: list[str] = []
    tensors = view.tensors(None) + [live for o in opt_views for live in o.outside()]
    assign_parts(layout, tensors)
    refuse_unstorable_tensors([live.name for live in tensors], [live.tensor for live in tensors], "restored")
    if not of_rank:
        refuse_parts(tensors, "restored")
    if contents.from_stages:
        ties = {live.name: live.alias for live in tensors if live.alias is not None}
        contents = plan.contents = replace(contents, entries=with_ties(contents.entries, ties))
    refuse_optimizer_before_dtensors(view.parameters(), [(one.class_name, one.params) for one in opt_views])
    left = _match_resizable(contents, view, tensors, plan)
    missing, extra, reshaped, retyped = _match_tensors(contents, left, plan, notes)
    plan.untied = _untied(contents, left)
    notes.extend(f"{one} when it was saved, and is not now" for one in plan.untied if unused_is_drift)
    _match_optimizers(contents, opt_views, plan, notes, unused_is_drift)
    _match_objects(contents, objects, plan, notes, unused_is_drift, strict)
    _match_extra_state(contents, view, plan, notes)
    if any(name.startswith("outside/") for name in (*missing, *extra)):
        notes.append("outside/... names a parameter that an optimizer holds and the model does not, or not any more")
    plan.drift = Drift(missing, extra, reshaped, retyped, tuple(notes))
    if plan.drift and strict:
        cure = (
            "Build them as they were (on any number of ranks, sharded in any way; with layout=, if plain tensors are "
            "parts); or load the whole tensors with lightck.recover(directory, model) before the model is sharded, and "
            "attach to another directory"
            if of_rank
            else "Build them as they were, or take what fits with lightck.recover(path, model, strict=False)"
        )
        raise DriftError(
            f"The checkpoint of step {contents.step} does not fit: {plan.drift}. It was saved from another model, "
            f"optimizer or state. {cure}.",
            plan.drift,
        )
    plan.overridden_options = changed_options.descriptions(contents, plan.optimizers, plan.objects)
    return plan


def _match_resizable(contents: Contents, view: ModelView, lives: list[Live], plan: RestorePlan) -> list[Live]:
    """Plan the restore of the resizable buffers whose shape or dtype differs from the checkpoint, or that are None on
    one side. Returns all other tensors of ``lives``."""
    left = []
    for live in lives:
        may_resize = live.role == "buffer" and live.name in contents.resizable
        entry = contents.entries.get(live.name) if may_resize else None
        is_whole = live.dtensor is None and live.part is None
        if may_resize and is_whole and not (entry and _is_like(live.tensor, entry)):
            plan.resizable.append((None if entry is None else entry.alias or live.name, live))
        else:
            left.append(live)
    for name, container, key in view.vacant_buffers():
        entry = contents.entries.get(name)
        if entry is not None and name in contents.resizable:
            plan.resizable.append((entry.alias or name, Live(name, "buffer", torch.empty(0), container, key)))
    return left


def _is_like(tensor: torch.Tensor, entry: Entry) -> bool:
    return tensor.shape == entry.shape and tensor.dtype == dtype_from_name(entry.dtype)


def _match_tensors(
    contents: Contents, lives: list[Live], plan: RestorePlan, notes: list[str]
) -> tuple[_Names, _Names, _Names, _Names]:
    """Match tensors by name and add them to the plan. Returns ``missing``, ``extra``, ``reshaped`` and ``retyped`` of
    ``Drift``; ``notes`` gets sentences for ``Drift.other``."""
    unmatched = {n: e for n, e in contents.entries.items() if n.startswith(("model/", "outside/"))}
    for _, live in plan.resizable:
        unmatched.pop(live.name, None)
    tensors = {live.name: live.tensor for live in lives}
    missing, reshaped, retyped = [], [], []
    for live in lives:
        entry = unmatched.pop(live.name, None)
        if entry is None:
            missing.append(live.name)
            continue
        is_part = live.dtensor is not None or live.part is not None or entry.pieces is not None
        other_part = _other_part(live, entry) if is_part else ""
        if other_part or not _is_like(live.tensor, entry):
            plan.unfit.add(live.name.removeprefix("model/"))
            if other_part:
                reshaped.append(other_part)
            elif tuple(live.tensor.shape) != entry.shape:
                reshaped.append(f"{live.name}: {list(entry.shape)} saved, {list(live.tensor.shape)} live")
            else:
                retyped.append(f"{live.name}: torch.{entry.dtype} saved, {live.tensor.dtype} live")
        # If the name is tied to ``live.alias`` now, and was so when it was saved, nothing is added to the plan: the
        # write of ``live.alias`` restores both names.
        elif live.alias is None or not _were_tied(contents, live.name, live.alias):
            if live.alias is not None and tensors.get(live.alias) is live.tensor and live.alias in contents.entries:
                notes.append(f"{live.name} is tied to {live.alias} now, and was saved with values of its own")
            else:
                # Either the name is not tied now; or the checkpoint does not hold ``live.alias``; or the two names have
                # two tensor objects that share memory. In the last case ``_refuse_contradiction`` compares the saved
                # values of the two before the first write.
                plan.tensors.append((entry.alias or live.name, live.tensor))
    return tuple(missing), tuple(unmatched), tuple(reshaped), tuple(retyped)


def _untied(contents: Contents, lives: Sequence[Live]) -> list[str]:
    """Describe the parameters that were one tensor with another one when they were saved, and are two tensors now:
    from the next update on they would differ."""
    owners = {live.name: live.alias or live.name for live in lives}
    found = []
    for live in lives:
        entry = contents.entries.get(live.name)
        saved_owner = None if entry is None or live.role != "param" else entry.alias
        if saved_owner in owners and owners[saved_owner] != owners[live.name]:
            found.append(f"{live.name} was tied to {saved_owner}")
    return found


def _other_part(live: Live, entry: Entry) -> str:
    """Return a text that says which part of a tensor was saved and which part is live; "" if it is the same part."""
    shape, pieces = part_of_live(live)
    if (shape, pieces) == (entry.logical_shape, entry.pieces):
        return ""
    whole_saved = entry.shape if entry.logical_shape is None else entry.logical_shape
    whole_now = tuple(live.tensor.shape) if shape is None else shape
    if whole_saved != whole_now:
        return f"{live.name}: {list(whole_saved)} saved, {list(whole_now)} live"
    saved, now = ("a whole tensor" if of is None else f"a part of {list(of)}" for of in (entry.logical_shape, shape))
    return f"{live.name}: {saved} saved, {now if saved != now else 'another part of it'} live"


def _were_tied(contents: Contents, name: str, other: str) -> bool:
    """Whether the checkpoint stores both names as one tensor."""
    owners = [entry.alias or entry.name for n in (name, other) if (entry := contents.entries.get(n)) is not None]
    return len(owners) == 2 and owners[0] == owners[1]


def _match_optimizers(
    contents: Contents, views: list[OptimizerView], plan: RestorePlan, notes: list[str], unused_is_drift: bool
) -> None:
    left, pairs = _pairs(contents.optimizers, views)
    for saved, live in pairs:
        if live is None:
            if unused_is_drift:
                notes.append(
                    f"the checkpoint holds the state of {saved.class_name}, and this run has no optimizer for it"
                )
            continue
        problem = _optimizer_problem(saved, live)
        if problem:
            notes.append(problem)
        else:
            plan.optimizers.append((saved, live))
    notes.extend(f"the checkpoint holds no state for the {live.class_name} of this run" for live in left)


_Pair = tuple[OptimizerContents, OptimizerView | None]


def _pairs(
    saved: Sequence[OptimizerContents],
    views: Sequence[OptimizerView],
) -> tuple[list[OptimizerView], list[_Pair]]:
    """Match saved and live optimizers by their parameters. Returns the live optimizers that are left over, and one pair
    for each saved optimizer. The second item of a pair is None if there is no live optimizer for the saved one.

    A wrapper has the same parameters as the optimizer that it wraps. Therefore optimizers of equal class are matched
    first, and all others after them."""
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
    """Return a sentence that says why a saved optimizer does not fit a live one, or None if it fits."""
    if saved.class_name != live.class_name:
        return f"the checkpoint holds the state of {saved.class_name}, and this run has {live.class_name}"
    if len(saved.names) != len(live.names):
        return _other_groups(saved, live)
    for g, (was, now) in enumerate(zip(saved.names, live.names, strict=True)):
        if set(was) != set(now):
            differ = sorted(set(was) ^ set(now))
            return f"parameter group {g} of {live.class_name} has other parameters now ({listed(differ)})"
    return None


def _other_groups(saved: OptimizerContents, live: OptimizerView) -> str:
    n_saved, n_live = len(saved.names), len(live.names)
    fact = f"{live.class_name} has {n_live} parameter group{'s' * (n_live != 1)}, and the checkpoint has {n_saved}"
    if n_saved < n_live:
        return fact
    names = [name for group in saved.names[n_live:] for name in group]
    if not names:
        return (
            f"{fact}, whose last groups have no parameter on this rank. Give the optimizers of all pipeline stages the "
            "same parameter groups in the same order, empty ones included"
        )
    elsewhere = {name for group in live.names for name in group}
    if elsewhere.issuperset(names):
        return f"{fact}: {listed(names)} are in other groups now. Give the optimizer the groups that it had"
    return (
        f"{fact}: the live optimizer lacks the groups of {listed(names)}. If the training adds groups while it runs "
        "(add_param_group), call add_param_group before attach for each group that the optimizer had at the saved step "
        "(lightck.recover(path).step)"
    )


def _match_objects(
    contents: Contents,
    objects: Mapping[str, object],
    plan: RestorePlan,
    notes: list[str],
    unused_is_drift: bool,
    strict: bool,
) -> None:
    """Match the objects in ``state`` by name. A live object of another class than the saved one is drift. Without
    ``strict`` the object is restored nevertheless if its state has the saved keys: its class may have been renamed."""
    for name in contents.state:
        if objects.get(name) is not None:
            was = contents.classes.get(name)
            if was is not None and was != class_name_of(objects[name]):
                notes.append(f"state {name!r} is {class_name_of(objects[name])} now, and was saved from {was}")
                if strict or not has_same_keys(objects[name], contents.state[name]):
                    continue
            plan.objects[name] = objects[name]
        elif unused_is_drift and name not in plan.declined:
            notes.append(
                f"the checkpoint holds state {name!r}, and this run has no object for it (build a scheduler before "
                f'attach; pass any other object in state={{"{name}": ...}}, or None to leave this state out)'
            )
    not_saved = objects.keys() - plan.declined - contents.state.keys()
    notes.extend(f"the checkpoint holds no state for the object state[{name!r}]" for name in sorted(not_saved))


def _match_extra_state(contents: Contents, view: ModelView, plan: RestorePlan, notes: list[str]) -> None:
    live = dict(view.extra)
    for name in contents.extra.keys() ^ live.keys():
        where = "model" if name in live else "checkpoint"
        notes.append(f"extra state {name!r} (from get_extra_state()) is only in the {where}")
    plan.extra_state = [(name, module) for name, module in view.extra if name in contents.extra]


def apply(plan: RestorePlan, source: Source) -> None:
    """Execute the plan. Raises ``DamagedError`` at a block that does not match its checksum, and ``DriftError`` if
    tensors share memory and were saved with different values, or if an object or an optimizer does not take its state.
    After an error, ``plan.restored`` contains the live tensors that may have been written."""
    _refuse_contradiction(plan, source)
    new_buffers = {name: load_tensor(source, name) for name, _ in plan.resizable if name is not None}
    with torch.no_grad():
        writes = TensorWrites(source)
        for name, tensor in plan.tensors:
            plan.restored[name] = tensor
            writes.add(name, tensor)
        states = [
            read_state(saved, live, plan.contents, plan.unfit, plan.restored, writes) for saved, live in plan.optimizers
        ]
        writes.run()
    read = tensor_reader(source, plan.restored)
    rests = [
        like_live(unpack_dict(saved.packed_other_state, tensor=read), live.other_state())
        for saved, live in plan.optimizers
    ]
    objects = {name: values.unpack(plan.contents.state[name], tensor=read) for name in plan.objects}
    extra_states = {name: values.unpack(plan.contents.extra[name], tensor=read) for name, _ in plan.extra_state}
    _set_resizable(plan, new_buffers)
    for name, module in plan.extra_state:
        module.set_extra_state(extra_states[name])
    checks = {name: ObjectCheck(name, obj) for name, obj in plan.objects.items()}
    for name, obj in plan.objects.items():
        _load(name, obj, checks[name].on_live_devices(objects[name]))
    for (saved, live), state, rest in zip(plan.optimizers, states, rests, strict=True):
        set_state(saved, live, state)
        for key in live.other_state():
            del live.optimizer.state[key]
        live.optimizer.state.update(rest)
        if plan.contents.step > 0:
            # Else a scheduler of torch warns at its first step that no optimizer.step() was called before it.
            vars(live.optimizer)["_opt_called"] = True
    for (saved, live), state, rest in zip(plan.optimizers, states, rests, strict=True):
        check_optimizer(live, state, rest, saved.groups)
    for name, check_one in checks.items():  # the state is unpacked again: load_state_dict may have changed its argument
        check_one.after(values.unpack(plan.contents.state[name], tensor=plan.restored.__getitem__))
    changed_options.warn_options(plan.overridden_options)


def _refuse_contradiction(plan: RestorePlan, source: Source) -> None:
    with torch.no_grad():
        names = tensor_writes.contradiction(plan.tensors, lambda name: load_tensor(source, name))
    if names is not None:
        raise DriftError(
            f"The checkpoint of step {plan.contents.step} does not fit: {names[0]} and {names[1]} share memory now, "
            "and were saved with different values. Nothing was changed. Give each of the two memory of its own first "
            "(p.data = p.data.clone()), or read the saved values without the model: lightck.recover(path).model."
        )


def _set_resizable(plan: RestorePlan, new_buffers: Mapping[str, torch.Tensor]) -> None:
    """Add, remove or resize buffers. A buffer that is resized keeps its tensor object. ``new_buffers``: entry name ->
    tensor with the saved size and values."""
    device = next((tensor.device for _, tensor in plan.tensors), torch.device("cpu"))
    for name, live in plan.resizable:
        assert live.owner is not None
        if name is None:
            live.owner[live.key] = None
        elif live.owner.get(live.key) is None:
            live.owner[live.key] = new_buffers[name].to(device)
        else:
            live.tensor.data = new_buffers[name].to(live.tensor.device)
        if name is not None:
            plan.restored[name] = live.owner[live.key]


def _load(name: str, obj: Any, value: object) -> None:
    try:
        obj.load_state_dict(value)
    except LightckError:
        raise
    except Exception as err:
        raise DriftError(
            f"The load_state_dict() of state[{name!r}] rejected its saved state: {type(err).__name__}: {err}. The "
            "object may be built differently than the saved one. Build it the same way, then restore again."
        ) from err


def write_nan(touched: Iterable[torch.Tensor], model: nn.Module) -> None:
    """Write NaN into the floating-point and complex tensors in ``touched`` and among the model's parameters: no
    checkpoint was restored completely, and nobody must train on a mix of two."""
    with torch.no_grad():
        for tensor in [*map(local_of, model.parameters()), *touched]:
            if tensor.dtype == torch.float4_e2m1fn_x2 or not (tensor.is_floating_point() or tensor.is_complex()):
                continue  # the dtype has no NaN
            tensor_writes.write_constant(tensor, float("nan"))
