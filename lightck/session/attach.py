"""``attach``: from a model and a path to a session.

The steps, in order: find and check what is to be saved; take the pool's lock; open an existing pool (restore and adopt
its checkpoint, refuse the pool, or discard it) or create a pool; install the hooks. The user's objects are changed only
after every check has passed. A pool that holds a checkpoint is overwritten only if the caller passed
``overwrite=True``, and loaded only if the caller passed ``resume=True``.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lightck.errors import StateValueError, UnsupportedError
from lightck.hooks.layerwise import layerwise_of
from lightck.layout import Layout
from lightck.pipeline.nonfinite import NonfiniteCheck
from lightck.pipeline.pipeline import Pipeline
from lightck.pipeline.plan import Strategy
from lightck.pipeline.staging.kinds import StagingOption
from lightck.pool.direct_writes import copy_threads
from lightck.pool.engine import threads_with_devices
from lightck.pool.format.structures import CommitRecord
from lightck.pool.storage import durability
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.backends import pool_path as _pool_path
from lightck.pool.storage.lock import PoolLock
from lightck.restore.contents import Contents
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.resume import Resumed
from lightck.restore.tensor_writes import ordinary_tensors
from lightck.restore.together import TIMEOUT
from lightck.session.arguments import AUTO_STRATEGY, Arguments
from lightck.session.arguments import SaveOptions as Options
from lightck.session.capture import Capture
from lightck.session.commits import CommitParticipants
from lightck.session.compression import Compression, compression_of
from lightck.session.cross_check import cross_check_of
from lightck.session.discover import Found, discover, unwrap
from lightck.session.first_step import FirstStep
from lightck.session.gradient_arguments import gradient_pools, n_records, optimizers_at_hand, refuse_unrecordable
from lightck.session.group import checked_timeout, group_of, world_of_one
from lightck.session.group_arguments import refuse_unsupported
from lightck.session.group_start import GroupStart
from lightck.session.interval import Auto
from lightck.session.newest_of_tiers import replace_pool_from_tier, warn_of_damage
from lightck.session.pool_file import PoolFile
from lightck.session.replica_arguments import refuse_unreplicable
from lightck.session.replicas import Replicas
from lightck.session.session import Session
from lightck.session.shared_state import warn_of_shared_memory_in_objects
from lightck.session.slowdown import slowdown
from lightck.session.steps import Steps
from lightck.session.strategy_choice import (
    AUTO_CANDIDATE,
    StrategyChoice,
    explained_refusal,
    keep_full_state,
    not_eligible,
    with_present_strategy,
)
from lightck.session.tiers_of_group import TiersOfGroup
from lightck.state.blocks import compares_all
from lightck.state.device_transfers import transfer_of
from lightck.state.optimizer_wrappers import enabled_scalers
from lightck.state.storable import check_objects
from lightck.stats import Meter
from lightck.tiers.claiming import ResumePoint, claim_of
from lightck.tiers.drains import Drains
from lightck.tiers.keep import Exports, Keep
from lightck.tiers.pin import Holds
from lightck.tiers.session_claim import claim_for_session, run_of_new_training
from lightck.tiers.tier import Tier

log = logging.getLogger("lightck")


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
    strategy: Strategy | str | None = None,
    backend: str = "auto",
    require: str | None = None,
    slots: int | None = None,
    keep: Keep | None = None,
    tiers: Sequence[Tier] | None = None,
    pause_on_nonfinite: bool = False,
    staging: StagingOption | None = None,
    strict_data: bool = False,
    group: object = None,
    split: bool = True,
    replicas: int | Replicas = 1,
    layout: Layout | None = None,
    timeout: float = TIMEOUT,
) -> Session:
    """Make every finished training step of ``model`` survive a crash.

    Args:
        model: the root module. Attach after its optimizer and LR scheduler were built.
        pool_path: the pool's file, made if it does not exist, or a device-dax device. In a group of ranks: a directory.
        optimizer: one or a list; default: those of the model. ``[]``: none; then each ``end_step()`` is an update.
        state: name -> object with ``state_dict``. Schedulers and a GradScaler are found; ``{"scheduler": None}``: none.
        interval: updates between saved checkpoints; ``"auto"`` or ``lightck.Auto(...)`` chooses it by their cost.
        resume: restore the newest checkpoint, if the pool holds one, and continue from it.
        overwrite: discard what the pool holds.
        strategy: what a checkpoint holds: ``FullState()`` (default), ``Gradients(...)``, ``Replica()``, or ``"auto"``.
        backend: ``"file"``, ``"pmdk"`` or ``"devdax"``; ``"auto"`` chooses by the path and the medium.
        require: ``"process"``, ``"os"`` or ``"power"``: refuse a medium that does not survive that failure.
        slots: room for checkpoints, 2 to 8; default: as in the pool, else 2 (group: 3; replicas=2: 4). Tiers add some.
        keep: deprecated; ``Tier(..., format="safetensors")`` writes the same files.
        tiers: send whole checkpoints to folders or object stores: ``[lightck.Tier(folder, every="5min")]``.
        pause_on_nonfinite: commit no checkpoint if a GradScaler's scale or a sampled value of a tensor is not finite.
        staging: how tensors on a device are sent: ``lightck.Host()``, ``Direct()``, ``Device()``; by default the best.
        strict_data: raise ``DataMismatchError``, and do not only warn, if a resume goes on with other data.
        group: the process group whose ranks attach together; None: the default group. False: this process alone.
        split: ranks of a host divide what all of them hold; False: each writes all of it into its pool.
        replicas: 2 keeps a copy of each rank's pool on another host; ``lightck.Replicas`` says how often.
        layout: which parts of tensors the model holds, if they are no DTensors (see ``lightck docs layout``).
        timeout: seconds after which a wait for another rank ends with an error.

    Raises:
        CheckpointExistsError: the pool holds a checkpoint, and neither ``resume`` nor ``overwrite`` is True.
        PoolError, MediumError: no pool can be made, opened, locked or read; its medium survives less than ``require``.
        DriftError, CorruptPoolError: ``resume=True``, and the checkpoint does not fit, or none is intact.
        RankError, LayoutError: ranks or layouts do not fit; another rank failed or did not come within ``timeout``.
        AmbiguousError, StateValueError, LateError, SessionError, UnsupportedError, KeepError, TierError: see errors.
    """
    save = Options(interval, strategy, slots, keep, pause_on_nonfinite, staging, strict_data, split, replicas, tiers)
    arguments = Arguments(model, pool_path, optimizer, state, resume, overwrite, backend, require, save, layout)
    with GroupStart.of(group_of(group) or world_of_one(pool_path, group), checked_timeout(timeout)) as group_start:
        return _attach(arguments, group_start, is_rank_known=group_start is not None or group is False)


def _attach(arguments: Arguments, group_start: GroupStart | None, *, is_rank_known: bool) -> Session:
    """Make the session. If a step fails, release what the steps before it acquired. ``group_start``: the part of attach
    that concerns the other ranks of the group (None: no group). ``is_rank_known``: see ``FirstStep``."""
    is_rank_pool = group_start is not None
    cadence = arguments.check(is_rank_pool=is_rank_pool)
    if group_start is not None:
        refuse_unsupported(arguments, group_start.group.world_size)
    path = _pool_path(arguments.pool_path) if group_start is None else group_start.own_path(arguments)
    backend = backend_for(path, arguments.backend)
    medium_durability = backend.probe(path)
    durability.require(medium_durability, arguments.require)
    found = _discover(arguments)
    is_auto = arguments.save_options.strategy == AUTO_STRATEGY
    arguments = with_present_strategy(arguments, path, backend, is_rank_pool=is_rank_pool)
    with explained_refusal(path) if is_auto else nullcontext():
        _refuse_by_strategy(arguments, found, is_rank_pool=is_rank_pool)
    found, capture, compression = _captured(arguments, found, group_start)
    file = PoolFile(arguments, path, backend, found, capture, is_rank_pool=is_rank_pool)
    meter = Meter(slowdown(), type(arguments.save_options.chosen_strategy).__name__)
    lock = file.lock()
    with ExitStack() as undo:
        undo.callback(lock.release)
        pipeline = _pipeline(
            arguments, path, backend, medium_durability, meter, lock, capture, compression, is_rank_pool=is_rank_pool
        )
        undo.callback(pipeline.close)
        participants = _commit_participants(file, meter, group_start)
        participants.register_with(pipeline)
        backend.remove_stale(path)
        first = _first_step(found, arguments, is_rank_known)
        resumed = file.open(pipeline) if group_start is None else group_start.open(file, pipeline)
        if group_start is not None:
            group_start.join(file, pipeline, participants.holds, participants.nonfinite_check)
            cadence = group_start.agreed_cadence(arguments.save_options.interval, pipeline, resumed, meter) or cadence
        if resumed is not None:
            first.after_restore(resumed.has_recorded_options)
        steps = Steps(
            arguments.model,
            found,
            capture,
            pipeline,
            meter,
            participants,
            cadence=cadence,
            resumed=resumed,
            first_step=first,
            strict_data=arguments.save_options.strict_data,
        )
        _follow_strategy(steps, file, compression, is_auto)
        session = Session(steps, lock, found.classes, None if group_start is None else group_start.membership())
        undo.pop_all()
        undo.callback(session.abandon)
        _start(session, path, resumed, arguments, participants.tiers)
        if group_start is not None:
            steps.add_early_gate()
            steps.commits.cross_check = cross_check_of(group_start.membership(), capture, pipeline)
            _commit_first(session, resumed)
            group_start.begin()
        undo.pop_all()
    return session


def _commit_first(session: Session, resumed: Resumed | None) -> None:
    """In a new training, commit checkpoint 0 of a rank, so that the ranks have a common checkpoint from the start.
    Raises ``StateValueError`` if ``pause_on_nonfinite`` refuses it."""
    if resumed is None:
        session.flush()
    if session.committed is None:
        raise StateValueError(
            f"The training begins with values that are not finite (pause_on_nonfinite=True): {session.paused_reason}. "
            "The ranks of a group need a good checkpoint from the start. Nothing was trained yet. Look for the cause "
            "of these values, or leave out pause_on_nonfinite=."
        )


def _refuse_by_strategy(arguments: Arguments, found: Found, *, is_rank_pool: bool) -> None:
    """Raise ``UnsupportedError``, ``ValueError`` or ``TypeError`` for a training that the strategy cannot save."""
    options = arguments.save_options
    if options.gradients is not None:
        refuse_unrecordable(options.gradients, arguments, found, is_rank_pool=is_rank_pool)
    if options.replica_strategy is not None:
        refuse_unreplicable(options.replica_strategy, arguments, found)


def _captured(
    arguments: Arguments, found: Found, group_start: GroupStart | None
) -> tuple[Found, Capture, Compression | None]:
    """Return what the session saves, what reads it, and the compression of gradients, whose residuals are saved too."""
    n_ranks = 1 if group_start is None else group_start.group.world_size
    compression = compression_of(arguments.save_options.gradients, n_ranks)
    found = found if compression is None else compression.added_to(found)
    capture = Capture(arguments.model, found.optimizers, found.state, arguments.layout)
    if compression is not None:
        compression.allocate(capture)
    return found, capture, compression


def _pipeline(
    arguments: Arguments,
    path: str,
    backend: Backend,
    medium_durability: durability.Durability,
    meter: Meter,
    lock: PoolLock,
    capture: Capture,
    compression: Compression | None,
    *,
    is_rank_pool: bool,
) -> Pipeline:
    options, pool_kind = arguments.save_options, None
    slots = options.slots or (options.replicas.slots_min if is_rank_pool else 2)
    if options.gradients is not None:
        interval = options.fixed_interval
        slots = n_records(options.gradients, interval, is_rank_pool=is_rank_pool)
        pool_kind = gradient_pools(options.gradients, capture, path, backend, interval, compression)
    on_device = any(transfer_of(p) is not None for p in arguments.model.parameters())
    return Pipeline(
        path,
        backend,
        medium_durability,
        slots,
        meter,
        options.chosen_strategy,
        options.staging,
        uncommitted_max=0 if is_rank_pool or pool_kind is not None else None,
        check=compares_all(),
        lock=lock,
        copy_threads=copy_threads(path, backend.name, medium_durability.medium_kind)
        or (threads_with_devices(torch.cuda.device_count()) if on_device else None),
        pool_kind=pool_kind,
    )


def _follow_strategy(steps: Steps, file: PoolFile, compression: Compression | None, is_auto: bool) -> None:
    """Install what the strategy needs at each update. ``is_auto``: whether ``strategy="auto"`` was passed. Then a
    session that begins with ``FullState`` may choose another strategy later."""
    gradients = file.arguments.save_options.gradients
    if gradients is not None:
        steps.record_updates(compression, mtbf=gradients.mtbf, is_in_group=file.is_rank_pool)
    elif is_auto:
        _choose_strategy(steps, file)
    steps.keep_replica(file.arguments.save_options.replica_strategy)


def _choose_strategy(steps: Steps, file: PoolFile) -> None:
    """Let the session choose its strategy after ten steps, if there is a choice."""
    reason = not_eligible(file.arguments, file.backend, file.found, is_rank_pool=file.is_rank_pool)
    if reason:
        keep_full_state(steps.meter, reason)
        return
    kind = gradient_pools(AUTO_CANDIDATE, file.capture, file.path, file.backend, 1, None)
    capture = file.capture
    choice = StrategyChoice(
        steps.pipeline,
        steps.meter,
        kind,
        n_pins=lambda: steps.commits.participants.holds.n_pins,
        state_nbytes=lambda: capture.expected_state_nbytes,
        record_updates=lambda on: steps.record_updates() if on else steps.record_no_updates(),
        done=steps.events.remove,
    )
    steps.events.add(choice)


def _commit_participants(file: PoolFile, meter: Meter, group_start: GroupStart | None) -> CommitParticipants:
    options, capture_ref = file.arguments.save_options, weakref.ref(file.capture)

    def optimizers_for_replay() -> OptimizersAtHand:
        """Return the live optimizers of this training for a replay; none if the session is gone. (The reference to them
        is weak, because background threads reach the holds, and would keep the model alive.)"""
        live_capture = capture_ref()
        return OptimizersAtHand() if live_capture is None else optimizers_at_hand(live_capture)

    holds = Holds(options.replicas.slots_min if file.is_rank_pool else 2, optimizers_for_replay)
    keeper = Exports(options.exports, file.path, meter, holds) if options.exports is not None else None
    tiers = None
    if options.tiers:
        tiers = Drains(options.tiers, file.path, meter, holds, may_feed_from_folders=group_start is None)
    if tiers is not None and group_start is None:
        _fetch_newest_and_claim_tiers(file, tiers)
    elif tiers is not None and group_start is not None:
        group_start.tiers = TiersOfGroup(tiers, options.tiers, group_start.group, group_start.meeting)
    return CommitParticipants(
        holds, keeper, tiers, NonfiniteCheck(file.found.state, meter) if options.pause_on_nonfinite else None
    )


def _fetch_newest_and_claim_tiers(file: PoolFile, tiers: Drains) -> None:
    """Fetch the newest checkpoint if a tier holds it, and have the tiers claimed before anything is saved."""
    newest = None
    if file.arguments.resume:
        newest = replace_pool_from_tier(file.path, file.backend, tiers.stores)

    def claim(contents: Contents | None, record: CommitRecord | None) -> None:
        capture = file.capture
        assert capture.run_id is not None, "not in a group"
        if contents is None:
            capture.run_id = run_of_new_training(tiers.stores, capture.run_id)
        resume_point = None if contents is None else ResumePoint(contents.step, claim_of(contents.claim))
        if resume_point is not None and not file.was_restored_by_script:
            warn_of_damage(file.path, newest, resume_point, file.restored_incarnation)
        claimed = claim_for_session(tiers.stores, capture.run_id, resume_point)
        tiers.use_claim(claimed, resume_point, 0 if record is None else record.payload_generation)
        capture.claim = claimed.claim

    file.before_first_change = claim


def _discover(arguments: Arguments) -> Found:
    """Find what the session saves, and check that it can be saved."""
    model = arguments.model
    found = discover(model, arguments.optimizer, arguments.state)
    check_objects(found.state)
    warn_of_shared_memory_in_objects(found)
    if not found.optimizers and next(model.parameters(), None) is None:
        log.warning(
            "lightck: the model (%s) has no parameters, and no optimizer is followed, so nothing of a training "
            "is in its checkpoints. Layers in a plain list, dict or tuple are not part of a module: put them "
            "in an nn.ModuleList or nn.ModuleDict",
            type(model).__name__,
        )
    if enabled_scalers(found.state) and any(layerwise_of(o) is not None for o in found.optimizers):
        raise UnsupportedError(
            "A GradScaler is enabled, and layers are updated inside backward(). The scaler decides only after "
            "backward(), from all gradients, whether a step is skipped. Leave out lightck.layerwise(), or the scaler "
            '(bfloat16 needs none). If the scaler belongs to another training, pass state={"scaler": None}.'
        )
    return found


def _first_step(found: Found, arguments: Arguments, is_rank_known: bool) -> FirstStep:
    given = arguments.state or {}
    scheduled = frozenset(id(unwrap(o.optimizer)) for o in given.values() if isinstance(o, LRScheduler))
    return FirstStep(
        found.optimizers,
        found.state,
        "scheduler" in arguments.declined,
        scheduled,
        is_scaler_declined="scaler" in arguments.declined,
        is_rank_known=is_rank_known,
    )


def _start(session: Session, path: str, resumed: Resumed | None, arguments: Arguments, tiers: Drains | None) -> None:
    """Start the drain (which sends checkpoints to the tiers), set the restored random states, and log what is saved
    and at which step the training starts."""
    if tiers is not None:
        tiers.start()
    if resumed is not None:
        resumed.set_rng()
    found = ", ".join(f"{name}: {kind}" for name, kind in session.found.items())
    also_saved = f"found and saved too: {found}" if found else "found nothing else to save"
    passed = ", ".join(name for name, value in (arguments.state or {}).items() if value is not None)
    also_saved += f"; saved from state=: {passed}" if passed else ""
    start = f"resumed at step {resumed.step}" if resumed is not None else "fresh start"
    if resumed is not None and resumed.done:
        start += ", at which the training was declared finished (session.done is True)"
    sent = "" if tiers is None else f"; sent to {tiers}"
    log.info("lightck: %s, %s (%s); %s%s", path, start, session.durability, also_saved, sent)
