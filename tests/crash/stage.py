"""A process that has imported torch and lightck, and forks a child for each scene: real faults, at a fork's price.

A scene is a function ``module:name`` that takes and returns plain values. ``Stage.play`` says how it ended: its result,
the status of its process, or that it hung and was killed. With ``interpose`` the process is started under
``interpose.c``, so that scenes can arm faults of system calls. Only the stage's own children are ever killed.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightck
from crash import interpose

HANG_SECONDS = 60.0
"""The longest wait for a scene; a longer one counts as a hang, which is a failure."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a scene ended."""

    result: Any
    """What the function returned; None where it did not return."""
    status: int
    """As ``os.waitstatus_to_exitcode``: 0, an exit code, or minus the number of a signal."""
    hung: bool
    text: str
    """What the child wrote to stderr, its last lines."""

    def trouble(self) -> str | None:
        """Why this is no ending that a training may have; None where the scene returned."""
        if self.hung:
            return f"it hung: {self.text}"
        if self.status != 0:
            return f"the process ended with {_named(self.status)}: {self.text}"
        return None if self.result is not None else f"the scene raised: {self.text}"


def _named(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


class Stage:
    """The process with its children; ``with`` ends it."""

    def __init__(self, *, interposed: bool = False, path: str | None = None) -> None:
        """``path``: a folder beside lightck's in which modules are found."""
        self.plant: str | None = None
        """A function ``module:name`` that is called before each scene, in its process: tests plant bugs by it."""
        self._texts = tempfile.TemporaryDirectory(prefix="lightck-stage-")
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(_paths(path))}
        if interposed:
            library = interpose.build(self._texts.name)
            before = os.environ.get("LD_PRELOAD")  # a sanitizer's library has to stay the first
            environment["LD_PRELOAD"] = f"{before}:{library}" if before else library
        command = [sys.executable, "-m", "crash.stage"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._answer()

    def play(self, scene: str, *arguments: Any, seconds: float = HANG_SECONDS) -> Ending:
        """Run ``module:name`` with these arguments in a child, and wait until the process is gone."""
        text = os.path.join(self._texts.name, "stderr")
        assert self._process.stdin is not None
        request = {"scene": scene, "arguments": arguments, "text": text, "seconds": seconds, "plant": self.plant}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Ending(answer["result"], answer["status"], answer["hung"], answer["text"])

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the stage ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()
        self._texts.cleanup()


def _paths(path: str | None) -> list[str]:
    """Where the stage finds lightck and this package: where this process found them."""
    found = [str(Path(str(file)).resolve().parents[1]) for file in (__file__, lightck.__file__)]
    return [p for p in (path, *found, os.environ.get("PYTHONPATH")) if p]


def clear(folder: str) -> None:
    """Remove the folder of a life, and the note beside it of what was acknowledged there: the next life is another."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(f"{folder}.acknowledged").unlink(missing_ok=True)


@contextmanager
def staged(stage: Stage | None, *, interposed: bool = False) -> Iterator[Stage]:
    """The stage that is given, or one for this block."""
    if stage is not None:
        yield stage
        return
    with Stage(interposed=interposed) as own:
        yield own


# -- in the stage's process -----------------------------------------------------------------------------------------


def serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _warm()
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0  # attach would unfreeze, to search what was imported for optimizers
    _tell(answers, {})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            answers.close()
            _child(request, write)
            return  # an interpreter that ends: with all that belongs to it
        os.close(write)
        _tell(answers, _ended(pid, read, request))


def _tell(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _warm() -> None:
    """What torch and lightck import when they are first used is imported once, here."""
    import torch

    import lightck

    for name in lightck.__all__:
        getattr(lightck, name)

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a process that forks must have one"


def _named_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _child(request: Any, write: int) -> None:
    """Run the scene and send its result. Returns if the interpreter is to end by itself."""
    with open(os.devnull, "rb") as nothing, open(request["text"], "wb", buffering=0) as text:
        os.dup2(nothing.fileno(), 0)
        os.dup2(text.fileno(), 1)
        os.dup2(text.fileno(), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(request["seconds"] * 0.9, exit=False)

    def say(result: Any) -> None:
        os.write(write, json.dumps(result).encode())
        os.close(write)

    try:
        if request["plant"]:
            _named_function(request["plant"])()
        result = _named_function(request["scene"])(*request["arguments"])
        if not callable(result):
            say(result)
            os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    result(say)  # the scene sends its result, and then the interpreter ends as that of a program


def _ended(pid: int, read: int, request: Any) -> dict[str, Any]:
    deadline, hung, status = time.monotonic() + request["seconds"], False, None
    while status is None:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > deadline and not hung:
            hung = True
            os.kill(pid, signal.SIGKILL)
        else:
            time.sleep(0.002)
    os.set_blocking(read, False)  # a child of the child may still hold the other end
    try:
        result = os.read(read, 1 << 16)
    except BlockingIOError:
        result = b""
    os.close(read)
    text = Path(request["text"]).read_bytes() if os.path.exists(request["text"]) else b""
    return {
        "result": json.loads(result) if result else None,
        "status": status,
        "hung": hung,
        "text": text[-2500:].decode("utf-8", "replace"),
    }


if __name__ == "__main__":
    serve()
