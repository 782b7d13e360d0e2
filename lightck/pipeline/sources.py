"""Writes that nobody announces: tensors that moved while a version needed them, and tensors that rest.

``SourceWatch`` remembers the signatures of the sources of background copies at the boundary. ``UnchangedTensors``
decides which frozen parameters need not be written again. Neither trusts ``_version`` alone (fused optimizers,
BatchNorm and ``.data`` writes do not move it): for each checkpoint some bytes are read and their checksums compared
(``blocks.py``), all of them in the first ones and under ``LIGHTCK_CHECK=1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck.errors import StateChangedError
from lightck.state.blocks import ALL, NO_BLOCKS, Blocks, Positions, Turn, checksums
from lightck.state.device_transfers import on_host, transfer_of
from lightck.state.inventory import Live, is_plain, memory_of, staged
from lightck.state.signatures import Places, Reading, Signatures, VersionCounters, reading_of, version_counter_of

Signature = tuple[int, Reading]
STAGED_NBYTES = 64 << 10
"""Of tensors of which a copy has to be made so much is read for each checkpoint."""


def signature_of(tensor: torch.Tensor) -> Signature:
    """How a tensor looks without reading its bytes."""
    return version_counter_of(tensor), reading_of(tensor)


class SourceWatch:
    """The sources of one checkpoint's background copies."""

    def __init__(self, lives: Sequence[Live], numbers: Sequence[int], on_devices: int = 0) -> None:
        """``numbers``: of their records. ``on_devices``: how many of them, the last ones, do not lie in host memory."""
        self.lives, self.numbers = lives, numbers
        self.forward_seen = False
        self.is_proved_whole = False
        """All sources in host memory were read at the boundary."""
        self._on_devices = range(len(lives) - on_devices, len(lives))
        tensors = [live.tensor for live in lives]
        self._signatures, self._counters, self._places = Signatures(tensors), VersionCounters(tensors), Places(lives)
        self._blocks = NO_BLOCKS
        self._proof = self._blocks.places[:0], np.zeros(0, np.uint32), self._blocks.owners[:0]

    def moved(self) -> list[int]:
        """Positions of the sources that no longer look as they did."""
        try:
            if self._signatures.hold() and self._counters.hold() and self._places.hold():
                return []
        except KeyError:
            pass  # one is gone from its place: which?
        gone = {i for i, live in enumerate(self.lives) if not live.is_home()}
        return sorted(self._signatures.changed() | self._counters.changed() | gone)

    def prove(self, blocks: Blocks, turn: Turn, budget: int | None) -> None:
        """Read sources now, at the boundary, before their copies begin: ``audit`` then knows what the checkpoint has to
        hold. ``blocks``: of all sources in host memory; ``budget``: how many bytes of them (None: all)."""
        chosen, _ = turn.take(blocks, budget)
        self.is_proved_whole = chosen is ALL
        self._blocks = blocks
        self._proof = blocks.places[chosen], blocks.checksums(chosen), blocks.owners[chosen]

    def audit(
        self,
        raw: npt.NDArray[np.uint32],
        of_record: Callable[[int], npt.NDArray[np.uint32]],
        block: int,
        turn: int,
        whole: bool,
    ) -> list[str]:
        """Compare what was copied with what was read at the boundary. Returns the names of tensors whose copies hold
        other bytes.

        ``raw``: the checksums of all that was copied; ``of_record``: those of one record. Of sources on devices one
        block is read now, by ``turn``. ``whole``: all sources are read again too.
        """
        places, proof, owners = self._proof
        wrong = set(owners[raw[places] != proof].tolist())
        if whole and len(self._blocks):
            again = self._blocks.checksums()
            wrong |= set(self._blocks.owners[raw[self._blocks.places] != again].tolist())
        if self._on_devices:
            i = self._on_devices[turn % len(self._on_devices)]
            copied, index = of_record(self.numbers[i]), turn // len(self._on_devices)
            if len(copied) and not _block_equal(self.lives[i].tensor, copied, index % len(copied), block):
                wrong.add(i)
        return [self.lives[i].name for i in sorted(wrong)]


def _block_equal(tensor: torch.Tensor, copied: npt.NDArray[np.uint32], index: int, block: int) -> bool:
    """Of a tensor on a device."""
    transfer = transfer_of(tensor)
    assert transfer is not None
    return bool(checksums(transfer.read(tensor, index * block, block), block)[0] == copied[index])


@dataclass(slots=True)
class _Unchanged:
    tensor: torch.Tensor
    memory: object
    """Held, so that no other tensor's bytes come to lie there: its address tells it."""
    signature: Signature
    crcs: npt.NDArray[np.uint32]
    proved: bool


@dataclass(frozen=True, slots=True)
class _Audited:
    """What is at rest, for reading it again in turn: by name those in host memory, their blocks, and the checksums that
    checkpoints hold; and the names of the others."""

    names: list[str]
    blocks: Blocks
    held: npt.NDArray[np.uint32]
    others: list[str]


class UnchangedTensors:
    """Which still parameters have proved that they rest, and the audit of those that are left out.

    A still parameter is one that no optimizer step changes. It rests once two successive checkpoints, each written
    whole, hold equal bytes, and for as long as it looks the same as at the step before. One that was written
    unannounced is never taken for unchanged again.
    """

    def __init__(self) -> None:
        self.copied_at_boundary: set[str] = set()
        """Names that moved unannounced once: they are copied at every boundary from then on, after a restart too."""
        self.right_until = 0
        """The generation up to which what checkpoints leave out is known to be what it was."""
        self._known: dict[str, _Unchanged] = {}
        self._turn = Turn()
        self._round_began: int | None = None
        self._audited: _Audited | None = None
        self._others_turn = 0

    def crcs_if_unchanged(self, live: Live) -> npt.NDArray[np.uint32] | None:
        """The checksums that a slot must hold for this tensor to be left out; None where it must be written."""
        rest = self._known.get(live.name)
        if rest is None or not rest.proved or live.name in self.copied_at_boundary:
            return None
        if rest.tensor is not live.tensor or rest.signature != signature_of(live.tensor):
            return None
        return rest.crcs

    def written(self, live: Live, crcs: npt.NDArray[np.uint32]) -> None:
        """A checkpoint holds this still tensor whole, with these checksums."""
        before = self._known.get(live.name)
        proved = before is not None and np.array_equal(before.crcs, crcs) and live.name not in self.copied_at_boundary
        self._known[live.name] = _Unchanged(
            live.tensor, memory_of(live.tensor), signature_of(live.tensor), crcs.copy(), proved
        )
        if proved or (before is not None and before.proved):
            self._set_changed()

    def keep(self, lives: Sequence[Live]) -> None:
        """Forget tensors that are gone, or are not still any more: these are all that are."""
        if len(self._known) > len(lives):
            names = {live.name for live in lives}
            self._known = {name: rest for name, rest in self._known.items() if name in names}
            self._set_changed()

    def trust_none(self) -> None:
        """Every tensor has to prove anew that it rests."""
        self._known.clear()
        self._set_changed()

    def _set_changed(self) -> None:
        """The present round of reading is none over all of them."""
        self._audited = self._round_began = None

    def audit(self, generation: int, block: int, budget: int | None) -> tuple[set[str], int]:
        """Read tensors at rest again, before the next checkpoint is made. Returns the names of those whose bytes are
        not what checkpoints hold, and how many bytes were read.

        ``generation``: the last one that was begun. ``block``: bytes for each checksum. ``budget``: bytes to read
        (None: all). Where one tensor differs, all are read, so that whoever writes to many is found at once.
        """
        if not self._known:
            return set(), 0
        self._audited = audited = self._audited or self._table(block)
        chosen, is_round = self._turn.take(audited.blocks, budget)
        wrong = self._differing(audited, chosen) | self._other_differing(audited.others, block)
        if wrong:
            wrong |= self._differing(audited, ALL)
            self.copied_at_boundary |= wrong
            return wrong, 0
        if chosen is ALL and not audited.others:
            self.right_until = generation
        elif is_round:
            self.right_until = self._round_began if self._round_began is not None else self.right_until
            self._round_began = generation
        return set(), int(audited.blocks.nbytes[chosen].sum())

    def _table(self, block: int) -> _Audited:
        proved = {name: rest for name, rest in self._known.items() if rest.proved and len(rest.crcs)}
        here = {name: rest for name, rest in proved.items() if is_plain(rest.tensor)}
        counts = [len(rest.crcs) for rest in here.values()]
        blocks = Blocks.of(
            [rest.signature[1][0] for rest in here.values()],
            [r.tensor.nbytes for r in here.values()],
            np.cumsum(counts, dtype=np.int64) - np.array(counts, np.int64),
            block,
        )
        held = np.concatenate([rest.crcs for rest in here.values()] or [np.zeros(0, np.uint32)])
        return _Audited(list(here), blocks, held, [name for name in proved if name not in here])

    def _differing(self, audited: _Audited, chosen: Positions | slice) -> set[str]:
        """Of these blocks the tensors that hold other bytes and look as they did. A visible change is no unannounced
        one: its tensor is written whole for it."""
        blocks = audited.blocks
        differ = blocks.checksums(chosen) != audited.held[blocks.places[chosen]]
        found = {audited.names[i] for i in blocks.owners[chosen][differ].tolist()}
        return {name for name in found if self._has_same_signature(name)}

    def _other_differing(self, names: Sequence[str], block: int) -> set[str]:
        """The same for the next ones that do not lie in host memory as they are: of those on devices one."""
        if not names:
            return set()
        spent = 0
        for _ in names:
            self._others_turn += 1
            name = names[self._others_turn % len(names)]
            rest = self._known[name]
            if self._has_same_signature(name):
                if not np.array_equal(checksums(staged(on_host(rest.tensor)), block), rest.crcs):
                    return {name}
                spent += rest.tensor.nbytes
            if spent >= STAGED_NBYTES or not rest.tensor.is_cpu:
                break
        return set()

    def _has_same_signature(self, name: str) -> bool:
        return self._known[name].signature == signature_of(self._known[name].tensor)


def changed_error(names: Sequence[str], when: str) -> StateChangedError:
    return StateChangedError(
        f"{', '.join(map(repr, names[:3]))} was written {when}, in a way that moves no version counter (a fused "
        "kernel, .data, numpy or another thread). It is copied at the boundary at every step from here on. Wrap writes "
        "that are taken back (weight swaps) in `with session.paused():`, or call session.end_step() after the last "
        "write of a step. (This is an error because LIGHTCK_CHECK=1 is set; without it such a checkpoint is given up "
        "with a warning, and the next one is written whole.)"
    )
