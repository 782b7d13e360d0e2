"""``session.trace(path)``: records the next steps of a training and writes them to one file.

A recording is a listener of the step events. The listener is added when the recording starts, and removed when it
ends. Invariant: no failure of a recording, whether of a hook or of the file, is raised in the training loop;
``Recording.close`` raises it. A recording reads no tensor and writes to no pool.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import Tensor, nn

from lightck.errors import ExportError, ExportExistsError, LightckError, SessionError, TraceError
from lightck.events import ReducedBucket, StepEvents, StepListener
from lightck.export.atomic import atomic_file, file_path, refuse_existing
from lightck.pool.engine import Engine
from lightck.pool.format.layout import Entry
from lightck.pool.listener import CommitEvents, CommitListener
from lightck.profiler import events
from lightck.profiler.events import COMMUNICATION, STALL, STATE, STEP, UPDATE, Args, Event, Trace
from lightck.profiler.layers import ModuleHooks
from lightck.profiler.spans import EngineSpans
from lightck.stats import Meter

log = logging.getLogger("lightck")
_SPAN_ROWS_MAX, _NAME_MAX = 50, 200
"""The largest number of rows that ``Recording.span`` can add, and of characters in a span's name and its row's name."""


class Recording:
    """A trace that is being recorded. The recording ends after the number of steps that was given, at ``close``, at the
    end of its ``with`` block, or with the session. If the file cannot be written, the end of the ``with`` block or
    ``session.close()`` raises the error."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: int | None,
        overwrite: bool,
        *,
        model: nn.Module,
        step_events: StepEvents,
        commits: CommitEvents,
        engine: Engine,
        meter: Meter,
        about: Args,
    ) -> None:
        self.path = os.path.abspath(file_path(path))
        self._overwrite = overwrite
        _check(self.path, steps, overwrite)
        self._left = steps
        """The number of steps that are still to be recorded (None: no limit)."""
        self._pid = os.getpid()
        self._about = {**about, "pid": self._pid, "model": type(model).__name__}
        self._events: list[tuple[str, str, int, int, Args]] = []
        """(row, name, begin, end, args). All times in this class are nanoseconds of CLOCK_MONOTONIC."""
        self._dropped = 0
        """The number of events that were not recorded, because a limit was reached."""
        self._span_rows: set[str] = set()
        """Names of the rows that the user's calls of ``span`` have added."""
        self._failure: LightckError | None = None
        """The first failure, until ``close`` raises it."""
        self._step_events, self._commits, self._meter = step_events, commits, meter
        self._update_since = 0
        """Time at which the running update began; 0 if none runs."""
        self._start = self._step_since = time.monotonic_ns()
        """``_start``: the time at which the recording began. ``_step_since``: the time at which the current step
        began."""
        self.is_on = False
        self._engine_spans = EngineSpans(engine)
        self._module_hooks = ModuleHooks(model, self.add, self._guarded)
        try:
            self._module_hooks.install()
            self._engine_spans.start()
        except Exception as err:
            self._module_hooks.remove()
            raise _error(self.path, err) from err
        self._step_recorder = _StepRecorder(self)
        step_events.add(self._step_recorder)
        self._checkpoint_recorder = _CheckpointRecorder(self)
        commits.add(self._checkpoint_recorder)
        meter.observer = self
        self.is_on = True

    # -- what a user calls -------------------------------------------------------------------------------

    def span(self, name: str, row: str = COMMUNICATION) -> AbstractContextManager[None]:
        """Return a context manager that records its block as an event. It is for work that lightck cannot observe, such
        as a collective or loading data.

        Args:
            name: the name of the event.
            row: the row in which the event is shown. Raises ``ValueError`` for a row of lightck's own
                (`events.is_own`).
        """
        for key, value in (("name", name), ("row", row)):
            if not isinstance(value, str):
                raise TypeError(f"span({key}={value!r}): the {key} is a {type(value).__name__}. Pass a str.")
        if events.is_own(row):
            raise ValueError(
                f"span(row={row!r}): only lightck adds events to this row (to its own rows, and to each row whose name "
                "begins with 'copy'). Pass the name of another row."
            )
        return self._span(name, row)

    @contextmanager
    def _span(self, name: str, row: str) -> Iterator[None]:
        has_room = row in self._span_rows or len(self._span_rows) < _SPAN_ROWS_MAX
        if has_room:
            self._span_rows.add(row)
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            if has_room:
                self.add(row[:_NAME_MAX], name[:_NAME_MAX], begin, time.monotonic_ns(), {})
            else:
                self._dropped += 1

    def close(self) -> None:
        """End the recording and write its file. Raises the first failure of the recording, a ``TraceError`` or an
        ``ExportExistsError``, unless it was raised before."""
        self.end()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.end()

    # -- what is recorded --------------------------------------------------------------------------------

    def add(self, row: str, name: str, begin: int, end: int, args: Args) -> None:
        """Add one event. ``begin`` and ``end`` are nanoseconds of CLOCK_MONOTONIC. Any thread can call this method."""
        if not self.is_on:
            return
        if len(self._events) >= events.EVENTS_MAX // 2:
            self._dropped += 1
            return
        self._events.append((row, name, begin, end, args))

    def stalled(self, what: str, begin: float, end: float, is_state: bool = False) -> None:
        """Add a stall that the session's meter measured. ``begin``, ``end``, ``is_state``: as in ``stats.Observer``."""
        self.add(STATE if is_state else STALL, what, round(begin * 1e9), round(end * 1e9), {})

    def checkpoint_begun(self, generation: int, step: int, entries: Sequence[Entry]) -> None:
        self._engine_spans.checkpoint_begun(generation, step, entries)

    def forward_begins(self) -> None:
        self._module_hooks.forward_begins()

    def forward_ended(self) -> None:
        self._module_hooks.forward_ended()

    def backward_over(self) -> None:
        self._module_hooks.backward_over()

    def update_begins(self) -> None:
        """An update begins; its gate is over."""
        self._engine_spans.take()
        self._update_since = time.monotonic_ns()

    def update_ended(self, index: int) -> None:
        if self._update_since:
            self.add(UPDATE, "optimizer step", self._update_since, time.monotonic_ns(), {"optimizer": index})
        self._update_since = 0

    def layer_updated(self, name: str, begin: int) -> None:
        """A layer-wise update has updated one layer, inside the backward pass."""
        self.add(UPDATE, name, begin, time.monotonic_ns(), {"module": name})

    def buckets_reduced(self, buckets: Sequence[ReducedBucket]) -> None:
        """Ranks have reduced the buckets of a backward pass of DistributedDataParallel, for a layer-wise update."""
        for number, bucket in enumerate(buckets):
            self.add(COMMUNICATION, f"bucket {number}", bucket.begin, bucket.end, {"bytes": bucket.nbytes})

    def step_ended(self, number: int) -> None:
        now = time.monotonic_ns()
        self.add(STEP, f"step {number}", self._step_since, now, {"step": number})
        self._step_since = now
        if self._left is not None:
            self._left -= 1
        self._engine_spans.take()

    @property
    def is_full(self) -> bool:
        """Whether all requested steps are recorded. The recording then ends when the next update begins, because the
        copies of the last step are done by then."""
        return self._left is not None and self._left <= 0

    # -- the end -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the recording and write its file. Raises nothing: a failure is kept, and ``close`` raises it. Does
        nothing in a forked child, or if the recording has ended."""
        if not self.is_on or os.getpid() != self._pid:
            return
        try:
            self._stop()
            self._write()
        except LightckError as err:
            self._failed(err)
        except Exception as err:  # a bug of lightck, which must not end the training
            log.exception(
                "lightck: the trace %r could not be written, because of a bug in lightck; the training goes on",
                self.path,
            )
            self._failed(_error(self.path, err))

    def _stop(self) -> None:
        self._meter.observer = None
        self._step_events.remove(self._step_recorder)
        self._commits.remove(self._checkpoint_recorder)
        try:
            self._module_hooks.remove()
            self._engine_spans.stop()
        finally:
            self.is_on = False

    def _write(self) -> None:
        engine_events = list(self._engine_spans.events(self._start))
        own_events = [
            Event(row, name, begin - self._start, end - self._start, args)
            for row, name, begin, end, args in self._events
            if begin >= self._start
        ]
        self._events.clear()
        dropped = self._dropped + self._engine_spans.dropped
        if dropped:
            log.warning("lightck: the trace %r lacks %d events, because a buffer was full", self.path, dropped)
        about = {**self._about, "dropped": dropped, "compiled": self._module_hooks.compiled[:100]}
        whole = Trace(tuple(sorted(own_events + engine_events, key=lambda event: (event.begin, -event.end))), about)
        try:
            with atomic_file(self.path, overwrite=self._overwrite) as file:
                events.write(whole, file)
        except ExportExistsError:
            raise
        except (ExportError, OSError) as err:
            raise _error(self.path, err) from err
        log.info("lightck: trace of %d steps in %s", len(whole.steps()), self.path)

    def _failed(self, err: LightckError) -> None:
        if self._failure is None:
            log.error("lightck: %s", err)
            self._failure = err

    def _guarded(self, work: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls ``work``. If ``work`` raises, the error is kept as the failure of the recording,
        and is not raised in the training."""

        def guarded(*args: object) -> None:
            try:
                work(*args)
            except Exception as err:
                self._failed(_error(self.path, err))

        return guarded


class Traces:
    """The recordings of one session. At most one of them runs at a time."""

    def __init__(self, step_events: StepEvents, commits: CommitEvents, engine: Engine, meter: Meter) -> None:
        self._record = partial(Recording, step_events=step_events, commits=commits, engine=engine, meter=meter)
        self._newest: Recording | None = None

    def start(
        self,
        path: str | os.PathLike[str],
        steps: int | None,
        overwrite: bool,
        model: nn.Module | None,
        about: Args,
    ) -> Recording:
        assert model is not None, "a session lives no longer than its model"
        if self._newest is not None and self._newest.is_on:
            raise SessionError(
                f"A trace is being recorded already, into {self._newest.path!r}. A session records one trace at a "
                "time. Close the running recording first."
            )
        self._newest = self._record(path, steps, overwrite, model=model, about=about)
        return self._newest

    def end(self) -> None:
        if self._newest is not None:
            self._newest.end()

    def close(self) -> None:
        """Close the newest recording. Raises its failure, unless the failure was raised before."""
        if self._newest is not None:
            self._newest.close()


class _StepRecorder(StepListener):
    """Passes step events on to a recording. An exception of the recording is kept as its failure, and is not raised in
    the training."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        guarded = recording._guarded
        self._forward_begins, self._forward_ended = guarded(recording.forward_begins), guarded(recording.forward_ended)
        self._backward_over = guarded(recording.backward_over)
        self._update_begins, self._update_ended = guarded(recording.update_begins), guarded(recording.update_ended)
        self._step_ended, self._layer_updated = guarded(recording.step_ended), guarded(recording.layer_updated)
        self._buckets_reduced = guarded(recording.buckets_reduced)

    def forward_begins(self) -> None:
        self._forward_begins()

    def forward_ended(self) -> None:
        self._forward_ended()

    def before_step(self, index: int, bypasses_wrapper: bool, has_gradients: bool) -> None:
        self._backward_over()

    def update_begins(self) -> None:
        if self._recording.is_full:
            self._recording.end()
        else:
            self._update_begins()

    def after_step(self, index: int) -> None:
        self._update_ended(index)

    def skipped_step(self, index: int) -> None:
        self._update_ended(index)

    def step_ended(self, step: int) -> None:
        self._step_ended(step)

    def layer_updated(self, name: str, begin: int, tensors: Sequence[Tensor]) -> None:
        self._layer_updated(name, begin)

    def buckets_reduced(self, buckets: Sequence[ReducedBucket]) -> None:
        self._buckets_reduced(buckets)


class _CheckpointRecorder(CommitListener):
    """Passes on to a recording the generation, the step and the tensors of each checkpoint that begins."""

    def __init__(self, recording: Recording) -> None:
        self._checkpoint_begun = recording._guarded(recording.checkpoint_begun)

    def begun(self, generation: int, step: int, entries: Sequence[Entry]) -> None:
        self._checkpoint_begun(generation, step, entries)


def _check(path: str, steps: object, overwrite: bool) -> None:
    """Check the arguments before the recording starts, and check, as far as possible, that the file can be written when
    the recording ends. Raises ``ValueError``, ``TraceError`` or ``ExportError``."""
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ValueError(f"trace(steps={steps!r}): `steps` is a number of steps, an int of at least 1, or None.")
    refuse_existing(path, overwrite=overwrite)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise TraceError(
            f"A trace cannot be written to {path!r}: its folder does not exist or is not writable. Nothing is "
            "recorded. Pass another path."
        )


def _error(path: str, err: BaseException) -> TraceError:
    error = TraceError(
        f"The trace {path!r} could not be made: {err}. The training and its pool are not affected. Pass another path, "
        "or record the trace again."
    )
    error.errno = getattr(err, "errno", None)
    return error
