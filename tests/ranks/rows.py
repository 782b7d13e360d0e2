"""A row of ``test_model.py`` or ``test_copying.py``: a group, and what must come out when it is explored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ranks.copying import Copies
from ranks.explore import explore
from ranks.model import Model
from ranks.topology import Topology

NO_COMMON = "after a crash the ranks have no checkpoint in common"
STUCK = "no rank can go on"


@dataclass(frozen=True)
class Row:
    name: str
    n: int
    topology: Topology
    states: int
    """How many states there are; a row that is not safe may end after fewer."""
    options: dict[str, Any] = field(default_factory=dict)
    model: type[Model] = Model
    expected: str | None = None
    """What is found; None: the row is safe."""
    lost: int | None = None
    """The most that a crash costs, beyond one for each step whose checkpoint was given up."""
    lost_with_host: int | None = None
    """With peer copies: the most that a crash costs that takes a host with it."""


def safe(
    name: str,
    n: int,
    topology: Topology,
    states: int,
    lost: int,
    *,
    lost_with_host: int | None = None,
    model: type[Model] = Model,
    **options: Any,
) -> Row:
    """A row without an unsafe state and without a deadlock, in which a crash costs ``lost`` steps at the most."""
    return Row(name, n, topology, states, {"loss": lost, **options}, model, None, lost, lost_with_host)


def wrong(name: str, model: type[Model], expected: str, n: int, topology: Topology, states: int, **options: Any) -> Row:
    return Row(name, n, topology, states, {"loss": None, **options}, model, expected)


def check(row: Row) -> None:
    model = row.model(row.n, row.topology, **row.options)
    result = explore(model, 2 * row.states + 1000)
    print(f"{row.name}: {result}")
    assert result.problem == row.expected, f"{row.name}: {result}"
    if row.expected is None:
        assert result.states == row.states, f"{row.name}: {result.states:,} states, where there were {row.states:,}"
        assert model.lost_max == row.lost, f"{row.name}: a crash costs up to {model.lost_max}"
        if isinstance(model, Copies) and row.lost_with_host is not None:
            lost = model.lost_with_host_max
            assert lost == row.lost_with_host, f"{row.name}: a crash with a lost host costs up to {lost}"
    else:
        assert len(result.trace) > 1 or row.states == 1, "the events that lead there"
