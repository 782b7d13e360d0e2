"""``lightck doctor``: whether and how well lightck works on this machine. Needs no torch, leaves no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click

from lightck.cli import checks
from lightck.cli.base import BAD, OK, Command, json_option
from lightck.cli.checks import NOTE, PROBLEM, Finding
from lightck.cli.machine import Machine
from lightck.cli.text import clean, count, print_json, print_line, print_verdict

_COLOURS = {NOTE: "yellow", PROBLEM: "red"}


@click.command(
    "doctor", cls=Command, short_help="Check whether lightck works on this machine, and where a pool can lie."
)
@click.argument("path", required=False, type=click.Path())
@json_option
def command(path: str | None, as_json: bool) -> int:
    """Check this machine: backends, media, kernel and limits. With PATH, also the medium of the folder or pool PATH.

    Exit status 1 if a problem makes lightck unusable.
    """
    findings = list(examine(Machine(), path))
    problems = sum(one.level == PROBLEM for one in findings)
    if as_json:
        print_json({"ok": not problems, "lines": [asdict(one) for one in findings]})
    else:
        _show(findings, problems)
    return BAD if problems else OK


def examine(machine: Machine, path: str | None = None) -> Iterator[Finding]:
    """Yield all findings in the order in which they are shown."""
    found = [one for check in checks.CHECKS_BEFORE_MEDIA for one in check(machine)]
    yield from found
    if not any(one.topic == checks.NATIVE and one.level == PROBLEM for one in found):
        yield from checks.backends(machine)
        yield from checks.media(machine, path)
    else:
        yield Finding(
            "media",
            NOTE,
            "not checked: this needs the native library",
            "Solve the problem with the native library first.",
        )
    for check in checks.CHECKS_AFTER_MEDIA:
        yield from check(machine)


def _show(findings: list[Finding], problems: int) -> None:
    width = max(len(clean(one.topic)) for one in findings)
    for one in findings:
        level = click.style(one.level.ljust(7), fg=_COLOURS.get(one.level))
        click.echo(f"{level}  {clean(one.topic).ljust(width)}  {clean(one.said)}")
        if one.cure:
            click.echo(f"{'':7}  {'':{width}}    -> {clean(one.cure)}")
    print_line()
    notes = sum(one.level == NOTE for one in findings)
    if problems:
        print_verdict(
            f"{count(problems, 'problem')}: lightck cannot be used like this. The lines with arrows say what to do.",
            good=False,
        )
    else:
        print_verdict("lightck can be used here" + (f"; {count(notes, 'note')} above." if notes else "."), good=True)
