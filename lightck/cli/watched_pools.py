"""What ``lightck watch`` sees of pools that are in use: it reads their commit logs and slot headers again and again.

    WatchedPool   one pool: newest checkpoint, slots, which process trains; goes on with the new file after a relayout,
                  and when a symbolic link in its path is changed
    WatchedGroup  the pools of a group in one directory: what all ranks have, and which rank is behind
    tier_facts    the newest complete checkpoint of a tier

Nothing is written, and no lock is taken: the kernel is asked which locks there are. A pool holds no times, so ages
count from when a checkpoint was first seen.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from dataclasses import asdict

from lightck.cli import groups
from lightck.cli.open_tier import is_tier, options_of
from lightck.cli.text import Facts
from lightck.errors import LightckError, PoolError
from lightck.pool.commit_log import candidates
from lightck.pool.format.structures import CommitRecord
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.slot_locks import is_held
from lightck.pool.storage.backends import backend_for, readable_path
from lightck.pool.storage.lock import Holder, holder_of
from lightck.ranks.directory import existing_pools, worlds_of

ATTEMPTS = 20
"""The largest number of reads in one poll. A read is repeated if a training overwrote all checkpoints meanwhile."""
_SAMPLES_MAX = 10
"""The number of samples that are kept. The rate (steps per second) is computed from the oldest and the newest."""


class Progress:
    """The newest checkpoint that was seen: since when, and how fast its step grows."""

    def __init__(self) -> None:
        self.newest: tuple[int, int] | None = None
        """(incarnation, step)."""
        self._since: float | None = None
        """When the step was last seen to change, at first the time of the first look; None before that."""
        self._is_since_start = True
        """Whether ``_since`` is the time of the first look, so that the checkpoint may be older than the age says."""
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES_MAX)

    @property
    def step(self) -> int | None:
        return None if self.newest is None else self.newest[1]

    def see(self, newest: tuple[int, int] | None) -> None:
        """Note the newest checkpoint at this moment. (A training that resumes from it gives it a new incarnation.)"""
        before, self.newest = self.step, newest
        if self._since is not None and self.step == before:
            return
        if self.step is None or before is None or self.step < before:
            self._samples.clear()
        self._is_since_start = self._since is None
        self._since = time.monotonic()

    def facts(self) -> Facts:
        """Return the part of the JSON object that describes the newest checkpoint: step, incarnation, age and rate.
        Call it once in each interval."""
        incarnation, step = self.newest or (None, None)
        age = rate = None
        if step is not None and self._since is not None:
            now = time.monotonic()
            age = now - self._since
            self._samples.append((now, step))
            began, first = self._samples[0]
            rate = (step - first) / (now - began) if now > began else None
        return {
            "step": step,
            "incarnation": incarnation,
            "age_seconds": age,
            "age_is_at_least": age is not None and self._is_since_start,
            "steps_per_second": rate,
        }


class WatchedPool:
    """One pool. The constructor raises ``PoolError`` if the pool cannot be read. If it cannot be read later, ``facts``
    returns the error under the key ``problem``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.progress = Progress()
        self.ids: frozenset[tuple[int, int]] = frozenset()
        """(incarnation, step) of each committed checkpoint in the pool."""
        self.problem: str | None = None
        self._holder: Holder | None = None
        self._events: list[str] = []
        self.reader: PoolReader | None = None
        self._use(_opened(path))
        self._holder = holder_of(self.path_of_file)
        self.poll()

    @property
    def path_of_file(self) -> str:
        return self.path if self.reader is None else self.reader.path

    def _use(self, reader: PoolReader) -> None:
        self.reader, self.problem = reader, None
        found = backend_for(reader.path).probe(reader.path)
        names = ("process", "os", "power", "media", "medium")
        self._durability: Facts = {name: getattr(found, name) for name in names}

    def poll(self) -> None:
        """Look for a newer checkpoint, and for another file at the path."""
        self._follow_file()
        reader = self.reader
        if reader is None:
            return
        for _ in range(ATTEMPTS):
            records = _committed(reader)
            if records or reader.commit_log().is_empty:
                break
        else:
            return  # all checkpoints were overwritten during each read; the next poll tries again
        self.ids = frozenset((one.incarnation, one.step) for one in records)
        self.progress.see((records[0].incarnation, records[0].step) if records else None)

    def _follow_file(self) -> None:
        """Open the file that the path names now, if it is another one."""
        old = self.reader
        if old is not None and old.path == readable_path(self.path) and old.container.is_current():
            return
        try:
            reader = _opened(self.path)
        except (PoolError, OSError) as err:
            self.problem = str(err)
            if old is not None:
                self._events.append("gone")
                self.close()
            return
        self.close()
        self._use(reader)
        records, before = _committed(reader), self.progress.newest
        is_same_path = old is not None and old.path == reader.path  # else a link has changed, or the file was gone
        goes_on = any(before is None or (one.incarnation, one.step) >= before for one in records)
        self._events.append("relayout" if goes_on and is_same_path else "replaced")

    def facts(self) -> Facts:
        """Return the object of this pool; docs/json-tiers.md lists its keys."""
        self.poll()
        holder = holder_of(self.path_of_file)
        before, self._holder = self._holder, holder
        is_same = holder is not None and before is not None and holder.pid == before.pid
        if before is not None and not is_same:
            self._events.append("ended")
        if holder is not None and not is_same:
            self._events.append("started")
        events, self._events = self._events, []
        reader = self.reader
        slots = [] if reader is None else _slots(reader, is_open=holder is not None)
        return {
            "path": os.path.abspath(self.path),
            "group": None if reader is None else groups.group_facts(reader.group),
            "holder": None if holder is None else asdict(holder),
            **self.progress.facts(),
            "in_flight": sum(slot["state"] == "being written" for slot in slots),
            "slots": slots,
            "durability": self._durability,
            "events": events,
            "problem": self.problem,
        }

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        self.reader = None


class WatchedGroup:
    """The pools of a group in one directory. The constructor raises ``PoolError`` or ``RankError``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._progress = Progress()
        self._pools: dict[str, WatchedPool] = {}
        self._world: dict[int, WatchedPool] = {}
        self._missing: list[int] = []
        self._problem: str | None = None
        self._refresh()

    def _refresh(self) -> None:
        """Open pools that are new in the directory, forget those that are gone, and find the newest world."""
        paths = [str(path) for path in existing_pools(self.directory)]
        for gone in self._pools.keys() - set(paths):
            self._pools.pop(gone).close()
        for path in paths:
            if path not in self._pools:
                self._pools[path] = WatchedPool(path)
        readers = {pool.reader: pool for pool in self._pools.values() if pool.reader is not None}
        worlds = worlds_of(self.directory, list(readers))
        if not worlds:
            return  # files are being replaced
        self._world = {rank: readers[reader] for rank, reader in worlds[0].readers.items()}
        self._missing = worlds[0].missing

    def poll(self) -> None:
        """Look for newer checkpoints of all ranks."""
        for pool in self._world.values():
            pool.poll()
        held = [pool.ids for pool in self._world.values()]
        common = frozenset.intersection(*held) if held and not self._missing else frozenset()
        newest = max(common, default=None)
        # The pools were read one after the other. If no checkpoint is common now, a checkpoint that the first pools
        # held may have been overwritten in the last pools before they were read. Then the earlier result is kept.
        if newest is not None or self._missing or not any(held):
            self._progress.see(newest)

    def facts(self) -> Facts:
        """Return the object of the directory; docs/json-tiers.md lists its keys."""
        self._problem = None
        try:
            self._refresh()
        except LightckError as err:
            self._problem = str(err)
        self.poll()
        ranks = {rank: pool.facts() for rank, pool in self._world.items()}
        steps = {rank: facts["step"] for rank, facts in ranks.items()}
        slowest = min(steps, key=lambda rank: -math.inf if steps[rank] is None else steps[rank], default=None)
        events = [{"rank": rank, "event": event} for rank, facts in ranks.items() for event in facts["events"]]
        return {
            "directory": os.path.abspath(self.directory),
            "common": self._progress.facts(),
            "slowest": None if slowest is None else {"rank": slowest, "step": steps[slowest]},
            "missing": self._missing,
            "ranks": list(ranks.values()),
            "events": events,
            "problem": self._problem,
        }

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def watched(path: str) -> WatchedPool | WatchedGroup:
    """Return what watches a pool, or the directory of a group. Raises ``PoolError`` or ``RankError``."""
    return WatchedGroup(path) if os.path.isdir(path) else WatchedPool(path)


def tier_facts(path: str) -> Facts:
    """Return the newest complete checkpoint of a tier. The tier's file names are listed, and no file is read."""
    from lightck.tiers.decisions import manifests_of, newest_complete
    from lightck.tiers.open_store import open_store

    facts: Facts = {"tier": path, "step": None, "sent_at": None, "age_seconds": None, "problem": None}
    try:
        if not is_tier(path):
            return facts | {"problem": "no tier is there yet (no folder with a claim.json)"}
        listing = open_store(path, options_of(path)).listing()
    except LightckError as err:
        return facts | {"problem": str(err)}
    newest = newest_complete(listing)
    if newest is None:
        return facts
    sent_at = max(listing.manifests[name] for name in manifests_of(listing, newest))
    return facts | {"step": newest.step, "sent_at": sent_at, "age_seconds": max(0.0, time.time() - sent_at)}


def _opened(path: str) -> PoolReader:
    return open_pool(readable_path(path), gradients=True)


def _committed(reader: PoolReader) -> list[CommitRecord]:
    """Return the records of the checkpoints that recovery would try, newest first. Empty also if a training has
    overwritten all of them since the log was read."""
    return [one for one in candidates(reader.commit_log()) if not reader.has_lost_slot(one)]


def _slots(reader: PoolReader, *, is_open: bool) -> list[Facts]:
    """Return what lies in each slot. ``is_open``: whether a training has the pool open."""
    records = {(one.slot, one.payload_generation): one for one in reader.commit_log().records.values()}
    newest = max((one.payload_generation for one in records.values()), default=0)
    found: list[Facts] = []
    for slot in range(len(reader.superblock.slots)):
        generation = reader.slot_generation(slot)
        record = None if generation is None else records.get((slot, generation))
        if record is not None:
            state = "committed"
        elif generation is None:
            state = "empty"
        elif reader.superblock.has_gradients and generation < newest:
            state = "record"
        else:
            state = "being written" if is_open else "unfinished"
        step = None if record is None else record.step
        found.append({"slot": slot, "state": state, "step": step, "held": is_held(reader.container.fd, slot)})
    return found
