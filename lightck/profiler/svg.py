"""A trace as a picture: one self-contained SVG with a row per activity over a time axis in milliseconds.

The colour of a bar shows the activity. The shade of the colour shows the layer, from light (the first layer) to dark
(the last layer); forward, backward and copies of one layer have the same shade. The bar of a copy, of a
part of a commit or of a slot header is pale if its thread mostly waited: for a processor, for the disk, or for the
emulated memory of LIGHTCK_EMULATE. Bars thinner than half a
pixel are joined with their neighbours, so that the size of the picture is bounded. All text of the trace is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from lightck.profiler import events
from lightck.profiler.events import COMMIT, COPY, STATE, STEP, TRAINER_COPY, Event, Trace
from lightck.profiler.summary import is_part, length, united

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _GAP = 1240, 178, 128, 58, 30, 9
"""Pixels: the width of the picture; the margins left, right and above; the height of a row, and between two rows."""
_PLOT = _WIDTH - _LEFT - _RIGHT
"""The width of the time axis, in pixels."""
_TINY = 0.5
"""The width in pixels below which bars are joined with their neighbours."""
_JOINED_MAX = 3.0
"""The greatest width of joined bars, in pixels."""
_LETTER = 6.0
"""The assumed width of a letter, in pixels."""
_TEXT_MAX = 60
"""The largest number of letters of a name that is written on bars."""
_STEPS_NAMED_MAX = 40
"""The largest number of steps that get a mark and a name."""
_COLOURS = {
    # row: (colour of the first layer, colour of the last layer)
    events.FORWARD: ("#bcd7f5", "#1c5fa8"),
    events.BACKWARD: ("#fbd3a5", "#c25e06"),
    events.COMMUNICATION: ("#b79ad6", "#b79ad6"),
    events.UPDATE: ("#d9a6c8", "#d9a6c8"),
    events.STALL: ("#e8837e", "#b3201a"),
    STATE: ("#8a8a8a", "#8a8a8a"),
    COPY: ("#bfe5c0", "#1d7a33"),
    TRAINER_COPY: ("#bfe5c0", "#1d7a33"),
    COMMIT: ("#333333", "#333333"),
}
_OTHER = ("#c9b458", "#c9b458")
"""The colours of a row of ``Recording.span``."""


@dataclass(slots=True)
class _Bar:
    """One bar of a row. ``left`` and ``right`` are pixels from the left end of the time axis; ``inset`` is how many
    pixels its upper and lower edge lie inside the row."""

    left: float
    right: float
    colour: str
    inset: float
    is_pale: bool
    event: Event
    is_tiny: bool
    """Whether the event is shorter than ``_TINY`` pixels."""
    joined: int = 1
    """The number of events that this bar shows."""


def draw(trace: Trace, begin: int, end: int, title: str) -> str:
    """Draw all rows of a trace from ``begin`` to ``end`` (nanoseconds from the start of the trace), and return the
    SVG."""
    rows = [row for row in trace.rows() if row != STEP]
    picture = _Picture(trace, begin, max(end, begin + 1))
    height = _TOP + len(rows) * (_ROW + _GAP) + 84
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" role="img">',
        f"<title>{_text(title, 200)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="14" y="24" font-size="15" font-weight="bold" fill="#222">{_text(title, 130)}</text>',
        *picture.axis(_TOP + len(rows) * (_ROW + _GAP)),
        *picture.step_marks(_TOP + len(rows) * (_ROW + _GAP)),
    ]
    for number, row in enumerate(rows):
        parts += picture.row(row, _TOP + number * (_ROW + _GAP))
    parts += [*_legend(rows, height - 26), "</svg>", ""]
    return "\n".join(parts)


class _Picture:
    def __init__(self, trace: Trace, begin: int, end: int) -> None:
        self._trace = trace
        self._begin, self._end = begin, end
        layers = [(e.args.get("module", ""), e.args["layer"]) for e in trace.of(events.FORWARD) if "layer" in e.args]
        self._layers = dict(layers)
        self._last_layer = max(max(self._layers.values(), default=1), 1)

    def _x(self, time: int) -> float:
        return (min(max(time, self._begin), self._end) - self._begin) / (self._end - self._begin) * _PLOT

    # -- time --------------------------------------------------------------------------------------------

    def axis(self, bottom: int) -> Iterator[str]:
        """Yield vertical lines at round numbers of milliseconds, which count from the left end of the axis."""
        whole = (self._end - self._begin) / 1e6
        unit = _round_unit(whole / 10)
        for i in range(int(whole / unit + 1e-9) + 1):
            x = _LEFT + i * unit / whole * _PLOT
            yield f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e4e4"/>'
            yield (
                f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle" fill="#666" font-size="11">'
                f"{f'{i * unit:.6f}'.rstrip('0').rstrip('.')}</text>"
            )
        yield f'<text x="{_WIDTH - _RIGHT + 14}" y="{bottom + 15}" fill="#666" font-size="11">ms</text>'

    def step_marks(self, bottom: int) -> Iterator[str]:
        inside = [e for e in self._trace.of(STEP) if e.end > self._begin and e.begin < self._end]
        for step in inside[:_STEPS_NAMED_MAX]:
            left, right = _LEFT + self._x(step.begin), _LEFT + self._x(step.end)
            yield (
                f'<path d="M{left:.1f} {_TOP - 18}V{bottom}M{right:.1f} {_TOP - 18}V{bottom}" stroke="#999" '
                'stroke-dasharray="3 3" fill="none"/>'
            )
            label = f"step {step.args['step']}"
            if right - left > _LETTER * len(label):
                x = (left + right) / 2
                yield f'<text x="{x:.1f}" y="{_TOP - 9}" text-anchor="middle" fill="#444">{label}</text>'

    # -- a row -------------------------------------------------------------------------------------------

    def row(self, row: str, top: int) -> Iterator[str]:
        shown = [e for e in self._trace.of(row) if e.end >= self._begin and e.begin < self._end]
        middle = top + _ROW / 2 + 4
        yield f'<text x="{_LEFT - 10}" y="{middle}" text-anchor="end" fill="#222">{_text(_label(row), 26)}</text>'
        yield f'<rect x="{_LEFT}" y="{top}" width="{_PLOT}" height="{_ROW}" fill="#f6f6f6"/>'
        bars = _joined(self._bars(row, shown))
        for bar in bars:
            yield self._rect(bar, top)
        if row not in (events.STALL, COMMIT, STATE):
            yield from self._names(bars, top)
        yield f'<text x="{_WIDTH - _RIGHT + 10}" y="{middle}" fill="#222">{_text(self._total(row, shown), 40)}</text>'

    def _bars(self, row: str, shown: Sequence[Event]) -> Iterator[_Bar]:
        thinnest = 1.6 if row in (COMMIT, STATE) else 0.8
        outer: list[Event] = []
        for event in shown:
            while outer and outer[-1].end <= event.begin:
                outer.pop()
            inset = 5.0 * min(len(outer), 2) if row == events.STALL else 0.0
            outer.append(event)
            left, right = self._x(event.begin), self._x(event.end)
            colour = self._colour(row, event, len(outer))
            yield _Bar(left, max(right, left + thinnest), colour, inset, _is_pale(event), event, right - left < _TINY)

    def _colour(self, row: str, event: Event, depth: int) -> str:
        first, last = _COLOURS.get(COPY if row.startswith(COPY) else row, _OTHER)
        if event.args.get("whole"):
            return _mixed("#ffffff", first, 0.55)
        if row == events.STALL:
            return _mixed(first, last, min(depth - 1, 2) / 2)
        layer = event.args.get("layer", self._layers.get(event.args.get("module", ""), self._last_layer / 2))
        return _mixed(first, last, layer / self._last_layer)

    def _rect(self, bar: _Bar, top: int) -> str:
        pale = ' fill-opacity="0.45"' if bar.is_pale else ""
        more = f" and {bar.joined - 1} more" if bar.joined > 1 else ""
        tooltip = f"{bar.event.name}{more}: {_duration(bar.event.end - bar.event.begin)}"
        return (
            f'<rect x="{_LEFT + bar.left:.1f}" y="{top + bar.inset:g}" width="{bar.right - bar.left:.1f}" '
            f'height="{_ROW - 2 * bar.inset:g}" fill="{bar.colour}"{pale}><title>{_text(tooltip, 150)}</title></rect>'
        )

    def _names(self, bars: Sequence[_Bar], top: int) -> Iterator[str]:
        """Yield the names of groups of modules. Successive bars of one group get one name, if they are wide enough for
        it."""
        runs: list[tuple[str, float, float]] = []
        for bar in bars:
            if bar.event.args.get("whole"):
                continue
            group = _group(bar.event)
            if runs and runs[-1][0] == group and bar.left - runs[-1][2] < 60:
                runs[-1] = group, runs[-1][1], bar.right
            else:
                runs.append((group, bar.left, bar.right))
        for group, left, right in runs:
            if right - left > _LETTER * len(group) + 6:
                x = _LEFT + (left + right) / 2
                yield (
                    f'<text x="{x:.1f}" y="{top + _ROW / 2 + 4}" text-anchor="middle" font-size="11" fill="#222" '
                    f'stroke="#fff" stroke-width="3" stroke-opacity="0.75" paint-order="stroke" '
                    f'pointer-events="none">{_text(group, _TEXT_MAX)}</text>'
                )

    def _total(self, row: str, shown: Iterable[Event]) -> str:
        """Return, as text, the total time of the row's events inside the picture and, for copies, their bytes."""
        inside = [(max(e.begin, self._begin), min(e.end, self._end)) for e in shown]
        nbytes = sum(e.args.get("bytes", 0) for e in shown if not is_part(e)) if row.startswith("copy") else 0
        copied = f", {_size(nbytes)}" if nbytes else ""
        return _duration(length(united(inside))) + copied


def _joined(bars: Iterable[_Bar]) -> list[_Bar]:
    """Join tiny neighbouring bars, and return the joined bars and all other bars. A joined bar is narrower than
    ``_JOINED_MAX`` pixels, so that shades remain visible."""
    found: list[_Bar] = []
    for bar in bars:
        last = found[-1] if found else None
        if (
            last is not None
            and last.is_tiny
            and bar.is_tiny
            and bar.left - last.right < _TINY
            and bar.right - last.left < _JOINED_MAX
            and bar.inset == last.inset
        ):
            last.right, last.joined = max(last.right, bar.right), last.joined + 1
        else:
            found.append(bar)
    return found


# -- legend ----------------------------------------------------------------------------------------------------------


def _legend(rows: Sequence[str], y: int) -> Iterator[str]:
    x = 14.0
    for row, (first, last) in _COLOURS.items():
        if not any(r.startswith(row) for r in rows) or row == TRAINER_COPY:
            continue
        label = {COPY: "copy", events.STALL: "training thread waits for lightck"}.get(row, row)
        shades = [_mixed(first, last, i / 3) for i in range(4)] if first != last and row != events.STALL else [first]
        for shade in shades:
            yield f'<rect x="{x:.0f}" y="{y - 10}" width="10" height="12" fill="{shade}"/>'
            x += 10
        yield f'<text x="{x + 5:.0f}" y="{y}" fill="#444" font-size="11">{_text(label, 40)}</text>'
        x += 5 + 5.6 * len(label) + 16
    explanation = (
        "light to dark: first to last layer; pale: a copy or commit that mostly waited (for a processor, for the disk, "
        "or for the memory that LIGHTCK_EMULATE emulates)"
    )
    yield f'<text x="14" y="{y + 18}" fill="#777" font-size="11">{explanation}</text>'


# -- text, numbers and colours ---------------------------------------------------------------------------------------


def _text(text: str, most: int) -> str:
    """Return the text with at most ``most`` characters, control characters replaced, escaped for XML."""
    printable = "".join(c if c.isprintable() else "\ufffd" for c in text[: most + 1])
    return escape(printable if len(printable) <= most else printable[: most - 1] + "…")


def _label(row: str) -> str:
    return {events.STALL: "waits for lightck"}.get(row, row)


def _group(event: Event) -> str:
    """Return the group of an event's module: ``h.0`` for ``transformer.h.0.attn.c_proj``. A name without a number gives
    its last part: ``head`` for ``model.head``."""
    parts = str(event.args.get("module") or event.name).split(".")
    for at, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[max(at - 1, 0) : at + 1])
    return parts[-1]


def _is_pale(event: Event) -> bool:
    """Whether the thread of an event mostly waited: the event lasted longer than 0.05 ms, and the thread ran for less
    than half of this time."""
    cpu = event.args.get("cpu_ms")
    lasted = (event.end - event.begin) / 1e6
    return isinstance(cpu, (int, float)) and lasted > 0.05 and cpu < lasted / 2


def _duration(ns: int) -> str:
    # Seconds from 10 s on, milliseconds from 0.1 ms on, otherwise microseconds.
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size / 10 and (unit == "ms" or ns >= 10 * size):
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns / 1e3:.3g} us" if ns else "0"


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def _round_unit(least: float) -> float:
    """Return the smallest number that is not less than ``least`` and is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _mixed(first: str, last: str, share: float) -> str:
    """Return the colour between two colours: ``first`` for share 0, ``last`` for share 1."""
    share = min(max(share, 0.0), 1.0)
    pairs = [(int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
