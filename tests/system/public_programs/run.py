"""Run public training programs with lightck, kill them, and compare what they become with a run without lightck.

    python -m public_programs.run --repositories FOLDER [--only NAME ...] [--save docs/evidence]     # in tests/

By hand, never in CI. FOLDER has the repositories of catalog.COMMITS, each a clone under ``owner+name`` (or a git
directory ``owner+name/repo``); nothing is downloaded, and nothing of theirs is written anywhere but below --work.

A program runs once without lightck. With lightck it runs once without a kill, then it is killed in many ways, each time
on a new pool, and started again until it ends. The weights and optimizers at its end must be those of the first run, to
the bit, or lightck must have said a warning or raised an error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resume.forkserver import ForkServer

from . import report
from .catalog import COMMITS, PROGRAMS, Program
from .edits import apply

HERE = Path(__file__).resolve().parent
MOST_PROCESSES = 10
MAY_BE_LOST = 2  # updates: one that is not committed, and one whose checkpoint was given up


@dataclass(frozen=True)
class Kill:
    """When a process dies: at the ``nth`` event of a kind (see child.Events), or ``delay`` seconds after it."""

    kind: str
    nth: int
    delay: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.nth}" + (f" + {self.delay * 1e3:.0f} ms" if self.delay else "")


@dataclass
class Reported:
    """The reports of one process."""

    status: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    place: str | None = None
    digests: dict[str, str] | None = None
    marks: list[tuple[str, int, int]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Chain:
    """Processes on one pool, from nothing to the program's end."""

    kills: list[str]
    came: int = 0
    processes: int = 0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    error_in: str | None = None
    differs: list[str] | None = None
    """What differs at the end from the run without lightck; empty: identical. None: there was no end."""
    differs_from_whole: list[str] | None = None
    """The same, from the run with lightck that was not killed."""


class Runner:
    def __init__(self, program: Program, repositories: Path, work: Path, plain: ForkServer, ours: ForkServer) -> None:
        self.program, self._repositories = program, repositories
        self._work = work / "".join(c if c.isalnum() else "_" for c in program.name)
        self._servers = {"plain": plain, "ours": ours}
        self.lines = 0
        self.last: dict[str, str] | None = None
        """Digests at the end of the last chain."""
        self._n_runs = 0

    # -- the program's files

    def prepare(self) -> None:
        """Both variants, patched, with their data."""
        shutil.rmtree(self._work, ignore_errors=True)
        for variant in self._servers:
            root = self._work / variant
            root.mkdir(parents=True)
            self._check_out(root)
            apply(self.program.common, root, self.program.script)
            if variant == "ours":
                self.lines = apply(self.program.ours, root, self.program.script)
            self.program.data(root)

    def _check_out(self, root: Path) -> None:
        if not self.program.repository:
            shutil.copy(HERE / "scripts" / self.program.script, root)
            return
        base = self._repositories / self.program.repository.replace("/", "+")
        git = base / "repo" if (base / "repo").exists() else base
        taken = self.program.take or (str(Path(self.program.script).parent),)
        archive = subprocess.run(
            ["git", "-C", str(git), "archive", COMMITS[self.program.repository], *taken],
            capture_output=True,
            check=True,
        )
        subprocess.run(["tar", "-x", "-C", str(root)], input=archive.stdout, check=True)

    # -- one process

    def process(self, variant: str, folder: Path, kill: Kill | None, seed: int) -> Reported:
        script = folder / self.program.script
        request = {
            "folder": str(folder / self.program.folder if self.program.folder else script.parent),
            "script": str(script),
            "argv": self.program.argv.split(),
            "paths": list(self.program.paths),
            "seed": seed,
            "with_lightck": variant == "ours",
            "environment": self.program.environment,
            "sees_frozen": False,
            "kill": asdict(kill) if kill and not kill.delay else None,
        }
        if self.program.paths == (".",):
            request["folder"] = str(folder)
        server = self._servers[variant]
        started = server.start(request, self._work / f"{variant}.log")
        reported, deadline = Reported(), time.monotonic() + self.program.seconds
        over = threading.Event()
        threading.Thread(target=_let_it_die, args=(started.pid, over), daemon=True).start()
        try:
            for message in started.messages():
                self._take(reported, message)
                if kill and kill.delay and (message.get("event"), message.get("count")) == (kill.kind, kill.nth):
                    time.sleep(kill.delay)
                    started.kill()
                if time.monotonic() > deadline:
                    reported.error = "TimeoutError: it hangs"
                    started.kill()
        except TimeoutError as error:
            reported.error = f"TimeoutError: {error}"
        reported.status = started.end()
        over.set()
        server.bury()
        return reported

    @staticmethod
    def _take(reported: Reported, message: dict[str, Any]) -> None:
        if "warning" in message:
            reported.warnings.append(message["warning"])
        elif "event" in message:
            reported.seconds.append(time.monotonic())
        elif "error" in message:
            reported.error, reported.place = message["error"], message.get("place")
        elif "digests" in message:
            reported.digests, reported.counts = message["digests"], message["counts"]
            reported.marks = [tuple(mark) for mark in message["marks"]]

    # -- a chain of them

    def fresh_folder(self, variant: str) -> Path:
        self._n_runs += 1
        folder = self._work / f"run-{self._n_runs}"
        shutil.copytree(self._work / variant, folder)
        return folder

    def reference(self) -> Reported:
        folder = self.fresh_folder("plain")
        reported = self.process("plain", folder, None, 0)
        shutil.rmtree(folder)
        if reported.digests is None:
            raise RuntimeError(
                f"without lightck it fails: {reported.error} at {reported.place}; see {self._work}/plain.log"
            )
        return reported

    def chain(self, kills: list[Kill], reference: Reported, whole: dict[str, str] | None = None) -> Chain:
        found, folder, waiting = Chain([str(kill) for kill in kills]), self.fresh_folder("ours"), list(kills)
        n_events = 0
        while found.processes < MOST_PROCESSES:
            kill = waiting.pop(0) if waiting else None
            is_first = not found.processes
            # Other seeds would show what a resume does not restore; where nothing is committed yet, there is no resume.
            reported = self.process("ours", folder, kill, 0 if n_events <= MAY_BE_LOST else 1000 + found.processes)
            found.processes += 1
            n_events += len(reported.seconds)
            found.warnings += [warning for warning in reported.warnings if warning not in found.warnings]
            if reported.error is not None:
                found.error, found.error_in = reported.error, "first run" if is_first else "restart"
                break
            if reported.digests is not None:
                assert reference.digests is not None
                self.last = reported.digests
                found.differs = _different(reported.digests, reference.digests)
                found.differs_from_whole = _different(reported.digests, whole) if whole is not None else None
            if reported.status == 0:
                break
            if reported.status != -signal.SIGKILL:
                found.error, found.error_in = f"status {reported.status}", "first run" if is_first else "restart"
                break
            found.came += 1
        shutil.rmtree(folder)
        return found


def _let_it_die(pid: int, over: threading.Event) -> None:
    """A killed process is gone when its threads with idle priority have run once more; on a loaded machine that takes
    seconds, and how long is no matter here."""
    while not over.wait(0.05):
        with contextlib.suppress(OSError, ValueError):
            status = Path(f"/proc/{pid}/status").read_text()
            pending = [
                int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
            ]
            if any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending) or "State:\tZ" in status:
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def _different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def kills_for(reference: Reported, draw: random.Random) -> list[list[Kill]]:
    """Lists of kills, one list for each chain: in mid-epoch, at its end and the next one's start, in evaluation, at
    random instants, and again and again."""
    event = "update" if reference.counts["update"] else "backward"
    last = reference.counts[event]
    between = [mark for mark in reference.marks if 0 < mark[2] < last]
    end = between[0][2] if between else max(1, last // 3)
    kills = [[Kill(event, nth)] for nth in dict.fromkeys((last // 2 + 1, end, min(end + 1, last), 1, last))]
    for kind, which in (("eval", 0), ("pass", -1)):
        of_kind = [mark for mark in between if mark[0] == kind]
        kills[2:2] = [[Kill(kind, of_kind[which][1])]] if of_kind else []
    gaps = sorted(b - a for a, b in zip(reference.seconds, reference.seconds[1:], strict=False)) or [0.01]
    kills.insert(4, [Kill(event, draw.randint(1, last), draw.uniform(0.001, 1.5 * gaps[len(gaps) // 2]))])
    kills.insert(5, [Kill(event, draw.randint(3, max(3, last // 4))) for _ in range(4)])
    return kills


def run(runner: Runner, seed: int, most: int | None) -> dict[str, Any]:
    program = runner.program
    result: dict[str, Any] = {
        "program": program.name,
        "repository": program.repository,
        "commit": COMMITS.get(program.repository, ""),
        "script": program.script,
        "wiring": program.wiring,
        "seed": seed,
        "lightck": _version(),
    }
    try:
        runner.prepare()
        result["lines"] = runner.lines
        reference = runner.reference()
        draw = random.Random(f"{program.name} {seed}")
        result["updates"] = reference.counts["update"] or reference.counts["backward"]
        result["whole"] = asdict(runner.chain([], reference))
        if result["whole"]["error"] is not None:  # killing what does not run tells nothing
            result["chains"] = []
            return result
        whole = runner.last
        chains = kills_for(reference, draw)[:most]
        result["chains"] = [asdict(runner.chain(kills, reference, whole)) for kills in chains]
    except Exception as error:
        result["not run"] = f"{type(error).__name__}: {error}"
    return result


def _version() -> str:
    """The commit of lightck that was run."""
    reported = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True)
    return os.environ.get("LIGHTCK_PROGRAMS_VERSION") or reported.stdout.strip()


def _chosen(only: list[str]) -> Iterator[Program]:
    for name, program in PROGRAMS.items():
        if not only or any(name == wanted or name.startswith(wanted + ",") for wanted in only):
            yield program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/public-programs"))
    parser.add_argument("--only", nargs="*", default=[], help="names of programs; a name stands for its wirings too")
    parser.add_argument("--save", type=Path, help="a folder for public-programs.md and public-programs/results.json")
    parser.add_argument("--preload", default="", help="modules that are imported once: torchvision,timm,...")
    parser.add_argument("--chains", type=int, help="at most so many for each program, for a quick look")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    environment = {"LIGHTCK_PROGRAMS_PRELOAD": args.preload, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    results = []
    with ExitStack() as stack:
        plain = ForkServer(programs="public_programs.child", without_lightck=True, environment=environment)
        ours = ForkServer(programs="public_programs.child", environment=environment)
        servers = [stack.enter_context(plain), stack.enter_context(ours)]
        for program in _chosen(args.only):
            started = time.monotonic()
            result = run(Runner(program, args.repositories, args.work, *servers), args.seed, args.chains)
            results.append(result)
            print(report.in_words(result), f"({time.monotonic() - started:.0f} s)", flush=True)
            if args.save is not None:
                report.save(args.save, results)


if __name__ == "__main__":
    main()
