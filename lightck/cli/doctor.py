"""``lightck doctor``: will it work here, how well, and what to do where it will not. Needs no torch, writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click

from lightck.cli import checks
from lightck.cli.base import BAD, OK, Command, json_option
from lightck.cli.checks import NOTE, PROBLEM, Line
from lightck.cli.machine import Machine
from lightck.cli.text import clean, count, say, say_json, verdict

_COLOURS = {NOTE: "yellow", PROBLEM: "red"}


@click.command("doctor", cls=Command, short_help="What this machine offers a pool, and what stands in the way.")
@click.argument("path", required=False, type=click.Path())
@json_option
def command(path: str | None, as_json: bool) -> int:
    """Look at this machine: backends, media, kernel and limits. With PATH also at the medium of that folder or pool.

    Exit status 1 where a problem makes lightck unusable.
    """
    lines = list(examine(Machine(), path))
    problems = sum(line.level == PROBLEM for line in lines)
    if as_json:
        say_json({"ok": not problems, "lines": [asdict(line) for line in lines]})
    else:
        _show(lines, problems)
    return BAD if problems else OK


def examine(machine: Machine, path: str | None = None) -> Iterator[Line]:
    """All findings, in the order in which they are shown."""
    found = [line for check in checks.CHECKS for line in check(machine)]
    yield from found
    if not any(line.topic == checks.NATIVE and line.level == PROBLEM for line in found):
        yield from checks.backends(machine)
        yield from checks.media(machine, path)
    else:
        yield Line("media", NOTE, "not looked at: that takes the native library", "Mend that first, and ask again.")
    for check in checks.LATER:
        yield from check(machine)


def _show(lines: list[Line], problems: int) -> None:
    width = max(len(clean(line.topic)) for line in lines)
    for line in lines:
        level = click.style(line.level.ljust(7), fg=_COLOURS.get(line.level))
        click.echo(f"{level}  {clean(line.topic).ljust(width)}  {clean(line.said)}")
        if line.cure:
            click.echo(f"{'':7}  {'':{width}}    -> {clean(line.cure)}")
    say()
    notes = sum(line.level == NOTE for line in lines)
    if problems:
        verdict(f"{count(problems, 'problem')}: lightck cannot be used like this. Do what the arrows say.", good=False)
    else:
        verdict("lightck can be used here" + (f"; {count(notes, 'note')} above." if notes else "."), good=True)
