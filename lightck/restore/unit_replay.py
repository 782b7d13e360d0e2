"""The replay of one unit: whole, or slice by slice.

A large unit is replayed in slices where this gives the same bits. A thread makes all updates of one slice before it
begins another slice. So the slice stays in the processor's cache, several threads can replay slices of one unit at the
same time, and each thread reads no more of a gradient in a pool at a time than one slice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightck.errors import ReplayError
from lightck.state.unit_update import Unit, UpdateInSlices, copied, flat, put_into, state_of_parameter_shape

Check = Callable[[Unit, int, slice | None], str | None]
"""Called after each replayed update with the unit, the step that it has now, and the elements (in the order of its
memory) that have this step; None: all have it. Returns None, or what differs from the training. Units and slices that
are replayed at the same time call it from several threads."""


@dataclass(frozen=True, slots=True)
class Base:
    """A unit as it was at the end of ``step``; its tensors hold these bytes, and are changed in place."""

    unit: Unit
    step: int


class UnitReplay:
    """What happens at each step of a replay of one unit: it can be cancelled, is checked, and its errors are named."""

    def __init__(self, base: Base, to_step: int, check: Check | None, is_cancelled: threading.Event) -> None:
        self._base, self._to_step, self._check, self._is_cancelled = base, to_step, check, is_cancelled

    def steps(self) -> Iterator[int]:
        """Yield the steps to replay, until the replay is cancelled."""
        for step in range(self._base.step + 1, self._to_step + 1):
            if self._is_cancelled.is_set():
                return
            yield step

    @contextmanager
    def named_errors(self, step: int) -> Iterator[None]:
        """A ``ReplayError`` that the block raises is raised with the names of the unit and of the step."""
        name = self._base.unit.name
        try:
            yield
        except ReplayError as error:
            raise ReplayError(
                f"The update of step {step} of the parameter {name!r} cannot be replayed: {error}. An older checkpoint "
                "can be restored.",
                name,
                step,
            ) from error

    def compare(self, unit: Unit, step: int, part: slice | None) -> None:
        """Raise ``ReplayError`` if the unit differs from the training."""
        difference = None if self._check is None else self._check(unit, step, part)
        if difference is not None:
            raise ReplayError(
                f"The replay of the parameter {unit.name!r} differs from the training after the update of step {step}: "
                f"{difference}. Something that lightck does not know of changed the parameter or its optimizer state, "
                "or this machine computes other bits. An older checkpoint can be restored.",
                unit.name,
                step,
            )


class SlicedReplay:
    """The replay of a unit in slices."""

    def __init__(
        self, replay: UnitReplay, unit: Unit, updates: Mapping[int, Sequence[UpdateInSlices]], slice_numel: int
    ) -> None:
        """``unit``: has the state of one optimizer. ``updates``: step -> the updates of the unit in that step."""
        ((self._optimizer, state),) = unit.states.items()
        self._replay, self._unit, self._updates = replay, unit, updates
        self._sliced_state = state_of_parameter_shape(unit.parameter, state)
        self._unsliced_state = copied({key: value for key, value in state.items() if key not in self._sliced_state})
        numel = unit.parameter.numel()
        self.parts = [slice(start, min(start + slice_numel, numel)) for start in range(0, numel, slice_numel)]
        """The slices. Each is replayed once."""

    def replay(self, part: slice) -> None:
        """Bring one slice to the last step. May be called from several threads."""
        unsliced = copied(self._unsliced_state)
        parameter = flat(self._unit.parameter)[part]
        views = {key: flat(value)[part] for key, value in self._sliced_state.items()}
        for step in self._replay.steps():
            with self._replay.named_errors(step):
                for update in self._updates[step]:
                    unsliced = update.make(parameter, views, unsliced, part)
            self._replay.compare(self._with(unsliced), step, part)
        if part.start == 0:
            self._put(unsliced)

    def _with(self, unsliced: dict[Any, Any]) -> Unit:
        return Unit(self._unit.name, self._unit.parameter, {self._optimizer: {**self._sliced_state, **unsliced}})

    def _put(self, unsliced: dict[Any, Any]) -> None:
        """Put the state that is not cut into slices (such as the step count) into the unit. It is the same after the
        replay of any slice, because each slice updates a copy of its own."""
        put_into(self._unit.states[self._optimizer], unsliced)
