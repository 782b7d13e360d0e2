"""Which of several alternatives is the best here: they carry versions in turn, and medians decide."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Margin(NamedTuple):
    """A figure counts as lower than another where it is lower by more than this ``share`` of the other and ``least``.
    A negative share lets it be higher by as much."""

    share: float
    least: float = 0.0


class Trial(Generic[T]):
    """The alternatives are in the order of what they need, least first. One is better than another if each of its
    medians is lower by the margin of that figure (one share at least is not negative). The first alternative that no
    other one is better than wins.

    Each version is begun (``begin``), and where it reaches its end its figures are noted (``note``), one for each
    margin. The first ``warm_up`` versions do not count. Then each round gives every alternative a turn: ``lead_in``
    versions that do not count, since they may bear what the alternative before them left behind, and one that does.
    Every second round goes backwards, so that a drift falls on all alike. Without rounds the first alternative wins at
    once.
    """

    def __init__(
        self, alternatives: Sequence[T], margins: Sequence[Margin], *, rounds: int, warm_up: int = 0, lead_in: int = 0
    ) -> None:
        self._margins, self._rounds_max, self._lead_in = margins, rounds, lead_in
        self.alternatives = list(alternatives)
        """Those that were not withdrawn."""
        self._figures: dict[T, list[tuple[float, ...]]] = {one: [] for one in alternatives}
        self._turns: list[T] = []
        """Those whose turn in this round is still to come, or the winner."""
        self._passed = -warm_up
        """Versions of this turn."""
        self._left = 2 * (warm_up + rounds * len(self.alternatives) * (lead_in + 1))
        """Versions may be dropped and note nothing. After twice as many as are needed the trial leads nowhere."""
        self.is_over = False
        self._go_on()

    @property
    def turn(self) -> T:
        """Whose turn it is; the winner, when the trial is over."""
        return self._turns[0]

    @property
    def rounds(self) -> int:
        """Rounds that are over."""
        return min(len(self._figures[one]) for one in self.alternatives)

    def begin(self) -> T:
        """A version begins, by the alternative that is returned."""
        self._left -= 1
        if self._left < 0 and not self.is_over:
            self.give_up()
        return self.turn

    def note(self, *figures: float) -> None:
        """The version that was begun last has ended with these figures."""
        if self.is_over:
            return
        self._passed += 1
        if self._passed > self._lead_in:
            self._figures[self._turns.pop(0)].append(figures)
            self._passed = 0
            self._go_on()

    def withdraw(self, alternative: T) -> None:
        """This alternative is left out; it is not the only one. Whose turn it is then carries the version that this one
        should have carried."""
        self.alternatives.remove(alternative)
        self._turns = [one for one in self._turns if one != alternative]
        self._passed = min(self._passed, 0)
        self._go_on()

    def give_up(self) -> None:
        """The trial is over without a result: the first alternative wins."""
        self.is_over, self._turns = True, self.alternatives[:1]

    def medians(self, alternative: T) -> list[float]:
        """One for each figure; empty where none was noted."""
        return [median(column) for column in zip(*self._figures[alternative], strict=True)]

    def _go_on(self) -> None:
        if self.is_over or self.rounds == self._rounds_max or len(self.alternatives) == 1:
            self.is_over, self._turns = True, [self._best()]
        elif not self._turns:
            self._turns = self.alternatives[:: -1 if self.rounds % 2 else 1]

    def _best(self) -> T:
        medians = {one: self.medians(one) for one in self.alternatives}
        return next(one for one in medians if not any(self._is_better(own, medians[one]) for own in medians.values()))

    def _is_better(self, own: list[float], others: list[float]) -> bool:
        """One that has no figures is neither better nor worse."""
        if not own or not others:
            return False
        figures = zip(own, others, self._margins, strict=True)
        return all(one < other * (1 - margin.share) - margin.least for one, other, margin in figures)
