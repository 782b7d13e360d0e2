"""A process that has imported torch and lightck, runs no thread, and forks a child for each training.

So a child costs milliseconds instead of the seconds of an import, and a SIGKILL to it is a real one. Its workers are
left as a crash leaves them until the server is asked to bury the dead: until then a pid cannot belong to anybody else.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HANG_SECONDS = 120  # nobody waits longer for a message of a child: a hang is a failure, not a timing
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# ---- in the server ---------------------------------------------------------------------------------------------


def main(sock_fd: int, compiles: bool, without_lightck: bool, programs: str, warms: bool) -> None:
    """``programs``: the module beside this package whose ``run_child`` a child calls."""
    sock = socket.socket(fileno=sock_fd)
    scenarios = importlib.import_module(programs)
    _import(compiles, without_lightck)
    if warms:
        _warm(compiles)
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("a server that forks must not have threads")
    sock.send(b"{}")
    pids: list[int] = []
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2)
        request = json.loads(data) if data else {"do": "bury"}
        answer: dict[str, int] = {}
        if request["do"] == "wait":
            answer["status"] = _status(request["pid"])
        elif request["do"] == "bury":
            _bury(pids)
        else:
            pid = os.fork()
            if not pid:
                sock.close()
                _child(scenarios, request, *fds)
            for fd in fds:
                os.close(fd)
            pids.append(pid)
            answer["pid"] = pid
        if not data:
            return
        sock.send(json.dumps(answer).encode())


def _status(pid: int) -> int:
    """Exit status of a child once it has ended, minus the signal where one killed it. It stays a zombie."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _bury(pids: list[int]) -> None:
    """End the children and what is left of their groups: a worker forked in the moment of the kill stays for ever."""
    while pids:
        os.kill(pids[-1], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pids[-1], signal.SIGKILL)
        os.waitpid(pids.pop(), 0)


def _import(compiles: bool, without_lightck: bool) -> None:
    """What lightck imports when it is first asked for, a child finds there."""
    if without_lightck:
        assert "lightck" not in sys.modules, "a training that never imported lightck"
    else:
        import lightck

        for name in lightck.__all__:
            getattr(lightck, name)
    if compiles:
        with contextlib.suppress(ImportError):  # where it is installed, torch.compile's progress bars start its thread
            importlib.import_module("tqdm").tqdm.monitor_interval = 0
        importlib.import_module("torch._inductor.compile_fx")


def _warm(compiles: bool) -> None:
    """What torch imports at its first update and the compiler at its first run, a child finds there."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))
    called = torch.compile(net, backend="aot_eager") if compiles else net
    optimizer = torch.optim.AdamW(net.parameters())
    called(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
    if compiles:
        torch._dynamo.reset()


def _child(scenarios: Any, request: dict[str, Any], pipe: int, log: int) -> None:
    status = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.setpgid(0, 0)
        _die_with_parent()
        if not request["sees_frozen"]:
            # attach would thaw, collect and search half a million objects that the imports left: nothing is among them.
            gc.get_freeze_count = lambda: 0
        os.register_at_fork(after_in_child=lambda: os.close(pipe))  # a worker that lives on keeps no pipe open
        scenarios.run_child(request, pipe)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    import ctypes

    pr_set_pdeathsig = 1  # <linux/prctl.h>
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


# ---- in the test's process ---------------------------------------------------------------------------------------


class ForkServer:
    """The server as its client sees it. A context manager; the server ends with it."""

    def __init__(
        self,
        *,
        compiles: bool = False,
        environment: dict[str, str] | None = None,
        without_lightck: bool = False,
        programs: str = "",
        warms: bool = True,
    ) -> None:
        """``programs``: a module with ``run_child``, by its name from the folder of tests; scenarios by default.
        ``warms``: whether the server itself makes an update first. With a CUDA device that starts threads and uses the
        driver, so children that use the device need a server that does not.
        ``without_lightck``: its children never import lightck, so they run nothing but reference runs."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package, _, name = __name__.rpartition(".")
        folder = Path(__file__).resolve().parents[len(package.split("."))]
        code = (
            f"import sys; sys.path[:0] = {[str(folder), str(Path(__file__).resolve().parents[2])]!r}\n"
            f"import torch; torch.set_num_threads(1)\n"
            f"from {package}.{name} import main; "
            f"main({theirs.fileno()}, {compiles}, {without_lightck}, {programs or f'{package}.scenarios'!r}, {warms})"
        )
        root = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": paths, **(environment or {})},
        )
        theirs.close()
        self._receive()  # it is ready

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()
        self._process.wait()

    def start(self, request: dict[str, Any], log: Path) -> Child:
        read, write = os.pipe()
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            message = json.dumps({"do": "run", **request}).encode()
            socket.send_fds(self._sock, [message], [write, log_fd])
            pid = self._receive()["pid"]
        finally:
            os.close(write)
            os.close(log_fd)
        return Child(self, pid, read)

    def status(self, pid: int) -> int:
        """Exit status of a child; minus the signal where one killed it. Waits for its end."""
        self._sock.send(json.dumps({"do": "wait", "pid": pid}).encode())
        return int(self._receive()["status"])

    def bury(self) -> None:
        """Reap all children, and end the workers that they left."""
        self._sock.send(json.dumps({"do": "bury"}).encode())
        self._receive()

    def _receive(self) -> dict[str, Any]:
        data = self._sock.recv(1 << 16)
        if not data:
            raise RuntimeError(f"the fork server ended with status {self._process.wait()}")
        return dict(json.loads(data))


class Child:
    """One training in its process. Its pid is its own until it is buried."""

    def __init__(self, server: ForkServer, pid: int, pipe: int) -> None:
        self._server = server
        self._pipe = pipe
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the child reports, until it is dead. A line that the kill cut short was not reported."""
        partial = b""
        while True:
            deadline = time.monotonic() + HANG_SECONDS
            if not select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.kill()
                raise TimeoutError(f"the child said nothing for {HANG_SECONDS} s")
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                return
            *lines, partial = (partial + chunk).split(b"\n")
            for line in lines:
                yield json.loads(line)

    def end(self) -> int:
        """Wait for its end: the exit status."""
        os.close(self._pipe)
        return self._server.status(self.pid)
