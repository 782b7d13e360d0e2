"""Hugging Face ``Trainer``: each finished update survives a crash, and a restart goes on where the last run stopped.

    trainer = Trainer(...)
    lightck.integrations.transformers.attach(trainer, "run.pool")
    trainer.train()

How a run goes:

    train()             the small state of the pool's newest checkpoint is read (its tensors too, if the pool has
                        gradient records). What the Trainer kept (``TrainerState``) is written into a folder, which is
                        given to the Trainer as ``resume_from_checkpoint``. So the Trainer itself finds epoch and update
                        at which it goes on. It loads nothing else from the folder: model, optimizer, scheduler and
                        random states come from the pool
    on_train_begin      ``lightck.attach``: optimizer and scheduler exist, and no batch was fetched. Then sums and
                        counters of the Trainer are set as they were. What hooks at the beginning of a run or of an
                        epoch may have overwritten is restored again after these hooks
    next() of a batch   closes the step before: its log, evaluation and save are done
    the end of the loop ``session.close(done=True)``, before the Trainer loads its best model into the trained one. If a
                        request to stop has ended it (``should_training_stop``), the training is not finished: the last
                        step is dropped, because the hooks at the end have run in it, and the next start continues from
                        the checkpoint before

Invariant: a checkpoint holds the Trainer's own state of the same moment as its tensors (``Progress``). If the process
is killed inside an evaluation or a save, the step is made again, and the evaluation or save is repeated.

Failure cases: an attribute of ``Trainer`` that this file uses does not exist: ``UnsupportedError`` at attach. The pool
changes between the first look and the attach: ``SessionError``, and nothing was trained.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

import lightck
from lightck.errors import (
    CheckpointExistsError,
    NoCheckpointError,
    SessionError,
    UnsupportedError,
)

try:
    import transformers
    from transformers import trainer as trainer_module
    from transformers.trainer_callback import TrainerCallback, TrainerState
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as err:
    raise ImportError(
        "lightck.integrations.transformers needs transformers. Install it with: pip install 'lightck[transformers]'"
    ) from err

from lightck.integrations.loaders import EvaluationLoader
from lightck.integrations.newest import newest_of_training
from lightck.integrations.replacing import replace
from lightck.integrations.trainer_attributes import assigned_by_transformers, attributes_of
from lightck.integrations.trainer_callbacks import CallbackStates
from lightck.integrations.trainer_loaders import TrainLoader, skipping
from lightck.integrations.trainer_refusals import refuse_arguments, refuse_hidden_state, refuse_other_batches
from lightck.integrations.trainer_state import EncodedState
from lightck.integrations.unfinished import close_unfinished

log = logging.getLogger("lightck")
STATE_NAME = "trainer"
"""Name in ``state`` under which ``Progress`` is saved."""
VERSIONS = (5, 6)
"""The first supported major version of transformers, and the first that is not known."""
_LOADING = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
_USED = (
    "_finalize_training",
    "_init_training_state",
    *_LOADING,
    "_run_epoch",
    "get_train_dataloader",
    "get_eval_dataloader",
    "callback_handler",
    "current_flos",
    "is_deepspeed_enabled",
    "is_fsdp_enabled",
)
"""Attributes of ``Trainer`` that this file uses."""
_Checkpoint = str | os.PathLike[str] | bool
"""A folder; True: the newest one in ``output_dir``."""
_USED_IN_TRAINING = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""Attributes that exist only while the Trainer trains."""


def attach(
    trainer: transformers.Trainer, pool_path: str | os.PathLike[str], *, resume: bool = True, **options: Any
) -> TrainerSession:
    """Make every finished update of a ``Trainer`` survive a crash.

    Call it once, after the Trainer was built and before ``trainer.train()``. The pool is opened in ``train()``. If it
    holds a checkpoint, the training continues from there: weights, optimizer, scheduler, random states, batches, log
    history, best metric, and the state of callbacks that have one are those of the run before.

    Args:
        trainer: a Trainer of transformers, or of a library whose trainers are Trainers (``Seq2SeqTrainer``, TRL).
        pool_path: the pool's file, made if it does not exist. In a group of ranks: a directory.
        resume: continue from what the pool holds. False: raise ``CheckpointExistsError`` if it holds a checkpoint.
        options: other keywords of ``lightck.attach``. ``optimizer`` is the Trainer's.

    Raises:
        UnsupportedError: a version, a trainer or an argument that cannot be resumed exactly; the message says which.
        SessionError: the Trainer has trained already, or is attached already.
        TypeError: ``trainer`` is no Trainer.
    """
    _refuse_unsupported(trainer)
    if "optimizer" in options:
        raise TypeError(
            "Do not pass optimizer= here: the Trainer builds its optimizer in train(), and lightck finds it."
        )
    session = TrainerSession(trainer, os.fspath(pool_path), resume=resume, options=options)
    session.install()
    return session


def _refuse_unsupported(trainer: object) -> None:
    if not isinstance(trainer, transformers.Trainer):
        given = f"the class {trainer.__name__}" if isinstance(trainer, type) else f"a {type(trainer).__name__}"
        raise TypeError(f"trainer is {given}. Pass a transformers.Trainer.")
    major = int(transformers.__version__.partition(".")[0])
    if not VERSIONS[0] <= major < VERSIONS[1]:
        raise UnsupportedError(
            f"transformers {transformers.__version__} is not supported: lightck knows {VERSIONS[0]}.x. Install such a "
            "release, or save the checkpoints of the Trainer itself."
        )
    missing = [name for name in _USED if not hasattr(trainer, name)]
    missing += [name for name in _USED_IN_TRAINING if name not in assigned_by_transformers()]
    if missing or not hasattr(trainer_module, "skip_first_batches"):
        raise UnsupportedError(
            f"This Trainer of transformers {transformers.__version__} has no {(missing or ['skip_first_batches'])[0]}, "
            "which lightck needs to resume exactly. Install another release: 5.3 to 5.24 have it."
        )
    if any(isinstance(one, _Callback) for one in trainer.callback_handler.callbacks):
        raise SessionError("This Trainer is attached to a pool already. One attach for each Trainer.")
    if trainer.state.global_step:
        raise SessionError(
            f"This Trainer has made {trainer.state.global_step} updates already. Attach before train(); the pool then "
            "knows where the training begins."
        )
    refuse_hidden_state(trainer)
    refuse_arguments(trainer)


class Progress:
    """What the Trainer keeps beside model, optimizer and scheduler. Saved in each checkpoint (``state=``)."""

    def __init__(self, owner: TrainerSession) -> None:
        self._owner = owner
        self._encoded = EncodedState()
        self._loaded: tuple[int, bool, bool] | None = None
        """(step, whether the run before was stopped at this step, whether by early stopping), as loaded."""

    def state_dict(self) -> dict[str, Any]:
        owner, trainer = self._owner, self._owner.trainer
        owner.callbacks.warn_of_changes()
        is_stopped = trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps
        is_early = is_stopped and owner.callbacks.has_stopped_early()
        if self._loaded is not None and self._loaded[0] == trainer.state.global_step:
            _, is_stopped, is_early = self._loaded
        return {
            "trainer_state": self._encoded.of(trainer.state),
            "callbacks": json.dumps(owner.callbacks.states()),
            "attributes": owner.attributes.changed(),
            "epoch": owner.epoch,
            "begun_epoch": owner.begun_epoch,
            "updates_before_epoch": owner.updates_before_epoch,
            "updates_per_epoch": owner.updates_per_epoch,
            "batches_per_update": trainer.args.gradient_accumulation_steps,
            "batch_size": trainer.args.train_batch_size,
            "tr_loss": trainer._tr_loss,
            "total_loss_scalar": trainer._total_loss_scalar,
            "globalstep_last_logged": trainer._globalstep_last_logged,
            "current_flos": trainer.current_flos,
            "initial_global_step": getattr(trainer, "_initial_global_step", 0),  # earlier releases have none
            "seconds": owner.seconds,
            "stopped": is_stopped,
            "stopped_early": is_early,
            "epoch_was_cut": owner.epoch_was_cut,
            "evaluated": sorted(owner.started_loaders),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        owner, trainer = self._owner, self._owner.trainer
        # The state of this rank. ``owner.found`` is that of rank 0, whose log has other times.
        own_state = json.loads(state["trainer_state"])
        if owner.found is None or own_state["global_step"] != json.loads(owner.found["trainer_state"])["global_step"]:
            raise SessionError(
                f"The pool {owner.path!r} has changed since train() began. Another process may train into it. Nothing "
                "was trained. Call train() again."
            )
        trainer.state.log_history = own_state["log_history"]
        self._encoded.load(own_state["global_step"], len(own_state["log_history"]), state["trainer_state"])
        trainer._tr_loss = state["tr_loss"].to(trainer.args.device)
        trainer._total_loss_scalar = state["total_loss_scalar"]
        trainer._globalstep_last_logged = state["globalstep_last_logged"]
        trainer.current_flos = state["current_flos"]
        if hasattr(trainer, "_initial_global_step"):
            trainer._initial_global_step = state["initial_global_step"]
        is_early = state.get("stopped_early", state["stopped"])
        self._loaded = own_state["global_step"], state["stopped"], is_early
        # Only early stopping ends the training. Any other request to stop has ended only the process that got it.
        trainer.control.should_training_stop = is_early and not owner.is_longer
        owner.callbacks.had_stopped_early = trainer.control.should_training_stop
        owner.epoch_was_cut, owner.started_loaders = state["epoch_was_cut"], set(state["evaluated"])
        owner.epoch, owner.updates_before_epoch = state["epoch"], state["updates_before_epoch"]
        owner.begun_epoch = state.get("begun_epoch")
        owner.callbacks.restore(state["callbacks"])
        owner.attributes.restore(state["attributes"])


class _Callback(TrainerCallback):
    """Attaches the session when the training begins."""

    def __init__(self, owner: TrainerSession) -> None:
        self._owner = owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._owner.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._owner.callbacks.update_ended()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._owner.epoch_was_cut |= bool(control.should_epoch_stop and not control.should_training_stop)


class TrainerSession:
    """What ``attach`` returns. ``session``: the ``lightck.Session`` of the run; None before ``train()`` has begun. It
    is closed at the end of ``train()``."""

    def __init__(self, trainer: transformers.Trainer, path: str, *, resume: bool, options: Mapping[str, Any]) -> None:
        self.trainer, self.path = trainer, path
        self.session: lightck.Session | None = None
        self.found: Mapping[str, Any] | None = None
        """What ``Progress`` saved in the checkpoint from which this run goes on."""
        self._max_steps_before: int | None = None
        """The number of updates that the run before was to make; None if there was none."""
        self.started_loaders: set[str] = set()
        """Keys of the evaluation's loaders whose workers have started in this run or an earlier one."""
        self.epoch_was_cut = False
        """Whether a callback has ended an epoch early, so that the Trainer cannot find its place in a later one."""
        self.begins_epoch = False
        """Whether a finished training goes on with another epoch."""
        self.epoch, self.updates_before_epoch = 0, 0
        """The Trainer's epoch, and how many updates were made before it. The Trainer computes them from the length of
        its loader, and a loader of an iterable dataset has none."""
        self.begun_epoch: int | None = None
        """The last epoch whose ``on_epoch_begin`` has run; None if none has."""
        self._restored_groups: list[dict[str, Any]] = []
        """The hyperparameters of the optimizer after a resume."""
        self.updates_per_epoch: int | None = None
        """None: the loader has no length."""
        self.callbacks = CallbackStates(trainer)
        self.attributes = attributes_of(trainer)
        self._resume, self._options = resume, dict(options)
        self._discards_pool = False
        """Whether the present ``train()`` loads a checkpoint of the Trainer's own, so that the pool begins anew."""
        self._session_loader: Any = None
        self._progress = Progress(self)
        self._folder: str | None = None
        """Holds ``trainer_state.json`` while a resumed ``train()`` runs."""
        self.has_batch = False
        """Whether the loader has given a batch in this run's part of the present epoch."""
        self._began, self._seconds_before = 0.0, 0.0

    def __repr__(self) -> str:
        return f"<lightck.integrations.transformers, pool {self.path!r}: {self.session or 'train() has not begun'}>"

    @property
    def seconds(self) -> float:
        """How long the training took so far, earlier runs included."""
        return self._seconds_before + time.time() - self._began

    # -- the Trainer's methods -----------------------------------------------------------------------------

    def install(self) -> None:
        """Let the Trainer call this object. Only this one Trainer is changed, not its class."""
        trainer = self.trainer
        trainer.add_callback(_Callback(self))
        setattr(trainer, "train", functools.partial(self._train, trainer.train))  # noqa: B010 - mypy knows no assignment

    def _train(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: _Checkpoint | None = None,
        trial: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if args:
            train = functools.partial(_with_positional, train, trial, args)
        if trial is not None:
            raise UnsupportedError(
                "A hyperparameter search trains several models, and a pool holds one training. Attach to a Trainer "
                "that trains one."
            )
        if self.session is not None and self.session.is_open:
            raise SessionError("train() is running already.")
        step, self._discards_pool = self._look(), False
        if resume_from_checkpoint:
            self._prefer_trainer_checkpoint(resume_from_checkpoint, step)
            return self._run(train, resume_from_checkpoint, kwargs)
        if self.found is None:
            return self._run(train, None, kwargs)
        self._refuse_unresumable()
        with tempfile.TemporaryDirectory(prefix="lightck-trainer-") as folder:
            with open(os.path.join(folder, trainer_module.TRAINER_STATE_NAME), "wb") as file:
                file.write(self.found["trainer_state"])
            self._folder = folder
            try:
                return self._run(train, folder, kwargs)
            finally:
                self._folder = None

    def _look(self) -> int | None:
        """Read what the pool holds of the Trainer. Returns the step of the Trainer in the newest checkpoint; None if
        there is no checkpoint."""
        self.found = self._max_steps_before = None
        if self._options.get("overwrite"):
            return None
        checkpoint = newest_of_training(self.path, resume=self._resume, options=self._options)
        if checkpoint is None:
            return None
        with checkpoint:
            step, state = checkpoint.step, checkpoint.state
        if not self._resume:
            raise CheckpointExistsError(
                f"The pool {self.path!r} holds step {step}, and resume=False is given. Leave it out to continue from "
                "there, or pass overwrite=True to discard what the pool holds."
            )
        if STATE_NAME not in state:
            raise SessionError(
                f"The pool {self.path!r} was not written by a Trainer, so it does not say at which epoch and batch one "
                "goes on. Go on with the loop that wrote it, or attach to another pool."
            )
        self.found = state[STATE_NAME]
        own = json.loads(self.found["trainer_state"])
        self._max_steps_before = int(own["max_steps"])
        return int(own["global_step"])

    def _prefer_trainer_checkpoint(self, resume_from_checkpoint: _Checkpoint, step: int | None) -> None:
        """Raise ``CheckpointExistsError`` if the pool is ahead of the Trainer's own checkpoint, which is to be loaded.
        Else that one is loaded, and the pool begins anew."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.trainer.args.output_dir)  # type: ignore[no-untyped-call]
        if not isinstance(folder, (str, os.PathLike)):
            return  # there is no checkpoint, so the Trainer raises an error
        folder = os.fspath(folder)
        file = os.path.join(folder, trainer_module.TRAINER_STATE_NAME)
        if not os.path.isfile(file):
            raise NoCheckpointError(
                f"resume_from_checkpoint={folder!r} is no checkpoint of the Trainer: it has no "
                f"{trainer_module.TRAINER_STATE_NAME}. Leave resume_from_checkpoint out, and the training continues "
                "from the pool."
            )
        state = TrainerState.load_from_json(file)
        if step is not None and step > state.global_step:
            raise CheckpointExistsError(
                f"resume_from_checkpoint={folder!r} holds step {state.global_step}, and the pool {self.path!r} holds "
                f"step {step}, which would be lost. Leave out resume_from_checkpoint to continue from the pool, or "
                "pass overwrite=True to attach to discard what the pool holds."
            )
        self.found = None
        self._discards_pool = True
        log.warning(
            "lightck: the training continues from the Trainer's checkpoint %s, as resume_from_checkpoint says. The "
            "pool %s begins anew there",
            folder,
            self.path,
        )

    def _refuse_unresumable(self) -> None:
        assert self.found is not None
        if self.found["epoch_was_cut"]:
            raise UnsupportedError(
                "A callback of the run before has ended an epoch early (should_epoch_stop). The Trainer counts full "
                "epochs, so it cannot find its place again. lightck.recover(path, model) restores the weights."
            )

    def _run(
        self,
        train: Callable[..., Any],
        resume_from_checkpoint: _Checkpoint | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the Trainer's ``train``, with methods of this object in place of the Trainer's."""
        trainer, is_resumed = self.trainer, self._folder is not None
        self._session_loader, self.begins_epoch = None, False
        self._began, self._seconds_before = time.time(), self.found["seconds"] if self.found is not None else 0.0
        with ExitStack() as stack:
            replace(stack, trainer, "get_train_dataloader", lambda get: lambda: TrainLoader(get(), self))
            if trainer.args.dataloader_persistent_workers:
                replace(
                    stack, trainer, "get_eval_dataloader", lambda get: functools.partial(self._evaluation_loader, get)
                )
            replace(stack, trainer, "_finalize_training", lambda finalize: functools.partial(self._finalize, finalize))
            replace(stack, trainer, "_init_training_state", lambda init: functools.partial(self._init_state, init))
            replace(stack, trainer.callback_handler, "on_train_begin", lambda run: functools.partial(self._begun, run))
            replace(stack, trainer, "_run_epoch", lambda run: functools.partial(self._run_epoch, run))
            replace(stack, trainer_module, "skip_first_batches", skipping)
            if is_resumed:
                for name in _LOADING:
                    replace(stack, trainer, name, lambda _: _load_nothing)
                replace(stack, trainer.args, "eval_on_start", lambda _: False)  # the first run has evaluated
            self.attributes.watch()  # now, because the methods above are attributes too
            try:
                return train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            finally:
                if self.session is not None:
                    self.session.abandon()  # does nothing after close()
                if trainer.neftune_noise_alpha is not None and hasattr(trainer, "neftune_hook_handle"):
                    trainer.neftune_hook_handle.remove()  # after an error, a second train() would add noise twice

    def begin(self) -> None:
        """Attach. Called when optimizer and scheduler exist, and no batch was fetched."""
        trainer, options = self.trainer, dict(self._options)
        if self._discards_pool:
            options["overwrite"] = True
        state = {STATE_NAME: self._progress, **(options.pop("state", None) or {})}
        if not isinstance(trainer.lr_scheduler, LRScheduler):  # as GreedyLR; LRSchedulers are found by attach
            state.setdefault("scheduler", trainer.lr_scheduler)
        self.session = lightck.attach(
            trainer.model_wrapped,
            self.path,
            optimizer=trainer.optimizer,
            state=state,
            resume=self.found is not None,
            **options,
        )
        self._restored_groups = [_hyperparameters(group) for group in _groups_of(trainer)]
        self._options.pop("overwrite", None)  # a second train() continues from this one
        if self.is_finished:
            log.warning(
                "lightck: the training in the pool %s is finished (step %d). Nothing is trained; the Trainer only ends "
                "it again",
                self.path,
                trainer.state.global_step,
            )

    def _begun(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run all ``on_train_begin``: callbacks that come after that of this file may have overwritten what it has
        restored."""
        control = run(*args, **kwargs)
        self._restore_again()
        self.callbacks.watch()  # now, because callbacks set attributes in on_train_begin too
        return control

    def _restore_again(self) -> None:
        if self.found is not None:
            self.attributes.restore_again()
            self.callbacks.restore_again()

    def _evaluation_loader(self, get: Callable[..., Any], eval_dataset: Any = None) -> EvaluationLoader:
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        return EvaluationLoader(get(eval_dataset), self.started_loaders, key)

    def loader_of(self, loader: Any) -> Any:
        """Return the session's loader, which iterates over the Trainer's, and is at the batch that comes next."""
        assert self.session is not None, "on_train_begin has made it"
        if self._session_loader is None:
            self._session_loader = self.session.loader(loader, name="train")
            if self.begins_epoch and self._session_loader.epoch < self.epoch:
                self._end_pass(self._session_loader)
        return self._session_loader

    def _end_pass(self, loader: Any) -> None:
        """End the pass of the run before. All its batches were trained, and the Trainer asks for none after the last
        one, so the pass has not ended yet."""
        for _ in loader:
            raise SessionError(
                f"An epoch of this Trainer has more batches than one of the run in the pool {self.path!r}, so its "
                "place cannot be found. Give the dataset of that run, or begin another pool with its weights: "
                "lightck.recover(path, model)."
            )

    @property
    def is_finished(self) -> bool:
        """Whether the run before has made the last update."""
        state = self.trainer.state
        if self.found is None or self.session is None:
            return False
        if state.global_step >= state.max_steps:
            return True
        return self.session.done and bool(self.found["stopped"]) and not self.is_longer

    @property
    def is_longer(self) -> bool:
        """Whether this run is to make more updates than the run before was to make."""
        return self._max_steps_before is not None and self.trainer.state.max_steps > self._max_steps_before

    @property
    def was_stopped(self) -> bool:
        """Whether somebody has asked this run to stop, other than ``EarlyStoppingCallback``, before its last update.
        (At the end of the data the Trainer stops by itself, in an epoch without a batch.)"""
        trainer, state = self.trainer, self.trainer.state
        if not trainer.control.should_training_stop or self.is_finished or state.global_step >= state.max_steps:
            return False
        return self.has_batch and not self.callbacks.has_stopped_early()

    def _init_state(
        self, init: Callable[..., tuple[int, int]], max_steps: int, per_epoch: int, n_epochs: int, *others: Any
    ) -> tuple[int, int]:
        """Return the epoch, and how many batches of it were trained. (If the loader has no length, the Trainer takes
        all updates for one epoch, so it would give ``set_epoch`` of an iterable dataset a wrong number. Then the saved
        epoch is returned.)"""
        self.updates_per_epoch = None if n_epochs == sys.maxsize else per_epoch  # the Trainer's mark of no length
        epoch, n_batches = init(max_steps, per_epoch, n_epochs, *others)
        if self.found is None:
            return epoch, n_batches
        before = self.found["updates_per_epoch"]
        if self.updates_per_epoch != before:
            now, before = (one or "an unknown number of" for one in (self.updates_per_epoch, before))
            raise SessionError(
                f"An epoch of this Trainer has {now} updates, and one of the run in the pool {self.path!r} had "
                f"{before}, so the Trainer cannot find its place. Give the dataset, per_device_train_batch_size, "
                "gradient_accumulation_steps and number of ranks of that run, or begin another pool with its weights: "
                "lightck.recover(path, model)."
            )
        refuse_other_batches(self.found, self.trainer.args, self.path)
        if self.updates_per_epoch is not None:
            return epoch, n_batches
        n_updates = self.trainer.state.global_step - self.found["updates_before_epoch"]
        return self.found["epoch"], n_updates * self.trainer.args.gradient_accumulation_steps

    def _run_epoch(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.is_finished:
            self.trainer.control.should_training_stop = True
            return
        trainer, n_skipped = self.trainer, kwargs["steps_trained_in_current_epoch"]
        is_first = kwargs["epoch"] == kwargs["epochs_trained"]
        self.begins_epoch = is_first and not n_skipped and self.session is not None and self.session.done
        updates = n_skipped // trainer.args.gradient_accumulation_steps if is_first else 0
        self.epoch, self.updates_before_epoch = kwargs["epoch"], trainer.state.global_step - updates
        found, self.begun_epoch = self.found, kwargs["epoch"]
        if is_first and found is not None and (n_skipped or found.get("begun_epoch") == kwargs["epoch"]):
            self._restore_again()  # the run before had run on_epoch_begin for this epoch
            for group, values in zip(_groups_of(trainer), self._restored_groups, strict=True):
                group.update(copy.deepcopy(values))
        self.has_batch = False
        run(*args, **kwargs)

    def _finalize(self, finalize: Callable[..., Any], trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """Close the session before the Trainer may load its best model into the trained one."""
        assert self.session is not None, "on_train_begin has made it"
        if self.was_stopped:
            state = self.trainer.state
            close_unfinished(
                self.session,
                f"a request to stop (should_training_stop) has ended this run after step {state.global_step} of "
                f"{state.max_steps}.",
            )
        else:
            self.session.close(done=True)
        return finalize(trial, num_train_samples, start_time - self._seconds_before)


# -- small pieces ------------------------------------------------------------------------------------------------------


def _groups_of(trainer: Any) -> list[dict[str, Any]]:
    return list(trainer.optimizer.param_groups)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of what a group of an optimizer has beside its parameters and other tensors."""
    return {k: copy.deepcopy(one) for k, one in group.items() if k != "params" and not isinstance(one, Tensor)}


def _with_positional(train: Callable[..., Any], trial: object, args: tuple[Any, ...], **kwargs: Any) -> Any:
    """Call ``train`` with the arguments that come by position behind the first one (``ignore_keys_for_eval``)."""
    return train(kwargs.pop("resume_from_checkpoint"), trial, *args, **kwargs)


def _load_nothing(*_: Any, **__: Any) -> None:
    """In place of the Trainer's loading: the pool has what it would load."""
