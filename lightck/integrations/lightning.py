"""Lightning: each finished update of a ``Trainer``, or of a loop with Fabric, survives a crash.

    trainer = Trainer(callbacks=[lightck.integrations.lightning.LightckCallback("run.pool")])
    trainer.fit(model, loader)

    model, optimizer = fabric.setup(model, optimizer)
    session = lightck.integrations.lightning.attach(fabric, "run.pool")
    loader = session.loader(fabric.setup_dataloaders(loader))       # the loop is the user's

``LightckCallback`` only begins and ends a ``Fit`` (``lightning_fit.py``, which says how a fit goes). Both package names
are supported: ``lightning`` and ``pytorch_lightning``, with ``lightning_fabric``.

Failure cases: ``setup`` raises an error, before anything is trained, that names a release, a strategy, a callback or an
argument with which a resume would not be exact.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from typing import Any

import lightck
from lightck.errors import AmbiguousError, LateError, SessionError, UnsupportedError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _package() -> Any:
    """Return the package that the script has imported; if it has imported none yet, the one that is installed."""
    names = sorted(_PACKAGES, key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as err:
            if err.name != name.partition(".")[0]:
                raise
    raise ImportError(
        "lightck.integrations.lightning needs lightning. Install it with: pip install 'lightck[lightning]'"
    )


pl: Any = _package()

from lightck.integrations.lightning_fit import Fit  # noqa: E402
from lightck.integrations.lightning_results import USED_OF_CONNECTOR  # noqa: E402

VERSIONS = ((2, 5), (3, 0))
"""The first supported release of Lightning, and the first that is not known."""
_USED_OF_CHECKPOINT_CONNECTOR = (
    "resume_start",
    "_ckpt_path",
    "_loaded_checkpoint",
    "_user_managed",
    "_hpc_resume_path",
)
_USED_OF_FIT_LOOP = (
    "_load_combined_loader_states",
    "_combined_loader",
    "_loaded_from_state_dict",
    "is_resuming",
    "on_run_end",
    "restarted_mid_epoch",
    "epoch_progress",
    "max_batches",
)
_USED_OF_EPOCH_LOOP = ("reset", "on_run_start", "batch_progress", "_results", "_batches_that_stepped", "val_loop")
_USED_OF_VAL_LOOP = ("setup_data", "_combined_loader", "_seen_batches_per_dataloader")
"""Attributes of Lightning's loops that ``Fit`` uses, or that the loops of a known release use for a restart."""
_REFUSED_STRATEGIES = {
    "FSDPStrategy": "it shards the model with torch's first FSDP, which was not tested",
    "DeepSpeedStrategy": "DeepSpeed has its own optimizers and partitions",
    "XLAStrategy": "lightck knows no XLA devices",
    "SingleDeviceXLAStrategy": "lightck knows no XLA devices",
}
_REFUSED_CALLBACKS = {
    "BaseFinetuning": "it gives parameters to the optimizer in mid-training",
    "ModelPruning": "it replaces parameters in mid-training",
    "StochasticWeightAveraging": "it replaces schedulers in mid-training, and its average is not saved",
    "WeightAveraging": "it keeps an average of the model that is not saved",
    "LearningRateFinder": "it makes trial updates before the training begins. Call Tuner(trainer).lr_find(model) "
    "instead",
    "BatchSizeFinder": "it makes trial updates before the training begins. Call Tuner(trainer).scale_batch_size(model) "
    "instead",
}
"""Names of classes, and why a resume would not be exact with them."""


class LightckCallback(pl.Callback):  # type: ignore[misc]
    """Makes every finished update of ``Trainer.fit`` survive a crash.

    The pool is opened in ``fit``. If it holds a checkpoint, the training continues from there: weights, optimizers,
    schedulers, random states, batches, loops, logged metrics, and the states of callbacks and data module are those of
    the run before.

    Args:
        pool_path: the pool's file, made if it does not exist. In a group of ranks: a directory.
        resume: continue from what the pool holds. False: ``fit`` raises ``CheckpointExistsError`` if it holds a
            checkpoint.
        options: other keywords of ``lightck.attach``. ``optimizer`` is the Trainer's.

    ``fit`` raises ``UnsupportedError`` for a release, a strategy, a callback or an argument with which a resume would
    not be exact, and ``SessionError`` if the Trainer has trained already, or has two such callbacks.
    """

    session: lightck.Session | None = None
    """The session of the present fit, or of the last one; None before ``fit`` has begun."""

    def __init__(self, pool_path: str | os.PathLike[str], *, resume: bool = True, **options: Any) -> None:
        super().__init__()
        if "optimizer" in options:
            raise TypeError("Do not pass optimizer= here: lightck takes the optimizers of the Trainer.")
        self._path, self._resume, self._options = os.fspath(pool_path), resume, options
        self._fit: Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run or _is_tuner_run(trainer):
            return
        self.on_exception()  # a fit before this one may have been interrupted before its teardown
        if self.session is not None and self.session.done:
            raise SessionError(
                f"This LightckCallback has completed a fit, and the pool {self._path!r} holds that one training. For a "
                "second fit, make another Trainer with another LightckCallback and another pool."
            )
        _refuse_unsupported(trainer, pl_module, goes_on=self.session is not None)
        self._fit = Fit(self, trainer, pl_module, self._path, self._resume, self._options)
        self._fit.begin()

    def on_exception(self, *_: Any) -> None:
        """End the session. What was finished is committed, and the step that was interrupted is dropped."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self._fit is not None and self.session is not None:
            self._options.pop("overwrite", None)  # a second fit continues from this one
        self.on_exception()


def attach(
    fabric: Any,
    pool_path: str | os.PathLike[str],
    *,
    model: Any = None,
    state: dict[str, object] | None = None,
    resume: bool = True,
    **options: Any,
) -> lightck.Session:
    """Make every finished update of a loop with Fabric survive a crash, and continue from the pool.

    Call it after ``fabric.setup``, and iterate over ``session.loader(loader)`` in place of ``loader``.

    Args:
        fabric: the Fabric object.
        pool_path: the pool's file, made if it does not exist. In a group of ranks: a directory.
        model: what ``fabric.setup`` returned. It may be left out if Fabric has set up one model. If it has set up
            several: the module that contains them all.
        state: name -> further object with ``state_dict`` and ``load_state_dict``. Optimizers, schedulers and the
            GradScaler are found.
        resume: continue from what the pool holds. False: raise ``CheckpointExistsError`` if it holds a checkpoint.
        options: other keywords of ``lightck.attach``.

    Raises:
        LateError: no model is set up yet.
        AmbiguousError: several models are set up, and ``model`` is not given.
        UnsupportedError: a strategy that lightck does not know.
        TypeError: ``fabric`` is no Fabric.
    """
    if not {"lightning.fabric.fabric", "lightning_fabric.fabric"} & {one.__module__ for one in type(fabric).__mro__}:
        raise TypeError(f"fabric is a {type(fabric).__name__}. Pass a lightning.Fabric.")
    _refuse_strategy(fabric._strategy, "Save with fabric.save() instead.")
    given = dict(state or {})
    if (scaler := getattr(fabric._precision, "scaler", None)) is not None:
        given.setdefault("scaler", scaler)
    root = _set_up_by(fabric) if model is None else model
    root = getattr(root, "_forward_module", root)
    return lightck.attach(root, pool_path, state=given, resume=resume, **options)


def _set_up_by(fabric: Any) -> Any:
    wrappers_module = sys.modules[type(fabric).__mro__[-2].__module__.replace(".fabric.fabric", ".fabric.wrappers")]
    kind = getattr(wrappers_module, "_FabricModule", None)
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is kind and one._strategy is fabric._strategy]
    if not found:
        raise LateError("Fabric has set up no model yet. Call attach after fabric.setup(model, optimizer).")
    if len(found) > 1:
        raise AmbiguousError(
            f"Fabric has set up {len(found)} models, and a pool has one root. Pass a module that contains them all: "
            "attach(fabric, path, model=torch.nn.ModuleDict({'first': first, 'second': second}))."
        )
    return found[0]


# -- what is refused ---------------------------------------------------------------------------------------------------


def _is_tuner_run(trainer: Any) -> bool:
    """Whether this fit is a trial of a ``Tuner``, which undoes it afterwards."""
    return any(getattr(one, "_early_exit", False) for one in trainer.callbacks)


def _refuse_unsupported(trainer: Any, module: Any, *, goes_on: bool) -> None:
    """``goes_on``: an earlier fit of this callback has trained."""
    _refuse_release(trainer)
    if sum(type(one).__name__ == LightckCallback.__name__ for one in trainer.callbacks) > 1:
        raise SessionError("The Trainer has two LightckCallbacks. One callback, with one pool, for each Trainer.")
    trackers = [name for name, one in module.named_modules() if type(one).__name__ == "MetricTracker"]
    if trackers:
        raise UnsupportedError(
            f"{trackers[0]} is a MetricTracker of torchmetrics, which grows in mid-training, and is not restored. Use "
            "a metric in its place, or leave the LightckCallback out."
        )
    if trainer.global_step and not goes_on:
        raise SessionError(
            f"This Trainer has made {trainer.global_step} updates already. Give it the LightckCallback before its "
            "first fit; the pool then knows where the training begins."
        )
    _refuse_strategy(trainer.strategy, "Leave the LightckCallback out, and use Lightning's checkpoints.")
    for one in trainer.callbacks:
        for kind in type(one).__mro__:
            if kind.__name__ in _REFUSED_CALLBACKS:
                raise UnsupportedError(
                    f"{type(one).__name__} cannot be resumed exactly: {_REFUSED_CALLBACKS[kind.__name__]}. Leave it "
                    "out, or leave the LightckCallback out."
                )
    if trainer.reload_dataloaders_every_n_epochs:
        raise UnsupportedError(
            "Trainer(reload_dataloaders_every_n_epochs=...) cannot be used with lightck: the place in a loader that "
            "is made anew cannot be found again. Leave the argument out."
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedError(
            "training_step(dataloader_iter) fetches batches on its own, so the end of a step is unknown. Use "
            "training_step(batch), or leave the LightckCallback out."
        )


def _refuse_strategy(strategy: Any, cure: str) -> None:
    for kind in type(strategy).__mro__:
        if kind.__name__ in _REFUSED_STRATEGIES:
            raise UnsupportedError(
                f"The strategy {type(strategy).__name__} cannot be used with lightck: "
                f"{_REFUSED_STRATEGIES[kind.__name__]}. {cure}"
            )


def _refuse_release(trainer: Any) -> None:
    package = sys.modules[type(trainer).__module__.partition(".")[0]]
    version = package.__version__
    major, minor = (int(one) for one in version.split(".")[:2])
    if not VERSIONS[0] <= (major, minor) < VERSIONS[1]:
        raise UnsupportedError(
            f"{package.__name__} {version} is not supported: lightck knows {VERSIONS[0][0]}.{VERSIONS[0][1]} to "
            f"{VERSIONS[1][0] - 1}.x. Install such a release, or use Lightning's checkpoints."
        )
    loop = trainer.fit_loop
    used = (
        (trainer, ("ckpt_path", "_logger_connector", "_checkpoint_connector", "num_sanity_val_steps")),
        (trainer._checkpoint_connector, _USED_OF_CHECKPOINT_CONNECTOR),
        (loop, _USED_OF_FIT_LOOP),
        (loop.epoch_loop, _USED_OF_EPOCH_LOOP),
        (loop.epoch_loop.val_loop, _USED_OF_VAL_LOOP),
        (trainer._logger_connector, USED_OF_CONNECTOR),
        (sys.modules[type(loop).__module__], ("_select_data_fetcher",)),
    )
    missing = [f"{type(one).__name__}.{name}" for one, names in used for name in names if not hasattr(one, name)]
    if missing:
        raise UnsupportedError(
            f"{package.__name__} {version} has no {missing[0]}, which lightck needs to resume exactly. Install another "
            "release: 2.5.3 to 2.6.6 have it."
        )
