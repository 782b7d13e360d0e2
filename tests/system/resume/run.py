"""The training's side: what a scenario calls, with lightck and, in the reference run, without it.

A scenario is a function of a ``Run``. It builds everything as a user would, calls ``run.attach`` where a user calls
``lightck.attach``, and tells the run of each update. In the reference run ``attach`` gives an inert stand-in, so that
lightck is imported and never called.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn


class InertLoader:
    """``session.loader`` in the reference run: the loader itself."""

    epoch = 0
    start = 0

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class InertSession:
    """``lightck.attach`` in the reference run: the same surface, and nothing behind it."""

    iteration = 0  # as a loop finds it where nothing was restored

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def step(self) -> int:
        return self._run.updates

    def loader(self, loader: Any, *, name: str | None = None, **said: Any) -> InertLoader:
        return InertLoader(loader)

    def end_step(self) -> None: ...

    def flush(self) -> None: ...

    def close(self, **said: Any) -> None: ...

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


class Run:
    """One process of a training: reports to the test, and dies where the test wants it to.

    ``request``: ``mode`` ("reference" or "lightck"), ``pool``, ``seed``, and ``kill``: None, or kind, name and nth.
    """

    def __init__(self, request: Mapping[str, Any], pipe: int) -> None:
        self.is_reference = request["mode"] == "reference"
        self.options: Mapping[str, Any] = request.get("options") or {}
        self.updates = 0
        self.session: Any = None
        self._request = request
        self._pipe = pipe
        self._kill = request.get("kill") or {"kind": None}
        self._passed = 0

    # -- what a scenario calls

    def seed(self) -> None:
        """Seed the global generators. A resumed run seeds otherwise: what it does not restore would show."""
        random.seed(self._request["seed"])
        np.random.seed(self._request["seed"])
        torch.manual_seed(self._request["seed"])

    def attach(self, model: nn.Module, **arguments: Any) -> Any:
        if self.is_reference:
            self.session = InertSession(self)
        else:
            logging.getLogger("lightck").addHandler(_ToParent(self.send))
            logging.getLogger("lightck").setLevel(logging.INFO)
            self._arm("attach-site")
            self.session = self._attach(model, arguments)
            self.updates = self.session._steps.updates  # not what a loop asks: whether one does is noted
        self.send(start=self.updates)
        self._arm("site")
        return self.session

    def updated(self, loss: Any) -> None:
        """Called by a training after an ``optimizer.step()`` that changed something."""
        self.updates += 1
        self.send(update=self.updates, loss=_bits(loss))
        if self.session.step != self.updates:
            raise AssertionError(f"session.step is {self.session.step} after update {self.updates}")
        self.here("update")

    def skipped(self, loss: Any) -> None:
        """Called by a training after an iteration without an update (GradScaler found inf)."""
        self.saw("skip")
        self.send(skip=self.updates, loss=_bits(loss))

    def here(self, place: str) -> None:
        """A named place at which the test may kill this process."""
        if self.is_reference:
            self.send(saw=f"place {place}")
        elif self._kill["kind"] == "place" and self._kill["name"] == place:
            self._passed += 1
            if self._passed == self._kill["nth"]:
                self.send(killed_at=place)
                os.kill(os.getpid(), signal.SIGKILL)

    def saw(self, what: str) -> None:
        """Called by a training when the feature that its scenario tests was used."""
        self.send(saw=what)

    def finished(self, model: nn.Module, optimizers: Sequence[Any], objects: Mapping[str, Any] | None = None) -> None:
        """Report, at the end of the training, digests of all state that must be bit-identical."""
        self.send(
            digests={
                **digests("weights", model.state_dict()),
                **digests("optimizer", [o.state_dict() for o in optimizers]),
                **digests("objects", {name: obj.state_dict() for name, obj in (objects or {}).items()}),
                **digests("rng", [torch.get_rng_state(), np.random.get_state(legacy=False), digest(random.getstate())]),
                **digests("device rng", torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []),
            }
        )

    # -- inside

    def send(self, **message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._pipe, data) :]

    def _attach(self, model: nn.Module, arguments: dict[str, Any]) -> Any:
        import lightck  # here, so that a reference run can be one that never imported it

        base_every = self.options.get("base_every")
        if base_every is not None:
            from lightck.strategy.gradients import Gradients

            arguments = {"strategy": Gradients(base_every=base_every), **arguments}
        if self.options.get("replica"):
            arguments = {"strategy": lightck.Replica(), **arguments}
        if "interval" in self.options:
            arguments = {"interval": self.options["interval"], **arguments}
        older = self.options.get("recover_step")
        if older is None:
            return lightck.attach(model, self._request["pool"], resume=True, **arguments)
        lightck.recover(self._request["pool"], model, arguments["optimizer"], step=older)
        return lightck.attach(model, self._request["pool"], **arguments)

    def _arm(self, kind: str) -> None:
        if self._kill["kind"] == kind and not self.is_reference:
            from lightck import _native

            _native.check(_native.lib.lck_kill(self._kill["name"].encode(), self._kill["nth"]), "lck_kill")

    def execute(self, train: Callable[[Run], None]) -> None:
        train(self)
        self.here("before close")
        self.session.close()
        self.here("after close")
        if not self.is_reference:
            self.send(closed=self.session.committed)


def _bits(loss: Any) -> str:
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss).hex()


class _ToParent(logging.Handler):
    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(log=record.getMessage(), level=record.levelname)


# ---- digests -----------------------------------------------------------------------------------------------------


def digests(path: str, value: Any) -> dict[str, str]:
    """Every leaf of nested dicts and lists with its path -> sha256."""
    return {where: digest(leaf) for where, leaf in _leaves(path, value)}


def digest(leaf: Any) -> str:
    """Of type, shape and bytes of a tensor or array; of the exact text of anything else."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        head, body = f"{leaf.dtype} {tuple(leaf.shape)}", flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, np.ndarray):
        head, body = f"{leaf.dtype} {leaf.shape}", leaf.tobytes()
    else:
        head, body = type(leaf).__name__, repr(leaf).encode()
    return hashlib.sha256(head.encode() + b"\0" + body).hexdigest()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{path}/{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}/{index}", item)
    else:
        yield path, value
