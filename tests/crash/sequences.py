"""All small sequences of what a training does to its pool: bounded and exhaustive, so that no order is forgotten.

A sequence has at most three checkpoints and at most two other events between attach and the last close. A checkpoint
before which a tensor grew counts as other events too. Every sequence is made with two slots and with three.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

import lightck
from crash.recorded import Average, Pair, Workload, build, one_step
from crash.recording import Recorder
from lightck.pool.reader import StoredCheckpoint, open_pool

CHECKPOINTS_MAX, OTHERS_MAX = 3, 2
CHECKPOINTS = {"step": 0, "grow": 1, "outgrow": 2}
"""Name -> how many other events it counts as: a step; a step for which a tensor grew within the pool's reserve; one for
which it outgrew the pool, so that a new file replaces it."""
OTHERS = ("reopen", "crash", "overwrite", "back", "relayout", "pin", "release")
"""Close and resume; die before the newest checkpoint is committed, and resume; close and discard what is there; close,
and continue from the oldest checkpoint that the pool holds; close, and resume with one slot more; hold the newest
checkpoint; release it."""
NUMEL, GROWN, OUTGROWN = 16, 3000, 400_000


@dataclass(frozen=True, slots=True)
class Sequence:
    """One of them. ``frozen``: a parameter that never changes (it counts as an event)."""

    slots: int
    frozen: bool
    events: tuple[str, ...]

    def __str__(self) -> str:
        what = " ".join(("attach", *self.events, "close"))
        return f"{self.slots} slots{', a frozen parameter' if self.frozen else ''}: {what}"

    def workload(self) -> Workload:
        grows = any(event in ("grow", "outgrow") for event in self.events)
        state = (lambda: {"average": Average(NUMEL)}) if grows else dict[str, Any]
        return Workload(lambda recorder: _Run(recorder, self, state()).run(), self.build, state)

    def build(self) -> Pair:
        return build(frozen=self.frozen)


def sequences() -> list[Sequence]:
    """Every one, shortest first."""
    found = [Sequence(slots, False, events) for events in _events((), 0, 0) for slots in (2, 3)]
    plain = [events for events in _events((), 0, 1) if not any(CHECKPOINTS.get(event) for event in events)]
    found += [Sequence(slots, True, events) for events in plain for slots in (2, 3)]
    return sorted(found, key=lambda s: (len(s.events), s.frozen, s.slots, s.events))


def _events(so_far: tuple[str, ...], checkpoints: int, others: int) -> Iterator[tuple[str, ...]]:
    yield so_far
    for name, cost in CHECKPOINTS.items():
        if checkpoints < CHECKPOINTS_MAX and others + cost <= OTHERS_MAX:
            yield from _events((*so_far, name), checkpoints + 1, others + cost)
    for name in OTHERS:
        if others < OTHERS_MAX and _is_possible(name, so_far):
            yield from _events((*so_far, name), checkpoints, others + 1)


def _is_possible(name: str, so_far: tuple[str, ...]) -> bool:
    """``pin`` needs a checkpoint of this session, ``release`` a pin of this session, ``back`` any checkpoint."""
    session = so_far[max((i + 1 for i, e in enumerate(so_far) if _is_restart(e)), default=0) :]
    if name == "release":
        return session.count("pin") > session.count("release")
    if name == "pin":
        return any(event in CHECKPOINTS for event in session)
    if name == "back":
        since = so_far[max((i + 1 for i, e in enumerate(so_far) if e == "overwrite"), default=0) :]
        return any(event in CHECKPOINTS for event in since)
    return True


def _is_restart(event: str) -> bool:
    return event in ("reopen", "crash", "overwrite", "back", "relayout")


class _Died(Exception):
    """The exception that ends the training loop."""


class _Run:
    """Runs one sequence."""

    def __init__(self, recorder: Recorder, sequence: Sequence, state: dict[str, Any]) -> None:
        self._recorder = recorder
        self._sequence = sequence
        self._state = state
        self._slots = sequence.slots
        self._pins: list[lightck.Pin] = []
        self._number = 0

    def run(self) -> None:
        """Sessions, one after the other, each up to the event that ends it."""
        events, options = list(self._sequence.events), dict[str, Any](resume=True)
        while True:
            ends = next((i for i, event in enumerate(events) if _is_restart(event)), len(events))
            self._session(events[:ends], options, dies=events[ends : ends + 1] == ["crash"])
            if ends == len(events):
                return
            options = self._restart(events[ends])
            events = events[ends + 1 :]

    def _restart(self, event: str) -> dict[str, Any]:
        """The arguments of the next attach."""
        if event == "relayout":
            self._slots += 1
        if event == "overwrite":
            return {"overwrite": True}
        return {} if event == "back" else {"resume": True}

    def _session(self, events: list[str], options: dict[str, Any], *, dies: bool) -> None:
        self._pins.clear()
        model, optimizer = self._sequence.build()
        if not options:
            with closing(open_pool(self._recorder.path)) as pool:
                oldest = min(v.step for v in pool.checkpoints() if isinstance(v, StoredCheckpoint))
            lightck.recover(self._recorder.path, model, optimizer, self._state, step=oldest)
        try:
            with self._recorder.attach(model, optimizer, state=self._state, slots=self._slots, **options) as session:
                for event in events:
                    self._play(event, session, model, optimizer)
                if dies:
                    model(torch.ones(1, 2))  # closes the last checkpoint, whose copies may be under way
                    raise _Died
        except _Died:
            pass

    def _play(self, event: str, session: lightck.Session, model: torch.nn.Module, optimizer: Any) -> None:
        if event == "pin":
            self._pins.append(session.pin())
        elif event == "release":
            self._pins.pop().release()
        else:
            self._number += 1
            one_step(model, optimizer, self._number)
            self._grow(event)
            self._recorder.note(model, optimizer, **self._state)

    def _grow(self, event: str) -> None:
        if self._state:
            numel = {"step": self._state["average"].values.numel(), "grow": GROWN, "outgrow": OUTGROWN}[event]
            self._state["average"].values = torch.full((numel,), float(self._number))
