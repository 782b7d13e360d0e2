"""The savers of a bench, with one interface: lightck, the rivals of ``bench/rivals``, and one that saves nothing.

Order of calls: ``start`` before the first step; ``step_begins`` at the top of each; ``window_ends`` after the last step
of a window, which waits until its checkpoint causes no more cost; ``finish``, which saves the current state; ``load``.
For a rival, ``window_ends`` waits for background work that would delay the next checkpoint: at interval 1 the rival's
next ``save`` would wait for as long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import lightck
from bench import rivals
from bench.measures.training import Training
from bench.rivals import Rival
from bench.running.machine import cpu_seconds
from lightck.errors import BenchError
from lightck.pipeline.wait_policy import TRIAL

NOTHING, LIGHTCK, FULL = "nothing", "lightck", "full"
STAGING: dict[str, Any] = {"direct": lightck.Direct, "host": lightck.Host, "device": lightck.Device}
_SAVED_SECONDS_MAX, _POLL_SECONDS = 600.0, 0.0005


def strategy_of(text: str) -> Any:
    """Return the strategy of this name: ``full``, ``gradients N`` (``base_every``), ``gradients N topk RATIO``."""
    try:
        match text.split():
            case ["full"]:
                return lightck.FullState()
            case ["gradients", n]:
                return lightck.Gradients(int(n))
            case ["gradients", n, "topk", ratio]:
                return lightck.Gradients(int(n), compress=lightck.TopK(float(ratio)))
    except ValueError as error:
        raise BenchError(f"The strategy {text!r} has a number that cannot be read ({error}).") from error
    raise BenchError(
        f"There is no strategy {text!r}. Name 'full', 'gradients N' (N is base_every), or 'gradients N topk RATIO'."
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """Totals since the start."""

    stall_seconds: float = 0.0
    """Wall time on the training thread, in all calls and hooks."""
    end_seconds: float = 0.0
    """Waiting time at the end of windows. For a rival it is a part of the stall: at interval 1 its next ``save`` would
    wait for as long."""
    wait_seconds: float = 0.0
    """The part of the stall that waited for copies (lightck only)."""
    own_cpu_seconds: float = 0.0
    """CPU time of the saver: for lightck all of it, for a rival the CPU time of the process during its calls."""
    helped_bytes: int = 0
    written_bytes: int = 0


class Saver(Protocol):
    """The interface of a saver; see the module."""

    def start(self, training: Training, folder: str, every: int) -> None: ...

    def step_begins(self, step: int) -> None: ...

    def window_ends(self, saved: bool) -> None: ...

    @property
    def is_settled(self) -> bool:
        """Whether no trial of the saver is going on."""

    def costs(self) -> Costs: ...

    def finish(self, step: int) -> None: ...

    def load(self, training: Training, folder: str) -> int: ...

    def facts(self) -> dict[str, Any]: ...


def saves(step: int, every: int) -> bool:
    """Whether the state after this many updates is to be saved."""
    return step > 0 and step % every == 0


class Nothing:
    """The same loop without any checkpoint."""

    is_settled = True

    def start(self, training: Training, folder: str, every: int) -> None: ...

    def step_begins(self, step: int) -> None: ...

    def window_ends(self, saved: bool) -> None: ...

    def costs(self) -> Costs:
        return Costs()

    def finish(self, step: int) -> None: ...

    def load(self, training: Training, folder: str) -> int:
        raise BenchError("Nothing was saved: this row measures the loop alone.")

    def facts(self) -> dict[str, Any]:
        return {}


class Lightck:
    """lightck as a user has it: ``attach`` and no further call. The boundary is the forward, so that a checkpoint's
    whole cost falls within one step. ``staging``: a name of ``STAGING``; such a row has one more slot, so that the
    in-flight checkpoint may outlast the update. The window's end waits for it, so that none of it falls on the plain
    steps. ``strategy``: see ``strategy_of``. ``slots``: as of ``attach``."""

    def __init__(
        self, backend: str = "file", staging: str | None = None, strategy: str = FULL, slots: int | None = None
    ) -> None:
        self._options: dict[str, Any] = {"backend": backend}
        if slots is not None:
            self._options["slots"] = slots
        if strategy != FULL:
            self._options["strategy"] = strategy_of(strategy)
        if staging is not None:
            self._options |= {"staging": STAGING[staging](), "slots": 3}
        self._facts: dict[str, Any] = {}
        self._every, self._due, self._end_seconds = 1, 0, 0.0

    def start(self, training: Training, folder: str, every: int) -> None:
        self._every, began = every, time.perf_counter()
        self._session = lightck.attach(
            training.model, self._path(folder), optimizer=training.optimizer, interval=every, **self._options
        )
        self._facts["attach_seconds"] = time.perf_counter() - began
        self._facts["survives"] = str(self._session.durability)
        self._facts |= self._populated()

    def _populated(self) -> dict[str, float]:
        """Wait until the idle thread has allocated the pool's pages, that is, until it uses no more CPU."""
        began = quiet_since = time.perf_counter()
        before = cpu = self._session.stats().cpu_seconds
        while time.perf_counter() - quiet_since < 0.5:
            time.sleep(0.02)
            now = self._session.stats().cpu_seconds
            if now > cpu:
                cpu, quiet_since = now, time.perf_counter()
        return {"populate_seconds": quiet_since - began, "populate_cpu_seconds": cpu - before}

    def step_begins(self, step: int) -> None:
        if saves(step, self._every):
            self._due = step

    def window_ends(self, saved: bool) -> None:
        """With two slots the gate before the update waits for the checkpoint; its commit takes negligible time."""
        if saved and self._options.get("slots", 2) > 2:
            began = time.perf_counter()
            _wait_for(lambda: self._session.committed or -1, self._due)
            self._end_seconds += time.perf_counter() - began

    @property
    def is_settled(self) -> bool:
        stats = self._session.stats()
        return stats.wait_policy != TRIAL and not stats.staging_trial

    def costs(self) -> Costs:
        stats = self._session.stats()
        return Costs(
            stats.stall_seconds,
            self._end_seconds,
            stats.wait_seconds,
            stats.cpu_seconds,
            stats.bytes_helped,
            stats.bytes_written,
        )

    def finish(self, step: int) -> None:
        base_every = self._session.stats().base_every
        self._session.close()
        stats = self._session.stats()
        self._facts |= {"staging": stats.staging, "wait_policy": stats.wait_policy, "skipped": stats.skipped}
        if base_every is not None:
            self._facts["base_every"] = base_every

    def load(self, training: Training, folder: str) -> int:
        return lightck.recover(self._path(folder), training.model, training.optimizer).step

    def facts(self) -> dict[str, Any]:
        return dict(self._facts)

    @staticmethod
    def _path(folder: str) -> str:
        return os.path.join(folder, "bench.pool")


def _wait_for(saved: Callable[[], int], step: int) -> None:
    """Wait until ``step`` is the newest saved step."""
    deadline = time.monotonic() + _SAVED_SECONDS_MAX
    while saved() < step:
        if time.monotonic() > deadline:
            raise BenchError(
                f"The checkpoint of step {step} was not reported as saved within {_SAVED_SECONDS_MAX:.0f} seconds. A "
                "bench waits until the saver reports it; check the saver's background work."
            )
        time.sleep(_POLL_SECONDS)


class _Clock:
    """Wall time of this thread and CPU time of all processes between two moments."""

    def begin(self) -> None:
        self._cpu, self._wall = cpu_seconds(), time.perf_counter()

    def end(self) -> tuple[float, float]:
        wall = time.perf_counter() - self._wall
        return wall, cpu_seconds() - self._cpu


class Driven:
    """A rival as a saver. Its calls, and its hooks before a forward and an update, are timed from outside."""

    is_settled = True

    def __init__(self, make: Callable[[], Rival]) -> None:
        self._make, self._rival = make, make()
        self._every, self._step = 1, -1
        self._costs, self._clock = Costs(), _Clock()
        self._facts: dict[str, Any] = {}

    def start(self, training: Training, folder: str, every: int) -> None:
        self._every = every
        # torch calls hooks in the order of their registration: the rival's hooks run between these two.
        self._hook(training, lambda *_: self._clock.begin())
        self._rival.start(training.model, training.optimizer, folder)
        self._hook(training, lambda *_: self._add(*self._clock.end()))

    @staticmethod
    def _hook(training: Training, call: Callable[..., None]) -> None:
        training.optimizer.register_step_pre_hook(call)
        training.model.register_forward_pre_hook(call)

    def step_begins(self, step: int) -> None:
        if saves(step, self._every):
            self._step = step
            self._timed(lambda: self._rival.save(step))

    def window_ends(self, saved: bool) -> None:
        """Save without ``finish``, in which a rival removes its hooks and stops its threads."""
        if saved and self._rival.saved < self._step:
            before = self._costs.stall_seconds
            self._timed(lambda: _wait_for(lambda: self._rival.saved, self._step))
            waited = self._costs.stall_seconds - before
            self._costs = replace(self._costs, end_seconds=self._costs.end_seconds + waited)

    def _timed(self, call: Callable[[], None]) -> None:
        self._clock.begin()
        call()
        self._add(*self._clock.end())

    def _add(self, stall: float, own: float) -> None:
        self._costs = replace(
            self._costs,
            stall_seconds=self._costs.stall_seconds + stall,
            own_cpu_seconds=self._costs.own_cpu_seconds + own,
        )

    def costs(self) -> Costs:
        return self._costs

    def finish(self, step: int) -> None:
        self._rival.save(step)
        self._rival.finish()

    def load(self, training: Training, folder: str) -> int:
        """Load with a new object, as after a restart."""
        fresh = self._make()
        step = fresh.load(training.model, training.optimizer, folder)
        if (replayed := getattr(fresh, "replayed", None)) is not None:
            self._facts["replayed"] = replayed
        return step

    def facts(self) -> dict[str, Any]:
        return {"synchronous": self._rival.synchronous, "use": self._rival.use, **self._facts}


def make(
    name: str,
    backend: str = "file",
    staging: str | None = None,
    strategy: str = FULL,
    rival: dict[str, Any] | None = None,
    slots: int | None = None,
) -> Saver:
    """The saver of this name. ``backend``, ``staging``, ``strategy`` and ``slots`` apply to lightck only, ``rival``
    (options of its class) to a rival only."""
    if name == NOTHING:
        return Nothing()
    if name == LIGHTCK:
        return Lightck(backend, staging, strategy, slots)
    if name not in rivals.ALL:
        raise BenchError(f"There is no rival {name!r}; there are {', '.join(rivals.ALL)}. Name one of them.")
    if why := rivals.why_not(name):
        raise BenchError(f"The rival {name!r} cannot be used here: {why}.")
    options = {**rivals.EVERY_STEP.get(name, {}), **(rival or {})}
    return Driven(lambda: rivals.named(name, **options))
