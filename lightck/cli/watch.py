"""``lightck watch``: how far a training is, live, from what lies in its pool."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from lightck.cli.base import OK, POOL, Command, any_store_option, signals_handled
from lightck.cli.text import Facts, clean, columns, count, print_json_line, print_line, survives

if TYPE_CHECKING:
    from rich.live import Live

_POLL_SECONDS = 0.1
"""The pause between two polls. The age that is shown may be too small by this much."""
_EVENTS = {
    "started": "a training has opened the pool",
    "ended": "the training has ended: the pool is not open any more",
    "relayout": "the pool has moved to a new file, which is watched from now on",
    "replaced": "another pool has taken the path, and is watched from now on",
    "gone": "the pool is gone; if another one takes its path, that is watched",
}


@click.command("watch", cls=Command, short_help="Show how far a training is, live.")
@click.argument("pool", type=POOL)
@click.option(
    "--tier", "tiers", metavar="TIER", multiple=True, help="Also show the newest checkpoint in this tier; repeatable."
)
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to show it.",
)
@click.option("--count", "n", type=click.IntRange(1), metavar="N", help="End after N times. [default: at Ctrl-C]")
@any_store_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in a line each time, and nothing else.")
def command(pool: str, tiers: tuple[str, ...], interval: float, n: int | None, as_json: bool) -> int:
    """Show the newest committed step of POOL, its age, how fast steps come, the slots, and which process trains, again
    and again until Ctrl-C. Of the directory of a group of ranks: the step that all ranks have, and the slowest rank.

    POOL may be in use. It is only read, no lock is taken, and a new file that takes its path is followed. A pool holds
    no times: an age counts from when the checkpoint was first seen. Without a terminal a line is printed each time.
    """
    stop = threading.Event()
    with ExitStack() as stack:
        # Before the first look, so that Ctrl-C ends the command in the same way at any moment.
        stack.enter_context(signals_handled(lambda *_: stop.set(), signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
        live = None if as_json else _live(stack)
        for number, facts in enumerate(_looks(pool, tiers, interval, stop, stack), 1):
            _show(facts, live, as_json=as_json)
            if number == n:
                break
    return OK


def _looks(
    path: str, tiers: tuple[str, ...], interval: float, stop: threading.Event, stack: ExitStack
) -> Iterator[Facts]:
    """Yield what is seen in each interval, until ``stop`` is set."""
    from lightck.cli.watched_pools import tier_facts, watched

    pool = watched(path)
    stack.callback(pool.close)
    due = time.monotonic()
    while not stop.is_set():
        yield {"time": time.time(), **pool.facts(), "tiers": [tier_facts(each) for each in tiers]}
        due = max(due + interval, time.monotonic())
        while not stop.wait(min(_POLL_SECONDS, max(0.0, due - time.monotonic()))) and time.monotonic() < due:
            pool.poll()


def _live(stack: ExitStack) -> Live | None:
    """Return what draws in place, if the standard output is a terminal that can."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if console.is_dumb_terminal:
        return None
    return stack.enter_context(Live(console=console, auto_refresh=False))


def _show(facts: Facts, live: Live | None, *, as_json: bool) -> None:
    if as_json:
        print_json_line(facts)
        return
    is_group = "ranks" in facts
    clock = time.strftime("%H:%M:%S", time.localtime(facts["time"]))
    events = [f"{clock}  {text}" for text in _event_texts(facts)]
    if live is None:
        for text in [*events, f"{clock}  {_group_line(facts) if is_group else _pool_line(facts)}"]:
            print_line(text)
        return
    from rich.text import Text

    for text in events:  # above what is drawn in place
        live.console.print(Text(clean(text)))
    lines = [clock, *(_group_lines(facts) if is_group else _pool_lines(facts))]
    live.update(Text("\n".join(map(clean, lines)), no_wrap=True, overflow="ellipsis"), refresh=True)


def _event_texts(facts: Facts) -> list[str]:
    return [
        _EVENTS[each] if isinstance(each, str) else f"rank {each['rank']}: {_EVENTS[each['event']]}"
        for each in facts["events"]
    ]


# -- in one line


def _pool_line(facts: Facts) -> str:
    held = [str(slot["slot"]) for slot in facts["slots"] if slot["held"]]
    parts = [
        *_progress(facts),
        f"{facts['in_flight']} in flight",
        f"held: slot {', '.join(held)}" if held else "",
        _trainer(facts),
        *map(_tier, facts["tiers"]),
        facts["problem"] or "",
    ]
    return "  ".join(filter(None, parts))


def _group_line(facts: Facts) -> str:
    slowest = facts["slowest"]
    behind = "" if slowest is None else f"slowest rank {slowest['rank']} at {_step(slowest['step'])}"
    n_open = sum(rank["holder"] is not None for rank in facts["ranks"])
    parts = [
        f"common {' '.join(_progress(facts['common'])[:1])}",
        *_progress(facts["common"])[1:],
        behind,
        f"{n_open} of {count(len(facts['ranks']), 'rank')} train",
        _missing(facts),
        *map(_tier, facts["tiers"]),
        facts["problem"] or "",
    ]
    return "  ".join(filter(None, parts))


def _progress(facts: Facts) -> list[str]:
    rate = facts["steps_per_second"]
    return [_step(facts["step"]), "" if rate is None else f"{rate:.3g} steps/s", _age(facts)]


def _step(step: int | None) -> str:
    return "no step yet" if step is None else f"step {step}"


def _age(facts: Facts) -> str:
    if facts["age_seconds"] is None:
        return ""
    return f"{'at least ' if facts['age_is_at_least'] else ''}{_seconds(facts['age_seconds'])} old"


def _seconds(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.1f} {name}" if seconds < 10 else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} days"


def _trainer(facts: Facts) -> str:
    holder = facts["holder"]
    if holder is None:
        return "no training"
    return "training" if holder["pid"] is None else f"training pid {holder['pid']}"


def _tier(facts: Facts) -> str:
    if facts["problem"] is not None:
        return f"tier {facts['tier']}: {facts['problem']}"
    if facts["step"] is None:
        return f"tier {facts['tier']}: nothing yet"
    return f"tier {facts['tier']}: step {facts['step']}, {_seconds(facts['age_seconds'])} old"


def _missing(facts: Facts) -> str:
    return f"without the pools of ranks {', '.join(map(str, facts['missing']))}" if facts["missing"] else ""


# -- on a terminal


def _pool_lines(facts: Facts) -> list[str]:
    holder, durability = facts["holder"], facts["durability"]
    command = "" if holder is None or not holder["command"] else f": {holder['command']}"
    rows = [
        ("pool", facts["path"]),
        ("trains", _trainer(facts) + command),
        ("newest", ", ".join(filter(None, _progress(facts)))),
        ("slots", "; ".join(map(_slot, facts["slots"]))),
        ("medium", f"{durability['medium']}; survives {survives(durability)}"),
        *(("tier", _tier(tier).removeprefix("tier ")) for tier in facts["tiers"]),
    ]
    if facts["problem"] is not None:
        rows.append(("problem", facts["problem"]))
    return columns(rows)


def _slot(slot: Facts) -> str:
    what = slot["state"] if slot["step"] is None else _step(slot["step"])
    return f"{slot['slot']}: {what}{' (held by a reader)' if slot['held'] else ''}"


def _group_lines(facts: Facts) -> list[str]:
    rows = [
        ("pools", facts["directory"]),
        ("common", ", ".join(filter(None, _progress(facts["common"])))),
        *(("tier", _tier(tier).removeprefix("tier ")) for tier in facts["tiers"]),
    ]
    slowest = facts["slowest"]
    if slowest is not None:
        rows.insert(2, ("slowest", f"rank {slowest['rank']} at {_step(slowest['step'])}"))
    if facts["missing"]:
        rows.append(("missing", _missing(facts)))
    if facts["problem"] is not None:
        rows.append(("problem", facts["problem"]))
    table = [("rank", "newest", "", "age", "in flight", "trains", "")]
    for rank in facts["ranks"]:
        number = rank["group"]["rank"] if rank["group"] is not None else 0
        step, rate, age = _progress(rank)
        table.append((str(number), step, rate, age, str(rank["in_flight"]), _trainer(rank), rank["problem"] or ""))
    return [*columns(rows), "", *columns(table, right=(0,))]
