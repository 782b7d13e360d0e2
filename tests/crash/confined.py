"""Trials in a child that cannot take this process with it: memory bounded by the kernel, time watched, crashes seen.

Where a trial ends its child (a signal, a hang), that is a finding of this trial, and another child goes on behind it.
The size of the address space is what the kernel counts, whoever asked for memory, and whether or not it was touched.
What malloc had free before the first trial is not asked of the kernel and not seen: long campaigns run in a process of
their own, which has little of it.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
import resource
import select
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable

from crash.campaign import Finding, Tally

CHUNK = 20_000
"""Trials of one child."""
HUNG_SECONDS = 120
"""Without progress, by the clock: other processes may have the machine. What a trial itself took is CPU time."""
CPU_SECONDS_MAX = 1.0
PER_KIND_MAX = 3
"""Findings of one kind that are kept; the others are counted."""
_NUMBER = struct.Struct("<Q")


class Limits:
    """Of one child: how much the address space may grow at a trial."""

    def __init__(self, grow_nbytes: int) -> None:
        self.grow_nbytes = grow_nbytes
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        self._base = self.peak()
        hard = self._base + 4 * grow_nbytes
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def peak(self) -> int:
        """Bytes that the address space had at most."""
        found = re.search(rb"VmPeak:\s*(\d+) kB", os.pread(self._status, 4096, 0))
        assert found is not None, "Linux says it"
        return 1024 * int(found[1])

    def grown(self) -> int:
        return self.peak() - self._base


def run(trials: range, play: Callable[[int, Tally], None], grow_nbytes: int, say: Callable[[str], None]) -> Tally:
    """``play`` of every trial, in children. A trial may take a second of CPU, and so many bytes of memory."""
    tally = Tally()
    left, seen = trials, 0
    while left:
        chunk, left = left[:CHUNK], left[CHUNK:]
        while chunk:
            chunk = _child(chunk, play, grow_nbytes, tally)
        for finding in tally.findings[seen:]:
            say(f"found {finding}")
        seen = len(tally.findings)
        say(f"{trials.index(left[0]) if left else len(trials):,} of {len(trials):,}, {len(tally.findings)} findings")
    return _condensed(tally)


def _child(chunk: range, play: Callable[[int, Tally], None], grow_nbytes: int, tally: Tally) -> range:
    """Returns the trials that are left when a child has ended."""
    now = mmap.mmap(-1, _NUMBER.size)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _in_child(chunk, play, grow_nbytes, now, write)
    os.close(write)
    answer, hung = _answer(read, now, pid)
    _, status = os.waitpid(pid, 0)
    (done,) = _NUMBER.unpack(now[:])
    now.close()
    if status == 0 and answer:
        facts = json.loads(answer)
        tally.counts.update(facts["counts"])
        tally.findings += [Finding(trial, reason) for trial, reason in facts["findings"]]
        return chunk[facts["done"] :]
    trial = chunk[min(done, len(chunk) - 1)]
    ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
    tally.found(trial, "it hung" if hung else f"the process ended with {ended}")
    tally.counts["inputs before a crash, not counted"] += done
    return chunk[done + 1 :]


def _answer(read: int, now: mmap.mmap, pid: int) -> tuple[bytes, bool]:
    """What the child sent, and whether it had to be killed."""
    data, seen, since = b"", b"", time.monotonic()
    with os.fdopen(read, "rb", buffering=0) as source:
        while True:
            if select.select([source], [], [], 1.0)[0]:
                part = source.read(1 << 16)
                if not part:
                    return data, False
                data += part
            elif now[:] != seen:
                seen, since = now[:], time.monotonic()
            elif time.monotonic() - since > HUNG_SECONDS:
                os.kill(pid, signal.SIGKILL)
                return b"", True


def _in_child(chunk: range, play: Callable[[int, Tally], None], grow_nbytes: int, now: mmap.mmap, write: int) -> None:
    try:
        tally, done = Tally(), 0
        limits = Limits(grow_nbytes)
        gc.freeze()  # what came before is not searched for garbage again and again
        for trial in chunk:
            now[:] = _NUMBER.pack(done)
            begun = time.process_time()
            play(trial, tally)
            done += 1
            if time.process_time() - begun > CPU_SECONDS_MAX:
                tally.found(trial, f"it took {time.process_time() - begun:.1f} s")
            if limits.grown() > grow_nbytes:
                tally.found(trial, "it took more memory than allowed")
                break  # the peak stays: only a fresh child sees the next one
        findings = [(f.trial, f.reason) for f in tally.findings]
        answer = json.dumps({"done": done, "counts": tally.counts, "findings": findings}).encode()
        with os.fdopen(write, "wb") as out:
            out.write(answer)
        os._exit(0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)


def _condensed(tally: Tally) -> Tally:
    """Of many findings of one kind the first few."""
    kinds: Counter[str] = Counter()
    kept = []
    for finding in tally.findings:
        kind = re.sub(r"'[^']*'|\d+|\"[^\"]*\"", "_", finding.reason)[:100]
        kinds[kind] += 1
        if kinds[kind] <= PER_KIND_MAX:
            kept.append(finding)
    dropped = len(tally.findings) - len(kept)
    if dropped:
        tally.counts["findings like the ones named"] += dropped
    return Tally(tally.counts, kept)
