"""One ``trainer.fit`` of Lightning whose updates are saved.

How a fit goes:

    setup()             the small state of the pool's newest checkpoint is read (its tensors too, if the pool has
                        gradient records). If there is one, the loggers go on with the version of the run before, and
                        the sanity check of the validation is left out
    loaders are made    (``FitLoop.setup_data``) and nothing was fetched: ``lightck.attach``. Optimizers and schedulers
                        exist, and the model is where the strategy puts it. A resume sets the loops to the batch after
                        the checkpoint, and each loader is replaced by one that iterates over ``session.loader``
    next() of a batch   closes the step before: its log, validation and files are done. The first ``next()`` restores
                        again what hooks at the beginning of a run may have overwritten
    the end of the fit  ``session.close(done=True)``, after all ``on_train_end`` hooks. If a request to stop has ended
                        it (``should_stop``), the training is not finished: the last step is dropped, because the hooks
                        at the end have run in it, and the next start continues from the checkpoint before

Invariant: a checkpoint holds the Trainer's own state of the same moment as its tensors (``Progress``): that between two
batches. Lightning's own rules for a restart, which guess at which hook a checkpoint was made, are not used. If the
process is killed inside a validation or a save, the step is made again, and the validation or save is repeated.

Failure cases: an attribute of Lightning that this file uses does not exist: ``UnsupportedError`` in ``setup``. The pool
changes between the first look and the attach: ``SessionError``, and nothing was trained.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import lightck
from lightck.errors import (
    CheckpointExistsError,
    SessionError,
    UnsupportedError,
)
from lightck.integrations import lightning_callbacks as callbacks
from lightck.integrations import lightning_files as files
from lightck.integrations import lightning_loggers as loggers
from lightck.integrations import lightning_loops as loops
from lightck.integrations import lightning_results as results
from lightck.integrations.attributes import ChangedAttributes, assigned_in
from lightck.integrations.lightning_loaders import (
    Batches,
    Lookahead,
    RandomStates,
    TrainLoader,
    ValidationLoader,
    generators_of,
    has_length,
)
from lightck.integrations.newest import newest_of_training
from lightck.integrations.replacing import replace
from lightck.integrations.unfinished import close_unfinished

log = logging.getLogger("lightck")
STATE_NAME = "lightning"
"""Name in ``state`` under which ``Progress`` is saved."""
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "torch")
"""The attributes of a module or callback that the code of these packages assigns are not the user's."""
_LIMITS = ("max_epochs", "min_epochs", "max_steps", "min_steps")
_SETTINGS = ("limit_val_batches", "check_val_every_n_epoch", "gradient_clip_val", "log_every_n_steps")
"""Attributes of the loops and the Trainer that hooks may change in mid-training."""


class Progress:
    """What a Trainer keeps beside model, optimizer and scheduler. Saved in each checkpoint (``state=``)."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def state_dict(self) -> dict[str, Any]:
        fit, trainer, pending = self._fit, self._fit.trainer, self._fit.pending_state
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        found = {
            "loops": loops.saved(trainer.fit_loop),
            "batches_of_an_epoch": fit.n_batches if pending is None else pending["batches_of_an_epoch"],
            "validated": [[key, n] for key, n in val_loop._seen_batches_per_dataloader.items()],
            "should_stop": bool(trainer.should_stop) if pending is None else pending["should_stop"],
            "stopped_early": fit.has_stopped_early if pending is None else _is_early(pending),
            "limits": loops.limits(trainer.fit_loop) if pending is None else pending["limits"],
            "accumulate_grad_batches": fit.batches_per_update,
            "accumulate_grad_batches_given": fit.given_batches_per_update,
            "in_eval": fit.eval_modules,
            "validation_generators": fit.validation_generators(),
            "callbacks": callbacks.saved(trainer, fit.callback),
            "attributes": {name: changed for name, one in fit.attributes.items() if (changed := one.changed())},
            "evaluated": sorted(fit.started_loaders),
            "loggers": loggers.saved(trainer) if pending is None else pending["loggers"],
            "pass_has_ended": fit.pass_has_ended,
            "closed_at": time.time(),
            **results.saved(trainer),
        }
        if trainer.datamodule is not None and (state := trainer.datamodule.state_dict()):
            found["datamodule"] = state
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        fit, trainer = self._fit, self._fit.trainer
        found = fit.found
        if found is None or state["loops"] != found["loops"]:
            raise SessionError(
                f"The pool {fit.path!r} has changed since fit() began. Another process may train into it. Nothing was "
                "trained. Call fit() again."
            )
        fit.pending_state, fit.pass_has_ended = state, state["pass_has_ended"]
        loop = trainer.fit_loop
        loops.restore(loop, state["loops"])
        fit.seen_batches = dict(state["validated"])
        loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(fit.seen_batches)
        # Only early stopping ends the training. Any other request to stop has ended only the process that got it.
        trainer.should_stop = fit.had_stopped_early = _is_early(state) and not loops.are_raised(loop, state["limits"])
        fit.saved_generator_states = state["validation_generators"]
        fit.started_loaders |= set(state["evaluated"])
        callbacks.restore(trainer, state["callbacks"])
        callbacks.write_again(trainer, state["closed_at"])
        fit.restore_attributes(state["attributes"])
        if "datamodule" in state and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["datamodule"])
        results.restore(trainer, state)


class Fit:
    """Replaces methods of one Trainer's loops from ``setup`` until ``end``."""

    def __init__(self, callback: Any, trainer: Any, module: Any, path: str, resume: bool, options: Any) -> None:
        """``callback``: the ``LightckCallback``. ``options``: keywords of ``lightck.attach``."""
        self.callback, self.trainer, self.module, self.path = callback, trainer, module, path
        self.session: lightck.Session | None = None
        self.found: Mapping[str, Any] | None = None
        """What ``Progress`` saved in the checkpoint from which this fit goes on."""
        self.pending_state: dict[str, Any] | None = None
        """The same, from the time when it is loaded until the first batch is fetched; else None."""
        self.seen_batches: dict[int, int] = {}
        """Batches of each validation loader so far. Lightning begins to count when it makes these loaders."""
        self.started_loaders: set[str] = set()
        """Keys of the validation's loaders whose workers have started in this run or an earlier one."""
        self.attributes = {"module": ChangedAttributes(module, _assigned_by_packages(type(module)), trained=module)}
        self._names_by_number: dict[str, str] = {}
        """Name in ``attributes`` of each callback, by the name that pools of earlier releases have for it."""
        for name, number, one in callbacks.named(trainer, callback):
            if type(one).__module__.partition(".")[0] not in (*PACKAGES, "lightck"):
                self.attributes[name] = ChangedAttributes(one, _assigned_by_packages(type(one)), trained=module)
                self._names_by_number[f"callback {number}"] = name
        for name, one in results.metrics_of(module):
            saved_or_known = results.known_of_metric(one) | _assigned_by_packages(type(one))
            self.attributes[f"metric {name}"] = ChangedAttributes(one, saved_or_known, trained=module)
        loop = trainer.fit_loop
        for name, owner, names in (("limits", loop, _LIMITS), ("limits of an epoch", loop.epoch_loop, _LIMITS)):
            self.attributes[name] = ChangedAttributes(owner, only=names)
        self.attributes["trainer"] = ChangedAttributes(trainer, only=_SETTINGS)
        if trainer.datamodule is not None:
            known = _assigned_by_packages(type(trainer.datamodule))
            self.attributes["datamodule"] = ChangedAttributes(trainer.datamodule, known, trained=module)
        self._resume, self._options = resume, dict(options)
        self._progress, self._stack = Progress(self), ExitStack()
        self.n_batches = float("inf")
        """Number of batches of an epoch; infinite if a loader has no length."""
        self._lookahead: Lookahead | None = None
        self.saved_generator_states: list[Any] | None = None
        """What ``validation_generators`` returned in the run before, until the generators are set to it; else None."""
        self._had_sanity_check = bool(trainer.num_sanity_val_steps)
        self._runs = False
        """Whether the loop of the training has begun."""
        self._states_at_early_loaders: RandomStates | None = None
        """The random states at the time when the loaders were made, if that was before the training's loop began."""
        self.pass_has_ended = False
        """Whether the loader of the training has said that its last pass has ended."""
        self._goes_on_in_epoch = False
        """Whether the loaded checkpoint lies inside an epoch."""
        self._early_stops: list[tuple[Any, Any]] = []
        """What the ``EarlyStopping`` callbacks said of their last stop when this fit began."""
        self.had_stopped_early = False
        """Whether an ``EarlyStopping`` callback of the run before has asked for the end, which is still to come."""
        self.given_batches_per_update = 1
        """What the script has passed as ``accumulate_grad_batches``."""
        self._n_ended = 0
        """Number of batches of the training, earlier runs included, when ``end_step()`` last ended a step (used with
        manual optimization only)."""

    # -- the beginning and the end -------------------------------------------------------------------------

    def begin(self) -> None:
        """Look at the pool, and replace what this file needs."""
        self._look()
        trainer, loop = self.trainer, self.trainer.fit_loop
        self.given_batches_per_update = trainer.accumulate_grad_batches
        loggers.follow(trainer)
        if self.found is not None:
            if trainer.is_global_zero and not files.is_asked_for(trainer):  # a file of the script counts, not the pool
                loggers.rewind(trainer, self.found["loggers"])
            self._replace(trainer, "num_sanity_val_steps", lambda _: 0)  # the first run has made the check
        for one in _flat(getattr(loop.epoch_loop.val_loop._data_source, "instance", None)):
            if isinstance(one, DataLoader):
                one._lightck_restores_draw = True  # ValidationLoader undoes the draw when the workers start again
        self._replace(self.module, "_lightck_restores_attributes", lambda _: True)
        connector = trainer._checkpoint_connector
        self._replace(connector, "resume_start", lambda start: functools.partial(self._read_file, start))
        self._replace(loop, "run", lambda run: functools.partial(self._run, run))
        self._replace(loop, "_load_combined_loader_states", lambda load: functools.partial(self._loaders_made, load))
        self._replace(loop, "on_run_end", lambda end: functools.partial(self._fitted, end))
        self._replace(loop.epoch_loop, "reset", lambda reset: functools.partial(self._reset_epoch, reset))
        self._replace(loop.epoch_loop, "on_run_start", lambda start: functools.partial(self._epoch_started, start))
        val_loop = loop.epoch_loop.val_loop
        self._replace(val_loop, "setup_data", lambda setup: functools.partial(self._validation_loaders, setup))
        module = sys.modules[type(loop).__module__]
        self._replace(module, "_select_data_fetcher", lambda select: functools.partial(self._fetcher, select))

    def end(self) -> None:
        """Release the pool, and put back what was replaced. Does nothing more after the end of the fit."""
        self._stack.close()
        if self.session is not None:
            self.session.abandon()  # does nothing after close()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        replace(self._stack, owner, name, make)

    def _look(self) -> None:
        if self._options.get("overwrite"):
            return
        checkpoint = newest_of_training(self.path, resume=self._resume, options=self._options)
        if checkpoint is None:
            return
        with checkpoint:
            step, state = checkpoint.step, checkpoint.state
        if not self._resume:
            raise CheckpointExistsError(
                f"The pool {self.path!r} holds step {step}, and resume=False is given. Leave it out to continue from "
                "there, or pass overwrite=True to discard what the pool holds."
            )
        if STATE_NAME not in state:
            raise SessionError(
                f"The pool {self.path!r} was not written by a Trainer of Lightning, so it does not say at which epoch "
                "and batch one goes on. Go on with the loop that wrote it, or attach to another pool."
            )
        self.found = state[STATE_NAME]

    # -- attach --------------------------------------------------------------------------------------------

    def _loaders_made(self, load: Callable[[], None]) -> None:
        """Attach, if optimizers and schedulers exist. Called when the loaders exist, and no batch was fetched."""
        load()
        if self._runs:
            self._attach()
        else:
            self._states_at_early_loaders = RandomStates(self.trainer.fit_loop._combined_loader.flattened)

    def _run(self, run: Callable[[], None]) -> None:
        """Run the loop. If the script has asked for the number of steps (``estimated_stepping_batches``, for a
        schedule), the loaders exist already, and the first pass has begun. It begins once more, with the same random
        states."""
        self._runs = True
        if self._states_at_early_loaders is not None:
            self._attach()
            loop = self.trainer.fit_loop
            with self._states_at_early_loaders.set_for_a_while():
                fetcher = sys.modules[type(loop).__module__]._select_data_fetcher(
                    self.trainer, self.trainer.state.stage
                )
                fetcher.setup(loop._combined_loader)
                iter(fetcher)
            loop._data_fetcher = fetcher
        run()

    def _attach(self) -> None:
        if self.session is not None:
            raise UnsupportedError(
                "Lightning has made the loaders of the training anew (reload_dataloaders_every_n_epochs, or a second "
                "fit inside this one). lightck cannot find the place in them again. Leave that argument out."
            )
        self._prefer_ckpt_path()
        trainer, options = self.trainer, dict(self._options)
        self._prepare_validation()
        for one in self.attributes.values():
            one.watch()
        self.n_batches = _n_batches(trainer.fit_loop._combined_loader)
        state = {STATE_NAME: self._progress, **(options.pop("state", None) or {})}
        for number, config in enumerate(trainer.lr_scheduler_configs):
            if not isinstance(config.scheduler, LRScheduler) or len(trainer.lr_scheduler_configs) > 1:
                state.setdefault(f"scheduler {number}", config.scheduler)
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            state.setdefault("scaler", scaler)
        self._early_stops = callbacks.early_stops(trainer)
        self.session = self.callback.session = lightck.attach(
            trainer.strategy.model,
            self.path,
            optimizer=list(trainer.optimizers),
            state=state,
            resume=self.found is not None,
            **options,
        )
        self._early_stops = callbacks.early_stops(trainer)  # again, because a resume restores them
        if not self.module.automatic_optimization:
            self.session._expect_end_step()  # the first batch too may make several updates
        if not (self.session.done and trainer.fit_loop.done):
            self._warn_of_other_accumulation()
            self._wrap_loaders()
            return
        log.warning(
            "lightck: the training in the pool %s is finished (step %d). Nothing is trained",
            self.path,
            self.session.step,
        )

    def _read_file(self, start: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Read the file of ``ckpt_path``. Nothing of it is restored yet."""
        start(*args, **kwargs)
        if self.found is not None:
            files.drop_loaded(self.trainer, self.path, loops.global_step(self.found["loops"]))

    def _prefer_ckpt_path(self) -> None:
        """If the user asked for a checkpoint of Lightning (``ckpt_path``), go on from that, and let the pool begin
        anew. Raise if the pool is ahead of it."""
        if not self.trainer.ckpt_path:
            return
        if self.found is not None:
            theirs, ours = self.trainer.global_step, loops.global_step(self.found["loops"])
            if ours > theirs:
                raise CheckpointExistsError(
                    f"ckpt_path={self.trainer.ckpt_path!r} holds step {theirs}, and the pool {self.path!r} holds step "
                    f"{ours}, which would be lost. Leave out ckpt_path to continue from the pool, or pass "
                    "overwrite=True to LightckCallback to discard what the pool holds."
                )
        self.found = None
        self._options["overwrite"] = True
        log.warning(
            "lightck: the training continues from Lightning's checkpoint %s (ckpt_path). The pool %s begins anew there",
            self.trainer.ckpt_path,
            self.path,
        )

    def _wrap_loaders(self) -> None:
        assert self.session is not None
        loop = self.trainer.fit_loop
        combined = loop._combined_loader
        progress = loop.epoch_progress.current
        self._goes_on_in_epoch = self.pending_state is not None and progress.started > progress.processed
        if self._goes_on_in_epoch:
            self._refuse_other_length()
            for one in combined.flattened:  # now, because the pass begins before Lightning does this
                sys.modules[type(loop).__module__]._set_sampler_epoch(one, progress.processed)
        pending = self.pending_state
        # The checkpoint lies between two epochs, and the pass before was not read to its end.
        begins_new_pass = pending is not None and not (self._goes_on_in_epoch or pending["pass_has_ended"])
        sized = [has_length(one) for one in combined.flattened]
        if len(sized) > 1 and (combined._mode == "max_size" or not all(sized)):
            raise UnsupportedError(
                "lightck cannot find the place in these training loaders again. Several loaders can be resumed only if "
                "each has a length, and CombinedLoader's mode is 'min_size' or 'max_size_cycle'. Use such loaders and "
                "such a mode, or a single loader."
            )
        wrapped = []
        for number, (loader, is_sized) in enumerate(zip(combined.flattened, sized, strict=True)):
            inner = loader
            if not is_sized:
                inner = self._lookahead = Lookahead(loader)
            name = "train" if len(sized) == 1 else f"train {number}"
            session_loader = self.session.loader(inner, name=name, anew=begins_new_pass)
            wrapped.append(TrainLoader(loader, session_loader, self._before_next, self._forget_fetcher))
        combined.flattened = wrapped

    def _warn_of_other_accumulation(self) -> None:
        if self._accumulates_otherwise:
            assert self.pending_state is not None
            log.warning(
                "lightck: accumulate_grad_batches is %s now, and was %s in the run before. From step %d on, an update "
                "takes the gradients of %s batches",
                self.given_batches_per_update,
                self.pending_state["accumulate_grad_batches_given"],
                self.callback.session.step,
                self.given_batches_per_update,
            )

    def _refuse_other_length(self) -> None:
        """Raise if an epoch has another number of batches than the epoch in which the run before was."""
        assert self.pending_state is not None
        now, before = self.n_batches, self.pending_state["batches_of_an_epoch"]
        if now != before:
            raise SessionError(
                f"An epoch of this Trainer has {now:g} batches, and the epoch of the run in the pool {self.path!r} had "
                f"{before:g}, so its place cannot be found. Give the dataset, batch size, limit_train_batches and "
                "number of devices of that run, or begin another pool with its weights: lightck.recover(path, model)."
            )

    # -- in the loops --------------------------------------------------------------------------------------

    def _before_next(self) -> None:
        assert self.session is not None
        loop = self.trainer.fit_loop.epoch_loop
        if self.pending_state is not None:
            for one in self.attributes.values():
                one.restore_again()
            results.restore(self.trainer, self.pending_state)
            self.trainer.accumulate_grad_batches = self.batches_per_update
            eval_modules = set(self.pending_state["in_eval"])
            for name, one in self.module.named_modules():
                one.training = name not in eval_modules
            self.pending_state, self.pass_has_ended = None, False
            self._n_ended = loop.batch_progress.total.completed
        if not self.module.automatic_optimization and loop.batch_progress.total.completed > self._n_ended:
            self._n_ended = loop.batch_progress.total.completed
            self.session.end_step()  # optimizers may step at different rates

    def _forget_fetcher(self) -> None:
        """Take Lightning's fetcher away, so that its teardown leaves the loaders alone. (It asks for the length of a
        pass that has not begun, and its own error would hide that of the loader.)"""
        self.trainer.fit_loop._data_fetcher = None

    @property
    def batches_per_update(self) -> int:
        """Number of batches for an update. (After a resume, ``trainer.accumulate_grad_batches`` gets the saved value
        only at the first batch: ``GradientAccumulationScheduler`` refuses any but 1 in ``on_train_start``.)"""
        now, pending = self.trainer.accumulate_grad_batches, self.pending_state
        return int(now if pending is None or self._accumulates_otherwise else pending["accumulate_grad_batches"])

    @property
    def _accumulates_otherwise(self) -> bool:
        """Whether the script now passes another ``accumulate_grad_batches`` than in the run before."""
        given = self.given_batches_per_update
        return bool((self.pending_state or {}).get("accumulate_grad_batches_given", given) != given)

    @property
    def eval_modules(self) -> list[str]:
        """Names of the modules in eval mode: hooks at the beginning of an epoch may set it."""
        if self.pending_state is not None:
            return list(self.pending_state["in_eval"])
        return [name for name, one in self.module.named_modules() if not one.training]

    def validation_generators(self) -> list[Any]:
        """Return the states of generators that loaders of the validation have of their own."""
        if self.saved_generator_states is not None:
            return self.saved_generator_states
        combined = self.trainer.fit_loop.epoch_loop.val_loop._combined_loader
        return [] if combined is None else [one.get_state() for one in generators_of(combined.flattened)]

    def _prepare_validation(self) -> None:
        """Make the loaders of the validation, if the sanity check, which makes them otherwise, is left out."""
        trainer = self.trainer
        if self.found is None or not self._had_sanity_check or not trainer.enable_validation:
            return
        random_states = RandomStates([])
        stage, trainer.validating = trainer.state.stage, True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.state.stage = stage
        random_states.set()

    def _reset_epoch(self, reset: Callable[[], None]) -> None:
        loop = self.trainer.fit_loop
        if self.pending_state is not None and self._goes_on_in_epoch:
            return  # all counters are as they were
        if self.pending_state is not None:
            loop.epoch_loop.restarting = False
        reset()

    def _epoch_started(self, start: Callable[[Any], None], fetcher: Any) -> None:
        start(fetcher)
        if self.pending_state is not None:
            loop = self.trainer.fit_loop
            loop.epoch_loop.restarting = loop._restarting = False  # the loaded state is that between two batches

    def _validation_loaders(self, setup: Callable[[], None]) -> None:
        setup()
        seen_batches, self.seen_batches = self.seen_batches, {}
        self.trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(seen_batches)
        combined = self.trainer.fit_loop.epoch_loop.val_loop._combined_loader
        if combined is not None:
            states, self.saved_generator_states = self.saved_generator_states or [], None
            for one, saved in zip(generators_of(combined.flattened), states, strict=False):
                one.set_state(saved)
            combined.flattened = [
                ValidationLoader(one, self.started_loaders, str(number)) if _has_persistent_workers(one) else one
                for number, one in enumerate(combined.flattened)
            ]

    def _fetcher(self, select: Callable[..., Any], *args: Any) -> Any:
        fetcher = select(*args)
        if self._lookahead is None or args[0] is not self.trainer or not hasattr(fetcher, "prefetch_batches"):
            return fetcher
        kind: Any = type(fetcher)
        fetcher.__class__ = _one_at_a_time(kind)
        fetcher.prefetch_batches, fetcher.lookahead = 0, self._lookahead
        return fetcher

    def restore_attributes(self, saved: dict[str, Any]) -> None:
        """Set the attributes that earlier runs changed."""
        saved = {self._names_by_number.get(name, name): one for name, one in saved.items()}
        for name, one in self.attributes.items():
            one.restore(saved.pop(name, {}))
        if lost := [name for name, found in saved.items() if found]:
            log.warning(
                "lightck: the run before had the %s, which had changed its attribute %r. That is lost, because this "
                "Trainer has no such object",
                lost[0],
                next(iter(saved[lost[0]])),
            )

    def _fitted(self, end: Callable[[], None]) -> None:
        end()
        assert self.session is not None
        if self._was_stopped():
            close_unfinished(
                self.session,
                f"a request to stop (should_stop) has ended this fit after step {self.session.step}, before max_epochs "
                f"and max_steps.{callbacks.advice_of_timer(self.trainer)}",
            )
            return
        self._end_pass()
        self.session.close(done=True)

    def _was_stopped(self) -> bool:
        """Whether somebody has asked this fit to stop, other than ``EarlyStopping``, before it reached its limits."""
        assert self.session is not None
        trainer = self.trainer
        if not trainer.should_stop or self.session.done or loops.are_reached(trainer.fit_loop):
            return False
        return not self.has_stopped_early

    @property
    def has_stopped_early(self) -> bool:
        """Whether an ``EarlyStopping`` callback has asked for the end, in this run or, for an end that is still to
        come, in the run before."""
        return self.had_stopped_early or callbacks.early_stops(self.trainer) != self._early_stops

    def _end_pass(self) -> None:
        """If the last batch of the pass was given, ask for one more, so that the session sees the end of the pass.
        (Lightning does not ask for it, so the pass would look unfinished, and a fit with more epochs would have to
        begin it anew.)"""
        loop = self.trainer.fit_loop
        iterators = getattr(loop._combined_loader._iterator, "iterators", [])
        if len(iterators) != 1 or not isinstance(iterators[0], Batches):
            return
        # Lightning's own counter differs from ``has_given_all`` after ckpt_path of mid-epoch.
        is_last = iterators[0].has_given_all if self._lookahead is None else self._lookahead.gave_last
        if is_last:
            next(iterators[0], None)
            self.pass_has_ended = True


# -- small pieces ------------------------------------------------------------------------------------------------------


def _is_early(saved: Mapping[str, Any]) -> bool:
    """Whether early stopping has asked for the end. (Earlier releases saved only that somebody has asked for it.)"""
    return bool(saved.get("stopped_early", saved["should_stop"]))


def _n_batches(combined: Any) -> float:
    """Return the number of batches of an epoch. (The combined loader knows it only when its pass has begun.)"""
    lengths = [
        float(min(len(one) if has_length(one) else float("inf"), limit))
        for one, limit in zip(combined.flattened, combined.limits, strict=True)
    ]
    return min(lengths) if combined._mode == "min_size" else max(lengths)


def _flat(loaders: Any) -> list[Any]:
    """Return the loaders in lists and dicts."""
    if isinstance(loaders, dict):
        loaders = list(loaders.values())
    return [inner for one in loaders for inner in _flat(one)] if isinstance(loaders, (list, tuple)) else [loaders]


def _has_persistent_workers(loader: Any) -> bool:
    return not isinstance(loader, ValidationLoader) and bool(getattr(loader, "persistent_workers", False))


@functools.cache
def _one_at_a_time(kind: Any) -> Any:
    """Return the class of a fetcher that fetches no batch ahead, because the loader inside does it."""

    def __next__(self: Any) -> Any:
        batch = kind.__next__(self)
        self.done = self.lookahead.gave_last
        return batch

    return type(kind.__name__, (kind,), {"__next__": __next__})


def _assigned_by_packages(kind: type) -> frozenset[str]:
    """Return the names of all attributes that the code of torch and Lightning assigns to objects of this class."""
    found: set[str] = set()
    for one in kind.__mro__:
        if one.__module__.partition(".")[0] in PACKAGES:
            found |= assigned_in(one)
    found -= {"_hparams"}  # the script may change what is in it
    return frozenset(found | (set(vars(nn.Module())) if issubclass(kind, nn.Module) else set()))
