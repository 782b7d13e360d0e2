"""``torch.distributed.checkpoint``: ``save`` and three ways of ``async_save``, after PyTorch's recipes for them.

The state goes through ``get_state_dict`` / ``set_state_dict`` in a ``Stateful``, one folder per step. A single process
needs no process group, as the documentation of ``save`` says; only the process-based saver does (gloo).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from bench.rivals import steps


class Training(Stateful):
    def __init__(self, model: nn.Module, optimizer: Optimizer, step: int = 0) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(state["step"])


class _Dcp(steps.PerStep):
    needs = ""

    def state(self, step: int) -> dict[str, Any]:
        return {"training": Training(self.model, self.optimizer, step)}

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        def load(path: Path) -> int:
            training = Training(model, optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group
                try:
                    dcp.load({"training": training}, checkpoint_id=path)
                except CheckpointException as err:  # no Exception, but a BaseException
                    raise RuntimeError(str(err)) from err
            return training.step

        return steps.newest_that_loads(folder, load)


class Save(_Dcp):
    name = "dcp.save"
    synchronous = True
    use = "a folder per step, no process group; last two kept"

    def save(self, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.state(step), checkpoint_id=steps.path_of(self.folder, step))
        self.is_finished(step)

    def finish(self) -> None:
        pass


class AsyncSave(_Dcp):
    """The recipe: keep the future, and wait for it before the next save."""

    name = "dcp.async_save"
    synchronous = False
    use = "default options; the future awaited before the next save; a folder per step, last two kept"
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.pending: tuple[int, Any] | None = None

    @property
    def saved(self) -> int:
        if self.pending is not None and self.pending[1].done() and self.pending[1].exception() is None:
            return self.pending[0]
        return self.finished

    def save(self, step: int) -> None:
        self.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            response = dcp.async_save(self.state(step), checkpoint_id=steps.path_of(self.folder, step), **self.options)
        self.pending = step, self.future(response)

    def future(self, response: Any) -> Any:
        return response

    def wait(self) -> None:
        if self.pending is not None:
            step, future = self.pending
            self.pending = None
            future.result()
            self.is_finished(step)

    def finish(self) -> None:
        self.wait()


class _Staged(AsyncSave):
    """A stager of one's own, with its copy awaited before anything changes."""

    staging = StagingOptions(False, False, False, False)

    def __init__(self) -> None:
        super().__init__()
        self.stager = DefaultStager(self.staging)
        self.options = {"async_stager": self.stager}
        self.staged: Any = None
        self.undo: list[Callable[[], None]] = []

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        super().start(model, optimizer, folder)
        self.undo = steps.before_changes(model, optimizer, self.wait_for_staging)

    def future(self, response: Any) -> Any:
        if isinstance(response, AsyncSaveResponse):
            self.staged = response.staging_completion
            return response.upload_completion
        return response

    def wait_for_staging(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def wait(self) -> None:
        self.wait_for_staging()
        super().wait()

    def finish(self) -> None:
        super().finish()
        self.stager.close()
        for undo in self.undo:
            undo()


class AsyncPinned(_Staged):
    name = "dcp.async_save (pinned)"
    use = "DefaultStager with pinned memory in a thread, awaited before forward or update; last two kept"
    staging = StagingOptions(True, True, True, True)


class AsyncProcess(_Staged):
    """The saver in a process of its own. It needs a process group with gloo (left open), and shared memory to hand the
    state over. Staging in a thread is for accelerators by torch's documentation; on a CPU it works too."""

    name = "dcp.async_save (process)"
    use = "AsyncCheckpointerType.PROCESS, shared memory, staging awaited before forward or update; last two kept"
    staging = StagingOptions(False, True, True, False)

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        steps.join_a_group_of_one()
        self.options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        super().start(model, optimizer, folder)
