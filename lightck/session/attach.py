"""``attach``: from a model and a path to a session.

In order: what is to be saved is found and checked; the pool's lock is taken; an existing pool is restored, adopted or
refused, a new one is laid out; the hooks go in. Nothing of the user's is changed before everything that can be refused
was refused, and no pool that holds a checkpoint is overwritten or loaded unless the caller said so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lightck.errors import UnsupportedError
from lightck.hooks.layerwise import layerwise_of
from lightck.pipeline.nonfinite import NonfiniteCheck
from lightck.pipeline.pipeline import Pipeline
from lightck.pipeline.plan import Strategy
from lightck.pipeline.staging.kinds import Kind
from lightck.pool.storage import durability
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.backends import pool_path as _pool_path
from lightck.restore.resume import Resumed
from lightck.restore.tensor_writes import ordinary_tensors
from lightck.session.arguments import Arguments, Saving
from lightck.session.capture import Capture
from lightck.session.commits import Beside
from lightck.session.discover import Found, discover, unwrap
from lightck.session.first_step import FirstStep
from lightck.session.interval import Auto
from lightck.session.pool_file import PoolFile
from lightck.session.session import Session
from lightck.session.steps import Steps
from lightck.state.optimizer_wrappers import enabled
from lightck.state.storable import check_objects
from lightck.stats import Meter
from lightck.strategy.full import FullState
from lightck.tiers.keep import Keep, Keeper
from lightck.tiers.pin import Holds

log = logging.getLogger("lightck")
CHECK_VARIABLE = "LIGHTCK_CHECK"


@ordinary_tensors()
def attach(
    model: nn.Module,
    pool_path: str | os.PathLike[str],
    *,
    optimizer: object = None,
    state: Mapping[str, object] | None = None,
    interval: int | str | Auto = 1,
    resume: bool = False,
    overwrite: bool = False,
    strategy: Strategy | None = None,
    backend: str = "auto",
    require: str | None = None,
    slots: int | None = None,
    keep: Keep | None = None,
    pause_on_nonfinite: bool = False,
    staging: Kind | None = None,
    strict_data: bool = False,
) -> Session:
    """Make every finished training step of ``model`` survive a crash.

    Args:
        model: the root module. Attach after its optimizer and LR scheduler were built.
        pool_path: the pool's file, made if it is not there (its folder must exist); or a device-dax device.
        optimizer: an optimizer or a list of them. Not passed: looked for among live objects.
        state: name -> object with ``state_dict``. Schedulers and a GradScaler are found; ``{"scheduler": None}``: no.
        interval: every how many updates a version is saved; ``"auto"`` or ``lightck.Auto(...)``: by what it costs.
        resume: restore the newest version, if the pool holds one, and go on from it.
        overwrite: discard what the pool holds.
        strategy: what a version holds; ``FullState()``.
        backend: ``"file"``, ``"pmdk"``, ``"devdax"``; ``"auto"``: by the path; a new one on persistent memory PMDK's.
        require: ``"process"``, ``"os"`` or ``"power"``: refuse a medium that does not survive that.
        slots: versions that the pool has room for, 2 to 8; by default 2, or what an existing pool has.
        keep: export a version every so often: ``lightck.Keep(every=1000, last=3, to=folder)``. It takes one more slot.
        pause_on_nonfinite: commit no state whose loss scale or sampled values are not finite.
        staging: the way out of a device: ``lightck.Host()``, ``Direct()`` or ``Device()``; by default the best of them.
        strict_data: refuse the first update of a resume that is not made of what followed; else that is a warning.

    Raises:
        CheckpointExistsError: the pool holds a checkpoint, and neither ``resume`` nor ``overwrite`` was said.
        PoolError: the pool cannot be made, opened, locked or read (see :mod:`lightck.errors`).
        DriftError, CorruptPoolError: ``resume=True`` and the checkpoint does not fit, or none verifies.
        AmbiguousError, StateValueError, LateError, SessionError, UnsupportedError, MediumError, KeepError: see each.
    """
    how = Saving(interval, strategy, slots, keep, pause_on_nonfinite, staging, strict_data)
    return _attached(Arguments(model, pool_path, optimizer, state, resume, overwrite, backend, require, how))


def _attached(said: Arguments) -> Session:
    pace = said.check()
    path = _pool_path(said.pool_path)
    kind = backend_for(path, said.backend)
    durable = kind.probe(path)
    durability.require(durable, said.require)
    found = _discover(said)
    capture = Capture(said.model, found.optimizers, found.state)
    file = PoolFile(said, path, kind, found, capture)
    lock = file.lock()
    meter = Meter()
    strategy = said.how.strategy or FullState()
    is_checked = os.environ.get(CHECK_VARIABLE) == "1"
    with ExitStack() as undo:  # what was taken is given up where this fails
        undo.callback(lock.release)
        slots = said.how.slots or 2
        pipeline = Pipeline(path, kind, durable, slots, meter, strategy, said.how.staging, check=is_checked, lock=lock)
        undo.callback(pipeline.close)
        beside = _beside(said.how, found, path, meter)
        beside.join(pipeline)
        kind.remove_stale(path)
        first = _first_step(found, said)
        resumed = file.open(pipeline)
        if resumed is not None:
            first.restored_now(resumed.knows_options)
        steps = Steps(
            said.model,
            found,
            capture,
            pipeline,
            meter,
            beside,
            cadence=pace,
            resumed=resumed,
            first_step=first,
            strict_data=said.how.strict_data,
        )
        session = Session(steps, lock, found.found)
        undo.pop_all()
        undo.callback(session.abandon)
        _begin(session, path, resumed)
        undo.pop_all()
    return session


def _beside(how: Saving, found: Found, path: str, meter: Meter) -> Beside:
    holds = Holds()
    keeper = Keeper(how.keep, path, meter, holds) if how.keep is not None else None
    return Beside(holds, keeper, NonfiniteCheck(found.state, meter) if how.pause_on_nonfinite else None)


def _discover(said: Arguments) -> Found:
    model = said.model
    found = discover(model, said.optimizer, said.state)
    check_objects(found.state)
    if not found.optimizers and next(model.parameters(), None) is None:
        log.warning(
            "lightck: the model (%s) has no parameters, and no optimizer is followed, so nothing of a training "
            "is in its checkpoints. Layers in a plain list, dict or tuple are not part of a module: keep them "
            "in an nn.ModuleList or nn.ModuleDict",
            type(model).__name__,
        )
    if enabled(found.state) and any(layerwise_of(o) is not None for o in found.optimizers):
        raise UnsupportedError(
            "A GradScaler is enabled, and layers are updated inside backward(). Whether a step is skipped is known "
            "when all gradients are there. Leave out lightck.layerwise(), or the scaler (bfloat16 needs none); where "
            'the scaler is none of this training, say state={"scaler": None}.'
        )
    return found


def _first_step(found: Found, said: Arguments) -> FirstStep:
    given = said.state or {}
    chosen = frozenset(id(unwrap(o.optimizer)) for o in given.values() if isinstance(o, LRScheduler))
    return FirstStep(found.optimizers, found.state, "scheduler" in said.declined, chosen)


def _begin(session: Session, path: str, resumed: Resumed | None) -> None:
    """The loop comes next. One line: what was found, and where the training stands."""
    if resumed is not None:
        resumed.set_rng()
    found = ", ".join(f"{name}: {kind}" for name, kind in session.found.items()) or "nothing"
    start = f"resumed at step {resumed.step}" if resumed is not None else "fresh start"
    log.info("lightck: %s, %s (%s); found %s", path, start, session.durability, found)
