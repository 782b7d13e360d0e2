"""The measuring loop: windows of steps with a checkpoint and windows without one take turns in one process.

Two processes would differ in page placement and core clock, which more pairs do not average out, and two models of
BERT-large's size would not fit. The windows take turns, because on a shared machine the step time drifts by more than a
checkpoint costs. A window ends when its checkpoint causes no more cost, so that none falls on the next window.
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
"""The least warm-up pairs of windows: a saver's trials begin within them."""
SETTLED_WITHIN = 40
"""The most warm-up pairs, even if a saver's trials go on."""


@dataclass(frozen=True, slots=True)
class Window:
    """The costs of one window: wall time, CPU of all processes and of the training thread, and costs of the saver."""

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
    """The number of windows at whose end a trial of the saver was going on."""

    @property
    def plain(self) -> tuple[Window, ...]:
        return self.all[::2]

    @property
    def saved(self) -> tuple[Window, ...]:
        return self.all[1::2]


def run(training: Training, saver: Saver, folder: str, pairs: int, span: int = 1) -> Windows:
    """Start the saver at the training's first step, and measure pairs of windows of ``span`` steps."""
    saver.start(training, folder, 2 * span)
    # Window w begins at step w * span, and the saver saves at multiples of 2 * span: the even windows but the first.
    first = _warm_up(training, saver, span)
    counted, unsettled = [], 0
    for w in range(first, first + 2 * pairs + 1):
        counted.append(_window(training, saver, span, w % 2 == 0))
        unsettled += not saver.is_settled
    assert [w.saved for w in counted] == [False, True] * pairs + [False], "the windows are in turn"
    return Windows(tuple(counted), span, unsettled)


def _warm_up(training: Training, saver: Saver, span: int) -> int:
    """Run warm-up windows until the saver's trials are over. Returns their number, which is odd."""
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
    """Save the state, overwrite the live one, load, and compare every byte. Ends the saver."""
    saver.finish(training.step)
    compare(training, saver, folder)


def compare(training: Training, saver: Saver, folder: str) -> None:
    """The same for a saver that has already ended with this state."""
    expected, step = training.digest(), training.step
    training.scramble()
    found = saver.load(training, folder)
    wrong = differing(expected, training.digest())
    if found != step or wrong:
        raise BenchError(
            f"What was saved at step {step} does not load back right: step {found} came back, and {len(wrong)} tensors "
            f"differ ({', '.join(wrong[:3])}). The row is invalid: this is a bug of the saver or of the bench."
        )


def column(windows: Sequence[Window], name: str) -> list[float]:
    """One cost, of each window."""
    return [float(getattr(window.costs, name)) for window in windows]
