"""Find the best of several alternatives by measurement: they take turns over checkpoints, and medians decide."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Margin(NamedTuple):
    """A cost counts as lower than another cost c if it is below (1 - ``share``) * c - ``least``. With a negative
    ``share``, a cost that is a little higher than c counts as lower, too: with -0.01, one that is up to 1 % higher."""

    share: float
    least: float = 0.0


class Trial(Generic[T]):
    """Compare alternatives, given in the order of the resources that they need, least first.

    Every checkpoint of the trial uses the alternative that ``begin`` returns. When the checkpoint has ended,
    the caller passes its costs to ``finish``, one cost for each margin. The first ``warm_up`` checkpoints do not count.
    Then each round gives every alternative a turn: first ``lead_in`` checkpoints that do not count, because the
    previous alternative may still affect them, and then one checkpoint that counts. Every second round has the reverse
    order, so that a drift of the costs affects all alike.

    An alternative beats another one if each of its median costs is lower than the same cost of the other one, by the
    margin of that cost. The winner is the first alternative that no other one beats. At least one margin must have a
    share that is not negative; otherwise two alternatives could beat each other. If ``rounds`` is 0, the first
    alternative wins at once.
    """

    def __init__(
        self, alternatives: Sequence[T], margins: Sequence[Margin], *, rounds: int, warm_up: int = 0, lead_in: int = 0
    ) -> None:
        self._margins, self._rounds_max, self._lead_in = margins, rounds, lead_in
        self.alternatives = list(alternatives)
        """The alternatives that were not withdrawn."""
        self._costs: dict[T, list[tuple[float, ...]]] = {one: [] for one in alternatives}
        """For each alternative the costs of its checkpoints that count."""
        self._turns: list[T] = []
        """The alternatives that still have a turn in this round, the present one first; after the trial, only the
        winner."""
        self._finished = -warm_up
        """Number of checkpoints of this turn that have finished. Negative during the warm-up."""
        self._checkpoints_left = 2 * (warm_up + rounds * len(self.alternatives) * (lead_in + 1))
        """The number of further checkpoints that may begin before the trial is cancelled. At first it is twice the
        number that the trial needs, because some may be dropped, and a dropped checkpoint has no costs."""
        self.is_over = False
        self._advance()

    @property
    def current(self) -> T:
        """The alternative whose turn it is, or the winner when the trial is over."""
        return self._turns[0]

    @property
    def rounds(self) -> int:
        """Number of complete rounds."""
        return min(len(self._costs[one]) for one in self.alternatives)

    def begin(self) -> T:
        """Begin a checkpoint, and return the alternative that it uses."""
        self._checkpoints_left -= 1
        if self._checkpoints_left < 0 and not self.is_over:
            self.cancel()
        return self.current

    def finish(self, *costs: float) -> None:
        """Record the costs of the checkpoint that was begun last. Once the trial is over, this does nothing."""
        if self.is_over:
            return
        self._finished += 1
        if self._finished > self._lead_in:
            self._costs[self._turns.pop(0)].append(costs)
            self._finished = 0
            self._advance()

    def withdraw(self, alternative: T) -> None:
        """Remove an alternative. Call only while there is another one. If the present checkpoint used the removed
        alternative, it uses the new ``current`` instead."""
        self.alternatives.remove(alternative)
        self._turns = [one for one in self._turns if one != alternative]
        self._finished = min(self._finished, 0)
        self._advance()

    def cancel(self) -> None:
        """End the trial without a result: the first alternative wins."""
        self.is_over, self._turns = True, self.alternatives[:1]

    def medians(self, alternative: T) -> list[float]:
        """Return the median of each cost of this alternative; empty if it has no costs yet."""
        return [median(column) for column in zip(*self._costs[alternative], strict=True)]

    def _advance(self) -> None:
        """End the trial if it is decided. Otherwise begin the next round if the present round is complete."""
        if self.is_over or self.rounds == self._rounds_max or len(self.alternatives) == 1:
            self.is_over, self._turns = True, [self._best()]
        elif not self._turns:
            self._turns = self.alternatives[:: -1 if self.rounds % 2 else 1]

    def _best(self) -> T:
        medians = {one: self.medians(one) for one in self.alternatives}
        return next(one for one in medians if not any(self._beats(other, medians[one]) for other in medians.values()))

    def _beats(self, first: list[float], second: list[float]) -> bool:
        """Whether each median in ``first`` is lower by its margin than the same median in ``second``. False if one of
        the two lists is empty."""
        if not first or not second:
            return False
        costs = zip(first, second, self._margins, strict=True)
        return all(one < other * (1 - margin.share) - margin.least for one, other, margin in costs)
