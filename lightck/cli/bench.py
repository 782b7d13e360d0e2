"""``lightck bench``: how much time a checkpoint at each step takes on this machine; in a checkout, the project's whole
bench.

The whole bench (workloads, rivals, kept results) is the folder ``bench/`` of a checkout, and is not installed. This
command runs code of a checkout in two cases only: the working directory is the root of a checkout of the installed
version of lightck, or ``--checkout`` names such a root. Shell completion never runs code of a checkout.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import lightck
from lightck.cli.base import OK, Command, ended_by_signals, json_option, print_progress, usage_error
from lightck.cli.text import columns, count, print_json, print_line, print_verdict, size, survives
from lightck.errors import BenchError

if TYPE_CHECKING:
    from lightck.cli.machine_speed import Speed

MACHINE = "machine"
_EXPENSIVE = 0.05
"""If a checkpoint takes more than this share of a step, the verdict suggests ``interval="auto"``."""


class _Bench(Command):
    """The command that measures this machine. If the bench of a checkout is to be run, the bench command of this
    checkout parses the arguments instead."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if extra.get("resilient_parsing"):  # shell completion
            return super().make_context(info_name, args, parent, **extra)
        given = _raw_arguments.make_context(info_name, list(args), parent).params
        words, folder = list(given["words"]), given["checkout"]
        root = _checkout(folder)
        if root is None or MACHINE in words:
            return super().make_context(info_name, words, parent, **extra)
        return _command_of(root).make_context(info_name, words, parent, **extra)


@click.command("bench", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.option("--checkout")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def _raw_arguments() -> None:
    """Parses ``--checkout``; all other arguments go into ``words`` unparsed."""


@click.command(
    "bench",
    cls=_Bench,
    short_help="What a checkpoint at each step costs on this machine.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=f"[{MACHINE}]")
@click.option(
    "--pool-dir",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    metavar="DIR",
    help="A folder on the medium to measure. [default: /dev/shm where it has room, else the temporary folder]",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="The number of torch's threads. [default: torch decides]",
)
@click.option(
    "--checkout", expose_value=False, metavar="DIR", help="Run the whole bench of the lightck checkout in DIR instead."
)
@json_option
def command(words: tuple[str, ...], pool_dir: Path | None, threads: int | None, as_json: bool) -> int:
    """Measure what a checkpoint at each step costs on this machine. Takes less than two minutes; keeps nothing.

    Measures the speed of copies to the medium of a pool, and the step time of a small training without checkpoints,
    with lightck at each step, and with torch.save at each step. The trainings take turns; the results are ratios.

    In the root of a checkout of this version of lightck, or with --checkout DIR, this command runs the project's whole
    bench (that is, code of the checkout), and "lightck bench machine" runs the measurement described here.
    """
    others = [word for word in words if word != MACHINE]
    if others:
        usage_error(
            f"{others[0]!r} belongs to the project's whole bench, or is misspelt. The whole bench is not installed "
            f"with lightck: run this command in a checkout of lightck {lightck.__version__}, or add --checkout DIR. To "
            f"measure only this machine, omit {others[0]!r}."
        )
    with ended_by_signals():
        found = _measured(pool_dir, threads)
    if as_json:
        print_json({**asdict(found), "verdict": verdict_on(found)})
    else:
        _show(found)
    return OK


def _measured(pool_dir: Path | None, threads: int | None) -> Speed:
    import torch

    from lightck.cli import machine_speed
    from lightck.demo.place import free_nbytes, temporary_parent

    room = machine_speed.ROOM_NBYTES
    folder, why = (pool_dir, "requested by --pool-dir") if pool_dir else temporary_parent(room)
    if (free := free_nbytes(folder)) < room:
        raise BenchError(
            f"Nothing can be measured in {str(folder)!r}: the folder has {size(free)} free for this user, and "
            f"{size(room)} are needed. Free some space in it, or name a folder on another medium with --pool-dir."
        )
    print_progress(f"Measuring in {folder}: {why}. This takes about a minute.")
    if threads is not None:
        torch.set_num_threads(threads)
    return machine_speed.measure(folder)


# -- output ----------------------------------------------------------------------------------------------------------


def _show(found: Speed) -> None:
    machine, rates = found.machine, found.bytes_per_second
    cores, threads = count(machine["cores"], "core"), count(machine["threads"], "thread")
    print_line(f"{cores}, torch {machine['torch']} with {threads}")
    print_line(f"pools on {found.medium['medium']}, which survives {survives(found.medium)}")
    first = next(iter(rates.values()))
    copies = [(name, size(round(rate)), f"{rate / first:.2f} x") for name, rate in rates.items()]
    steps = [(_name(found, name), _ms(seconds), *_added(found, name)) for name, seconds in found.step_seconds.items()]
    heads = f"a training of {size(found.state_nbytes)}", "a step", "longer by", "interval of 95 %", "held up for"
    for table in (("copies on one thread", "per second", "relative"), *copies), (heads, *steps):
        print_line()
        for line in columns(table, right=range(1, 5)):
            click.echo(line)
    print_line()
    print_verdict(verdict_on(found), good=True)
    print_line(f"Medians of {found.rounds} rounds. For the cost in your own training, see session.stats().")


def _name(found: Speed, name: str) -> str:
    return f"{name}, fsync" if name == "torch.save" and found.is_synced else name


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _added(found: Speed, name: str) -> tuple[str, str, str]:
    if name not in found.added:
        return "", "", ""
    share, held_up = found.added[name], found.held_up_seconds.get(name)
    return _share(share.median), f"{_share(share.low)} to {_share(share.high)}", "" if held_up is None else _ms(held_up)


def _share(share: float) -> str:
    return f"{100 * share:.1f} %"


def verdict_on(found: Speed) -> str:
    """Return the verdict as a sentence. A difference that is within the noise (the difference between two equal
    trainings) is not called a cost."""
    _, (again, ours, theirs) = zip(*found.added.items(), strict=True)
    noise = max(abs(again.low), abs(again.high))
    other = f"torch.save{' and fsync' if found.is_synced else ''} at each step costs {_share(theirs.median)}"
    if theirs.median <= noise or theirs.low <= 0:
        return (
            f"The noise is too large to measure a cost: two equal trainings differ by up to {_share(noise)} of a step, "
            f"and {other}, which is not clearly more. Measure again while the machine does nothing else."
        )
    if ours.median <= noise or ours.low <= 0:
        return (
            f"The cost of a checkpoint at each step is within the noise on this medium: {_share(ours.median)} of a "
            "step, "
            f"where two equal trainings differ by up to {_share(noise)}; {other}."
        )
    cure = (
        ' interval="auto" saves less often, so that checkpoints cost at most 3 %.' if ours.median > _EXPENSIVE else ""
    )
    return f"A checkpoint at each step costs {_share(ours.median)} of a step on this medium; {other}.{cure}"


# -- the checkout ----------------------------------------------------------------------------------------------------


def _checkout(folder: str | None) -> Path | None:
    """Return the root of the checkout to run: ``folder``, or the working directory. Returns None if ``folder`` is None
    and the working directory is no checkout of this version. Raises ``BenchError`` if ``folder`` is given and is
    no checkout of this version."""
    root, own = Path(folder or "."), lightck.__version__
    version = _version_in(root)
    if version == own:
        return root
    if folder is None and version is not None:
        print_progress(f"The bench of this checkout (lightck {version}) is not run: the installed lightck is {own}.")
    if folder is None:
        return None
    if version is None:
        raise BenchError(
            f"{folder!r} is no checkout of lightck: it has no bench/command.py beside the sources of lightck. Name the "
            f"root of a checkout of lightck {own}, or omit --checkout to measure this machine."
        )
    raise BenchError(
        f"{folder!r} is a checkout of lightck {version}, and lightck {own} is installed: a bench measures only the "
        f"version of its checkout. Check out lightck {own} in that folder, or install lightck {version}."
    )


def _version_in(folder: Path) -> str | None:
    """Return the version of lightck in a checkout, or None if ``folder`` is no checkout. Files of the checkout are read
    as text, and no code of it is run."""
    project, package = folder / "pyproject.toml", folder / "lightck" / "__init__.py"
    if not (project.is_file() and package.is_file() and (folder / "bench" / "command.py").is_file()):
        return None
    part = re.search(r"^\[project\]\n(.*?)(?:^\[|\Z)", project.read_text(errors="replace"), re.M | re.S)
    if part is None or not re.search(r'^name = "lightck"$', part[1], re.M):
        return None
    version = re.search(r'^__version__ = "([^"]*)"$', package.read_text(errors="replace"), re.M)
    return version[1] if version else None


def _command_of(root: Path) -> click.Command:
    """Return the bench command of a checkout. Imports code of the checkout, and thereby runs it. Raises ``BenchError``
    if other users can write to the checkout."""
    from lightck.pool.storage.file import others_write

    for folder in (root, root / "bench"):
        if others_write(os.stat(folder)):
            raise BenchError(
                f"The bench of {str(root.resolve())!r} is not run: others can write to {str(folder.resolve())!r}, and "
                "could put code of their own into it. Remove this permission (chmod go-w), or use another checkout; "
                f"'lightck bench {MACHINE}' measures this machine without a checkout."
            )
    path = str(root.resolve())
    if path not in sys.path:
        sys.path.append(path)  # last, so that the installed lightck is measured
    package = importlib.import_module("bench")
    if not package.__file__ or Path(package.__file__).resolve().parents[1] != root.resolve():
        raise BenchError(
            f"The bench of {path!r} cannot be run: Python finds another package named bench ({package.__file__}). "
            "Remove its folder from PYTHONPATH, or uninstall that package."
        )
    found: click.Command = importlib.import_module("bench.command").command
    return found
