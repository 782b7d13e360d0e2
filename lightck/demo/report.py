"""The output of the demo: progress, a table at the end, and the commands that recover a kept pool by hand.

A terminal gets bars and colours; any other output gets plain lines. With ``--json``, stdout gets one JSON object and
nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lightck.demo.child import train_gpt_folder
from lightck.demo.compare import Kill
from lightck.demo.place import Place
from lightck.demo.process import PACKAGE_ROOT
from lightck.demo.run import EPOCHS, Options, Result, Watch

SURVIVED = {"process": "a killed process", "os": "a crash of the OS", "power": "a power cut", "media": "a media error"}


def progress_on(console: Console) -> Lines:
    """Return the progress display for ``console``. The display is a context manager."""
    return Bars(console) if console.is_terminal else Lines(console)


class Lines(Watch):
    """Shows each event as a line."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def opened(self, place: Place, options: Options) -> None:
        self.say(f"pool: {place.pool} ({place.why})")
        rounded = f" ({options.steps}, rounded up to {EPOCHS} whole epochs)" if options.total != options.steps else ""
        self.say(
            f"two runs of {options.total} updates{rounded}, one of them with {options.kills} kills; seed {options.seed}"
        )

    def reference_ended(self, seconds: float) -> None:
        self.say(f"reference run, without lightck: {seconds:.1f} s")

    def recovered(self, number: int, kill: Kill) -> None:
        self.say(
            f"kill {number} ({kill.how}): update {kill.reported} reported, step {kill.recovered} recovered"
            f" in {kill.recovery_seconds:.3f} s"
        )


class Bars(Lines):
    """Shows each event as a line, and below the lines a bar for each run."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, transient=True)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def opened(self, place: Place, options: Options) -> None:
        super().opened(place, options)
        self.tasks = {run: self.progress.add_task(run, total=options.total) for run in ("reference", "killed")}

    def updated(self, run: str, step: int) -> None:
        self.progress.update(self.tasks[run], completed=step)

    def recovered(self, number: int, kill: Kill) -> None:
        super().recovered(number, kill)
        self.progress.update(self.tasks["killed"], completed=kill.recovered)


def show(result: Result, options: Options, console: Console) -> None:
    """Print the tables, the verdict and, for a kept pool, the commands that read it."""
    style = box.SIMPLE_HEAD if console.is_terminal else None
    console.print(_kill_table(result, style), _fact_table(result, style))
    for difference in result.differences:
        console.print(f"DIFFERS  {difference}", style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(_verdict(result), style="green" if result.ok else "red", highlight=False, soft_wrap=True)
    if result.kept:
        console.print(by_hand(result, options), markup=False, highlight=False, soft_wrap=True)


def _kill_table(result: Result, style: box.Box | None) -> Table:
    table = Table(box=style, pad_edge=False)
    for heading in ("kill", "last update reported", "step recovered", "updates lost", "recovery"):
        table.add_column(heading, justify="left" if heading == "kill" else "right", no_wrap=heading != "kill")
    for kill in result.kills:
        numbers = (str(kill.reported), str(kill.recovered), str(kill.lost))
        table.add_row(kill.how, *numbers, f"{1000 * kill.recovery_seconds:.0f} ms")
    return table


def _fact_table(result: Result, style: box.Box | None) -> Table:
    table = Table(box=style, pad_edge=False, show_header=False)
    stall, step = result.stall_seconds_per_step, result.step_seconds
    table.add_row("bytes per checkpoint", f"{result.bytes_per_checkpoint:,} ({result.checkpoints} checkpoints)")
    shown = f"{1000 * stall:.2f} ms, {stall / step:.1%} of a step of {1000 * step:.0f} ms"
    table.add_row("stall per step (median)", shown)
    table.add_row("this pool survives", survives(result.durability))
    table.add_row("", "; ".join(result.durability.get("evidence", ())))
    table.add_row("whole demo", f"{result.seconds:.0f} s; --seed {result.seed} repeats the same kills")
    return table


def survives(durability: dict[str, Any]) -> str:
    """Return the durability of the pool in words: "a killed process; not a crash of the OS, a power cut, a media
    error"."""
    yes = [words for name, words in SURVIVED.items() if durability.get(name)]
    no = [words for name, words in SURVIVED.items() if not durability.get(name)]
    return (", ".join(yes) or "nothing") + (f"; not {', '.join(no)}" if no else "")


def _verdict(result: Result) -> str:
    killed = f"{len(result.kills)} of {result.kills_planned} kills"
    if result.ok:
        lost = max(kill.lost for kill in result.kills)
        return (
            f"Bit-identical after {killed}: weights, optimizer state, RNG and all {result.steps} losses."
            f" Finished updates lost per kill: at most {lost}."
        )
    if not result.differences:
        return "No kill happened: the training ended before its first kill. Pass a larger --steps."
    return f"NOT bit-identical, or more updates lost than promised, after {killed}: see the lines above."


def by_hand(result: Result, options: Options) -> str:
    """Return the shell commands that read the kept pool, and that resume the training from it for one more epoch."""
    read = f"import lightck; c = lightck.recover({json.dumps(result.pool)}); print(c.step, list(c.model))"
    script = train_gpt_folder() / "train_gpt.py"
    more = options.arguments(result.pool, epochs=EPOCHS + 1)
    return "\n".join(
        (
            "The pool is kept. To read the pool, and to resume the training from it for one more epoch:",
            f"  {_command('-c', read)}",
            f"  {_command(str(script), *more)}",
        )
    )


def _command(*words: str) -> str:
    """Return a shell command that runs this Python with ``words``. The command sets PYTHONPATH if lightck is not
    installed."""
    line = shlex.join([sys.executable, *words])
    try:
        importlib.metadata.version("lightck")
    except importlib.metadata.PackageNotFoundError:
        return f"PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))} {line}"
    return line


def as_json(result: Result) -> str:
    """Return the result as one JSON object. Its ``identical`` is the verdict, which also decides the exit status."""
    kills = [{**asdict(kill), "lost": kill.lost} for kill in result.kills]
    return json.dumps({**asdict(result), "kills": kills, "identical": result.ok}, indent=2)
