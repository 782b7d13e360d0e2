"""Writes that nobody announces: tensors that moved while a version needed them, and tensors that rest.

``Watched`` remembers how the sources of background copies looked at the boundary. ``Resting`` decides which still
parameters need not be written again. Neither trusts ``_version`` alone (fused optimizers, BatchNorm and ``.data``
writes do not move it): each version re-reads some bytes and compares checksums, and ``LIGHTCK_CHECK=1`` re-reads all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lightck._native import ffi, lib
from lightck.capture.inventory import Live, memory_of, staged
from lightck.capture.lanes import lane_of, on_host
from lightck.capture.looks import Looks, Places, Reading, Versions, reading_of, version_of
from lightck.errors import StateChangedError

Look = tuple[int, Reading]


def look(tensor: torch.Tensor) -> Look:
    """How a tensor looks without reading its bytes."""
    return version_of(tensor), reading_of(tensor)


def checksums(tensor: torch.Tensor, block: int) -> npt.NDArray[np.uint32]:
    """Unseeded CRC-32C of every block of a tensor's bytes, read now, without the GIL."""
    nbytes = tensor.numel() * tensor.element_size()
    out = np.zeros(-(-nbytes // block), np.uint32)
    if nbytes:
        source = ffi.cast("void *", tensor.data_ptr())
        lib.lck_crc32c_blocks(source, nbytes, block, ffi.cast("uint32_t *", out.ctypes.data))
    return out


@dataclass(slots=True)
class Watched:
    """The sources of one version's background copies."""

    lives: list[Live]
    numbers: list[int]
    _looks: Looks = field(init=False)
    _versions: Versions = field(init=False)
    _places: Places = field(init=False)
    forward_seen: bool = False
    _proofs: list[npt.NDArray[np.uint32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        tensors = [live.tensor for live in self.lives]
        self._looks, self._versions, self._places = Looks(tensors), Versions(tensors), Places(self.lives)

    def moved(self) -> list[int]:
        """Positions of the sources that no longer look as they did."""
        try:
            if self._looks.hold() and self._versions.hold() and self._places.hold():
                return []
        except KeyError:
            pass  # one is gone from its place: which?
        gone = {i for i, live in enumerate(self.lives) if not live.is_home()}
        return sorted(self._looks.changed() | self._versions.changed() | gone)

    def prove(self, block: int) -> None:
        """Read all sources now, at the boundary: ``audit`` then also finds what was written before it was copied."""
        self._proofs = [checksums(live.tensor, block) for live in self.lives]

    def audit(self, raw: Callable[[int], npt.NDArray[np.uint32]], block: int, turn: int, whole: bool) -> str | None:
        """Re-read sources and compare with what was copied: one block (by ``turn``), or all of them.

        ``raw``: the checksums of what was copied, by the source's number. Returns the name of a tensor whose bytes
        differ.
        """
        if not self.lives:
            return None
        positions = range(len(self.lives)) if whole else [turn % len(self.lives)]
        for i in positions:
            tensor, copied = self.lives[i].tensor, raw(self.numbers[i])
            if self._proofs and not np.array_equal(self._proofs[i], copied):
                return self.lives[i].name
            if whole:
                if not np.array_equal(checksums(tensor, block), copied):
                    return self.lives[i].name
            elif len(copied) and not _block_equal(tensor, copied, (turn // len(self.lives)) % len(copied), block):
                return self.lives[i].name
        return None


def _block_equal(tensor: torch.Tensor, copied: npt.NDArray[np.uint32], index: int, block: int) -> bool:
    nbytes = tensor.numel() * tensor.element_size()
    start = index * block
    lane = lane_of(tensor)
    if lane is not None:
        return bool(checksums(lane.read(tensor, start, block), block)[0] == copied[index])
    address = ffi.cast("void *", tensor.data_ptr() + start)
    return bool(lib.lck_crc32c(address, min(block, nbytes - start)) == copied[index])


@dataclass(slots=True)
class _Rest:
    tensor: torch.Tensor
    memory: object
    """Held, so that no other tensor's bytes come to lie there: its address tells it."""
    look: Look
    crcs: npt.NDArray[np.uint32]
    proved: bool


class Resting:
    """Which still parameters have proved that they rest, and the rolling audit of those that were left out.

    A still parameter is one that no optimizer step changes. It rests once two successive versions, each written whole,
    hold equal bytes, and for as long as it looks the same as at the step before.
    """

    def __init__(self) -> None:
        self.never: set[str] = set()
        """Names that moved unannounced once: they are copied at every boundary from then on, after a restart too."""
        self._rests: dict[str, _Rest] = {}
        self._turn = 0

    def crcs_at_rest(self, live: Live) -> npt.NDArray[np.uint32] | None:
        """The checksums that a slot must hold for this tensor to be left out; None where it must be written."""
        rest = self._rests.get(live.name)
        if rest is None or not rest.proved or live.name in self.never:
            return None
        if rest.tensor is not live.tensor or rest.look != look(live.tensor):
            return None
        return rest.crcs

    def written(self, live: Live, crcs: npt.NDArray[np.uint32]) -> None:
        """A version holds this still tensor whole, with these checksums."""
        before = self._rests.get(live.name)
        proved = before is not None and np.array_equal(before.crcs, crcs)
        self._rests[live.name] = _Rest(live.tensor, memory_of(live.tensor), look(live.tensor), crcs.copy(), proved)

    def keep(self, lives: Sequence[Live]) -> None:
        """Forget tensors that are gone, or are not still any more: these are all that are."""
        if len(self._rests) > len(lives):
            names = {live.name for live in lives}
            self._rests = {name: rest for name, rest in self._rests.items() if name in names}

    def trust_none(self) -> None:
        """Every tensor has to prove anew that it rests."""
        self._rests.clear()

    def audit(self, left_out: Sequence[Live], block: int) -> str | None:
        """Re-read one left-out tensor, the next in turn. Returns its name where its bytes differ."""
        if not left_out:
            return None
        self._turn += 1
        live = left_out[self._turn % len(left_out)]
        if np.array_equal(checksums(staged(on_host(live.tensor)), block), self._rests[live.name].crcs):
            return None
        self.never.add(live.name)
        del self._rests[live.name]
        return live.name


def changed_error(name: str, when: str) -> StateChangedError:
    return StateChangedError(
        f"The tensor {name!r} was written {when}, in a way that moves no version counter (a fused kernel, .data, or "
        "another thread). It is copied at once at every step from here on. Wrap writes that are taken back "
        "(weight swaps) in `with session.paused():`, or call session.end_step() after the last write of a step."
    )
