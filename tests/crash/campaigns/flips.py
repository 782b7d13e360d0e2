"""Every metadata bit flipped once, random payload bits, zeroed pages and lines, misdirected, lost and foreign writes.

Each damage is judged by what it left untouched: the newest checkpoint whose own bytes are all unchanged must be
recovered (or a newer one, where the damage is repaired), every recovery must be exact, and an error of ours is an
answer only if no checkpoint is undamaged. ``verify --deep`` must report each damage that changes a byte that counts,
and no other. What is damaged without a report is counted by the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import lightck
from crash import container
from crash.campaign import Campaign, Order, Tally
from crash.damages import CONTAINER, Damage, Damages, Image
from crash.images import ImageFile, pages_of
from crash.oracle import Outcome, Recovered, recovery, truth
from crash.reads import Memory, watched
from lightck.cli import inspect, verify
from lightck.errors import LightckError
from lightck.pool.format import anatomy
from lightck.pool.format.anatomy import Part
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import MIB, CommitRecord, DamagedError, unpack_slot_header
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage import backends, pmdk
from lightck.pool.storage.extents import runs
from lightck.pool.storage.pmdk_file import SIGNATURE
from lightck.restore.contents import Contents

STEPS, KEPT = 20, 6
"""Steps of the training, more than the commit log has records; and of how many of the last ones the files are kept."""
INSPECTED_EVERY = 20
PARSED_MAX = 32


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(path: str, backend: str) -> tuple[dict[int, bytes], list[bytes]]:
    """Truths by generation, and the file after each of the last steps. There is a restart on the way."""
    truths: dict[int, bytes] = {}
    files: list[bytes] = []
    for first, last in ((1, 3), (4, STEPS)):
        model, optimizer = build()
        with lightck.attach(model, path, optimizer=optimizer, slots=2, backend=backend, resume=first > 1) as session:
            for step in range(first, last + 1):
                optimizer.zero_grad()
                model(torch.ones(2, 2)).sum().backward()
                optimizer.step()
                session.flush()
                truths[lightck.recover(path).record.payload_generation] = truth(model, optimizer)
                if step > STEPS - KEPT:
                    with open(path, "rb") as file:
                        files.append(file.read())
    return truths, files


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint of the good pool, and the parts that it needs."""

    generation: int
    step: int
    slot: int
    lines: tuple[Part, ...]
    own: tuple[Part, ...]


class Bench:
    """The pool in a file that is damaged in place and put back."""

    def __init__(self, folder: str, backend: str, seed: int) -> None:
        backends.BACKENDS["pmdk"] = pmdk.PmdkBackend(arena_nbytes=4 * MIB)
        made, other = os.path.join(folder, "good.pool"), os.path.join(folder, "other.pool")
        self.truths, history = trained(made, backend)
        _, strangers = trained(other, backend)
        reader = open_pool(made)
        self.sb = reader.superblock
        self.parts = anatomy.parts_of(reader)
        self.places = reader.container.extents
        pages = pages_of(reader.container.fd)
        self.kept = tuple(_kept(reader, self.parts))
        reader.close()
        with open(made, "rb") as file:
            self.good = file.read()
        self.runs = {part: runs(self.places, part.offset, part.nbytes) for part in self.parts}
        self.container = _container(self.good)
        image = Image(self.good, self.places, self.parts, self.sb, tuple(history[:-1]), strangers[-1], self.container)
        self.damages = Damages(image, seed)
        for path in (made, other):
            os.unlink(path)
            os.unlink(path + ".lock")
        self.path = os.path.join(folder, "it.pool")
        self.file = ImageFile(self.path, len(self.good), pages, ((0, len(self.good)),))
        self.memory: Memory[Outcome] = Memory()
        with watched() as places:
            outcome = recovery(self.path)
        self.memory.learn(places, self._read, outcome)

    def _read(self, offset: int, nbytes: int) -> bytes:
        return b"".join(self.file.read(at, n) for at, n in runs(self.places, offset, nbytes))

    def recover(self, damage: Damage) -> Outcome:
        """``lightck.recover``, unless all that it read in the good file is as it was."""
        known = None if damage.kind.endswith(CONTAINER) else self.memory.recall(self._read)
        return recovery(self.path) if known is None else known[0]

    # -- what a damage changed ---------------------------------------------------------------------------------------

    def put(self, damage: Damage) -> bool:
        """Whether a byte is another one now."""
        changed = False
        for at, data in damage.writes:
            changed = changed or self.file.read(at, len(data)) != data
            self.file.write(at, data)
        return changed

    def restore(self, damage: Damage) -> None:
        for at, data in damage.writes:
            self.file.write(at, self.good[at : at + len(data)])

    def now(self, part: Part) -> bytes:
        return b"".join(self.file.read(at, n) for at, n in self.runs[part])

    def changed(self, damage: Damage) -> set[Part]:
        spans = [(at, at + len(data)) for at, data in damage.writes]
        touched = (p for p in self.parts if any(a < at + n and at < b for at, n in self.runs[p] for a, b in spans))
        return {p for p in touched if self.now(p) != b"".join(self.good[at : at + n] for at, n in self.runs[p])}

    def untouched(self, changed: set[Part]) -> list[Kept]:
        """The checkpoints that recovery must be able to use, newest first."""
        for kind in (anatomy.SUPERBLOCK, anatomy.TABLE):
            if all(p in changed for p in self.parts if p.kind == kind):
                return []
        return [v for v in self.kept if not changed.intersection(v.own) and self._named(v, changed) is not None]

    def _named(self, checkpoint: Kept, changed: set[Part]) -> CommitRecord | None:
        """A commit record that names this checkpoint, unless its slot's header names a later one."""
        if (self._header(checkpoint.slot) or 0) > checkpoint.generation:
            return None
        lines = (self._line(part) for part in (checkpoint.lines if changed else checkpoint.lines[:1]))
        return next((ln for ln in lines if ln and ln.payload_generation == checkpoint.generation), None)

    def _header(self, slot: int) -> int | None:
        part = next(p for p in self.parts if p.kind == anatomy.HEADER and p.slot == slot)
        return unpack_slot_header(self.now(part), slot, self.sb.uuid)

    def _line(self, part: Part) -> CommitRecord | None:
        try:
            return CommitRecord.unpack(self.now(part), self.sb.uuid)
        except DamagedError:
            return None

    def counts(self, changed: set[Part]) -> tuple[bool | None, str]:
        """Whether a byte that counts was changed (None: a kill may leave the same); if not, why not."""
        counts, why = self._counts(changed)
        if not counts and self._is_erased():
            sealed = [v for v in self.kept if self._header(v.slot) == v.generation and self._manifest(v) not in changed]
            return (True if len(sealed) > 1 else None), "in a ring that is as before its first commit"
        return counts, why

    def _counts(self, changed: set[Part]) -> tuple[bool | None, str]:
        counts: bool | None = False
        why = "in bytes that no reader uses"
        for part in changed:
            if part.kind in (anatomy.SUPERBLOCK, anatomy.TABLE):
                return True, ""
            if part.kind == anatomy.COMMIT_RECORD:
                counts, why = self._line_counts(part)
                if counts:
                    return True, ""
            elif part.kind == anatomy.HEADER and self._header_counts(part):
                return True, ""
        named = [v for v in self.kept if changed.intersection(v.own)]
        if any(self._named(v, changed) for v in named):
            return True, ""
        return counts, "in a version that no line names any more" if named else why

    def _is_erased(self) -> bool:
        """Whether all commit records are gone, though there were some."""
        return not any(any(self.now(part)) for part in self.parts if part.kind == anatomy.COMMIT_RECORD)

    @staticmethod
    def _manifest(checkpoint: Kept) -> Part:
        return next(part for part in checkpoint.own if part.kind == anatomy.MANIFEST)

    def _line_counts(self, part: Part) -> tuple[bool | None, str]:
        data = self.now(part)
        try:
            line = CommitRecord.unpack(data, self.sb.uuid)
        except DamagedError:
            repaired = data[24:32] + data[8:]
            is_cut = _is_line(repaired, self.sb.uuid)
            return None if is_cut else True, "in a line that is as a kill before its last store leaves it"
        return False, "in a line that is as before its commit" if line is None else "in a line that passes as it is"

    def _header_counts(self, part: Part) -> bool:
        assert part.slot is not None
        return self._header(part.slot) != part.generation

    def close(self) -> None:
        self.file.close()


def _is_line(data: bytes, uuid: bytes) -> bool:
    try:
        return CommitRecord.unpack(data, uuid) is not None
    except DamagedError:
        return False


def _kept(reader: PoolReader, parts: Iterable[Part]) -> Iterable[Kept]:
    for checkpoint in anatomy.checkpoints_of(reader):
        generation = checkpoint.record.payload_generation
        mine = [p for p in parts if p.generation == generation and p.slot == checkpoint.record.slot]
        own = tuple(p for p in mine if p.kind in (anatomy.MANIFEST, anatomy.TENSOR))
        yield Kept(
            generation,
            checkpoint.step,
            checkpoint.record.slot,
            tuple(p for p in parts if p.kind == anatomy.COMMIT_RECORD),
            own,
        )


def _container(good: bytes) -> tuple[tuple[int, int], ...]:
    if not good.startswith(SIGNATURE):
        return ()
    base = container.Base.of(good)
    return (
        (0, container.HEADER_NBYTES),
        (container.LAYOUT_AT, container.LAYOUT_NBYTES),
        (container.ROOT_AT, 8),
        (container.ROOT_AT + 16, 8),
        (base.root_at, len(base.root)),
    )


# -- what has to hold --------------------------------------------------------------------------------------------------


def judge(bench: Bench, damage: Damage) -> tuple[list[str], list[str]]:
    """What to count of this damage, and what is wrong."""
    changed = bench.changed(damage)
    whole = bench.untouched(changed)
    outcome = bench.recover(damage)
    is_contained = damage.kind.endswith(CONTAINER)
    newest = bench.kept[0]
    if isinstance(outcome, Recovered):
        if bench.truths.get(outcome.generation) != outcome.digest:
            return [], [f"step {outcome.step} was recovered with other values"]
        if whole and outcome.generation < whole[0].generation:
            return [], [f"step {outcome.step} was recovered, and step {whole[0].step} is untouched"]
        found = ["newest, exact" if outcome.generation == newest.generation else "older, exact"]
    elif not outcome.typed:
        return [], [f"{outcome.error}: {outcome.message[:200]}"]
    elif whole and not is_contained:
        return [], [f"{outcome.error}, and step {whole[0].step} is untouched: {outcome.message[:200]}"]
    else:
        found = [f"nothing recovered: {outcome.error}"]
    must, why = bench.counts(changed)
    if is_contained:
        must, why = not isinstance(outcome, Recovered), "in bytes of the container that no reader uses"
    said, wrong = _verified(bench, must, why)
    return found + said, wrong


def _verified(bench: Bench, must: bool | None, why: str) -> tuple[list[str], list[str]]:
    """What ``verify --deep`` said, against what it must say."""
    try:
        facts: dict[str, Any] | None = verify.pool_facts(bench.path, None, True)
    except LightckError:
        facts = None
    except Exception as err:
        return [], [f"verify: {type(err).__name__}: {err}"]
    is_reported = facts is None or not facts["ok"]
    if must and not is_reported:
        return [], ["verify --deep says that nothing is damaged"]
    if must is False and is_reported:
        return [], [f"verify --deep reports what is harmless ({why})"]
    return ["reported by verify --deep" if is_reported else f"not reported: {why}"], []


def inspected(bench: Bench) -> list[str]:
    try:
        inspect.pool_facts(bench.path, None, True)
    except LightckError:
        pass
    except Exception as err:
        return [f"inspect: {type(err).__name__}: {err}"]
    return []


@contextmanager
def quick() -> Iterator[None]:
    """Nobody else writes here, so one read is enough; and the small state that was parsed once is not parsed again:
    what comes of it follows from its bytes."""
    parse = Contents.parse
    known: dict[tuple[Any, ...], Contents] = {}

    def parsed(small_state: bytes, step: int, iteration: int, entries: Mapping[str, Entry]) -> Contents:
        key = small_state, step, iteration, tuple(entries.items())
        if key not in known:
            if len(known) >= PARSED_MAX:
                known.clear()
            known[key] = parse(small_state, step, iteration, entries)
        return known[key]

    with patch.object(Contents, "parse", parsed), patch.object(verify, "_READS", 1):
        yield


def play(order: Order) -> Tally:
    bench, tally = Bench(order.folder, order.backend, order.seed), Tally()
    tally.counts["damages that there are"] = len(bench.damages)
    try:
        with quick():
            _play(bench, order, tally)
    finally:
        bench.close()
    return tally


def _play(bench: Bench, order: Order, tally: Tally) -> None:
    for trial in order.trials:
        if trial >= len(bench.damages):
            break
        damage = bench.damages[trial]
        try:
            if not bench.put(damage):
                tally.counts["not counted: the bytes were the same"] += 1
                continue
            tally.counts[damage.kind] += 1
            counted, wrong = judge(bench, damage)
            wrong += inspected(bench) if trial % INSPECTED_EVERY == 0 else []
        finally:
            bench.restore(damage)
        tally.counts.update(counted)
        for reason in wrong:
            tally.found(trial, f"{damage.kind}, {damage.words}: {reason}")
        if trial % 10_000 == 0:
            order.say(f"{trial:,} of {len(bench.damages):,}, {len(tally.findings)} findings")


CAMPAIGN = Campaign(
    name="flips",
    summary="every metadata bit, payload bits, pages, lost and misdirected writes: found, and what is whole is used",
    small=300,
    long=400_000,
    run=play,
)
