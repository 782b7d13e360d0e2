"""The commit ring: which lines are live, in which order recovery tries them, and where the next one goes.

Pure functions over the lines of a ring, so that the writer, the reader and the checker share one set of rules.
Invariants: order is (incarnation, generation), never step or clock; the newest line of each slot's present content
is overwritten only after that slot is; a line between an adopted version and its adoption is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightck.pool.format.structures import KIND_ADOPTION, LINE_NBYTES, CommitLine, DamagedError, Superblock


@dataclass(frozen=True, slots=True)
class Ring:
    """The lines of a ring at one moment: position -> line; ``damaged`` are positions whose check fails."""

    lines: Mapping[int, CommitLine]
    damaged: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """No line was ever completed here: the pool holds no checkpoint and never held one."""
        return not self.lines and not self.damaged

    @property
    def generation(self) -> int:
        return max((line.generation for line in self.lines.values()), default=0)

    @property
    def highest(self) -> int:
        """Of all numbers that go on from here."""
        steps = (line.step for line in self.lines.values())
        return max(self.generation, self.incarnation, *steps, 0)

    @property
    def incarnation(self) -> int:
        return max((line.incarnation for line in self.lines.values()), default=0)


def read_ring(sb: Superblock, read: Callable[[int, int], bytes]) -> Ring:
    """All lines, through ``read(offset, nbytes)``."""
    lines: dict[int, CommitLine] = {}
    damaged: list[int] = []
    for position in range(sb.ring_lines):
        try:
            line = CommitLine.unpack(read(sb.line_offset(position), LINE_NBYTES), sb.uuid)
        except DamagedError:
            damaged.append(position)
            continue
        if line is not None and line.slot < len(sb.slots):
            lines[position] = line
    return Ring(lines, tuple(damaged))


def is_dead(line: CommitLine, ring: Ring) -> bool:
    """Whether the timeline of this line was left: an adoption went back to a version before it."""
    return any(
        other.kind == KIND_ADOPTION and other.payload_generation < line.generation < other.generation
        for other in ring.lines.values()
    )


def candidates(ring: Ring, step: int | None = None) -> list[CommitLine]:
    """Lines to try, newest first; each payload once. With ``step`` only that one, dead lines included."""
    if step is None:
        lines = [line for line in ring.lines.values() if not is_dead(line, ring)]
    else:
        lines = [line for line in ring.lines.values() if line.step == step]
    seen: set[tuple[int, int]] = set()
    ordered = []
    for line in sorted(lines, key=lambda ln: (ln.incarnation, ln.generation), reverse=True):
        if (line.slot, line.payload_generation) not in seen:
            seen.add((line.slot, line.payload_generation))
            ordered.append(line)
    return ordered


def next_position(ring: Ring, contents: Mapping[int, int | None], ring_lines: int, after: int) -> int:
    """The position for the next line: the first one after ``after`` that no slot's content still needs.

    ``contents`` maps slot -> generation of its present bytes (None: unknown, then all its lines count).
    """
    needed: dict[int, tuple[int, int]] = {}
    for position, line in ring.lines.items():
        content = contents.get(line.slot)
        if content is not None and content != line.payload_generation:
            continue
        if line.generation >= needed.get(line.slot, (0, 0))[0]:
            needed[line.slot] = (line.generation, position)
    protected = {position for _, position in needed.values()}
    for distance in range(1, ring_lines + 1):
        position = (after + distance) % ring_lines
        if position not in protected:
            return position
    raise AssertionError("a ring has at least twice as many lines as slots")
