"""torchtitan: its trainer goes on after a crash from the last finished step, with the same bits.

    config = llama3_debugmodel()                       # a function of a config registry
    config.checkpoint = PoolCheckpointManager.Config(pool="pools")

A checkpoint manager is torchtitan's own extension point: ``config.checkpoint`` builds it, and the trainer calls it.
This one is torchtitan's ``CheckpointManager`` with a pool beside it. It writes torchtitan's folders as ever.

How a training goes:

    load()                    the first statement of ``train()``: model, optimizers, schedulers and loader exist, and no
                              batch is drawn. The session is attached. At step 0 torchtitan loads what its options name
    train_step(), save()      the step is open: update, log, and the folder that torchtitan may write
    validate()                still open, so that an evaluation or a save that is interrupted is repeated
    should_continue_training  closes the step, before ``trainer.step`` counts the next one
    close()                   of the trainer: the session ends. A step that was begun and not closed is dropped

Invariant: a step is closed when everything of it is done and nothing of the next one is, so the numbers of the
trainer, the position of its loader and the tensors belong to one step.

Failure cases: an error is raised before the first step for a trainer with a loop of its own, for stages of a pipeline,
for folders that are ahead of the pool, and for ``load_step`` beside a pool with finished steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

import lightck
from lightck.errors import CheckpointExistsError, SessionError, UnsupportedError

try:
    import torchtitan
    import tyro
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.trainer import Trainer
except ImportError as err:
    raise ImportError(
        "lightck.integrations.torchtitan needs torchtitan 0.3 (earlier releases have no place for another checkpoint "
        f"manager): {err}. Install it with: pip install 'lightck[torchtitan]'"
    ) from err

RELEASE = "0.3."
"""The supported releases of torchtitan."""
_USED_OF_MANAGER = ("_load", "_save", "_close", "_find_load_step")
_USED_OF_TRAINER = ("should_continue_training", "parallel_dims", "config", "dataloader", "step")
"""What this file uses of torchtitan's ``CheckpointManager``, and of its trainer."""
_FOLDER_AHEAD_MAX = 3
"""After a kill, torchtitan's newest folder may be ahead of the pool by at most this number of the pool's intervals."""


class PoolCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager, and a pool in which every finished step survives a crash.

    The pool is used beside torchtitan's folders, whose options are inherited. A restart continues from the pool.

    Raises while the trainer is built:
        UnsupportedError: a release of torchtitan that lightck does not know.

    Raises from ``load()``, that is at the beginning of ``train()``:
        UnsupportedError: a trainer or a parallelism that lightck does not know.
        CheckpointExistsError: ``load_step`` is set, or torchtitan's folder is ahead, and the pool has finished steps.
        LightckError: what ``lightck.attach`` raises.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        enable: bool = True
        """Whether to use the pool, and torchtitan's folders."""

        pool: str = "pools"
        """The pool's file. With several ranks: their directory."""

        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Keywords of ``lightck.attach``, such as ``interval``, ``strategy`` and ``replicas``; not for the command
        line. ``resume=False``: refuse to continue from a pool with a checkpoint."""

    def __init__(self, config: Config, **components: Any) -> None:
        """Called by the trainer. ``components``: what it hands to each checkpoint manager."""
        self._session: lightck.Session | None = None
        _refuse_release(components["states"]["train_state"])
        super().__init__(config, **components)
        self._pool, self._options = config.pool, dict(config.options)
        self._model_parts, self._optimizers = components["model_parts"], components["optimizers"]
        self._closed = 0
        """The step of the trainer that was closed last."""

    @property
    def session(self) -> lightck.Session | None:
        """The session; None before ``train()``."""
        return self._session

    # -- what the trainer calls ----------------------------------------------------------------------------

    def _load(self, step: int = -1) -> bool:
        trainer = self.states["train_state"]
        self._refuse_unsupported(trainer)
        state = {name: self.states[name] for name in ("train_state", "lr_scheduler", "dataloader")}
        self._session = session = lightck.attach(
            self._model_parts[0],
            self._pool,
            optimizer=list(self._optimizers.optimizers),
            **{"resume": True, **self._options, "state": {**state, **self._options.get("state", {})}},
        )
        try:
            if session.step > 0:
                self._refuse_folder(step, trainer.step)
            is_loaded = session.step > 0 or bool(super()._load(step))
        except BaseException:
            session.abandon()
            raise
        if session.step > 0:
            trainer.dataloader = _ResumedLoader(trainer.dataloader)
        self._closed = trainer.step
        self._close_steps_of(trainer)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._session is not None and curr_step != self._closed + 1:
            raise SessionError(
                f"torchtitan saves step {curr_step}, and the step that was closed last is {self._closed}. lightck "
                "closes a step where the loop calls trainer.should_continue_training(). Call it before each step."
            )
        return bool(super()._save(curr_step, last_step))

    def _close(self) -> None:
        session = self._session
        if session is not None and session.is_open:
            trainer = self.states["train_state"]
            if trainer.step == self._closed:
                session.close(done=trainer.step >= trainer.config.training.steps)
            else:  # an error, or data that ended: the step has made no update, or is not finished
                session.abandon()
        super()._close()

    # -- the steps -----------------------------------------------------------------------------------------

    def _close_steps_of(self, trainer: Any) -> None:
        """Each time the trainer asks whether another step follows, close the step that it has made."""
        original = trainer.should_continue_training

        def should_continue_training() -> bool:
            session = self._session
            if session is not None and session.is_open and trainer.step > self._closed:
                session.end_step()
                self._closed = trainer.step
            return bool(original())

        trainer.should_continue_training = should_continue_training

    # -- what is refused -----------------------------------------------------------------------------------

    def _refuse_unsupported(self, trainer: Any) -> None:
        if not isinstance(trainer, Trainer) or type(trainer).train is not Trainer.train:
            raise UnsupportedError(
                f"{type(trainer).__name__} has a loop of its own (train), and lightck closes steps in that of "
                "torchtitan's Trainer. Attach in your loop with lightck.attach, or use CheckpointManager.Config."
            )
        if self._session is not None:
            raise SessionError("The trainer has called train() before. Build a new one for each call.")
        if trainer.parallel_dims.pp_enabled or len(self._model_parts) != 1:
            raise UnsupportedError(
                "lightck does not know which layers a stage of torchtitan's pipeline holds. Set "
                "pipeline_parallel_degree=1, or use torchtitan's CheckpointManager.Config."
            )

    def _refuse_folder(self, load_step: int, pool_step: int) -> None:
        """Raise ``CheckpointExistsError`` if the pool and torchtitan's folder may be two trainings. A folder may be a
        few steps ahead of the pool, since a step is closed after its folder is written."""
        folder_step, interval = self._find_load_step(), self._options.get("interval", 1)
        steps_max = _FOLDER_AHEAD_MAX * interval if isinstance(interval, int) else float("inf")
        if load_step != -1:
            fact = f"checkpoint.load_step={load_step} asks for a folder of torchtitan"
        elif folder_step > pool_step + steps_max:
            fact = f"the folder {self.folder!r} of torchtitan holds step {folder_step}"
        else:
            return
        raise CheckpointExistsError(
            f"The pool {self._pool!r} holds step {pool_step} of a training, and {fact}. Nothing was trained. To go on "
            "from the folder, name another pool (checkpoint.pool), or remove this one; to continue from the pool, "
            "leave load_step out, and name another folder (checkpoint.folder)."
        )


def _refuse_release(trainer: Any) -> None:
    """Raise ``UnsupportedError`` if this is a release of torchtitan that lightck does not know. Called while the
    trainer is built, because a release in which these methods have other names would never call this file's."""
    version = getattr(torchtitan, "__version__", "of an unknown release")
    missing = [f"CheckpointManager has no {name}" for name in _USED_OF_MANAGER if not hasattr(CheckpointManager, name)]
    missing += [f"trainer has no {name}" for name in _USED_OF_TRAINER if not hasattr(trainer, name)]
    if missing or not version.startswith(RELEASE):
        fact = f"its {missing[0]}" if missing else f"lightck knows {RELEASE}x"
        raise UnsupportedError(
            f"torchtitan {version} is not supported: {fact}. Install another release, or use torchtitan's "
            "CheckpointManager.Config."
        )


class _ResumedLoader:
    """The loader of a resumed training. Beginning a pass draws a random number. A run that was never killed drew it
    before its first step, so here the random state is put back."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        state = torch.get_rng_state()
        iterator: Iterator[Any] = iter(self._loader)
        torch.set_rng_state(state)
        return iterator

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy, or a pickle, that has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)
