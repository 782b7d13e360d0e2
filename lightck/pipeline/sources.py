"""Detection of writes to tensors: to the sources of background copies, and to frozen tensors that are left out.

``SourceWatch`` remembers the signatures of the sources at the boundary. ``UnchangedTensors`` decides which frozen
tensors need not be written again. Neither trusts torch's version counter alone, because fused optimizers, BatchNorm and
``.data`` writes do not move it. So both also read some bytes for each checkpoint and compare checksums
(``state/blocks.py``): all bytes in the first checkpoints and under ``LIGHTCK_CHECK=1``, otherwise some blocks, which
take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck.errors import StateChangedError, listed
from lightck.state.blocks import ALL, NO_BLOCKS, Blocks, Positions, RoundRobin, checksums
from lightck.state.device_transfers import on_host, transfer_of
from lightck.state.inventory import Live, address_of, in_plain_memory, is_plain, storage_of
from lightck.state.signatures import (
    MemoryLayout,
    MemoryLayouts,
    Registrations,
    VersionCounters,
    memory_layout_of,
    version_counter_of,
)

Signature = tuple[int, int, MemoryLayout]
"""The version counter of a tensor, the one of the DTensor that holds it (0 if there is none), and the memory layout of
the tensor. Its identity is compared separately."""
REREAD_BY_COPY_NBYTES = 64 << 10
"""For each checkpoint, tensors that can be read only through a copy are read again one after the other, until
``REREAD_BY_COPY_NBYTES`` bytes were read."""


def signature_of(live: Live) -> Signature:
    """Return the signature of a tensor. Its bytes are not read."""
    of_dtensor = 0 if live.dtensor is None else version_counter_of(live.dtensor)
    return version_counter_of(live.tensor), of_dtensor, memory_layout_of(live.tensor)


_NOTHING_WATCHED = MemoryLayouts([]), VersionCounters([]), Registrations([])
_NOTHING_READ = NO_BLOCKS.checksum_positions[:0], np.zeros(0, np.uint32), NO_BLOCKS.owners[:0]


class SourceWatch:
    """The sources of one checkpoint's background copies."""

    def __init__(self, lives: Sequence[Live], numbers: Sequence[int], n_on_devices: int = 0) -> None:
        """``numbers``: record numbers of ``lives``. ``n_on_devices``: how many of ``lives`` are on devices; these come
        last."""
        self.lives, self.numbers = lives, numbers
        self.forward_seen = False
        """Whether a training forward began after the boundary while the sources were unchanged."""
        self.was_read_whole = False
        """Whether all bytes of the sources in host memory were read at the boundary."""
        self._on_devices = range(len(lives) - n_on_devices, len(lives))
        """Positions in ``lives`` of the sources on devices."""
        self._memory_layouts, self._counters, self._registrations = _NOTHING_WATCHED
        if lives:
            tensors = [live.tensor for live in lives]
            self._memory_layouts, self._registrations = MemoryLayouts(tensors), Registrations(lives)
            self._counters = VersionCounters(tensors, self._registrations.dtensors)
        self._blocks, self._at_boundary = NO_BLOCKS, _NOTHING_READ
        """``_blocks``: the blocks of all sources in host memory. ``_at_boundary``: three parallel arrays with one item
        for each block that was read at the boundary: the position of the copy's checksum among all checksums of the
        slot, the checksum at the boundary, and the position of the source in ``lives``."""

    def has_on_device(self, names: Sequence[str]) -> bool:
        """Whether one of these sources is on a device."""
        return any(self.lives[i].name in names for i in self._on_devices)

    def changed(self) -> list[int]:
        """Return the positions in ``lives`` of the sources whose signatures differ from those at the boundary."""
        try:
            watched = self._memory_layouts, self._counters, self._registrations
            if all(one.are_unchanged() for one in watched):
                return []
        except KeyError:
            pass  # a tensor is gone from its module or optimizer: the next line finds which
        gone = {i for i, live in enumerate(self.lives) if not live.is_current()}
        return sorted(self._memory_layouts.changed() | self._counters.changed() | gone)

    def read(self, blocks: Blocks, round_robin: RoundRobin, budget: int | None) -> None:
        """Read sources at the boundary, before their copies begin, for a later comparison in ``differing``. ``blocks``:
        the blocks of all sources in host memory. ``round_robin``: chooses the blocks that are read. ``budget``: how
        many bytes are read (None: all)."""
        chosen, _ = round_robin.next_blocks(blocks, budget)
        self.was_read_whole = chosen is ALL
        self._blocks = blocks
        self._at_boundary = blocks.checksum_positions[chosen], blocks.checksums(chosen), blocks.owners[chosen]

    def differing(
        self,
        copied_crcs: npt.NDArray[np.uint32],
        crcs_of_record: Callable[[int], npt.NDArray[np.uint32]],
        block: int,
        turn: int,
        whole: bool,
    ) -> list[str]:
        """Return the names of tensors whose copies are wrong. The copies of blocks that were read at the boundary are
        compared with what was read. One block of one source on a device is read now and compared with its copy. With
        ``whole``, all sources in host memory are also read now and compared. ``copied_crcs``: checksums of all copied
        blocks. ``crcs_of_record``: record number -> checksums of its copied blocks. ``block``: bytes per block.
        ``turn``: a counter of checkpoints, which chooses the block on a device."""
        positions, crcs_at_boundary, owners = self._at_boundary
        wrong = set(owners[copied_crcs[positions] != crcs_at_boundary].tolist())
        if whole and len(self._blocks):
            again = self._blocks.checksums()
            wrong |= set(self._blocks.owners[copied_crcs[self._blocks.checksum_positions] != again].tolist())
        if self._on_devices:
            i = self._on_devices[turn % len(self._on_devices)]
            copied, index = crcs_of_record(self.numbers[i]), turn // len(self._on_devices)
            if len(copied) and not _block_equal(self.lives[i].written, copied, index % len(copied), block):
                wrong.add(i)
        return [self.lives[i].name for i in sorted(wrong)]


def _block_equal(tensor: torch.Tensor, copied: npt.NDArray[np.uint32], index: int, block: int) -> bool:
    """Whether one block of a tensor on a device has the checksum of its copy."""
    transfer = transfer_of(tensor)
    assert transfer is not None
    return bool(checksums(transfer.read(tensor, index * block, block), block)[0] == copied[index])


@dataclass(slots=True)
class _Known:
    """A frozen tensor as a checkpoint last held it."""

    live: Live
    written: torch.Tensor
    """What the checkpoint held of the tensor: itself, or the rows of a share."""
    memory: object
    """Keeps the tensor's memory alive, so that no other tensor can get the same address."""
    signature: Signature
    crcs: npt.NDArray[np.uint32]
    can_be_left_out: bool
    """Whether two checkpoints in a row wrote equal bytes of the tensor, so that later ones may leave it out."""


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """The tensors that can be left out, prepared for reading them again. ``names``, ``blocks``: names and blocks of
    the tensors in plain host memory."""

    names: list[str]
    blocks: Blocks
    crcs: npt.NDArray[np.uint32]
    """The checksums of ``blocks``, as the checkpoints hold them."""
    read_by_copy: list[str]
    """Names of the tensors that can be read only through a copy."""


class _Rounds:
    """The rounds in which one group of left-out tensors is read again, a few tensors for each checkpoint. There are two
    groups: the tensors in plain host memory, and the tensors that can be read only through a copy."""

    def __init__(self) -> None:
        self.verified_until = 0
        """The newest generation in which all left-out tensors of this group are known to have been unchanged."""
        self._began: int | None = None
        """The generation that was the newest one when the present round began. None if the group has changed since."""

    def all_read(self, generation: int) -> None:
        """Note that the whole group was read just now. ``generation``: the newest generation that was begun."""
        self.verified_until = self._began = generation

    def ended(self, generation: int) -> None:
        """Note that the last tensor of the round was read just now. ``generation``: as in ``all_read``. Every tensor
        was read after the round began, so the checkpoints up to generation ``_began`` hold the group's right bytes."""
        self.verified_until = self._began if self._began is not None else self.verified_until
        self._began = generation

    def group_changed(self) -> None:
        """Note that other tensors belong to the group from now on: the end of the present round proves nothing."""
        self._began = None


class UnchangedTensors:
    """Decides which frozen tensors a checkpoint may leave out, and from time to time reads again those that are left
    out. A frozen tensor is one that no optimizer step changes. It counts as unchanged once two checkpoints in a row
    have written equal bytes of it, and as long as its signature stays the same afterwards. After an unannounced write a
    tensor never counts as unchanged again."""

    def __init__(self) -> None:
        self.copied_at_boundary: set[str] = set()
        """Names of tensors that are always copied at the boundary, also after a resume, because something once wrote to
        them after a boundary."""
        self._known: dict[str, _Known] = {}
        self._round_robin = RoundRobin()
        self._left_out: _LeftOut | None = None
        self._next_by_copy = 0
        """Position in ``_LeftOut.read_by_copy`` of the tensor that is read next."""
        self._rounds, self._rounds_by_copy = _Rounds(), _Rounds()

    @property
    def verified_until(self) -> int:
        """The newest generation in which the left-out tensors of both groups are known to have been unchanged."""
        return min(self._rounds.verified_until, self._rounds_by_copy.verified_until)

    def crcs_if_unchanged(self, live: Live) -> npt.NDArray[np.uint32] | None:
        """Return the checksums that a slot must hold so that this tensor can be left out; None if the tensor must be
        written."""
        known = self._known.get(live.name)
        if known is None or not known.can_be_left_out or live.name in self.copied_at_boundary:
            return None
        if known.live.tensor is not live.tensor or known.signature != signature_of(live):
            return None
        return known.crcs

    def note_written(self, live: Live, crcs: npt.NDArray[np.uint32]) -> None:
        """Note that a checkpoint wrote this frozen tensor, with these checksums."""
        before = self._known.get(live.name)
        is_equal = before is not None and np.array_equal(before.crcs, crcs)
        can_be_left_out = is_equal and live.name not in self.copied_at_boundary
        self._known[live.name] = _Known(
            live,
            live.written,
            storage_of(live.tensor),
            signature_of(live),
            crcs.copy(),
            can_be_left_out,
        )
        if can_be_left_out or (before is not None and before.can_be_left_out):
            self._discard_rounds()

    def retain(self, lives: Sequence[Live]) -> None:
        """Forget all tensors that are not in ``lives``, because they no longer exist or are no longer frozen."""
        if len(self._known) > len(lives):
            names = {live.name for live in lives}
            self._known = {name: known for name, known in self._known.items() if name in names}
            self._discard_rounds()

    def forget(self, ids: Collection[int]) -> None:
        """Forget these tensors, so that each must be written twice again before it is left out."""
        if ids:
            left = {name: known for name, known in self._known.items() if id(known.live.tensor) not in ids}
            if len(left) < len(self._known):
                self._known = left
                self._discard_rounds()

    def reset(self) -> None:
        """Forget all tensors, so that each must be written twice again before it is left out."""
        self._known.clear()
        self._discard_rounds()

    def _discard_rounds(self) -> None:
        """Discard the present rounds, because the set of tensors to read has changed."""
        self._left_out = None
        self._rounds.group_changed()
        self._rounds_by_copy.group_changed()

    def reread(self, generation: int, block: int, budget: int | None) -> tuple[set[str], int]:
        """Read again some of the tensors that are left out, before the next checkpoint is made. Return the names of the
        tensors whose bytes differ from those in the checkpoints, and how many bytes in plain host memory were read (0
        if a tensor differs). If one tensor differs, all tensors in plain host memory are read, because the same kind of
        write may have changed more of them. ``generation``: the newest generation that was begun. ``block``: bytes per
        checksum. ``budget``: how many bytes in plain host memory are read (None: all)."""
        if not self._known:
            return set(), 0
        self._left_out = left_out = self._left_out or self._left_out_now(block)
        chosen, ends_round = self._round_robin.next_blocks(left_out.blocks, budget)
        wrong_by_copy, ends_round_by_copy = self._differing_by_copy(left_out.read_by_copy, block)
        wrong = self._differing(left_out, chosen) | wrong_by_copy
        if wrong:
            wrong |= self._differing(left_out, ALL)
            self.copied_at_boundary |= wrong
            return wrong, 0
        if chosen is ALL:
            self._rounds.all_read(generation)
        elif ends_round:
            self._rounds.ended(generation)
        if not left_out.read_by_copy:
            self._rounds_by_copy.all_read(generation)
        elif ends_round_by_copy:
            self._rounds_by_copy.ended(generation)
        return set(), int(left_out.blocks.nbytes[chosen].sum())

    def _left_out_now(self, block: int) -> _LeftOut:
        left_out = {name: known for name, known in self._known.items() if known.can_be_left_out and len(known.crcs)}
        plain = {name: known for name, known in left_out.items() if is_plain(known.written)}
        counts = [len(known.crcs) for known in plain.values()]
        blocks = Blocks.of(
            [address_of(known.written) for known in plain.values()],
            [known.written.nbytes for known in plain.values()],
            np.cumsum(counts, dtype=np.int64) - np.array(counts, np.int64),
            block,
        )
        crcs = np.concatenate([known.crcs for known in plain.values()] or [np.zeros(0, np.uint32)])
        return _LeftOut(list(plain), blocks, crcs, [name for name in left_out if name not in plain])

    def _differing(self, left_out: _LeftOut, chosen: Positions | slice) -> set[str]:
        """Return the names of tensors whose bytes in these blocks differ, although their signatures are unchanged. A
        tensor with a changed signature is not returned, because the next checkpoint writes it in any case."""
        blocks = left_out.blocks
        differ = blocks.checksums(chosen) != left_out.crcs[blocks.checksum_positions[chosen]]
        found = {left_out.names[i] for i in blocks.owners[chosen][differ].tolist()}
        return {name for name in found if self._has_same_signature(name)}

    def _differing_by_copy(self, names: Sequence[str], block: int) -> tuple[set[str], bool]:
        """Do what ``_differing`` does for the next tensors of ``names``, which can be read only through a copy. Of the
        tensors on devices, at most one is read. The second result is whether the last tensor of ``names`` was read,
        which ends the round."""
        spent, start = 0, self._next_by_copy if self._next_by_copy < len(names) else 0
        for following, name in enumerate(names[start:], start + 1):
            self._next_by_copy = following % len(names)
            known = self._known[name]
            if self._has_same_signature(name):
                if not np.array_equal(checksums(in_plain_memory(on_host(known.written)), block), known.crcs):
                    return {name}, False
                spent += known.written.nbytes
            if spent >= REREAD_BY_COPY_NBYTES or not known.live.tensor.is_cpu:
                break
        return set(), not self._next_by_copy

    def _has_same_signature(self, name: str) -> bool:
        return self._known[name].signature == signature_of(self._known[name].live)


def changed_error(names: Sequence[str], when: str) -> StateChangedError:
    """Return the error for an unannounced write to these tensors. ``when``: a clause for the message."""
    return StateChangedError(
        f"{listed(list(map(repr, names)))} was written {when}, in a way that moves no version counter of torch (a "
        "fused kernel, .data, numpy or another thread). From now on the tensor is copied at the end of each step, "
        "before training goes on. Wrap writes that are undone later (weight swaps) in `with session.paused():`, or "
        "call session.end_step() after the last write of a step. (This is an error because LIGHTCK_CHECK=1 is set. "
        "Without it such a checkpoint is given up with a warning, and the next one writes every tensor.)"
    )
