"""Find, read and verify the copy of each unit from which a recovery starts, in a pool with gradient records.

A unit is a parameter with its optimizer state. Its copies are its base, its older base, and the gradient records that
store it whole. If there is such a record, the newest one is used, and everything older is obsolete for this unit. A
damaged base is replaced by the older one, if the *chain* (the list of older records that a manifest holds) still names
the records since then; the updates after it lead to the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightck.pool.format.gradients import IN_RECORD
from lightck.pool.format.layout import HOME_PLACE, Entry
from lightck.pool.format.structures import DamagedError
from lightck.pool.gradient_reader import GradientCheckpoint, StoredTensor, checkpoint_of
from lightck.restore.contents import empty_for
from lightck.state.inventory import unit_of

log = logging.getLogger("lightck")


class Records:
    """The gradient records that lead to a checkpoint, by step. They are opened when they are first asked for."""

    def __init__(self, checkpoint: GradientCheckpoint) -> None:
        self.checkpoint = checkpoint
        self._named = {entry.step: entry for entry in checkpoint.part.chain}
        self._opened = {checkpoint.step: checkpoint}

    def at(self, step: int) -> GradientCheckpoint:
        """Return the record of a step, with its manifest. Raises ``DamagedError`` if the chain does not name it, or if
        it was overwritten or fails a check."""
        found = self._opened.get(step)
        if found is None:
            if step not in self._named:
                raise DamagedError(f"its list of gradient records lacks that of step {step}")
            try:
                found = self._opened[step] = checkpoint_of(self.checkpoint.reader, self._named[step])
            except DamagedError as err:
                raise DamagedError(f"the gradient record of step {step} cannot be used: {err}") from err
        return found


@dataclass(frozen=True, slots=True)
class UnitCopy:
    """A complete copy of a unit in the pool, as the unit was at the end of ``step``.

    parameter: the name of its parameter, as in the small state. tensors: entry name -> stored tensor. source: what
    reads them.
    """

    parameter: str
    step: int
    tensors: Mapping[str, StoredTensor]
    source: GradientCheckpoint


@dataclass(frozen=True, slots=True)
class LoadedUnit:
    """A copy of a unit in memory. tensors: entry name -> tensor, with the shape and strides of its entry."""

    copy: UnitCopy
    tensors: dict[str, torch.Tensor]


class UnitCopies:
    """Finds and reads the copies of units of a checkpoint."""

    def __init__(self, records: Records, parameters: Collection[str] | None = None) -> None:
        """``parameters``: those of the units; None: all units that have a home. Raises ``DamagedError`` if a base lacks
        its parameter, or has tensors of different steps."""
        self._records, checkpoint = records, records.checkpoint
        self._entries: dict[str, list[Entry]] = {}
        """Parameter -> the entries of its unit in a home."""
        for entry in checkpoint.reader.entries:
            if entry.place == HOME_PLACE and (parameters is None or unit_of(entry) in parameters):
                self._entries.setdefault(unit_of(entry), []).append(entry)
        self._first_whole = _first_whole(checkpoint)
        self._bases = self._by_unit(checkpoint.bases())
        self._older = self._by_unit(checkpoint.older_bases())

    def first_choices(self) -> list[UnitCopy]:
        """Return the newest copy of every unit, by what the manifests say. Raises ``DamagedError`` if a manifest that
        is needed for this is damaged."""
        return [one for parameter in self._entries if (one := self._first_choice(parameter)) is not None]

    def load(self) -> list[LoadedUnit]:
        """Read and verify a copy of every unit into new memory. Raises ``DamagedError`` if a unit has no copy that can
        be used."""
        chosen = self.first_choices()
        loaded = [self._allocated(copy) for copy in chosen]
        try:
            _read(loaded)
        except DamagedError:  # this does not say which of them is damaged
            loaded = [self._read_or_replaced(copy) for copy in chosen]
        return loaded

    def _by_unit(self, bases: Iterable[StoredTensor]) -> dict[str, UnitCopy]:
        """Return parameter -> its base. ``bases``: tensors in homes. Raises ``DamagedError`` if those of a unit are not
        of one moment."""
        checkpoint, found = self._records.checkpoint, dict[str, dict[str, StoredTensor]]()
        for base in bases:
            found.setdefault(unit_of(base.entry), {})[base.entry.name] = base
        copies = {}
        for parameter, tensors in found.items():
            moments = {(one.step, one.generation) for one in tensors.values()}
            if len(moments) != 1 or not _has_parameter(tensors):
                raise DamagedError(f"the tensors of {parameter!r} have no base, or bases of different steps")
            copies[parameter] = UnitCopy(parameter, moments.pop()[0], tensors, checkpoint)
        return copies

    def _first_choice(self, parameter: str) -> UnitCopy | None:
        """Return the newest copy of a unit; None if no tensor of the unit is present."""
        base, step = self._bases.get(parameter), self._records.checkpoint.step
        if base is not None:
            if parameter in self._first_whole:
                raise DamagedError(f"the tensors of {parameter!r} have no base, or bases of different steps")
            return self._whole(parameter, base.step + 1, step) or base
        if parameter not in self._first_whole:
            return None
        whole = self._whole(parameter, self._first_whole[parameter], step)
        if whole is None:
            raise DamagedError(f"no gradient record holds {parameter!r} whole, and it has no base")
        return whole

    def _whole(self, parameter: str, first: int, last: int) -> UnitCopy | None:
        """Return the copy of a unit from the newest record of the steps ``first`` to ``last`` that stores it whole;
        None if none does."""
        for step in range(last, first - 1, -1):
            record = self._records.at(step)
            names = [one.name for one in self._entries[parameter] if one.name in record.in_record]
            if names:
                tensors = {name: record.in_record[name] for name in names}
                if not _has_parameter(tensors):
                    raise DamagedError(
                        f"the gradient record of step {step} holds state of the parameter {parameter!r} whole, but not "
                        "the parameter itself"
                    )
                return UnitCopy(parameter, step, tensors, record)
        return None

    @staticmethod
    def _allocated(copy: UnitCopy) -> LoadedUnit:
        return LoadedUnit(copy, {name: empty_for(one.entry, "cpu") for name, one in copy.tensors.items()})

    def _read_or_replaced(self, copy: UnitCopy) -> LoadedUnit:
        loaded = self._allocated(copy)
        try:
            _read([loaded])
        except DamagedError as err:
            older = self._older_choice(copy)
            if older is None:
                raise DamagedError(f"the copy of {copy.parameter!r} of step {copy.step} cannot be used: {err}") from err
            loaded = self._allocated(older)
            _read([loaded])
            log.warning(
                "lightck: the newest copy of %r in the pool %r is damaged (%s). An older one, of step %d, is used, and "
                "the updates after it are replayed; they give the same bits",
                copy.parameter,
                copy.source.reader.path,
                err,
                older.step,
            )
        return loaded

    def _older_choice(self, copy: UnitCopy) -> UnitCopy | None:
        """Return the copy that stands in for a damaged base; None if there is none."""
        older = self._older.get(copy.parameter)
        if older is None or copy is not self._bases.get(copy.parameter):
            return None
        return self._whole(copy.parameter, older.step + 1, copy.step) or older


def _first_whole(checkpoint: GradientCheckpoint) -> dict[str, int]:
    """Return parameter -> the step of the record in which its unit lies whole, for the units that have no base. (If
    a tensor lies in a record, the ``step`` in its row is one less than the step of that record.)"""
    homes = {entry.name: entry for entry in checkpoint.reader.entries if entry.place == HOME_PLACE}
    return {
        unit_of(homes[checkpoint.name_of(number)]): int(row["step"]) + 1
        for number, row in enumerate(checkpoint.rows)
        if row["generation"] and row["home"] == IN_RECORD
    }


def _has_parameter(tensors: Mapping[str, StoredTensor]) -> bool:
    return any(one.entry.role == "param" for one in tensors.values())


def _read(units: Sequence[LoadedUnit]) -> None:
    """Read and verify the tensors of these units. Raises ``DamagedError`` at the first bad block."""
    by_source: dict[int, tuple[GradientCheckpoint, list[tuple[StoredTensor, int]]]] = {}
    for unit in units:
        _, reads = by_source.setdefault(id(unit.copy.source), (unit.copy.source, []))
        reads += [(one, unit.tensors[name].data_ptr()) for name, one in unit.copy.tensors.items()]
    for source, reads in by_source.values():
        source.read(reads)
