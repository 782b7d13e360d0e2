"""One process of a public program: runs its patched script, reports what happened, and dies where it was asked to.

Children of a fork server (tests/system/resume/forkserver.py). The patched program ends with
``finished(model, optimizer)``, which this module puts among the builtins.
"""

from __future__ import annotations

import builtins
import importlib
import json
import logging
import os
import random
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resume.run import digests
from torch.optim.optimizer import register_optimizer_step_post_hook

PRELOAD = "LIGHTCK_PROGRAMS_PRELOAD"  # modules that the server imports once for all its children
OPS = ("nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


def _torchvision_without_its_ops() -> None:
    """A torchvision whose compiled part does not fit this torch registers shapes for operators that are not there, and
    fails. Named here, they let it be imported; no program of the catalog calls one."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPS:
        for full in (name, f"_{name}_backward"):
            if not hasattr(torch.ops.torchvision, full):
                library.define(f"{full}(Tensor x) -> Tensor")
    globals()["_torchvision"] = library  # it must live on


class Events:
    """Counts what the process does, and kills it at the event that was asked for."""

    def __init__(self, send: Callable[..., None], kill: Mapping[str, Any] | None) -> None:
        self.counts = {"update": 0, "backward": 0, "eval": 0, "pass": 0}
        self.marks: list[tuple[str, int, int]] = []
        """(event, its number, updates before it), of evaluations and passes: the first one since an update."""
        self._send, self._kill, self._pid = send, kill or {}, os.getpid()

    def install(self) -> None:
        register_optimizer_step_post_hook(lambda *_: self._update())
        torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: self._forward())
        backward, iterate = torch.Tensor.backward, torch.utils.data.DataLoader.__iter__

        def counted_backward(tensor: Any, *args: Any, **options: Any) -> Any:
            result = backward(tensor, *args, **options)
            self._happened("backward")
            return result

        def counted_iter(loader: Any) -> Any:
            self._happened("pass")
            return iterate(loader)

        torch.Tensor.backward = counted_backward  # type: ignore[method-assign]
        torch.utils.data.DataLoader.__iter__ = counted_iter  # type: ignore[method-assign]

    def _update(self) -> None:
        if self.counts["backward"]:  # before the first one, only attach steps: scratch instances on tiny stand-ins
            self._happened("update")

    def _forward(self) -> None:
        if not torch.is_grad_enabled():
            self._happened("eval")

    def _happened(self, event: str) -> None:
        if os.getpid() != self._pid:  # a worker of a DataLoader
            return
        self.counts[event] += 1
        if event in ("update", "backward"):
            self._send(event=event, count=self.counts[event])
        else:
            mark = (event, self.counts[event], self.counts["update"] or self.counts["backward"])
            if not any(seen[0] == mark[0] and seen[2] == mark[2] for seen in self.marks[-8:]):
                self.marks.append(mark)
        if self._kill.get("kind") == event and self._kill["nth"] == self.counts[event]:
            self._send(killed=event)
            os.kill(os.getpid(), signal.SIGKILL)


class _Warnings(logging.Handler):
    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(warning=record.getMessage())


def run_child(request: Mapping[str, Any], pipe: int) -> None:
    def send(**message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]

    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    script = Path(request["script"]).resolve()
    sys.argv = [str(script), *request["argv"]]
    sys.path[:0] = [str(script.parent), *(str(Path(path).resolve()) for path in request["paths"])]
    random.seed(request["seed"])
    np.random.seed(request["seed"])
    torch.manual_seed(request["seed"])
    if request["with_lightck"]:
        logging.getLogger("lightck").addHandler(_Warnings(send))
    events = Events(send, request["kill"])
    events.install()

    def finished(model: Any, optimizers: Any = (), **objects: Any) -> None:
        several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        found = {**digests("weights", model.state_dict()), **digests("objects", objects)}
        found |= digests("optimizer", [optimizer.state_dict() for optimizer in several])
        send(digests=found, marks=events.marks, counts=events.counts)

    builtins.finished = finished  # type: ignore[attr-defined]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        if left.code:
            send(error=f"SystemExit: {left.code}")
            raise
    except BaseException as error:
        traceback.print_exc()
        send(error=f"{type(error).__name__}: {error}", place=_place(error))
        raise
    if not request["with_lightck"]:
        assert "lightck" not in sys.modules, "the reference imported lightck"


def _place(error: BaseException) -> str:
    """Where in the program it happened, or in lightck."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:]))


_torchvision_without_its_ops()
for _name in filter(None, os.environ.get(PRELOAD, "").split(",")):
    importlib.import_module(_name)
