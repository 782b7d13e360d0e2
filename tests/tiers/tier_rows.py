"""What a row of the tests is: a model, what must come out, and how many states there are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiers.tier_explore import explore
from tiers.tier_model import Model


@dataclass(frozen=True)
class Row:
    name: str
    states: int
    """Of a wrong model: the states until the search finds what is wrong."""
    options: dict[str, Any] = field(default_factory=dict)
    model: type[Model] = Model
    problem: str | None = None

    def check(self) -> None:
        found = explore(self.model(**self.options))
        assert (found.problem, found.states) == (self.problem, self.states), f"{self.name}: {found}"


def safe(name: str, states: int, **options: Any) -> Row:
    return Row(name, states, options)


def wrong(model: type[Model], problem: str, states: int, **options: Any) -> Row:
    return Row(model.__name__, states, options, model, problem)
