"""``lightck bench``: what a checkpoint at each step costs on this machine; in a checkout, the project's whole bench.

The whole bench, with its workloads, rivals and kept results, is ``bench/`` of a checkout and is not installed. Its code
is run only where the user stands in the root of a checkout of this version, or names one with ``--checkout``. A shell
that completes a word runs none of it.
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
from lightck.cli.base import OK, Command, ended_by_signals, json_option, tell, trouble
from lightck.cli.text import columns, count, say, say_json, size, survives, verdict
from lightck.errors import BenchError

if TYPE_CHECKING:
    from lightck.cli.machine_speed import Speed

MACHINE = "machine"
_MUCH = 0.05
"""A share of a step beyond which a user is told what to do about it."""


class _Bench(Command):
    """This machine's measure, or the command of a checkout."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if extra.get("resilient_parsing"):  # a word is completed
            return super().make_context(info_name, args, parent, **extra)
        given = _words.make_context(info_name, list(args), parent).params
        words, named = list(given["words"]), given["checkout"]
        root = _checkout(named)
        if root is None or MACHINE in words:
            return super().make_context(info_name, words, parent, **extra)
        return _command_of(root).make_context(info_name, words, parent, **extra)


@click.command("bench", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.option("--checkout")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def _words() -> None:
    """What is said to ``lightck bench``: ``--checkout``, and all else as it stands."""


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
    help="The medium to measure: a folder on it. [default: /dev/shm where there is room, else the temporary one]",
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Threads of torch. [default: as torch chooses]"
)
@click.option(
    "--checkout", expose_value=False, metavar="DIR", help="Run the whole bench of this checkout of lightck instead."
)
@json_option
def command(words: tuple[str, ...], pool_dir: Path | None, threads: int | None, as_json: bool) -> int:
    """Measure what a checkpoint at each step costs on this machine: less than two minutes, nothing is kept.

    The speed of copies to the medium of a pool, and a small training that is saved at each step, by lightck and by
    torch.save, beside the same training that saves nothing. All take turns, and what counts are ratios.

    In the root of a checkout of lightck of this version, or with --checkout DIR, this is the project's whole bench
    (code from there is run), and "lightck bench machine" is what is said here.
    """
    others = [word for word in words if word != MACHINE]
    if others:
        trouble(
            f"{others[0]!r} is not known here. Tables and their options belong to the project's whole bench, which is "
            f"not installed. Call it in the root of a checkout of lightck {lightck.__version__}, or with "
            f"--checkout DIR, and without {MACHINE!r}."
        )
    with ended_by_signals():
        found = _measured(pool_dir, threads)
    if as_json:
        say_json({**asdict(found), "verdict": verdict_on(found)})
    else:
        _show(found)
    return OK


def _measured(pool_dir: Path | None, threads: int | None) -> Speed:
    import torch

    from lightck.cli import machine_speed
    from lightck.demo.place import free_nbytes, temporary_parent

    room = machine_speed.ROOM_NBYTES
    folder, why = (pool_dir, "as asked for by --pool-dir") if pool_dir else temporary_parent(room)
    if (free := free_nbytes(folder)) < room:
        raise BenchError(
            f"Nothing can be measured in {str(folder)!r}: it has {size(free)} free for this user, and {size(room)} are "
            "needed for pools and files. Make room there, or name a folder on another medium with --pool-dir."
        )
    tell(f"Measuring in {folder}: {why}. This takes about a minute.")
    if threads is not None:
        torch.set_num_threads(threads)
    return machine_speed.measure(folder)


# -- what was found --------------------------------------------------------------------------------------------------


def _show(found: Speed) -> None:
    machine, rates = found.machine, found.bytes_per_second
    cores, threads = count(machine["cores"], "core"), count(machine["threads"], "thread")
    say(f"{cores}, torch {machine['torch']} with {threads}")
    say(f"pools on {found.medium['medium']}, which survives {survives(found.medium)}")
    first = next(iter(rates.values()))
    copies = [(name, size(round(rate)), f"{rate / first:.2f} x") for name, rate in rates.items()]
    steps = [(_name(found, name), _ms(seconds), *_added(found, name)) for name, seconds in found.step_seconds.items()]
    heads = f"a training of {size(found.state_nbytes)}", "a step", "longer by", "interval of 95 %", "held up for"
    for table in (("copies on one thread", "per second", "of the first"), *copies), (heads, *steps):
        say()
        for line in columns(table, right=range(1, 5)):
            click.echo(line)
    say()
    verdict(verdict_on(found), good=True)
    say(f"Medians of {found.rounds} rounds. Of your own training, session.stats() says what it costs.")


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
    """The verdict, in words. What is less than equal trainings differ by, or may as well be nothing, is not called a
    cost."""
    _, (again, ours, theirs) = zip(*found.added.items(), strict=True)
    noise = max(abs(again.low), abs(again.high))
    other = f"torch.save{' and fsync' if found.is_synced else ''} at each step costs {_share(theirs.median)}."
    if theirs.median <= noise or theirs.low <= 0:
        return (
            f"Nothing can be told now: two equal trainings differ by up to {_share(noise)} of a step, and {other} "
            "Measure again while the machine does nothing else."
        )
    if ours.median <= noise or ours.low <= 0:
        return (
            f"The cost of a checkpoint at each step cannot be told from noise on this medium: {_share(ours.median)} of "
            f"a step, where two equal trainings differ by up to {_share(noise)}; {other}"
        )
    cure = ' interval="auto" saves as often as costs at most 3 %.' if ours.median > _MUCH else ""
    return f"A checkpoint at each step costs {_share(ours.median)} of a step on this medium; {other}{cure}"


# -- the checkout ----------------------------------------------------------------------------------------------------


def _checkout(named: str | None) -> Path | None:
    """The root of a checkout of this version: the one that is named, or else the working directory where it is one."""
    root, own = Path(named or "."), lightck.__version__
    version = _version_in(root)
    if version == own:
        return root
    if named is None and version is not None:
        tell(f"The bench of this checkout, of lightck {version}, is not run: this is lightck {own}.")
    if named is None:
        return None
    if version is None:
        raise BenchError(
            f"{named!r} is no checkout of lightck: it has no bench/command.py beside the sources of lightck. Name "
            f"the root of a checkout of lightck {own}, or leave --checkout out to measure this machine."
        )
    raise BenchError(
        f"{named!r} is a checkout of lightck {version}, and this is lightck {own}: a bench measures its own version. "
        f"Check out {own} there, or install {version}."
    )


def _version_in(folder: Path) -> str | None:
    """The version of lightck whose checkout this is, or None. Nothing of it is run, so both files are read as text."""
    project, package = folder / "pyproject.toml", folder / "lightck" / "__init__.py"
    if not (project.is_file() and package.is_file() and (folder / "bench" / "command.py").is_file()):
        return None
    part = re.search(r"^\[project\]\n(.*?)(?:^\[|\Z)", project.read_text(errors="replace"), re.M | re.S)
    if part is None or not re.search(r'^name = "lightck"$', part[1], re.M):
        return None
    version = re.search(r'^__version__ = "([^"]*)"$', package.read_text(errors="replace"), re.M)
    return version[1] if version else None


def _command_of(root: Path) -> click.Command:
    """Its ``lightck bench``: from here on code from there runs."""
    from lightck.pool.storage.file import others_write

    for folder in (root, root / "bench"):
        if others_write(os.stat(folder)):
            raise BenchError(
                f"The bench of {str(root.resolve())!r} is not run: others can write to {str(folder.resolve())!r}, and "
                "put their own code there. Take that right from them (chmod go-w), or use a checkout of your own; "
                f"'lightck bench {MACHINE}' measures this machine without it."
            )
    path = str(root.resolve())
    if path not in sys.path:
        sys.path.append(path)  # last: what is measured is the lightck that was called
    package = importlib.import_module("bench")
    if not package.__file__ or Path(package.__file__).resolve().parents[1] != root.resolve():
        raise BenchError(
            f"The bench of {path!r} cannot be run: Python finds another package of that name ({package.__file__}). "
            "Take its folder off PYTHONPATH, or uninstall it."
        )
    found: click.Command = importlib.import_module("bench.command").command
    return found
