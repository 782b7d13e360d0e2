"""How the ranks of a model wait for each other within a step.

A topology is a program: the places at which a rank may have to wait, in the order of a step. Passing the last one is
the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

Place = tuple[int, int]
"""(step, index in the program): where a rank waits."""
Sync = Callable[[Sequence[Place], int], bool]
"""(places of all ranks, rank) -> whether this rank may go on: a collective, or a message of a pipeline."""
BEGIN: Literal["begin"] = "begin"
"""The boundary: the rank waits for a slot, and begins a checkpoint or leaves it out."""
BOUNDARY: Literal["boundary"] = "boundary"
"""The end of the boundary: a checkpoint that must be committed within it is waited for."""
GATE: Literal["gate"] = "gate"
"""The checkpoint of this step is waited for, until it is committed or given up."""
Wait = Sync | Literal["begin", "boundary", "gate"]


@dataclass(frozen=True)
class Topology:
    """``symmetries``: the renumberings of the ranks that change nothing. ``period``: after how many steps the program
    repeats itself."""

    program: tuple[Wait, ...]
    symmetries: tuple[tuple[int, ...], ...]
    period: int = 1


def collective(*groups: tuple[int, ...], every: int = 1) -> Sync:
    """A rank passes when all ranks of its group have come so far. ``every``: only in each such step."""

    def may_pass(places: Sequence[Place], i: int) -> bool:
        if places[i][0] % every:
            return True
        return all(places[j] >= places[i] for group in groups if i in group for j in group)

    return may_pass


def message_from(offset: int) -> Sync:
    """A rank passes when its neighbour at this offset has passed, if it has one."""

    def may_pass(places: Sequence[Place], i: int) -> bool:
        j = i + offset
        return not 0 <= j < len(places) or places[j] > places[i]

    return may_pass


def all_orders(n: int) -> tuple[tuple[int, ...], ...]:
    return tuple(permutations(range(n)))


def data_parallel(n: int, *, early: bool = True, every: int = 1) -> Topology:
    """One collective over all ranks, after the early gate (if there is one) and before the last one. ``every``: a
    collective in each such step alone (local SGD)."""
    sync = collective(tuple(range(n)), every=every)
    early_gate: tuple[Wait, ...] = (GATE,) if early else ()
    return Topology((BEGIN, BOUNDARY, *early_gate, sync, GATE), all_orders(n), every)


def mesh_2x2(*, early: bool = True) -> Topology:
    """Gradients are reduced over the rows, then over the columns. The early gate lies between them: it comes before the
    last collective of a rank."""
    rows, columns = collective((0, 1), (2, 3)), collective((0, 2), (1, 3))
    early_gate: tuple[Wait, ...] = (GATE,) if early else ()
    swaps = ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))
    return Topology((BEGIN, BOUNDARY, rows, *early_gate, columns, GATE), swaps)


def pipeline(n: int, *, early: bool = False) -> Topology:
    """Stages: activations go forward through all of them, then gradients go back. ``early``: a gate before the rank
    sends its gradients on."""
    early_gate: tuple[Wait, ...] = (GATE,) if early else ()
    return Topology((BEGIN, BOUNDARY, message_from(-1), *early_gate, message_from(1), GATE), (tuple(range(n)),))


def no_collective(n: int) -> Topology:
    """Ranks that never wait for each other in a step."""
    return Topology((BEGIN, BOUNDARY, GATE), all_orders(n))
