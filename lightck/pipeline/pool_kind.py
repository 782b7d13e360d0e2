"""What differs between kinds of pools, as the pipeline sees it: the layout of a new file, its writer, and which slot a
checkpoint gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from lightck.errors import NoSpaceError
from lightck.pipeline.plan import Strategy
from lightck.pool.engine import Engine
from lightck.pool.format.layout import HOME_PLACE, SLOT_PLACE, Entry
from lightck.pool.reader import PoolReader
from lightck.pool.slots import Slot
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter
from lightck.state.inventory import param_of
from lightck.state.signatures import ClosedStep


class PoolKind(Protocol):
    """One kind of pools."""

    def laid_out(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return the entries of a new file, in the order of its layout table. ``entries``: the tensors of the training,
        and tensors of an old file that keep an extent."""
        ...

    def n_slots(self, entries: Sequence[Entry], state_nbytes: int, wanted: int) -> int:
        """Return the number of slots of the first file of this kind. entries: as ``laid_out`` returned them.
        state_nbytes: of the small state. wanted: the number that the session asks for."""
        ...

    def writer(
        self,
        reader: PoolReader,
        engine: Engine,
        durability: Durability,
        predecessor: PoolWriter | None,
        lock: PoolLock | None,
    ) -> PoolWriter:
        """Return the writer of a pool. The arguments are those of ``PoolWriter``."""
        ...

    def whole_max(self, n_slots: int) -> int:
        """Return how many whole checkpoints (those that need no gradient record) a pool with so many slots has room
        for."""
        ...

    def choose_slot(self, writer: PoolWriter, closed_step: ClosedStep, held: frozenset[int]) -> Slot | None:
        """Return the slot for the checkpoint of this step; None if no slot is free. ``held``: indexes of slots whose
        checkpoints must not be overwritten. Raises ``RelayoutNeededError`` if the pool must be replaced first."""
        ...

    def takes_record(self, writer: PoolWriter, closed_step: ClosedStep) -> bool:
        """Whether what the update of a step consumed is to be stored, although the step is no checkpoint."""
        ...


class KindChange(NamedTuple):
    """The arguments of ``Pipeline.request_kind``."""

    kind: PoolKind
    strategy: Strategy
    n_slots: int
    reason: str
    does_not_fit: Callable[[NoSpaceError], None]


class WholeCheckpoints:
    """Pools in which each slot holds a whole checkpoint."""

    def laid_out(self, entries: Iterable[Entry]) -> list[Entry]:
        # The old file may be one with homes.
        return in_module_order(e._replace(place=SLOT_PLACE) if e.place == HOME_PLACE else e for e in entries)

    def n_slots(self, entries: Sequence[Entry], state_nbytes: int, wanted: int) -> int:
        return wanted

    def writer(
        self,
        reader: PoolReader,
        engine: Engine,
        durability: Durability,
        predecessor: PoolWriter | None,
        lock: PoolLock | None,
    ) -> PoolWriter:
        return PoolWriter(reader, engine, durability, predecessor, lock)

    def whole_max(self, n_slots: int) -> int:
        return n_slots

    def choose_slot(self, writer: PoolWriter, closed_step: ClosedStep, held: frozenset[int]) -> Slot | None:
        return writer.slots.choose(held)

    def takes_record(self, writer: PoolWriter, closed_step: ClosedStep) -> bool:
        return False


def in_module_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries in the order of the modules, each parameter followed by its optimizer state; the user's
    objects come last. So the tensors that one layer's update changes lie next to each other in a slot."""
    entries = list(entries)
    owner = _owners(entries)

    def key(item: tuple[int, Entry]) -> tuple[int, int]:
        i, entry = item
        if entry.role != "optimizer":
            return (i if entry.role != "state" else len(entries)), -1
        return owner.get(param_of(entry.name), len(entries)), i

    return [entry for _, entry in sorted(enumerate(entries), key=key)]


def _owners(entries: Sequence[Entry]) -> Mapping[str, int]:
    """Return name of a parameter or buffer -> its position among the entries."""
    return {e.name.removeprefix("model/"): i for i, e in enumerate(entries) if e.role in ("param", "buffer")}
