"""The tensors that one boundary found, and one look at the next whether they are all still the same.

Naming every tensor anew costs microseconds for each, and for thousands of steps nothing comes or goes. So identity,
address, shape, stride, dtype and ``requires_grad`` of every tensor, and what every place that was empty holds now, are
asked in loops that run in C. Invariant: where anything differs, ``holds`` says no, and everything is named anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from lightck.state.inventory import Live, OptimizerView, is_direct, storage_of
from lightck.state.looks import Looks, Places, all_equal, all_same

_grads = attrgetter("requires_grad")
_UNASKABLE = (KeyError, TypeError, RuntimeError, NotImplementedError, ValueError)
"""What a tensor without memory of its own answers, or a place that is gone."""


class Roster:
    """``lives`` as one boundary found them. Made by ``roster_of``."""

    def __init__(
        self, lives: list[Live], vacant: Sequence[tuple[dict[str, Any], str]], views: Sequence[OptimizerView]
    ) -> None:
        self.lives = lives
        self.token = object()
        """Tells this roster from every other, for who must not keep an optimizer alive."""
        self._vacant = list(vacant)
        self._places = Places(lives)
        self._looks = Looks([live.tensor for live in lives])
        self._params = [live.tensor for live in lives if live.role == "param"]
        self._grads = list(map(_grads, self._params))
        self._storages = list(map(storage_of, self._looks.tensors)) if any(live.still for live in lives) else None
        self._states = [_StateLook(view) for view in views]
        self.with_values = {look.view.index: look.with_values for look in self._states}
        """By index of the view: the parameters whose state is not only tensors, to be read at every boundary."""

    def holds(self) -> bool:
        """Whether naming everything anew would find just this."""
        try:
            return (
                self._places.hold()
                and not any(home.get(key) is not None for home, key in self._vacant)
                and self._looks.hold()
                and all_same(map(_grads, self._params), self._grads)
                and (self._storages is None or all_equal(map(storage_of, self._looks.tensors), self._storages))
                and all(look.holds() for look in self._states)
            )
        except _UNASKABLE:
            return False


def roster_of(
    lives: list[Live], vacant: Sequence[tuple[dict[str, Any], str]], views: Sequence[OptimizerView]
) -> Roster | None:
    """None where some tensor cannot be asked all of it: then everything is named anew each time."""
    try:
        return Roster(lives, vacant, views)
    except _UNASKABLE:
        return None


class _StateLook:
    """Which parameters an optimizer holds state for, and in which dicts."""

    def __init__(self, view: OptimizerView) -> None:
        self.view = view
        state = view.optimizer.state
        self._keys, self._homes = list(state.keys()), list(state.values())
        self._dicts = [home for home in self._homes if isinstance(home, dict)]
        self._sizes = list(map(len, self._dicts))
        self.with_values = [(name, p) for name, p in view.params if p in state and not _only_tensors(state[p])]
        self._mixed = [state[p] for _, p in self.with_values]
        self._directs = list(map(_n_direct, self._mixed))

    def holds(self) -> bool:
        state = self.view.optimizer.state
        return (
            len(state) == len(self._keys)
            and all_same(state.keys(), self._keys)
            and all_same(state.values(), self._homes)
            and list(map(len, self._dicts)) == self._sizes
            and list(map(_n_direct, self._mixed)) == self._directs
        )


def _only_tensors(home: Any) -> bool:
    return isinstance(home, dict) and 0 < len(home) == _n_direct(home)


def _n_direct(home: Any) -> int:
    return sum(is_direct(key, value) for key, value in home.items()) if isinstance(home, dict) else -1
