"""Power cuts while a pool is published on a device: in every image that they could leave, the old pool is whole or the
new one is, and the old one until the new one's record was begun. The same images catch a record that is not fenced.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toys
from crash import cuts, trace
from crash.cuts import PAYLOAD, VITAL
from crash.fates import Content, Fate
from crash.persistence import PersistentMemory, Tracker
from crash.trace import Event, Fence, Flush, Mark, Store, Sync
from devices import device

import lightck
from lightck._native import lib
from lightck.errors import LightckError, NoCheckpointError, PoolNotFoundError
from lightck.pool import create
from lightck.pool.engine import Medium
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import MIB, PAGE
from lightck.pool.storage import backends, devdax
from lightck.pool.storage.extents import Extents

pytestmark = pytest.mark.long

NBYTES = 16 * MIB
FATES_ALL = 12
"""So many lines are lost each alone at a crash point; of more, some by lot."""


class Recorded(Medium):
    """A medium that records its events with the offsets of the device."""

    events: list[Event]

    def __init__(self, fd: int, extents: Extents, tier: int) -> None:
        super().__init__(fd, extents, tier)
        self._start = extents[0][0]
        trace.start(self)

    def close(self) -> None:
        if self.handle is not None:
            self.events += [_moved(event, self._start) for event in trace.stop(self)]
        super().close()


def _moved(event: Event, by: int) -> Event:
    if isinstance(event, Store):
        return Store(event.thread, event.offset + by, event.data, event.streamed)
    if isinstance(event, Flush):
        return Flush(event.thread, event.offset + by, event.nbytes)
    return event


class Device:
    """A made-up device that ``attach`` and ``recover`` find, and whose medium can be any image."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, _, self.backend = device(folder, NBYTES)
        patch.setitem(backends.BACKENDS, "devdax", self.backend)
        self._file = open(self.path, "r+b", buffering=0)  # noqa: SIM115 - as long as the device

    def read(self, offset: int, nbytes: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(nbytes)

    def write(self, offset: int, data: bytes) -> None:
        self._file.seek(offset)
        self._file.write(data)

    def found(self) -> Any:
        """What recovery says of the device: a step, or the class of its error."""
        try:
            return lightck.recover(self.path)
        except LightckError as err:
            return type(err)

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    one = Device(folder, monkeypatch)
    yield one
    one.close()


def replace_pool(made: Device, patch: pytest.MonkeyPatch) -> list[Event]:
    """Make a pool beside what is there and publish it; everything that was written."""
    events: list[Event] = []
    kind = type("Recording", (Recorded,), {"events": events})
    with patch.context() as during:
        for module in (create, devdax):
            during.setattr(module, "Medium", kind)
        entries = [Entry("model/w", "param", "float32", (100,), (1,), 400)]
        container, _ = create.create(made.backend, made.path, entries, slots=2, state_nbytes=100)
        container.publish()
        container.close()
    return events


def images(made: Device, before: bytes, events: list[Event], rng: random.Random) -> Iterator[int]:
    """Every crash point, as the number of events before it; at each, one image after the other on the device."""
    after = made.read(0, NBYTES)
    made.write(0, before)
    tracker: Tracker = PersistentMemory().tracker(lambda at, n: before[at : at + n])
    for number, event in enumerate(events, 1):
        for part in _changes(made, event) if isinstance(event, Store) else [event]:
            tracker.feed(part)
        if isinstance(event, Store):
            made.write(event.offset, event.data)
        if isinstance(event, (Store, Fence, Sync, Mark)):
            yield from _at(made, tracker, number, rng)
    assert made.read(0, NBYTES) == after, "the trace is complete"


def _changes(made: Device, store: Store) -> list[Event]:
    """What a store changes, in whole pages of it: zeros over zeros cannot be lost."""
    there = made.read(store.offset, len(store.data))
    if store.offset % PAGE or len(store.data) <= PAGE:
        return [store]
    places = range(0, len(there), PAGE)
    return [
        Store(store.thread, store.offset + at, store.data[at : at + PAGE], store.streamed)
        for at in places
        if there[at : at + PAGE] != store.data[at : at + PAGE]
    ]


def _at(made: Device, tracker: Tracker, number: int, rng: random.Random) -> Iterator[int]:
    fates = tracker.fates()
    kinds = [VITAL if len(fates) <= FATES_ALL else PAYLOAD] * len(fates)
    for _, image in cuts.images(fates, kinds, cuts.Limits(), rng):
        missing = image.missing(fates)
        for i, content in missing.items():
            _put(made, fates[i], content)
        yield number
        for i in missing:
            _put(made, fates[i], fates[i].newest)


def _put(made: Device, fate: Fate, content: Content) -> None:
    for at, data in zip(fate.offsets, content, strict=True):
        made.write(at, data)


def outcomes(made: Device, patch: pytest.MonkeyPatch, seed: int = 0) -> list[Any]:
    """What recovery said of each image, in order."""
    before = made.read(0, NBYTES)
    events = replace_pool(made, patch)
    return [made.found() for _ in images(made, before, events, random.Random(seed))]


def test_a_pool_is_replaced_at_one_instant(made, monkeypatch):
    toys.pool_with(Path(made.path), 1)
    toys.pool_with(Path(made.path), 2, overwrite=True)
    model, optimizer = toys.pool_with(Path(made.path), 3, overwrite=True)  # where the first one lay
    held = toys.everything(model, optimizer)
    found = outcomes(made, monkeypatch)
    kinds = ["old" if toys.is_step(each, held) else "other" for each in found if isinstance(each, lightck.Checkpoint)]
    assert set(kinds) == {"old"}
    errors = {each for each in found if not isinstance(each, lightck.Checkpoint)}
    assert errors == {NoCheckpointError}  # the new pool is whole, and empty
    assert len(found) > 50
    assert isinstance(found[0], lightck.Checkpoint)
    assert found[-1] is NoCheckpointError


def test_the_first_pool_of_a_device_is_there_or_is_not(made, monkeypatch):
    found = outcomes(made, monkeypatch)
    assert set(found) == {PoolNotFoundError, NoCheckpointError}
    assert (found[0], found[-1]) == (PoolNotFoundError, NoCheckpointError)


def test_a_damaged_second_copy_is_put_right_first(made, monkeypatch):
    """Else a crash while the first one is written would leave none."""
    toys.pool_with(Path(made.path), 2)
    made.write(devdax.RECORD_OFFSETS[1] + 30, b"\xff")
    found = outcomes(made, monkeypatch)
    assert {each for each in found if not isinstance(each, lightck.Checkpoint)} == {NoCheckpointError}


@pytest.mark.parametrize("bug", ["records not fenced", "pool not written back"])
def test_planted_bugs_are_found(made, monkeypatch, bug):
    toys.pool_with(Path(made.path), 2)
    if bug == "records not fenced":
        monkeypatch.setattr(Medium, "store_commit_record", lambda self, offset, record: self.store(offset, record))
    else:
        monkeypatch.setattr(Medium, "store", lambda self, at, data: lib.lck_m_store(self.handle, at, data, len(data)))
    found = outcomes(made, monkeypatch)
    wrong = {each for each in found if not isinstance(each, lightck.Checkpoint)} - {NoCheckpointError}
    assert wrong, "no image shows it"
