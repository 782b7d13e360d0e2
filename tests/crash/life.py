"""The life of a pool, from its creation to a resume, in which faults are injected, and its true states.

``Life.live`` goes through it as a user would who catches lightck's errors and tries again; ``Life.aftermath`` then
looks at what is left once the fault is gone. Every promise that does not hold is noted in ``broken``. Which state
belongs to which step is known from ``truth``: the same updates without lightck.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lightck
from lightck.errors import BackgroundError, LightckError, NoCheckpointError, PoolNotFoundError
from lightck.strategy.gradients import Gradients

WIDTH = 1500
"""Makes tensors too large to be copied at the boundary itself."""
GROWS_AT, LAST = 3, 7
_TRIES = 3


class Box:
    """State that outgrows its pool: a function of the step, so that it needs no random numbers."""

    def __init__(self) -> None:
        self.value = torch.zeros(3)

    def set_step(self, step: int) -> None:
        self.value = torch.full((3 if step < GROWS_AT else 1 << 18,), float(step))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"].clone()


class Training:
    """A model, its optimizer, and a box, made from a seed."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.box = Box()

    def update(self, step: int) -> None:
        """From ``step`` to the one after it."""
        self.optimizer.zero_grad()
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 + step))
        self.model(data).square().sum().backward()
        self.optimizer.step()
        self.box.set_step(step + 1)

    def digest(self) -> str:
        """Every byte of the state."""
        found = hashlib.sha256()
        states = [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]
        for tensor in [*self.model.state_dict().values(), *states, self.box.value]:
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def truth(steps: int = LAST) -> list[str]:
    """The digest at each step of a training without lightck."""
    training = Training()
    digests = [training.digest()]
    for step in range(steps):
        training.update(step)
        digests.append(training.digest())
    return digests


class _Note:
    """A number in a mapped file: it outlives the process, and needs no descriptor and no room once it is there."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(fd, 8)
        self._map = mmap.mmap(fd, 8)
        os.close(fd)

    @property
    def step(self) -> int:
        return int.from_bytes(self._map[:], "little")

    @step.setter
    def step(self, step: int) -> None:
        self._map[:] = step.to_bytes(8, "little")


class Life:
    """One pool from its beginning, in a folder of its own."""

    def __init__(self, folder: str, backend: str, base_every: int = 0) -> None:
        """``base_every``: of ``Gradients``; 0: each checkpoint holds the whole state."""
        self.folder, self.backend = folder, backend
        self.saving: dict[str, Any] = {"strategy": Gradients(base_every)} if base_every else {}
        os.makedirs(folder, exist_ok=True)
        self.pool = os.path.join(folder, "run.pool")
        self.broken: list[str] = []
        self.errors: list[str] = []
        self.litter: list[str] = []
        """Files that nobody will remove."""
        self._note = _Note(f"{folder}.acknowledged")
        self.acknowledged = self._note.step
        self.updates = 0
        self._has_failed = False
        self._truth = truth()
        self._before = _open_things(folder)

    # -- with the fault --------------------------------------------------------------------------------------

    def live(self) -> None:
        """Create, train, re-lay out, pin, keep, export, close, recover, resume, train, close. (``Gradients`` refuses
        pins, and to keep checkpoints.)"""
        training = Training()
        if self._train(training, range(6), resume=False):
            self._reported(self._export)
            self._train(Training(seed=1), range(6, LAST), resume=True)

    def _train(self, training: Training, steps: range, *, resume: bool) -> bool:
        """Whether the session went on to its end."""
        session = self._attached(training, resume)
        if session is None:
            return False
        if resume:
            self._expect_exact(training, session.step, "resume")
            steps = range(session.step, steps.stop)
        ok = self._steps(training, session, steps)
        return self._closed(session) and ok

    def _attached(self, training: Training, resume: bool) -> lightck.Session | None:
        def attach() -> None:
            keep = None if self.saving else lightck.Keep(every=2, last=1, to=os.path.join(self.folder, "kept"))
            sessions.append(
                lightck.attach(
                    training.model,
                    self.pool,
                    optimizer=training.optimizer,
                    resume=resume,
                    backend=self.backend,
                    state={"box": training.box},
                    keep=keep,
                    **self.saving,
                )
            )

        sessions: list[lightck.Session] = []
        for _ in range(_TRIES):
            before = _open_things(self.folder)
            if self._reported(attach) is None:
                return sessions[0]
            gc.collect()
            self._expect_nothing_open(before, "a refused attach")
            if any(not torch.isfinite(p).all() for p in training.model.parameters()):
                return None  # a restore that failed half-way, as it says: another try takes another model
        return None

    def _steps(self, training: Training, session: lightck.Session, steps: range) -> bool:
        for step in steps:
            if not self._persist(session, training, lambda step=step: training.update(step)):  # type: ignore[misc]
                return False
            self.updates = max(self.updates, step + 1)
            self.acknowledge(session)
            if step == 1 and not self._persist(session, training, session.flush):
                return False
            if step == 3 and not self.saving and not self._persist(session, training, lambda: session.pin().release()):
                return False
            self.acknowledge(session)
        return True

    def _persist(self, session: lightck.Session, training: Training, work: Callable[[], object]) -> bool:
        """Do it, again after an error of which lightck says that the loop may go on."""
        for _ in range(_TRIES):
            before = training.digest()
            error = self._reported(work)
            if error is None:
                return True
            if isinstance(error, BackgroundError):
                self._has_failed = True
                self._expect_reported_again(session, training)
                return False
            if training.digest() != before:
                self.broken.append(f"the training was changed by what was refused: {_short(error)}")
                return False
        return False

    def _expect_reported_again(self, session: lightck.Session, training: Training) -> None:
        """Check that the next step raises the failure of the background, as does close (see ``_closed``)."""
        before = training.digest()
        error = self._reported(training.optimizer.step)
        if not isinstance(error, BackgroundError) or training.digest() != before:
            self.broken.append(f"a failure in the background was not raised by the next step (it raised {error!r})")

    def _closed(self, session: lightck.Session) -> bool:
        error = self._reported(session.close)
        if self._has_failed and error is None:
            self.broken.append("a failure in the background was raised by the step and not by close")
        self.acknowledge(session)
        if error is None and session.committed != self.updates:
            self.broken.append(f"close went well at step {self.updates}, and {session.committed} is what is committed")
        return error is None

    def _export(self) -> None:
        checkpoint = lightck.recover(self.pool)
        lightck.export_checkpoint(checkpoint, os.path.join(self.folder, "out.safetensors"), overwrite=True)
        lightck.export_checkpoint(checkpoint, os.path.join(self.folder, "out.pt"), format="torch")

    def acknowledge(self, session: lightck.Session) -> None:
        self.acknowledged = max(self.acknowledged, session.committed or 0)
        self._note.step = self.acknowledged

    def _reported(self, work: Callable[[], object]) -> LightckError | None:
        """Check that the raised error is one of lightck's, with a fact, a reason and a cure."""
        try:
            work()
        except LightckError as err:
            self.errors.append(_short(err))
            if str(err).count(". ") < 1 or "status " in str(err):
                self.broken.append(f"an error that helps nobody: {_short(err)}")
            return err
        except BaseException as err:
            self.broken.append(f"{type(err).__name__}, which is none of lightck's errors: {err} {_where(err)}")
            return LightckError(repr(err))
        return None

    # -- once it is gone -------------------------------------------------------------------------------------

    def aftermath(self) -> None:
        """Check that the acknowledged step is there, the training can finish, and no file or thread is left over."""
        gc.collect()
        self._expect_nothing_open(self._before, "the end")
        self._recovered()
        training = Training(seed=2)
        with lightck.attach(
            training.model,
            self.pool,
            optimizer=training.optimizer,
            resume=True,
            backend=self.backend,
            state={"box": training.box},
            **self.saving,
        ) as session:
            start = session.step
            if start < self.acknowledged:
                self.broken.append(f"step {self.acknowledged} was acknowledged, and the resume begins at {start}")
            if start == 0:
                training.__init__()  # type: ignore[misc]
            self._expect_exact(training, start, "the last resume")
        training = Training(seed=3) if start else Training()
        with lightck.attach(
            training.model,
            self.pool,
            optimizer=training.optimizer,
            resume=True,
            backend=self.backend,
            state={"box": training.box},
            **self.saving,
        ) as session:
            for step in range(session.step, LAST):
                training.update(step)
        self.updates = self.acknowledged = LAST
        self._recovered()
        self.litter = self._litter()

    def truth_at(self, step: int) -> str:
        return self._truth[step]

    def _recovered(self) -> None:
        training = Training(seed=2)
        try:
            checkpoint = lightck.recover(
                self.pool, training.model, optimizer=training.optimizer, state={"box": training.box}
            )
        except (NoCheckpointError, PoolNotFoundError) as err:
            if self.acknowledged:
                self.broken.append(f"step {self.acknowledged} was acknowledged and is gone: {err}")
            return
        if checkpoint.step < self.acknowledged or checkpoint.rejected:
            self.broken.append(
                f"step {self.acknowledged} was acknowledged, and {checkpoint.step} recovered, after "
                f"{[str(r) for r in checkpoint.rejected]}"
            )
        self._expect_exact(training, checkpoint.step, "recovery")

    def _expect_exact(self, training: Training, step: int, where: str) -> None:
        if training.digest() != self._truth[step]:
            self.broken.append(f"wrong bytes: {where} gave something else than step {step}")

    def _expect_nothing_open(self, before: set[str], when: str) -> None:
        if left := _left(self.folder, before):
            self.broken.append(f"left open at {when}: {sorted(left)}")

    def _litter(self) -> list[str]:
        names = {str(path.relative_to(self.folder)) for path in Path(self.folder).rglob("*") if path.is_file()}
        known = {"run.pool", "run.pool.lock", "out.safetensors", "out.pt"}
        return sorted(n for n in names - known if not (n.startswith("kept/step-") and n.endswith(".safetensors")))


def _short(err: BaseException) -> str:
    return f"{type(err).__name__}: {err}"


def _where(err: BaseException) -> str:
    """The innermost places in lightck."""
    places, trace = [], err.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if f"{os.sep}lightck{os.sep}" in code.co_filename and f"{os.sep}testing{os.sep}" not in code.co_filename:
            places.append(f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-3:]))


def _open_things(folder: str) -> set[str]:
    """The threads, descriptors and mappings of this process."""
    things = {f"thread {thread}" for thread in os.listdir("/proc/self/task")}
    for fd in os.listdir("/proc/self/fd"):
        try:
            things.add(f"descriptor {fd} on {os.readlink(f'/proc/self/fd/{fd}')}")
        except FileNotFoundError:
            continue  # the one that lists
    for line in Path("/proc/self/maps").read_text().splitlines():
        if folder in line:
            things.add(f"mapping {line}")
    return things


def _left(folder: str, before: set[str]) -> set[str]:
    """A thread that was joined stays listed until the kernel has taken it down: that is waited for."""
    never = threading.Event()
    for _ in range(500):
        left = {t for t in _open_things(folder) - before if "/proc/" not in t}
        if not left:
            break
        never.wait(0.01)
    return left
