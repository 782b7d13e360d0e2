"""A trace in memory and as a file: JSON of the Trace Event Format, which Perfetto and chrome://tracing open.

The file holds complete events (``"ph": "X"``) with one ``tid`` per row; metadata events name and order the rows. Times
in the file are microseconds from the start of the trace. A file is untrusted, so its events are checked when it is
read; a bad file raises ``TraceFormatError``.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NoReturn

from lightck.errors import TraceFormatError

# Names of rows. TRAINER_COPY: what the training thread copies itself, at the boundary or while it waits.
STEP, FORWARD, BACKWARD, COMMUNICATION, UPDATE, STALL, STATE, TRAINER_COPY, COMMIT = (
    "step",
    "forward",
    "backward",
    "communication",
    "update",
    "lightck on the training thread",
    "small state",
    "copy: training thread",
    "commit",
)
COPY = "copy: thread "
"""The name of a copy thread's row is this text, followed by the number of the thread, counted from 1."""
_ORDER = (STEP, FORWARD, BACKWARD, COMMUNICATION, UPDATE, STALL, STATE, COPY, TRAINER_COPY, COMMIT)
FORMAT = 1
"""The number of the file format that this module writes and reads."""
FILE_NBYTES_MAX = 1 << 30
"""The largest file that ``read`` accepts."""
EVENTS_MAX = 2_000_000
"""The largest number of events in a trace. A recording keeps half as many events of its own, and half as many spans of
the engine; further ones are counted as dropped."""
TEXT_MAX = 10_000
"""The largest number of characters of a name in a file."""
ROWS_MAX = 200
"""The largest number of rows in a file."""
Args = Mapping[str, Any]
"""Further facts about an event: its step, module, layer, bytes and so on. ``whole``: a forward or backward pass of the
whole model."""
_US_MAX = 1e13
"""The longest time in a file, in microseconds (four months). Beyond it a float cannot resolve nanoseconds."""


@dataclass(frozen=True, slots=True)
class Event:
    """One bar in a row. ``begin`` and ``end`` are nanoseconds from the start of the trace."""

    row: str
    name: str
    begin: int
    end: int
    args: Args


@dataclass(frozen=True, slots=True)
class Trace:
    """The recorded events, ordered by begin. ``about``: facts about the recording, such as the model, the medium and
    the number of dropped events."""

    events: tuple[Event, ...]
    about: Args

    def rows(self) -> list[str]:
        """Return the names of the rows that have events, in the order in which the rows are shown."""
        return sorted({event.row for event in self.events}, key=_sort_key)

    def of(self, *rows: str) -> list[Event]:
        return [event for event in self.events if event.row in rows]

    def steps(self) -> dict[int, Event]:
        """Return step number -> event of this step, which lasts from the end of the previous update to the end of the
        step's own update."""
        return {event.args["step"]: event for event in self.of(STEP)}


def is_own(row: str) -> bool:
    """Whether only lightck may add events to this row, so that ``Recording.span`` refuses it. These are lightck's rows
    (without COMMUNICATION, to which the user's spans are added too), and every name that begins with "copy"."""
    return row.startswith("copy") or (row in _ORDER and row != COMMUNICATION)


def _sort_key(row: str) -> tuple[int, str]:
    """Return the key by which rows are sorted."""
    kind = COPY if row.startswith(COPY) else row
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), row)


# -- to a file -------------------------------------------------------------------------------------------------------


def write(trace: Trace, file: IO[bytes]) -> None:
    """Write a trace as JSON, with one line per event."""
    about = json.dumps({"lightck_trace": FORMAT, **trace.about})
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {about},\n"traceEvents": [\n'.encode())
    for number, line in enumerate(_lines(trace)):
        file.write((",\n" if number else "").encode() + line.encode())
    file.write(b"\n]}\n")


def _lines(trace: Trace) -> Iterator[str]:
    pid = trace.about.get("pid", 1)
    tids = {row: number for number, row in enumerate(trace.rows(), 1)}

    def meta(kind: str, tid: int, args: Args) -> str:
        return json.dumps({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args})

    yield meta("process_name", 0, {"name": f"lightck: {trace.about.get('model', 'training')}"})
    for row, tid in tids.items():
        yield meta("thread_name", tid, {"name": row})
        yield meta("thread_sort_index", tid, {"sort_index": tid})
    for event in trace.events:
        yield json.dumps(
            {
                "name": event.name,
                "cat": event.row,
                "ph": "X",
                "ts": event.begin / 1000,
                "dur": (event.end - event.begin) / 1000,
                "pid": pid,
                "tid": tids[event.row],
                "args": dict(event.args),
            }
        )


# -- from a file -----------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace from a file, and return it. Raises ``TraceFormatError`` for a file that is no valid trace, and
    ``OSError`` if the file cannot be opened."""
    with open(path, "rb", opener=_open_regular) as file:
        if os.fstat(file.fileno()).st_size > FILE_NBYTES_MAX:
            raise _format_error(path, f"it is larger than {FILE_NBYTES_MAX >> 20} MiB")
        data = file.read(FILE_NBYTES_MAX + 1)
    try:
        return _trace(json.loads(data, parse_constant=_no_number))
    except (ValueError, RecursionError) as err:  # json's and unicode's errors are ValueErrors
        reason = "it is nested too deeply" if isinstance(err, RecursionError) else str(err)
        raise _format_error(path, reason[:200]) from err


def _open_regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise _format_error(path, "it is not a regular file")


def _format_error(path: str | os.PathLike[str], reason: str) -> TraceFormatError:
    return TraceFormatError(
        f"{os.fspath(path)!r} is not a trace that lightck wrote: {reason}. Record a trace with session.trace(path)."
    )


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _trace(found: object) -> Trace:
    """Return the trace in the parsed JSON. Its events are checked, so that other code may rely on the types, order and
    bounds of their times, names, steps, layers, modules and bytes. ``about`` is not checked. Raises ``ValueError``."""
    if not isinstance(found, dict) or not isinstance(found.get("otherData"), dict):
        raise ValueError("it has no otherData")
    about = found["otherData"]
    if about.get("lightck_trace") != FORMAT:
        raise ValueError(f"its otherData has no lightck_trace {FORMAT}")
    raw = found.get("traceEvents")
    if not isinstance(raw, list) or len(raw) > EVENTS_MAX + 3 * ROWS_MAX:
        raise ValueError("its traceEvents is not a list, or it has too many events")
    if not all(isinstance(each, dict) for each in raw):
        raise ValueError("an event is not an object")
    rows = _row_names(raw)
    events = sorted((_event(each, rows) for each in raw if each.get("ph") == "X"), key=lambda e: (e.begin, -e.end))
    return Trace(tuple(events), about)


def _row_names(raw: Iterable[Args]) -> dict[int, str]:
    rows: dict[int, str] = {}
    for each in raw:
        if each.get("ph") == "M" and each.get("name") == "thread_name":
            args = each.get("args")
            rows[_whole(each.get("tid"), "tid")] = _text(args.get("name") if isinstance(args, dict) else None)
    if len(rows) > ROWS_MAX:
        raise ValueError("it has too many rows")
    return rows


def _event(each: Args, rows: Mapping[int, str]) -> Event:
    tid = _whole(each.get("tid"), "tid")
    if tid not in rows:
        raise ValueError("the tid of an event has no name")
    begin, duration = _time(each.get("ts")), _time(each.get("dur"))
    args = each.get("args", {})
    if not isinstance(args, dict):
        raise ValueError("the args of an event are not an object")
    if rows[tid] == STEP or "step" in args:
        _whole(args.get("step"), "step")
    for key in ("bytes", "layer"):
        if key in args:
            _whole(args[key], key)
    if "module" in args:
        _text(args["module"])
    start = round(begin * 1000)
    return Event(rows[tid], _text(each.get("name")), start, start + round(duration * 1000), args)


def _whole(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"a {what} is not a whole number")
    return value


def _time(value: object) -> float:
    if (type(value) is not int and type(value) is not float) or not 0 <= value <= _US_MAX or not math.isfinite(value):
        raise ValueError("a time is not a number of microseconds")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > TEXT_MAX:
        raise ValueError("a name is not a string, or is too long")
    return value
