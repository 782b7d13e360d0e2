"""One crash point: the fates of what is not durable there, and a file that can be turned into any of its images."""

from __future__ import annotations

from collections.abc import Sequence

from lightck.testing import fingerprint
from lightck.testing.cuts import METADATA, PAYLOAD, VITAL, Image
from lightck.testing.fates import Content, Fate
from lightck.testing.images import ImageFile
from lightck.testing.recording import SlotPlace


class Point:
    """``file`` holds everything that was stored so far, and does so again after ``show({})``."""

    def __init__(self, file: ImageFile, fates: Sequence[Fate], base: int) -> None:
        """``base``: the fingerprint of the file as it is."""
        self.fates = fates
        self.fingerprint = base
        """Of the image that is shown."""
        self._file = file
        self._shown: dict[int, Content] = {}
        self._runs = [_runs(fate) for fate in fates]
        self._known: dict[tuple[int, Content], int] = {}

    def show(self, image: Image) -> None:
        """Turn the file into this image."""
        shown = self._shown
        for i in [i for i in shown if i not in image]:
            self._put(i, shown.pop(i), self.fates[i].newest)
        for i, content in image.items():
            before = shown.get(i)
            if before != content:
                self._put(i, self.fates[i].newest if before is None else before, content)
                shown[i] = content

    def _put(self, i: int, before: Content, content: Content) -> None:
        for low, high in self._runs[i]:
            self._file.write(self.fates[i].offsets[low], b"".join(content[low:high]))
        self.fingerprint ^= self._mark(i, before) ^ self._mark(i, content)

    def _mark(self, i: int, content: Content) -> int:
        found = self._known.get((i, content))
        if found is None:
            found = self._known[i, content] = fingerprint.of_parts(self.fates[i].offsets, content)
        return found

    def lost(self, image: Image) -> tuple[int, ...]:
        """Offsets of the words that are not the newest in an image."""
        found = []
        for i, content in image.items():
            fate = self.fates[i]
            found += [at for at, a, b in zip(fate.offsets, content, fate.newest, strict=True) if a != b]
        return tuple(sorted(found))


def _runs(fate: Fate) -> list[tuple[int, int]]:
    """Indexes of what lies together."""
    offsets, runs, low = fate.offsets, [], 0
    for high in range(1, len(offsets) + 1):
        if high == len(offsets) or offsets[high] != offsets[high - 1] + len(fate.lost[high - 1]):
            runs.append((low, high))
            low = high
    return runs


def kind_of(fate: Fate, slots: Sequence[SlotPlace]) -> int:
    """Whether a fate is about ring, headers or tables, about a manifest, or about payload."""
    return min(_kind(at, slots) for at in fate.offsets)


def _kind(offset: int, slots: Sequence[SlotPlace]) -> int:
    for slot in slots:
        if slot.header <= offset < slot.end:
            return PAYLOAD if offset >= slot.payload else VITAL if offset < slot.header + 64 else METADATA
    return VITAL
