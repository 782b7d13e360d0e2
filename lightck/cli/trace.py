"""``lightck trace``: what a recorded training did, as numbers and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lightck.cli.base import OK, Command, json_option, refuse_existing, trouble
from lightck.cli.text import Facts, columns, count, say, say_json, size
from lightck.profiler.events import EVENTS_MAX, Trace, read
from lightck.profiler.summary import StepFacts, facts, median_step


@click.command("trace", cls=Command, short_help="Sum up and draw what session.trace() recorded.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw the picture into this file.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Draw this step instead of the one of median length.")
@click.option("--from", "begin", type=click.FloatRange(0), metavar="MS", help="Draw from here (of the whole trace).")
@click.option("--to", "end", type=click.FloatRange(0, min_open=True), metavar="MS", help="Draw up to here.")
@click.option("--overwrite", is_flag=True, help="Replace a picture that is there.")
@json_option
def command(
    file: Path,
    svg: Path | None,
    step: int | None,
    begin: float | None,
    end: float | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Show what FILE, written by session.trace(), says of each step. Perfetto (ui.perfetto.dev) opens it too."""
    ranged = begin is not None or end is not None
    if svg is None and (step is not None or ranged or overwrite):
        trouble("--step, --from, --to and --overwrite are for the picture: say --svg FILE.")
    if step is not None and ranged:
        trouble("--step and --from / --to exclude each other.")
    if svg is not None:
        refuse_existing(str(svg), overwrite=overwrite)
    trace = read(file)
    steps = facts(trace)
    drawn = _draw(trace, steps, svg, step, begin, end, overwrite) if svg is not None else None
    if as_json:
        say_json({"trace": str(file), "about": _about(trace), "steps": [asdict(each) for each in steps], "svg": drawn})
        return OK
    _tell(trace, steps)
    if drawn is not None:
        say(f"{drawn['what']}: {drawn['path']}")
    return OK


def _about(trace: Trace) -> Facts:
    """What is known of the recording, as plain text and numbers."""
    about = trace.about
    dropped = about.get("dropped")
    compiled = about.get("compiled")
    return {
        "model": str(about.get("model", ""))[:200],
        "medium": str(about.get("medium", ""))[:200],
        "dropped": dropped if type(dropped) is int and 0 <= dropped <= 1 << 62 else 0,
        "compiled": [str(name)[:200] for name in compiled[:100]] if isinstance(compiled, list) else [],
        "events": min(len(trace.events), EVENTS_MAX),
    }


def _tell(trace: Trace, steps: list[StepFacts]) -> None:
    about = _about(trace)
    say(f"{about['model'] or 'a training'} on {about['medium'] or 'an unknown medium'}: {count(len(steps), 'step')}")
    if about["dropped"]:
        say(f"{count(about['dropped'], 'event')} found no room and is missing: times are too low")
    if about["compiled"]:
        say(f"not looked into, since compiled: {', '.join(about['compiled'][:6])}")
    if not steps:
        say("no whole step was recorded")
        return
    head = [
        "step",
        "ms",
        "forward",
        "backward",
        "update",
        "stall",
        "stall %",
        "copy",
        "overlap",
        "copied",
        "helped",
        "commit",
    ]
    rows = [head, *(_row(str(each.step), each) for each in steps)]
    middle = median_step(steps)
    if middle is not None and len(steps) > 2:
        rows.append(_row("median", middle))
    for line in columns(rows, right=range(len(head))):
        say(line)


def _row(name: str, each: StepFacts) -> list[str]:
    overlap = "-" if each.overlap is None else f"{each.overlap:.0%}"
    stall = f"{each.stall_ms / each.time_ms:.1%}" if each.time_ms else "-"
    helped = f"{each.helped_nbytes / each.copied_nbytes:.0%}" if each.copied_nbytes else "-"
    times = [f"{ms:.1f}" for ms in (each.time_ms, each.forward_ms, each.backward_ms, each.update_ms)]
    return [
        name,
        *times,
        f"{each.stall_ms:.2f}",
        stall,
        f"{each.copy_ms:.2f}",
        overlap,
        size(each.copied_nbytes),
        helped,
        f"{each.commit_ms:.3f}",
    ]


def _draw(
    trace: Trace,
    steps: list[StepFacts],
    svg: Path,
    step: int | None,
    begin: float | None,
    end: float | None,
    overwrite: bool,
) -> Facts:
    from lightck.export.atomic import atomic_file
    from lightck.profiler.svg import draw

    left, right, what = _range(trace, steps, step, begin, end)
    about = _about(trace)
    title = f"{about['model'] or 'training'}, {what}; pool on {about['medium'] or 'unknown'}"
    picture = draw(trace, left, right, title)
    with atomic_file(str(svg), overwrite=overwrite) as out:
        out.write(picture.encode())
    return {"path": str(svg), "what": what, "from_ms": left / 1e6, "to_ms": right / 1e6}


def _range(
    trace: Trace, steps: list[StepFacts], step: int | None, begin: float | None, end: float | None
) -> tuple[int, int, str]:
    last = max((event.end for event in trace.events), default=0)
    if begin is not None or end is not None:
        left, right = min((begin or 0.0) * 1e6, 1e18), min(end * 1e6, 1e18) if end is not None else last
        if not 0 <= left < right or left > last:  # not a number is neither
            trouble(f"--from and --to leave nothing to draw: the trace is {last / 1e6:.3f} ms long.")
        right = min(right, last)
        return round(left), round(right), f"{left / 1e6:g} to {right / 1e6:g} ms"
    known = trace.steps()
    middle = median_step(steps)
    if step is not None and step not in known:
        trouble(
            f"The trace holds no whole step {step}. It holds {f'{min(known)} to {max(known)}' if known else 'none'}."
        )
    if step is None and middle is None:
        return 0, last, "all of it"
    number = step if step is not None else middle.step if middle is not None else 0
    return known[number].begin, known[number].end, f"step {number}"
