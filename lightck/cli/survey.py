"""What a pool holds, version by version: one look that ``inspect``, ``verify`` and ``diff`` share.

A look at a pool in use may find a slot that is being written anew. A version that vanished while we looked is left out,
and where none is left the look is repeated, as recovery does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightck.errors import NoCheckpointError, PoolLockedError
from lightck.pool.format.structures import CommitLine, DamagedError
from lightck.pool.reader import PoolReader, Version, open_pool
from lightck.pool.ring import Ring, candidates
from lightck.pool.storage.backends import readable_path

if TYPE_CHECKING:
    from lightck.restore.contents import Contents

COMMITTED, REJECTED, DEAD = "committed", "rejected", "dead"
ATTEMPTS = 20
"""How often a pool is looked at again whose versions are overwritten meanwhile."""


@dataclass(frozen=True, slots=True)
class Held:
    """One version whose bytes are still in their slot.

    state: ``committed``: recovery may give it. ``dead``: the training went back behind it, and only asking for its step
    gives it. ``rejected``: something of it is damaged, and recovery passes it over. ``reason`` says what.
    """

    line: CommitLine
    state: str
    reason: str | None
    version: Version | None
    contents: Contents | None

    @property
    def step(self) -> int:
        return self.line.step

    @property
    def generation(self) -> int:
        return self.line.payload_generation

    @property
    def nbytes(self) -> int | None:
        return None if self.version is None else sum(entry.nbytes for entry in self.version.entries.values())


@contextmanager
def reading(path: str) -> Iterator[PoolReader]:
    """The pool at a path, opened for reading only."""
    reader = open_pool(readable_path(path))
    try:
        yield reader
    finally:
        reader.close()


def held(reader: PoolReader, step: int | None = None) -> tuple[Held, ...]:
    """All versions held, as recovery would try them, then the dead ones. With ``step`` only those of that step.

    Raises:
        NoCheckpointError: none of them has this step.
    """
    for _ in range(ATTEMPTS):
        ring = reader.ring()
        found = tuple(_look(reader, ring))
        if any(each.version for each in found) or reader.ring() == ring:
            return found if step is None else _of_step(reader, found, step)
    raise overwritten(reader)


def overwritten(reader: PoolReader) -> PoolLockedError:
    return PoolLockedError(
        f"The pool {reader.path!r} is in use, and its versions were overwritten faster than they could be read, "
        f"{ATTEMPTS} times. Nothing is wrong with it. Try again, or end the training first."
    )


def _of_step(reader: PoolReader, found: tuple[Held, ...], step: int) -> tuple[Held, ...]:
    chosen = tuple(each for each in found if each.step == step)
    if chosen:
        return chosen
    steps = ", ".join(str(s) for s in sorted({each.step for each in found})) or "no version yet"
    raise NoCheckpointError(
        f"The pool {reader.path!r} does not hold step {step}. It holds {steps}: a pool keeps the newest few, and older "
        "ones were overwritten. Ask for one of these, or leave --step out."
    )


def _look(reader: PoolReader, ring: Ring) -> Iterator[Held]:
    live = candidates(ring)
    known = {(line.slot, line.payload_generation) for line in live}
    dead = []
    for line in sorted(ring.lines.values(), key=lambda line: (line.incarnation, line.generation), reverse=True):
        if (line.slot, line.payload_generation) not in known:
            known.add((line.slot, line.payload_generation))
            dead.append(line)
    newest = newest_generations(ring)
    for lines, state in ((live, COMMITTED), (dead, DEAD)):
        for line in lines:
            is_superseded = line.payload_generation < newest[line.slot]
            if is_superseded and reader.slot_generation(line.slot) != line.payload_generation:
                continue  # a newer version was committed over it, whatever became of the slot's header since
            each = _examined(reader, line, state)
            if each is not None:
                yield each


def _examined(reader: PoolReader, line: CommitLine, state: str) -> Held | None:
    """The version of a line; None where its slot belongs to another version, now or by the end of the look."""
    from lightck.restore.recover import parse  # torch

    if not still_there(reader, line):
        return None
    try:
        version = reader.version(line)
        return Held(line, state, None, version, parse(version)) if version.is_intact() else None
    except DamagedError as error:
        return Held(line, REJECTED, str(error), None, None) if still_there(reader, line) else None


def still_there(reader: PoolReader, line: CommitLine) -> bool:
    """Whether the slot still holds the bytes that this line names, or its header proves nothing."""
    return not reader.is_reused(line)


def newest(versions: tuple[Held, ...], step: int | None) -> Held | None:
    """The one that recovery tries first. A dead one only where its step was asked for."""
    readable = (each for each in versions if each.version is not None)
    return next((each for each in readable if step is not None or each.state == COMMITTED), None)


def unfinished(reader: PoolReader) -> list[tuple[int, int]]:
    """(slot, generation) of versions that were begun and not committed: under way, given up, or cut off by a kill."""
    newest = newest_generations(reader.ring())
    headers = [(slot, reader.slot_generation(slot)) for slot in range(len(reader.superblock.slots))]
    return [(slot, gen) for slot, gen in headers if gen is not None and gen > newest.get(slot, 0)]


def newest_generations(ring: Ring) -> dict[int, int]:
    """slot -> generation of the newest version of which a line says that it was committed there."""
    found: dict[int, int] = {}
    for line in ring.lines.values():
        found[line.slot] = max(found.get(line.slot, 0), line.payload_generation)
    return found
