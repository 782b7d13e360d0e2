"""Checkpoints of pipeline stages: each rank has saved the tensors of its stage, under the names of the whole model.

The small state of a checkpoint names tensors, too: those of each optimizer's groups, extra state of modules, and some
others. Here the small states of all stages become that of the whole model, or that of a rank which holds some of its
tensors (``HeldNames``). What belongs to no tensor and to no optimizer is that of one rank
(``LogicalCheckpoint.state_position``), apart from ``done`` and ``persistent_started``, which are made from those of all
ranks. ``Contents.numbers`` is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lightck.errors import RankError, UnsupportedError, listed
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import DamagedError
from lightck.restore.contents import Contents, OptimizerContents, unpack_dict
from lightck.restore.saved_layout import SavedLayout
from lightck.restore.usable import RankCheckpoint, parse
from lightck.state import values
from lightck.state.inventory import param_of
from lightck.state.rules import ModelTensors


class HeldNames(NamedTuple):
    """Which tensors of the whole model a rank holds, by name."""

    names: frozenset[str]
    """Of parameters and buffers, as in the pool."""
    extra: frozenset[str]
    """Of modules' extra states."""
    ties: Mapping[str, str]
    """Name of a tied tensor -> the name under which its bytes are saved."""

    def holds(self, entry: Entry) -> bool:
        """Whether the rank holds a tensor of the whole model, or of an optimizer's state. Every rank holds the tensors
        of objects in ``state=``."""
        if entry.role in ("param", "buffer"):
            return entry.name in self.names or not entry.name.startswith("model/")
        if entry.role == "optimizer" and entry.name.startswith("optimizer/"):
            return self.holds_param(param_of(entry.name))
        path, _, rest = entry.name.partition("/")
        return path != "extra_state" or any(rest == name or rest.startswith(f"{name}/") for name in self.extra)

    def holds_param(self, name: str) -> bool:
        """Whether the rank holds a parameter. Those that only an optimizer has are on each rank."""
        return f"model/{name}" in self.names or name.startswith("outside/")


def held_by(tensors: ModelTensors) -> HeldNames | None:
    """Return what this rank holds, if its model is a stage; None: all tensors."""
    return HeldNames(tensors.names, tensors.extra, tensors.ties) if tensors.is_stage else None


def with_ties(entries: Mapping[str, Entry], ties: Mapping[str, str]) -> dict[str, Entry]:
    """Return the entries, and an alias for each tied name that has no entry while the other name of its tensor has one.
    (The stages save the bytes of a tensor under one name, also if the whole model has it under two.)"""
    found = dict(entries)
    for name, alias in ties.items():
        owner = entries.get(alias)
        if owner is not None and name not in entries:
            found[name] = owner._replace(name=name, alias=owner.alias or alias, nbytes=0)
    return found


def refuse_missing_stages(layouts: Sequence[SavedLayout | None]) -> None:
    """Raise ``DamagedError`` if a stage of the model is missing among these ranks. ``layouts``: of each rank."""
    stages = {one.stage for one in layouts if one is not None and one.stages > 1}
    count = max((one.stages for one in layouts if one is not None), default=1)
    if stages and len(stages) < count:
        missing = next(stage for stage in range(count) if stage not in stages)
        raise DamagedError(
            f"{count} pipeline stages saved it, and no pool holds the tensors of stage {missing} (counted from 0)"
        )


# -- the small state ---------------------------------------------------------------------------------------------------


def merged_state(of_ranks: Sequence[RankCheckpoint], own: RankCheckpoint, held: HeldNames | None) -> bytes:
    """Return the packed small state of the whole model; of what a rank holds, if ``held`` is given. ``own``: the
    checkpoint from which everything is taken that is not merged. Raises ``DamagedError``, and ``UnsupportedError`` for
    optimizers that cannot be put together."""
    contents, raw = [parse(stored) for stored in of_ranks], unpack_dict(own.state)
    optimizers, kept = _optimizers(contents, held)
    built = next((one.built for one in (parse(own), *contents) if one.built is not None), None)
    without_grad = {name for one in contents if one.built is not None for name in one.built.without_grad}
    if built is not None:
        built.groups = [one for number, one in enumerate(built.groups) if number in kept]
        built.state_counts = [one for number, one in enumerate(built.state_counts) if number in kept]
        built.without_grad = sorted(without_grad)
    extra = {name: value for one in (*reversed(contents), parse(own)) for name, value in one.extra.items()}
    changed: dict[str, object] = {
        "optimizers": [_optimizer_value(one) for one in optimizers],
        "extra": {name: value for name, value in extra.items() if held is None or name in held.extra},
        "built": None if built is None else built.pack(),
        "frozen": sorted({name for one in contents for name in _without_grad(one)}),
        "at_once": sorted({name for one in contents for name in one.copied_at_boundary}),
        "elastic": sorted({name for one in contents for name in one.resizable}),
        "numbers": {},
        "persistent_started": any(one.persistent_started for one in contents),
        "done": all(one.done for one in contents),
        "from_stages": True,
    }
    return values.pack(raw | changed, path="state")


def _without_grad(one: Contents) -> list[str]:
    if one.without_grad is not None:
        return one.without_grad
    return [] if one.built is None else one.built.without_grad


def _optimizer_value(one: OptimizerContents) -> dict[str, object]:
    return {
        "class": one.class_name,
        "wraps": one.wraps,
        "names": one.names,
        "groups": values.pack(one.groups, path="param_groups"),
        "values": one.packed_param_state,
        "rest": one.packed_other_state,
    }


def _optimizers(contents: Sequence[Contents], held: HeldNames | None) -> tuple[list[OptimizerContents], set[int]]:
    """Return the optimizers of the whole model, or of what a rank holds; and the number that each has in the lists of
    the stages."""
    found, kept = [], set()
    for number in range(max((len(one.optimizers) for one in contents), default=0)):
        of_stages = [one.optimizers[number] for one in contents if number < len(one.optimizers)]
        one = _with_held_params(_joined(of_stages), held)
        if held is None or one.all_names or not any(of_stage.all_names for of_stage in of_stages):
            found.append(one)
            kept.add(number)
    return found, kept


def _joined(of_stages: Sequence[OptimizerContents]) -> OptimizerContents:
    """Return one optimizer for the tensors of all stages. If stages contradict each other (``differing_options``), the
    options are those of the first stage with the most groups, and the state of a parameter is that of the last stage
    that has it."""
    first = max(of_stages, key=lambda one: len(one.groups))
    names: list[list[str]] = [[] for _ in first.groups]
    state: dict[str, object] = {}
    for one in of_stages:
        for group, of_group in zip(names, one.names, strict=False):
            group += [name for name in of_group if name not in group]
        state |= _values(one)
    packed = values.pack(state, path="optimizer") if state else of_stages[0].packed_param_state
    return OptimizerContents(first.class_name, names, first.groups, packed, first.packed_other_state, first.wraps)


def _values(one: OptimizerContents) -> dict[Any, object]:
    """Return name -> state that is no tensor. Raises ``UnsupportedError`` for large tensors in it."""

    def refuse(name: str) -> Any:
        raise UnsupportedError(
            f"{one.class_name} keeps the tensor {name!r} inside a list or another value of its state, and pipeline "
            "stages saved it. Such a tensor cannot be loaded into ranks with other tensors. Start as many ranks as "
            "saved it, with the same stages."
        )

    return unpack_dict(one.packed_param_state, tensor=refuse)


def _with_held_params(one: OptimizerContents, held: HeldNames | None) -> OptimizerContents:
    """Return the optimizer with only the parameters that a rank holds."""
    if held is None:
        return one
    names = [[name for name in group if held.holds_param(name)] for group in one.names]
    state = _values(one)
    packed = one.packed_param_state
    if state:
        packed = values.pack({name: value for name, value in state.items() if held.holds_param(name)}, path="optimizer")
    return OptimizerContents(one.class_name, names, one.groups, packed, one.packed_other_state, one.wraps)


def differing_options(of_ranks: Sequence[RankCheckpoint]) -> Iterator[str]:
    """Yield a text for each optimizer in which stages contradict each other: another class, other options of a group,
    or other state (not tensors) of a parameter that several stages have. Raises ``DamagedError``."""
    contents = [parse(stored).optimizers for stored in of_ranks]
    for number in range(max(map(len, contents), default=0)):
        of_stages = [one[number] for one in contents if number < len(one)]
        state: dict[Any, object] = {}
        for one in of_stages:
            same = _is_like(of_stages[0], one)
            for name, value in _values(one).items():
                same = same and values.pack([state.setdefault(name, value)], path="") == values.pack([value], path="")
            if not same:
                yield f"the optimizer {one.class_name} (its class, options or other state)"
                break


def _is_like(one: OptimizerContents, other: OptimizerContents) -> bool:
    groups = list(zip(one.groups, other.groups, strict=False))
    same_groups = all(values.pack(a, path="") == values.pack(b, path="") for a, b in groups)
    same_options = (one.class_name, one.wraps) == (other.class_name, other.wraps) and same_groups
    return same_options and one.packed_other_state == other.packed_other_state


# -- who holds what ----------------------------------------------------------------------------------------------------


def names_of_model(entries: Mapping[str, Entry]) -> list[str]:
    """Return the names of the model's parameters and buffers, sorted."""
    return sorted(
        name for name, one in entries.items() if one.role in ("param", "buffer") and name.startswith("model/")
    )


def flags_of(names: Sequence[str], held: Iterable[str]) -> bytes:
    """Return a byte for each of ``names``: 1 if it is in ``held``, else 0."""
    known = set(held)
    return bytes(name in known for name in names)


def refuse_tensors_without_holder(
    names: Sequence[str], entries: Mapping[str, Entry], flags_of_ranks: Sequence[bytes], what: str
) -> None:
    """Raise ``RankError`` if the checkpoint has a tensor that none of the ranks has. ``names``: of the parameters and
    buffers of the checkpoint. ``flags_of_ranks``: for each rank, ``flags_of`` these names. ``what``: names the
    checkpoint."""
    found = {name for flags in flags_of_ranks for name, is_held in zip(names, flags, strict=True) if is_held}
    left = [name for name in names if name not in found and entries[name].alias not in found]
    if left:
        raise RankError(
            f"{what} has the tensors {listed(left, 3)}, and no rank builds them, so they would be lost. Nothing was "
            "changed. Correct the stages of the model, or the names that its tensors get: Layout(..., rename=...)."
        )
