"""The tensors of a checkpoint in a pool with gradient records, replayed to the checkpoint's step.

Each unit starts from its newest copy (``unit_copies.py``), and the optimizer replays the updates after it
(``replay.py``). After each of them, one page of each tensor is compared with its *sentinel*: the checksum of this page
in that step's record, if the record has sentinels. The first difference ends the replay. A replay that is not exact can
still end without one, because each sentinel covers one page only. All else (buffers, small state) lies in the
checkpoint's own record as it is.

The residuals of ``TopK``, if they lie with the bases, cannot be replayed: gradients hold nothing of what was left out
of them. They are taken from the copy of their unit as they are, and ``UnitsAtStep`` says of which step they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightck._native import ffi, lib
from lightck.errors import CorruptPoolError, LightckError, ReplayError, StateValueError, UnsupportedError, listed
from lightck.pool.format.gradients import SENTINEL_PAGE
from lightck.pool.format.layout import HOME_PLACE, RESIDUAL_PREFIX, SLOT_PLACE, Entry
from lightck.pool.format.structures import DamagedError
from lightck.pool.gradient_reader import GradientCheckpoint
from lightck.pool.storage.failures import as_io_error
from lightck.restore.contents import empty_for, unpack_dict
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.replay import replay
from lightck.restore.unit_copies import LoadedUnit, Records, UnitCopies
from lightck.restore.unit_replay import Base
from lightck.state import values
from lightck.state.consumed_update import ConsumedUpdate
from lightck.state.fingerprint import fingerprint
from lightck.state.inventory import Live, entry_of, is_named_tensor, state_name, unit_of
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.storable import dtype_from_name
from lightck.state.unit_update import SLICE_NUMEL, Unit
from lightck.state.update_record import UPDATE_KEY, consumed_update, gradient_names
from lightck.state.values import typed

log = logging.getLogger("lightck")
_DECISIVE = ("torch", "machine", "cpu", "vendor", "deterministic")
"""Parts of the fingerprint that decide the bits of an update. (So does the number of threads; each record holds it.)"""


@dataclass(frozen=True, slots=True)
class UnitsAtStep:
    """The units of a checkpoint, as they were at the end of its step."""

    entries: dict[str, Entry]
    """Name of a tensor -> its entry."""
    tensors: dict[str, torch.Tensor]
    """Name of a tensor -> the tensor."""
    older_residuals: dict[str, int | None] = field(default_factory=dict)
    """Name of a residual that is older than the checkpoint -> the step that it is of; None: no residual was saved yet,
    and it is zero."""
    other_conditions: str = ""
    """What differs between the conditions of the training and those of the replay ("torch 2.12 -> 2.13"); empty if
    nothing does, or if nothing was replayed."""


def units_at_step(checkpoint: GradientCheckpoint, optimizers: OptimizersAtHand) -> UnitsAtStep:
    """Replay the units of a checkpoint to its step. Nothing is written into the pool.

    Raises:
        DamagedError: a copy or a record that is needed is damaged, or the replay is not exact. The reason names it. The
            checkpoint of an earlier step may be recoverable.
        ReplayError: this process cannot replay anything (it flushes denormal numbers to zero).
        UnsupportedError: an optimizer, or the device of a parameter, is not available.
        PoolIOError: there is no memory for it, or the system fails.
    """
    with _as_io_error(checkpoint):
        return _units_at_step(checkpoint, optimizers)


def _units_at_step(checkpoint: GradientCheckpoint, optimizers: OptimizersAtHand) -> UnitsAtStep:
    records, loaded, updates = _inputs_of(checkpoint)
    consumed = [one.consumed for one in updates]
    steppers = optimizers.for_updates(consumed)
    _refuse_state_elsewhere(checkpoint, loaded)
    non_tensors = _NonTensorStates(records)
    older = [
        _ReplayUnit(one, _optimizers_of(one, consumed), non_tensors, steppers, optimizers)
        for one in loaded
        if one.copy.step < checkpoint.step
    ]
    conditions = _other_conditions(checkpoint) if older else ""
    if conditions:
        log.warning(
            "lightck: updates are replayed under other conditions than in the training (%s). They may give other bits; "
            "one page of each tensor is compared after each of them",
            conditions,
        )
    check = _Sentinels({one.record.step: one.record for one in updates})
    try:
        replay(
            [one.base for one in older],
            consumed,
            steppers,
            checkpoint.step,
            check=check.difference,
            slice_numel=_slice_numel(checkpoint),
        )
    except ReplayError as err:
        if err.parameter is None and err.step is None:
            raise  # it says nothing about this checkpoint
        raise DamagedError(reason_of(err)) from err
    except CorruptPoolError as err:
        raise DamagedError(str(err)) from err
    for unit in older:
        non_tensors.refuse_other(unit.name, unit.non_tensor_state())
    joined = _joined(checkpoint, [one for one in loaded if one.copy.step == checkpoint.step], older)
    return replace(joined, other_conditions=conditions)


def _as_io_error(checkpoint: GradientCheckpoint) -> AbstractContextManager[None]:
    return as_io_error(
        f"The updates up to step {checkpoint.step} in the pool {checkpoint.reader.path!r} cannot be replayed"
    )


def reason_of(err: Exception) -> str:
    """Return the reason of an error of a replay, as a part of another sentence."""
    return str(err).removesuffix(" An older checkpoint can be restored.").rstrip(".")


def units_after(
    checkpoint: GradientCheckpoint, following: ConsumedUpdate, parameters: Collection[str], optimizers: OptimizersAtHand
) -> dict[str, torch.Tensor]:
    """Replay some units to one step after the checkpoint. ``following``: the update of that step, which the pool does
    not have. ``parameters``: the names of the units' parameters. Returns name of a tensor -> the tensor after
    ``following``.

    Raises:
        ReplayError: an update cannot be replayed, or its result differs from the checksums of a record.
        DamagedError: a copy or a record that is needed is damaged.
        PoolIOError: there is no memory for it, or the system fails.
    """
    with _as_io_error(checkpoint):
        return _units_after(checkpoint, following, parameters, optimizers)


def _units_after(
    checkpoint: GradientCheckpoint, following: ConsumedUpdate, parameters: Collection[str], optimizers: OptimizersAtHand
) -> dict[str, torch.Tensor]:
    records, loaded, updates = _inputs_of(checkpoint, parameters)
    consumed = [*(one.consumed for one in updates), following]
    steppers = optimizers.for_updates(consumed)
    _refuse_state_elsewhere(checkpoint, loaded)
    non_tensors = _NonTensorStates(records)
    units = [_ReplayUnit(one, _optimizers_of(one, consumed), non_tensors, steppers, optimizers) for one in loaded]
    check = _Sentinels({one.record.step: one.record for one in updates})
    slice_numel = _slice_numel(checkpoint)
    replay(
        [one.base for one in units], consumed, steppers, following.step, check=check.difference, slice_numel=slice_numel
    )
    return {name: tensor for unit in units for name, tensor in unit.tensors().items()}


def refuse_unreadable(checkpoint: GradientCheckpoint) -> None:
    """Raise ``DamagedError`` if a copy or a record that the replay of a checkpoint's units needs is damaged, and
    nothing stands in for it. No update is replayed."""
    records, loaded, updates = _inputs_of(checkpoint)
    non_tensors = _NonTensorStates(records)
    for one in loaded:
        if one.copy.step < checkpoint.step:
            non_tensors.at(one.copy.step, one.copy.parameter)
        for update in updates:
            if update.consumed.step > one.copy.step:
                update.refuse_damaged_gradient(one.copy.parameter)


def _slice_numel(checkpoint: GradientCheckpoint) -> int:
    """Return the number of elements of a slice. Only tensors of float32 and float64 are cut into slices. A slice of
    either has whole blocks, which are verified, and whole pages, which are compared."""
    nbytes = math.lcm(checkpoint.reader.superblock.block, SENTINEL_PAGE)
    return nbytes * max(4 * SLICE_NUMEL // nbytes, 1) // 4


def _inputs_of(
    checkpoint: GradientCheckpoint, parameters: Collection[str] | None = None
) -> tuple[Records, list[LoadedUnit], list[_Update]]:
    """Read and verify everything that a replay of a checkpoint's units needs: copies of the units, and what each update
    after the oldest copy consumed. ``parameters``: as for ``UnitCopies``."""
    records = Records(checkpoint)
    loaded = UnitCopies(records, parameters).load()
    low = min((one.copy.step for one in loaded), default=checkpoint.step)
    return records, loaded, [_Update(records.at(step)) for step in range(low + 1, checkpoint.step + 1)]


class _Update:
    """What one update consumed, and the record that holds it."""

    def __init__(self, record: GradientCheckpoint) -> None:
        self.record = record
        try:
            value = unpack_dict(record.state).get(UPDATE_KEY)
            if value is None:
                raise CorruptPoolError("it does not say what its update consumed")
            shapes = {unit_of(one): one.shape for one in record.reader.entries if one.role == "param"}
            self.consumed: ConsumedUpdate = consumed_update(value, self._read, shapes.get, _RecordSlices(record))
        except CorruptPoolError as err:
            raise DamagedError(f"the gradient record of step {record.step} cannot be used: {err}") from err
        if self.consumed.step != record.step:
            raise DamagedError(f"the gradient record of step {record.step} holds the update of another step")

    def refuse_damaged_gradient(self, parameter: str) -> None:
        """Raise ``DamagedError`` if the stored gradient of a parameter is damaged."""
        names = (*gradient_names(parameter, has_indices=False), *gradient_names(parameter, has_indices=True))
        held = map(self.record.in_record.get, names)
        try:
            self.record.read([(one, 0) for one in held if one is not None])  # address 0: only verified
        except DamagedError as err:
            raise DamagedError(f"the gradient record of step {self.record.step} cannot be used: {err}") from err

    def _read(self, name: str) -> torch.Tensor:
        try:
            tensor = _tensor_in_record(self.record, name)
        except DamagedError as err:
            raise DamagedError(f"the gradient record of step {self.record.step} cannot be used: {err}") from err
        return tensor.contiguous().to(_device_of(self.record.in_record[name].entry))


class _RecordSlices:
    """Reads slices of the tensors in a gradient record (``ReadSlice``)."""

    def __init__(self, record: GradientCheckpoint) -> None:
        self._record = record

    def layout(self, entry_name: str) -> torch.Tensor | None:
        found = self._record.in_record.get(entry_name)
        return None if found is None or found.entry.device != "cpu" else empty_for(found.entry, "meta")

    def read(self, entry_name: str, start: int, into: torch.Tensor) -> None:
        first, rest = divmod(start * into.element_size(), self._record.reader.superblock.block)
        assert rest == 0, "a slice begins where a block does"
        try:
            self._record.read_blocks(self._record.in_record[entry_name], first, into.nbytes, into.data_ptr())
        except DamagedError as err:
            raise DamagedError(f"the gradient record of step {self._record.step} cannot be used: {err}") from err


class _ReplayUnit:
    """A unit that is replayed from its copy, and its state as optimizers keep it."""

    def __init__(
        self,
        loaded: LoadedUnit,
        optimizer_indexes: frozenset[int],
        non_tensors: _NonTensorStates,
        steppers: Mapping[int, PartialOptimizer],
        optimizers: OptimizersAtHand,
    ) -> None:
        """``optimizer_indexes``: the index of the optimizer that updates the unit, as a set of at most one."""
        copy = loaded.copy
        self.name, self.step = copy.parameter, copy.step
        self.state: dict[Any, Any] = non_tensors.at(copy.step, self.name)
        self.residuals: dict[str, torch.Tensor] = {}
        """Name -> what ``TopK`` had left out of the gradients, at the step of the copy."""
        for name, tensor in loaded.tensors.items():
            entry = copy.tensors[name].entry
            if entry.role == "state":
                self.residuals[name] = tensor
                continue
            placed = tensor.to(_device_of(entry))
            if entry.role == "optimizer":
                self.state[name.rpartition("/")[2]] = placed
            else:
                self.parameter_name, parameter = name, placed
        live = optimizers.live_parameter(self.name)
        if live is not None and not all(steppers[index].is_torch for index in optimizer_indexes):
            # An optimizer class of the user may read attributes that the user has set on the parameter.
            vars(parameter).update(vars(live))
            parameter.requires_grad_(live.requires_grad)
        self.base = Base(Unit(self.name, parameter, dict.fromkeys(optimizer_indexes, self.state)), copy.step)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return entry name -> tensor, as it is now."""
        found = {state_name(self.name, key): value for key, value in self.state.items() if is_named_tensor(key, value)}
        return {self.parameter_name: self.base.unit.parameter.detach(), **found}

    def non_tensor_state(self) -> dict[Any, Any]:
        """Return the state that is not stored as tensors."""
        return {key: value for key, value in self.state.items() if not is_named_tensor(key, value)}


class _Sentinels:
    """Compares one page of each tensor with its checksum in the record of the same step (the sentinel)."""

    def __init__(self, records: Mapping[int, GradientCheckpoint]) -> None:
        """``records``: step -> its record."""
        self._expected: dict[int, dict[str, tuple[Entry, int]]] = {}
        """Step -> name of a tensor -> its entry, and the checksum of its page."""
        for step, record in records.items():
            homes = [entry for entry in record.reader.entries if entry.place == HOME_PLACE]
            sentinels = record.part.sentinels.tolist()
            if sentinels:  # there may be none
                self._expected[step] = {one.name: (one, crc) for one, crc in zip(homes, sentinels, strict=True)}

    def difference(self, unit: Unit, step: int, part: slice | None) -> str | None:
        """Return what differs from the record of this step; None if nothing does. ``part``: the elements that the
        replay has brought to this step, a slice that cuts no page; None: all elements. Tensors of state that have
        another shape than the parameter are compared with the first part."""
        expected = self._expected.get(step)
        if expected is None:
            return None
        (states,) = unit.states.values() or ({},)
        found = {state_name(unit.name, key): value for key, value in states.items() if is_named_tensor(key, value)}
        parameter = f"model/{unit.name}" if f"model/{unit.name}" in expected else unit.name
        for name, tensor in {parameter: unit.parameter, **found}.items():
            if name not in expected or not _is_in(part, tensor, unit.parameter, page_of(expected[name][0], step)):
                continue
            if page_checksum(tensor, expected[name][0], step) != expected[name][1]:
                return f"page {page_of(expected[name][0], step)} of {name!r} has other bits"
        return None


def _is_in(part: slice | None, tensor: torch.Tensor, parameter: torch.Tensor, page: int) -> bool:
    """Whether a page of a tensor of a unit is compared with this part: the page begins in it, or the tensor has another
    shape than the parameter and this is the first part."""
    if part is None:
        return True
    first = page * SENTINEL_PAGE // tensor.element_size() if tensor.shape == parameter.shape else 0
    return int(part.start) <= first < int(part.stop)


def page_of(entry: Entry, step: int) -> int:
    """Return the number of the page of a tensor that the sentinel of this step covers."""
    return step % max(-(-entry.nbytes // SENTINEL_PAGE), 1)


def page_checksum(tensor: torch.Tensor, entry: Entry, step: int) -> int | None:
    """Return the sentinel of a tensor at a step: the CRC-32C of one page of its bytes, in the order in which its entry
    has them. None if the tensor is not the one that the entry describes."""
    if not is_like(tensor, entry):
        return None
    if tuple(tensor.stride()) != entry.stride:
        tensor = empty_for(entry, tensor.device).copy_(tensor.detach())
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    first = page_of(entry, step) * SENTINEL_PAGE
    page = flat[first : first + SENTINEL_PAGE].cpu()
    return int(lib.lck_crc32c(ffi.cast("void *", page.data_ptr()), page.numel()))


def _device_of(entry: Entry) -> torch.device:
    """Return the device on which the updates of a tensor are replayed: that on which they were made. Raises
    ``UnsupportedError`` if this machine has no such device, because another one computes other bits."""
    if entry.device == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != entry.device:
        raise UnsupportedError(
            f"The updates of {entry.name!r} were made on a device of type {entry.device!r}, and this machine has none "
            "for torch. Another device computes other bits, so they cannot be replayed here. Recover the checkpoint "
            "on a machine with such a device."
        )
    return torch.device(found.type)


def _other_conditions(checkpoint: GradientCheckpoint) -> str:
    """Return what differs if the training made the updates with another torch or processor than the replay; "" if
    nothing does. (A replay on another type of device is refused, and it uses the number of threads of the training.)"""
    was, now = unpack_dict(checkpoint.state).get("fingerprint"), fingerprint()
    if not isinstance(was, dict):
        return ""
    names = [name for name in _DECISIVE if name in was and was[name] != now[name]]
    return ", ".join(f"{name} {was[name]} -> {now[name]}" for name in names)


def _refuse_state_elsewhere(checkpoint: GradientCheckpoint, loaded: Iterable[LoadedUnit]) -> None:
    """Raise ``DamagedError`` if optimizer state of an older unit lies outside of its copy: in the record of the
    checkpoint, or in the state of another parameter. Its value at the step of the copy is not known then."""
    elsewhere = {
        unit_of(one.entry): name
        for name, one in checkpoint.in_record.items()
        if one.entry.role == "optimizer" and one.entry.place == SLOT_PLACE
    }
    for one in loaded:
        parameter = one.copy.parameter
        if one.copy.step < checkpoint.step and parameter in elsewhere:
            raise DamagedError(f"{elsewhere[parameter]!r} does not lie with its parameter, whose copy is older")


def _optimizers_of(loaded: LoadedUnit, updates: Iterable[ConsumedUpdate]) -> frozenset[int]:
    """Return the index of the optimizer that has the unit's parameter, with or without a gradient, in the updates after
    the step of its copy, as a set of one; an empty set if no optimizer has it."""
    name, step = loaded.copy.parameter, loaded.copy.step
    later = [one for update in updates if update.step > step for one in update.optimizer_steps]
    found = {one.optimizer for one in later if name in one.gradients}
    if len(found) > 1:
        raise DamagedError(f"the parameter {name!r} was updated by several optimizers")
    return frozenset(found)


class _NonTensorStates:
    """The optimizer state that is not stored as tensors, but in the small state of each record."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._now = _non_tensor_states(records.checkpoint)
        self._earlier: dict[int, dict[str, dict[Any, Any]]] = {}

    def at(self, step: int, parameter: str) -> dict[Any, Any]:
        """Return the state of a parameter at a step, as a new dict. Raises ``DamagedError`` if the record of this step,
        which holds the state, cannot be used."""
        if parameter not in self._now:
            return {}
        if step not in self._earlier:
            self._earlier[step] = _non_tensor_states(self._records.at(step))
        return dict(self._earlier[step].get(parameter, {}))

    def refuse_other(self, parameter: str, found: Mapping[Any, Any]) -> None:
        """Raise ``DamagedError`` if the replayed state differs from the state in the checkpoint's small state."""
        saved = self._now.get(parameter, {})
        try:
            differ = [
                str(key)
                for key in {**saved, **found}
                if key not in saved
                or key not in found
                or values.pack(saved[key], path="") != values.pack(found[key], path="")
            ]
        except StateValueError as err:
            raise DamagedError(f"the replay of {parameter!r} gives a value that no checkpoint holds: {err}") from err
        if differ:
            raise DamagedError(
                f"the replay of {parameter!r} gives other values of {listed(differ)} than the checkpoint holds"
            )


def _non_tensor_states(record: GradientCheckpoint) -> dict[str, dict[Any, Any]]:
    """Return parameter -> its state that is not stored as tensors, at the step of a record. (A record that is no
    checkpoint has none: while an optimizer has such state, updates are not recorded, and each checkpoint is full.)"""
    found: dict[str, dict[Any, Any]] = {}
    try:
        for optimizer in typed(unpack_dict(record.state).get("optimizers", []), list):
            saved = typed(optimizer, dict)
            if not saved.get("wraps", False):
                of_all = unpack_dict(typed(saved["values"], bytes), tensor=partial(_tensor_in_record, record))
                found.update({typed(name, str): typed(state, dict) for name, state in of_all.items()})
    except (CorruptPoolError, KeyError) as err:
        raise DamagedError(f"the optimizer state in the record of step {record.step} is malformed ({err})") from err
    return found


def _tensor_in_record(record: GradientCheckpoint, name: str) -> torch.Tensor:
    stored = record.in_record[name]
    tensor = empty_for(stored.entry, "cpu")
    record.read([(stored, tensor.data_ptr())])
    return tensor


def _joined(checkpoint: GradientCheckpoint, current: Iterable[LoadedUnit], older: Sequence[_ReplayUnit]) -> UnitsAtStep:
    """Join units whose copy is of the checkpoint's step, and units that were replayed to it."""
    entries: dict[str, Entry] = {}
    tensors: dict[str, torch.Tensor] = {}
    for loaded in current:
        entries.update((name, one.entry) for name, one in loaded.copy.tensors.items())
        tensors.update(loaded.tensors)
    known = {entry.name: entry for entry in checkpoint.reader.entries if entry.place == HOME_PLACE}
    for unit in older:
        for name, tensor in unit.tensors().items():
            entries[name], tensors[name] = _entry(name, tensor, known.get(name)), tensor
    older_residuals = dict[str, int | None]()
    residual_names = _residuals_in(checkpoint) if any(entry.role == "state" for entry in known.values()) else ()
    older_by_name = {unit.name: unit for unit in older}
    for name in residual_names:
        replayed_unit = older_by_name.get(unit_of(known[name])) if name in known else None
        if replayed_unit is not None:
            found = replayed_unit.residuals.get(name)
            older_residuals[name] = None if found is None else replayed_unit.step
            entries[name] = known[name]
            tensors[name] = empty_for(known[name], "cpu").zero_() if found is None else found
    return UnitsAtStep(entries, tensors, older_residuals)


def _residuals_in(checkpoint: GradientCheckpoint) -> list[str]:
    """Return the names of the residuals that the small state of a checkpoint says are tensors of the pool."""
    names: list[str] = []

    def note(name: str) -> torch.Tensor:
        names.append(name)
        return torch.empty(0)

    try:
        for packed in typed(unpack_dict(checkpoint.state)["state"], dict).values():
            values.unpack(typed(packed, bytes), tensor=note)
    except (CorruptPoolError, KeyError) as err:
        raise DamagedError(f"the objects in the record of step {checkpoint.step} are malformed ({err})") from err
    return [name for name in names if name.startswith(RESIDUAL_PREFIX)]


def _entry(name: str, tensor: torch.Tensor, known: Entry | None) -> Entry:
    """Return the entry of a tensor that was replayed. ``known``: that of the layout table, if it has one."""
    if known is not None and is_like(tensor, known):
        return known
    try:
        return entry_of(Live(name, "optimizer", tensor, None, None))
    except LightckError as err:
        raise DamagedError(str(err)) from err


def is_like(tensor: torch.Tensor, entry: Entry) -> bool:
    """Whether a tensor has the shape and the dtype of an entry."""
    return tuple(tensor.shape) == entry.shape and tensor.dtype == dtype_from_name(entry.dtype)
