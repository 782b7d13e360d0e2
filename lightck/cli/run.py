"""``lightck run``: runs a command, and then waits for the drains of its trainings.

A drain outlives its training. If the container, or the step of a batch job, ends as soon as its first process ends, the
drain is killed with it. So this process adopts the drains (they are its grandchildren), and ends after them.

If a signal ends a shell, the training that the shell has started goes on as an orphan. This process adopts the
training, and passes the signal on to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

import click

from lightck.cli.base import FAILED, Command, print_error, print_progress, signals_handled
from lightck.tiers.drain_messages import ANNOUNCING_SIGNALS, DRAIN_MODULE, PROCESS_NAME

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_SECONDS = 0.05
_KEYS = (signal.SIGINT, signal.SIGQUIT)
"""The signals that a terminal sends for Ctrl-C and Ctrl-\\."""


@click.command(
    "run",
    cls=Command,
    short_help="Run a training, and wait until its checkpoints are in their tiers.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> int:
    """Run COMMAND, and pass signals on to it. Then wait until the processes that send its checkpoints to tiers have
    ended too, and return the exit status of COMMAND. Example: lightck run -- python train.py

    These processes take ten minutes at most after the end of their training. A second SIGTERM or Ctrl-C after the end
    of COMMAND ends the wait. In the foreground of a terminal, SIGINT and SIGQUIT are not passed on: they are taken for
    Ctrl-C and Ctrl-\\, which the terminal sends to COMMAND too. To end COMMAND from elsewhere, send SIGTERM.
    """
    _adopt_orphans()
    arrived: list[int] = []
    passed: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        if process is None:
            arrived.append(number)
        elif not _comes_from_keys(number):
            passed.append(number)
            process.send_signal(number)

    with signals_handled(pass_on, *ANNOUNCING_SIGNALS):
        try:
            process = subprocess.Popen(words)
        except OSError as err:
            print_error(f"{words[0]!r} cannot be run: {err.strerror}. Name a program: lightck run -- python train.py")
            return FAILED
        for number in arrived:
            pass_on(number, None)
        status = process.wait()
    _wait_for_drains(passed)
    return status if status >= 0 else 128 - status


def _comes_from_keys(number: int) -> bool:
    """Whether a signal can be one that the terminal sends for its keys to this process group. The command belongs to
    this group too, so it gets the signal without this process."""
    if number not in _KEYS:
        return False
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False


def _adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, if the system allows it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait_for_drains(signals: list[int]) -> None:
    """Wait until no drain is left below this process. ``signals``: those that were passed on to the command. A training
    that outlives the command gets the newest of them, once; if there is none, the first that arrives during the
    wait."""
    has_announced = False
    n_signals = n_empty = 0
    reached: set[int] = set()

    def count(number: int, _: object) -> None:
        nonlocal n_signals
        n_signals += 1
        if not _comes_from_keys(number):
            signals.append(number)

    with signals_handled(count, *ANNOUNCING_SIGNALS):
        while n_signals < 2:
            heads = _children_with_drains()
            n_empty = 0 if heads else n_empty + 1
            if n_empty > 1:  # a drain may be missed once, because its parent has ended meanwhile
                break
            if heads and not has_announced:
                print_progress("waiting until the newest checkpoint is in its tiers")
                has_announced = True
            for pid in [each for each, is_drain in heads.items() if not is_drain and each not in reached and signals]:
                reached.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signals[-1])
            time.sleep(_PAUSE_SECONDS)


def _is_drain(process: Path) -> bool:
    """Whether a folder of /proc is that of a drain, also of one that has just begun and has not taken its name yet.
    Raises ``OSError`` if it is gone."""
    name = (process / "comm").read_text().strip()
    return name == PROCESS_NAME or DRAIN_MODULE.encode() in (process / "cmdline").read_bytes()


def _children_with_drains() -> dict[int, bool]:
    """Return the children of this process that are drains, or below which a drain runs, each with whether it is a drain
    itself. Children that have ended are reaped first."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    parents: dict[int, int] = {}
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, of = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            # The parent of a zombie is kept too: a zombie of which only the first thread has ended still has children.
            parents[int(process.name)] = int(of)
            if state != "Z":
                running.append(process)
    found = {}
    for process in running:
        head = int(process.name)
        while (parent := parents.get(head, 0)) not in (0, os.getpid()):
            head = parent
        if parent:
            with contextlib.suppress(OSError):
                if _is_drain(process):
                    found[head] = int(process.name) == head
    return found
