"""One crash point: the fates of what is not durable there, and a file that can be turned into any of its images."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from crash import fingerprint
from crash.cuts import ALL, METADATA, PAYLOAD, VITAL, Image
from crash.fates import Content, Fate
from crash.images import ImageFile
from crash.oracle import Outcome
from crash.reads import Place
from crash.recording import SlotPlace


class Point:
    """``file`` holds everything that was stored so far, and does so again after ``show(ALL)``."""

    def __init__(self, file: ImageFile, fates: Sequence[Fate], base: int) -> None:
        """``base``: the fingerprint of the file as it is."""
        self.fates = fates
        self.fingerprint = base
        """Of the image that is shown."""
        self._file = file
        self._shown = ALL
        self._reported: dict[bool, tuple[Outcome, set[int]]] = {}
        self._runs = [_runs(fate) for fate in fates]
        self._known: dict[tuple[int, Content], int] = {}

    def show(self, image: Image) -> None:
        """Turn the file into this image."""
        shown, but = self._shown, image.but
        if image.is_bare == shown.is_bare:
            touched: Iterable[int] = {**shown.but, **but}
        else:
            touched = range(len(self.fates))
        for i in touched:
            fate = self.fates[i]
            before = shown.but.get(i) or (fate.lost if shown.is_bare else fate.newest)
            after = but.get(i) or (fate.lost if image.is_bare else fate.newest)
            if before != after:
                self._put(i, before, after)
        self._shown = image

    def known(self, image: Image) -> Outcome | None:
        """The outcome, if the recovery of the image that this one is described from read no byte that differs."""
        reported = self._reported.get(image.is_bare)
        return reported[0] if reported is not None and not any(i in reported[1] for i in image.but) else None

    def learn(self, image: Image, outcome: Outcome, places: Sequence[Place]) -> None:
        """What recovery made of an image with nothing in ``but``, and where it looked."""
        if not image.but:
            self._reported[image.is_bare] = outcome, {i for i, f in enumerate(self.fates) if _is_read(f, places)}

    def _put(self, i: int, before: Content, content: Content) -> None:
        for low, high in self._runs[i]:
            self._file.write(self.fates[i].offsets[low], b"".join(content[low:high]))
        self.fingerprint ^= self._mark(i, before) ^ self._mark(i, content)

    def _mark(self, i: int, content: Content) -> int:
        found = self._known.get((i, content))
        if found is None:
            found = self._known[i, content] = fingerprint.of_parts(self.fates[i].offsets, content)
        return found

    def lost(self, missing: Mapping[int, Content]) -> tuple[int, ...]:
        """Offsets of the words that are not the newest where these fates have these contents."""
        found = []
        for i, content in missing.items():
            fate = self.fates[i]
            found += [at for at, a, b in zip(fate.offsets, content, fate.newest, strict=True) if a != b]
        return tuple(sorted(found))


def _is_read(fate: Fate, places: Sequence[Place]) -> bool:
    """Whether a read of one of these places touches a word of the fate."""
    for at, nbytes in places:
        i = bisect_left(fate.offsets, at)
        if i < len(fate.offsets) and fate.offsets[i] < at + nbytes:
            return True
        if i > 0 and fate.offsets[i - 1] + len(fate.lost[i - 1]) > at:
            return True
    return False


def _runs(fate: Fate) -> list[tuple[int, int]]:
    """Indexes of what lies together."""
    offsets, runs, low = fate.offsets, [], 0
    for high in range(1, len(offsets) + 1):
        if high == len(offsets) or offsets[high] != offsets[high - 1] + len(fate.lost[high - 1]):
            runs.append((low, high))
            low = high
    return runs


def kind_of(fate: Fate, slots: Sequence[SlotPlace], homes: Sequence[tuple[int, int]] = ()) -> int:
    """Whether a fate is about ring, headers or tables, about a manifest, or about payload (all of a home is that)."""
    return min(_kind(at, slots, homes) for at in fate.offsets)


def _kind(offset: int, slots: Sequence[SlotPlace], homes: Sequence[tuple[int, int]]) -> int:
    if any(begin <= offset < end for begin, end in homes):
        return PAYLOAD
    for slot in slots:
        if slot.header <= offset < slot.end:
            return PAYLOAD if offset >= slot.payload else VITAL if offset < slot.header + 64 else METADATA
    return VITAL
