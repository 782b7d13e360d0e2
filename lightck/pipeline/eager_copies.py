"""Copies that begin before the boundary: of layers whose update is over while others are still to come.

A layer-wise update (``hooks/layerwise.py``) tells which tensors it is done with. Those that the last version left to
background copies go into the slot of the next one at once, several layers to a job of the engine. The boundary decides
as ever: what is still the same tensor, and looks as it did when its copy began, need not be copied again; all else is.

A loop may write to a parameter after its update in a way that moves no version counter (``p.data.clamp_``). Without
layers the boundary reads what was written then, so here it has to be found. A *proof* is the checksums of a tensor
right after its update: the first times that it is copied early, and later for one parameter and another in turn, they
are compared with what it holds at the boundary. Where one differs, all early copies of this version are compared with
their tensors; what differs is copied again, and never early from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck.pipeline.sources import Signature, signature_of
from lightck.pipeline.write_table import NONE, WriteTable, WriteTableCache
from lightck.pool.slots import Slot
from lightck.pool.writer import Reservation
from lightck.state.blocks import checksums
from lightck.state.inventory import Live

PARTS_MAX = 6
"""Jobs for one version."""
PART_NBYTES_MIN = 4 << 20
"""Layers are gathered up to so many bytes, or to their share of the parts, before a job is made of them."""
PROBATION = 3
"""Early copies of a tensor with a proof, before it is trusted."""


class EagerCopies:
    """What is under way of the version to come: nothing, until the first layer of an update. ``check``: compare all
    early copies of every version."""

    def __init__(self, check: bool = False) -> None:
        self._begun: _Begun | None = None
        self._check = check
        self._proved: dict[str, int] = {}
        """How often a proof of this tensor held."""
        self._turn = 0
        self._n_params = 0
        """Parameters that the last version had copied early."""
        self._never: set[str] = set()
        """Names of tensors that something writes to after their update."""

    def wants_slot(self, tables: WriteTableCache) -> bool:
        """Whether nothing is under way yet, and there is what could be."""
        return self._begun is None and tables.cached is not None and bool(tables.cached.background)

    def begin(self, tables: WriteTableCache, slot: Slot) -> None:
        """The version to come gets this slot. Only where a slot is wanted."""
        assert tables.cached is not None
        self._begun = _Begun(tables, slot, tables.cached, self._needs_proof)

    def copy(self, tensors: Iterable[torch.Tensor], room: int) -> None:
        """These are what they will be in the version to come: their copies begin now, where they can.

        ``room``: how many jobs of the engine this version may take beside the one that commits it.
        """
        if self._begun is not None:
            self._begun.add(tensors, min(room, PARTS_MAX), self._never)

    def _needs_proof(self, name: str, nth: int | None) -> bool:
        """Whether to take a proof of this tensor, the nth parameter of its version (None: it is none)."""
        in_turn = nth is not None and nth in (0, self._turn % max(self._n_params, 1))
        return self._check or in_turn or self._proved.get(name, 0) < PROBATION

    @property
    def reservation(self) -> Reservation | None:
        return None if self._begun is None else self._begun.reservation

    def sift(self, background: Sequence[Live], numbers: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
        """Of what the version leaves to background copies the records that need none any more; and how many others
        were begun. This waits for those: what is copied again must not be overtaken by its first copy."""
        if self._begun is None:
            return NONE, 0
        begun = self._begun
        good = begun.still_good_copies(dict(zip(numbers, background, strict=True)))
        wrong = self._wrong(begun, good)
        good = [one for one in good if one not in wrong]
        others = begun.count - len(good)
        if others:
            begun.reservation.wait()
        return np.array([one.number for one in good], np.int64), others

    def _wrong(self, begun: _Begun, copies: Sequence[_Copy]) -> set[_Copy]:
        """Those that hold other bytes than their tensors do now, as far as it is looked for."""
        self._turn += 1
        self._n_params = begun.n_params
        now: dict[_Copy, npt.NDArray[np.uint32]] = {}
        broken: set[_Copy] = set()
        for one in copies:
            if one.proof is not None:
                now[one] = begun.checksums_of(one)
                self._proved[one.name] = self._proved.get(one.name, 0) + 1
                if not np.array_equal(one.proof, now[one]):
                    broken.add(one)
        if broken:
            now |= {one: begun.checksums_of(one) for one in copies if one not in now}
        wrong = broken | begun.differing(now)
        self._never.update(one.name for one in wrong)
        return wrong

    def wait(self) -> None:
        """Help until no copy is under way."""
        if self._begun is not None:
            self._begun.reservation.wait()

    def taken(self) -> None:
        """The version that was to come has begun."""
        self._begun = None

    def drop(self) -> None:
        """There will be no version of it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.reservation.drop()


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A tensor whose copy began, and how it looked."""

    name: str
    number: int
    tensor: torch.Tensor
    signature: Signature
    proof: npt.NDArray[np.uint32] | None


class _Begun:
    """The copies of one update. ``needs_proof``: see there."""

    def __init__(
        self, tables: WriteTableCache, slot: Slot, table: WriteTable, needs_proof: Callable[[str, int | None], bool]
    ) -> None:
        self.reservation = tables.writer.reservation(slot)
        self._tables, self._writer, self._table = tables, tables.writer, table
        self._needs_proof = needs_proof
        self.n_params = 0
        self._waiting: dict[int, _Copy] = {}
        self._waiting_nbytes = 0
        self._part_nbytes = max(PART_NBYTES_MIN, sum(live.tensor.nbytes for live in table.background) // PARTS_MAX)
        self._copies: dict[int, _Copy] = {}
        self._again: set[int] = set()
        """Records that were updated once more after their copy began."""

    @property
    def count(self) -> int:
        return len(self._copies)

    def add(self, tensors: Iterable[torch.Tensor], parts_max: int, never: set[str]) -> None:
        """These have been updated, and will not be again before the version is committed or dropped."""
        for tensor in tensors:
            found = self._table.place_of(tensor)
            if found is None or found[0].name in never or not self._tables.describes(*found):
                continue
            live, number = found
            if number in self._copies:
                self._again.add(number)
            else:
                self._waiting[number] = self._noted(live, number)
                self._waiting_nbytes += tensor.nbytes
        if self._waiting_nbytes >= self._part_nbytes and len(self.reservation.parts) < parts_max:
            self._begin()

    def _noted(self, live: Live, number: int) -> _Copy:
        is_param = live.role == "param"
        needs_proof = self._needs_proof(live.name, self.n_params if is_param else None)
        self.n_params += is_param
        proof = checksums(live.tensor, self._writer.superblock.block) if needs_proof else None
        return _Copy(live.name, number, live.tensor, signature_of(live.tensor), proof)

    def _begin(self) -> None:
        waiting, self._waiting, self._waiting_nbytes = self._waiting, {}, 0
        addresses = [one.signature[1][0] for one in waiting.values()]
        if self.reservation.copy(list(waiting), addresses, self._table.keep):  # they lie where they lay for the columns
            self._copies |= waiting

    def still_good_copies(self, background: dict[int, Live]) -> list[_Copy]:
        """The copies of what the version holds, as far as looks tell."""
        return [
            one
            for number, one in self._copies.items()
            if number not in self._again
            and number in background
            and background[number].tensor is one.tensor
            and signature_of(one.tensor) == one.signature
        ]

    def checksums_of(self, one: _Copy) -> npt.NDArray[np.uint32]:
        """Of what the tensor holds now."""
        return checksums(one.tensor, self._writer.superblock.block)

    def differing(self, now: Mapping[_Copy, npt.NDArray[np.uint32]]) -> set[_Copy]:
        """Of copies and what their tensors hold, those that hold something else. Waits for the copies."""
        if not now:
            return set()
        self.reservation.wait()
        slot = self.reservation.slot
        return {one for one, crcs in now.items() if not np.array_equal(self._writer.raw_crcs(slot, one.number), crcs)}
