"""The life of one pool of ``known`` content: processes that train in it, one after the other, and what is left of it.

Also damage to the newest checkpoint, by the places that its own structures name.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

from crash import known
from crash.known import Plan
from crash.ledger import BrokenError, Ledger
from crash.victims import Kill, Story, Tell, Work, story
from lightck.errors import LightckError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage import extents, temporary


class Life:
    """One pool, from nothing on. Each method raises ``BrokenError`` where a promise is broken."""

    def __init__(self, plan: Plan, path: str, backend: str) -> None:
        self.plan, self.path, self.backend = plan, path, backend
        self.ledger = Ledger(plan, path)
        self.history: list[str] = []
        self._processes = 0

    def train(
        self,
        kill: Kill | None,
        slots: int,
        steps: int = 40,
        before: Callable[[], None] | None = None,
        refusal: type[LightckError] | None = None,
    ) -> Story:
        """A process that attaches and trains, and what has to be there after its end. ``before`` runs in it first;
        a ``refusal`` may end it, and is reported as such."""
        reported = story(partial(self._train, slots, steps, before, refusal), kill)
        self.history.append(f"{kill or 'no kill'}, {slots} slots: {reported}")
        self.ledger.note(reported, slots)
        if not reported.was_killed and os.path.lexists(temporary.path_of(self.path)):
            raise BrokenError("a new file that a kill left is still there")
        self.judge()
        return reported

    def process(self, work: Work, kill: Kill | None) -> Story:
        """Any other process: what the pool holds must not be touched by it."""
        reported = story(work, kill)
        self.history.append(f"{kill or 'no kill'}: {reported}")
        for trace in reported.of("error"):
            raise BrokenError(f"an error in the process: {trace}")
        self.judge(closely=True)
        return reported

    def judge(self, *, closely: bool = False) -> int:
        self._processes += 1
        return self.ledger.judge(closely=closely or self._processes % 8 == 1)

    def _train(
        self, slots: int, steps: int, before: Callable[[], None] | None, refusal: type[LightckError] | None, tell: Tell
    ) -> None:
        if before is not None:
            before()
        try:
            known.train(self.plan, self.path, tell, steps=steps, slots=slots, backend=self.backend)
        except LightckError as err:
            if refusal is None or not isinstance(err, refusal):
                raise
            tell("refused", str(err))

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Puts what happened before into the message of what is raised."""
        try:
            yield
        except BrokenError as err:
            raise BrokenError(f"{err}; {self.plan}; processes: {'; '.join(self.history[-4:])}") from err

    def remove(self) -> None:
        for left in (self.path, self.path + ".lock", temporary.path_of(self.path)):
            with suppress(FileNotFoundError):
                os.unlink(left)

    @property
    def file(self) -> int | None:
        """The identity of the file at the path, which changes with a relayout."""
        return os.stat(self.path).st_ino if os.path.exists(self.path) else None


def intact(path: str) -> list[int]:
    """The steps that verify, the one that recovery takes first."""
    steps = []
    with closing(open_pool(path)) as reader:
        for checkpoint in reader.checkpoints():
            with suppress(DamagedError):
                if isinstance(checkpoint, StoredCheckpoint):
                    checkpoint.verify()
                    steps.append(checkpoint.step)
    return steps


def places_in_newest(path: str) -> dict[str, tuple[int, int]]:
    """Structure -> offset and length, of the newest checkpoint of a pool."""
    with closing(open_pool(path)) as reader:
        checkpoint = next(v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint))
        sb, record = reader.superblock, checkpoint.record
        slot, _ = sb.slots[record.slot]
        at = next(p for p, each in reader.commit_log().records.items() if each.generation == record.generation)
        largest = max(checkpoint.entries.values(), key=lambda entry: entry.nbytes)
        return {
            "payload": (slot + largest.offset, largest.nbytes),
            "manifest": (
                slot + sb.manifest_offset + record.manifest_index * sb.manifest_nbytes,
                record.manifest_nbytes,
            ),
            "slot header": (slot, 64),
            "commit record": (sb.commit_record_offset(at), 64),
            "superblock": (0, 4096),
        }


def flip(path: str, offset: int, nbytes: int, rng: random.Random) -> None:
    """Flip one bit of this part of the pool."""
    with closing(open_pool(path, gradients=True)) as reader:
        ((at, _),) = extents.runs(reader.container.extents, offset + rng.randrange(nbytes), 1)
    with open(path, "r+b") as f:
        byte = os.pread(f.fileno(), 1, at)[0]
        os.pwrite(f.fileno(), bytes([byte ^ 1 << rng.randrange(8)]), at)
