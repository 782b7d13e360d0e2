"""``lightck trace``: shows a recording of ``session.trace()`` as a table of times, and draws it as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lightck.cli.base import OK, Command, json_option, refuse_existing, usage_error
from lightck.cli.text import Facts, columns, count, print_json, print_line, size
from lightck.profiler.events import EVENTS_MAX, Trace, read
from lightck.profiler.summary import StepFacts, facts, median_step


@click.command("trace", cls=Command, short_help="Summarize and draw a recording of session.trace().")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Write the picture to this file.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="Draw this step instead of the one of median length.")
@click.option(
    "--from", "begin", type=click.FloatRange(0), metavar="MS", help="Draw from this time of the trace on, in ms."
)
@click.option(
    "--to",
    "end",
    type=click.FloatRange(0, min_open=True),
    metavar="MS",
    help="Draw up to this time of the trace, in ms.",
)
@click.option("--overwrite", is_flag=True, help="Replace an existing picture.")
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
    """Show the times of each step in FILE, which session.trace() wrote. Perfetto (ui.perfetto.dev) opens it too.

    stall: the time that lightck took from the training thread; overlap: the share of all copied bytes that copy threads
    copied during forward, backward, communication or update; helped: the share that the training thread copied, at the
    boundary or while it waited.
    """
    ranged = begin is not None or end is not None
    if svg is None and (step is not None or ranged or overwrite):
        usage_error("--step, --from, --to and --overwrite apply to the picture only: pass --svg FILE too.")
    if step is not None and ranged:
        usage_error("--step and --from / --to exclude each other: pass one or the other.")
    if svg is not None:
        refuse_existing(str(svg), overwrite=overwrite)
    trace = read(file)
    steps = facts(trace)
    drawn = _draw(trace, steps, svg, step, begin, end, overwrite) if svg is not None else None
    if as_json:
        print_json(
            {"trace": str(file), "about": _about(trace), "steps": [asdict(each) for each in steps], "svg": drawn}
        )
        return OK
    _show(trace, steps)
    if drawn is not None:
        print_line(f"{drawn['what']}: {drawn['path']}")
    return OK


def _about(trace: Trace) -> Facts:
    """Return facts about the recording. Texts, lists and numbers are bounded, because the file is untrusted."""
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


def _show(trace: Trace, steps: list[StepFacts]) -> None:
    about = _about(trace)
    print_line(
        f"{about['model'] or 'a training'} on {about['medium'] or 'an unknown medium'}: {count(len(steps), 'step')}"
    )
    if about["dropped"]:
        print_line(f"{count(about['dropped'], 'event')} did not fit into a buffer and are missing: times are too low")
    if about["compiled"]:
        print_line(f"compiled modules, whose submodules were not recorded: {', '.join(about['compiled'][:6])}")
    if not steps:
        print_line("no whole step was recorded")
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
        print_line(line)


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
    """Return the times to draw, in nanoseconds from the start of the trace, and what they are, as text. ``begin`` and
    ``end`` are in milliseconds."""
    last = max((event.end for event in trace.events), default=0)
    if begin is not None or end is not None:
        left, right = min((begin or 0.0) * 1e6, 1e18), min(end * 1e6, 1e18) if end is not None else last
        if not 0 <= left < right or left > last:  # also refuses NaN
            usage_error(f"--from and --to select nothing: the trace is {last / 1e6:.3f} ms long.")
        right = min(right, last)
        return round(left), round(right), f"{left / 1e6:g} to {right / 1e6:g} ms"
    known = trace.steps()
    middle = median_step(steps)
    if step is not None and step not in known:
        usage_error(
            f"The trace holds no whole step {step}. Its steps: {f'{min(known)} to {max(known)}' if known else 'none'}."
        )
    if step is None and middle is None:
        return 0, last, "the whole trace"
    number = step if step is not None else middle.step if middle is not None else 0
    return known[number].begin, known[number].end, f"step {number}"
