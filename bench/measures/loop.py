"""The loop that measures: windows of steps with a checkpoint and windows without, in turn, in one process.

In one process, because two differ by where their pages lie and by what the clock of their core did, which no number of
pairs takes away, and because two models of BERT-large's size would not fit; in turn, because on a shared machine whole
blocks of steps scatter by more than a checkpoint costs. A window ends when all that its checkpoint costs is over, so
nothing of it falls on the next one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.measures.savers import Costs, Saver
from bench.measures.training import Training, differing
from bench.running.machine import cpu_seconds
from lightck.errors import BenchError

WARM_UP = 5
"""Pairs of windows that are not counted, at least: what a saver tries out begins within them."""
SETTLED_WITHIN = 40
"""Pairs of windows after which it counts whatever a saver still tries out."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one window took: of wall time, of CPU in all processes and on the training thread, and of the saver."""

    saved: bool
    seconds: float
    cpu_seconds: float
    thread_seconds: float
    costs: Costs


@dataclass(frozen=True, slots=True)
class Windows:
    """plain, saved, plain, ..., plain."""

    all: tuple[Window, ...]
    span: int
    unsettled: int = 0
    """Windows at whose end the saver was trying something out."""

    @property
    def plain(self) -> tuple[Window, ...]:
        return self.all[::2]

    @property
    def saved(self) -> tuple[Window, ...]:
        return self.all[1::2]


def run(training: Training, saver: Saver, folder: str, pairs: int, span: int = 1) -> Windows:
    """Start the saver and measure so many pairs of windows of ``span`` steps. The training is at its first step."""
    saver.start(training, folder, 2 * span)
    # Window w begins at step w * span, and the saver saves at multiples of 2 * span: the even ones, but the first.
    first = _warm_up(training, saver, span)
    counted, unsettled = [], 0
    for w in range(first, first + 2 * pairs + 1):
        counted.append(_window(training, saver, span, w % 2 == 0))
        unsettled += not saver.is_settled
    assert [w.saved for w in counted] == [False, True] * pairs + [False], "the windows are in turn"
    return Windows(tuple(counted), span, unsettled)


def _warm_up(training: Training, saver: Saver, span: int) -> int:
    """Windows until the saver does what it will go on doing. How many: an odd number, the next one is plain."""
    passed = 1
    _window(training, saver, span, False)
    while passed < 2 * WARM_UP or (passed < 2 * SETTLED_WITHIN and not saver.is_settled):
        for w in (passed, passed + 1):
            _window(training, saver, span, w % 2 == 0)
        passed += 2
    return passed


def _window(training: Training, saver: Saver, span: int, saved: bool) -> Window:
    before, cpu, thread, began = saver.costs(), cpu_seconds(), time.thread_time(), time.perf_counter()
    for _ in range(span):
        saver.step_begins(training.step)
        training.iterate()
    saver.window_ends(saved)
    training.settle()
    seconds, on_thread = time.perf_counter() - began, time.thread_time() - thread
    return Window(saved, seconds, cpu_seconds() - cpu, on_thread, _less(saver.costs(), before))


def _less(after: Costs, before: Costs) -> Costs:
    names = Costs.__dataclass_fields__
    return Costs(**{name: getattr(after, name) - getattr(before, name) for name in names})


def check(training: Training, saver: Saver, folder: str) -> None:
    """Save the state as it is, spoil the live one, load, and compare every byte. Ends the saver."""
    saver.finish(training.step)
    compare(training, saver, folder)


def compare(training: Training, saver: Saver, folder: str) -> None:
    """The same for a saver that has ended with the state as it is."""
    expected, step = training.digest(), training.step
    training.scramble()
    found = saver.load(training, folder)
    wrong = differing(expected, training.digest())
    if found != step or wrong:
        raise BenchError(
            f"What was saved at step {step} does not load back right: step {found} came back, and {len(wrong)} tensors "
            f"differ ({', '.join(wrong[:3])}). The row is worth nothing: a bug of what saved it, or of the bench."
        )


def column(windows: Sequence[Window], name: str) -> list[float]:
    """One cost of each window."""
    return [float(getattr(window.costs, name)) for window in windows]
