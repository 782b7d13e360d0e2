"""Recover from the directory of a group of ranks. The process that recovers may be alone, or be one of several ranks.

The newest checkpoint that all pools of a world have is taken; if it does not verify, the next older one. Without a
model, the parts of all ranks are put together into whole tensors. With a model, each of its tensors is filled: with the
whole logical tensor, or, if it is a DTensor or has a rule in ``layout``, with the part that this process holds. So the
number of ranks, and how they share the tensors, need not be those of the training that saved the checkpoint. All ranks
that hold parts call ``recover``, and agree on one checkpoint, so that the parts fit together. A tensor that every rank
holds whole is taken from rank 0, and compared with those of the other ranks. Random states, positions of loaders and
objects in ``state`` are those of rank 0.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import msgpack
import torch
from torch import nn

from lightck.errors import CorruptPoolError, NoCheckpointError, PoolLockedError, RankError, UnsupportedError, listed
from lightck.layout import Layout
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint
from lightck.ranks.directory import World, missing_error, open_worlds, worlds_of
from lightck.ranks.meet import Meeting
from lightck.ranks.rule import CheckpointId
from lightck.restore import restore as _restore
from lightck.restore.averages import describe_averaged
from lightck.restore.checkpoint import Checkpoint, as_list, plan_restore, poison, refuse_other_than_module
from lightck.restore.contents import Contents, MemorySource, in_memory
from lightck.restore.logical import LogicalCheckpoint
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.ranges import RangeReader, pieces_of_ranks
from lightck.restore.relocated import Relocated
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.stages import flags_of, held_by, names_of_model, refuse_tensors_without_holder
from lightck.restore.together import meeting_of, refuse_other_layouts, refuse_unused_rules
from lightck.restore.usable import RankCheckpoint, parse, usable_by_id
from lightck.state.local_tensors import reshard
from lightck.state.rules import ModelTensors, tensors_of

log = logging.getLogger("lightck")
T = TypeVar("T")
_ATTEMPTS = 20
"""The largest number of attempts. All checkpoints are tried again if a training reused slots of the pools meanwhile."""


def recover_directory(
    directory: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: object,
    state: Mapping[str, object] | None,
    step: int | None,
    device: torch.device | str,
    layout: Layout | None,
    *,
    strict: bool,
    lazy: bool,
) -> Checkpoint:
    """``recover`` for the directory of a group. Raises as ``recover`` does, and ``RankError`` if pools are missing that
    hold parts of tensors which no other pool has."""
    path = os.path.realpath(directory)
    if lazy:
        open_pools = ExitStack()
        return recover_newest(path, step, partial(_lazily, open_pools=open_pools), open_pools)
    tensors = None if model is None else _tensors_of(model, layout)
    at_hand = OptimizersAtHand() if model is None else OptimizersAtHand(model, as_list(optimizer))
    if model is None or tensors is None or not (tensors.parts or tensors.is_stage):
        whole = partial(_whole, device=device if model is None else "cpu")
        checkpoint = recover_newest(path, step, whole, optimizers=at_hand)
        if model is not None:
            checkpoint.restore(model, optimizer, state, strict=strict)
        return checkpoint
    meeting, take = meeting_of(tensors.lives, layout), partial(_parts, tensors=tensors)
    if meeting is None:
        return recover_newest(path, step, take, optimizers=at_hand).into(
            model, optimizer, state, strict=strict, layout=layout
        )
    meeting.meet(socket.gethostname())
    with meeting.shares_errors():
        refuse_other_layouts(layout, meeting)
        refuse_unused_rules(layout, tensors.names, meeting)
        loaded = _recover_together(path, step, take, meeting, at_hand)
        if tensors.is_stage:
            loaded.refuse_tensors_without_holder(tensors, meeting)
    return loaded.into(model, optimizer, state, strict=strict, layout=layout)


def recover_readers(
    name: str,
    readers: Sequence[PoolReader],
    model: nn.Module | None,
    optimizer: object,
    state: Mapping[str, object] | None,
    device: torch.device | str,
    *,
    strict: bool,
    lazy: bool,
) -> Checkpoint:
    """``recover`` for the pools of a group that were fetched from a tier, and are open already. Closes them; with
    ``lazy``, when the checkpoint is closed. ``name``: path or URL of the tier, for messages. Raises as ``recover``
    does."""
    with ExitStack() as stack:
        for reader in readers:
            stack.callback(reader.close)
        worlds = worlds_of(name, readers)
        if lazy:
            open_pools = ExitStack()
            checkpoint = _newest(name, worlds, None, partial(_lazily, open_pools=open_pools), None, open_pools)
            open_pools.push(stack.pop_all())
            return checkpoint
        if model is not None:
            tensors = _tensors_of(model, None)
            if tensors.parts or tensors.is_stage:
                raise UnsupportedError(
                    f"The model holds parts of tensors, and {name!r} is a tier. Nothing was restored. Continue from it "
                    "with attach(model, directory, resume=True, tiers=[...]) on all ranks; or fetch its newest "
                    f"checkpoint: lightck copy {name} DIRECTORY, and recover from the directory."
                )
        at_hand = OptimizersAtHand() if model is None else OptimizersAtHand(model, as_list(optimizer))
        whole = partial(_whole, device=device if model is None else "cpu")
        checkpoint = _newest(name, worlds, None, whole, at_hand, stack)
    if model is not None:
        checkpoint.restore(model, optimizer, state, strict=strict)
    return checkpoint


def _tensors_of(model: nn.Module, layout: Layout | None) -> ModelTensors:
    refuse_other_than_module(model)
    reshard(model)
    return tensors_of(model, layout)


Take = Callable[[str, LogicalCheckpoint, Sequence[RejectedCheckpoint]], T]
"""Loads one checkpoint. Arguments: directory, checkpoint, newer checkpoints that were rejected. Raises
``DamagedError``."""


def recover_newest(
    directory: str,
    step: int | None,
    take: Take[T],
    keep_open: ExitStack | None = None,
    optimizers: OptimizersAtHand | None = None,
) -> T:
    """Call ``take`` for the newest common checkpoint (of ``step``, if given), and return the result. If a pool has
    moved to a new file since it was opened, and so nothing was found, open all pools again. ``keep_open``: gets the
    open pools, and closes them when it is closed; None: they are closed here. ``optimizers``: as in
    ``checkpoints_of``."""
    for attempt in range(1, _ATTEMPTS + 1):
        with ExitStack() as stack:
            worlds = stack.enter_context(open_worlds(directory))
            try:
                taken = _newest(directory, worlds, step, take, optimizers, stack)
                if keep_open is not None:
                    keep_open.push(stack.pop_all())
                return taken
            except (NoCheckpointError, CorruptPoolError, PoolLockedError):
                readers = [reader for world in worlds for reader in world.readers.values()]
                if attempt == _ATTEMPTS or all(reader.container.is_current() for reader in readers):
                    raise
    raise AssertionError("the last attempt returns or raises")


def _newest(
    directory: str,
    worlds: Sequence[World],
    step: int | None,
    take: Take[T],
    optimizers: OptimizersAtHand | None,
    keep_open: ExitStack,
) -> T:
    """Call ``take`` for one common checkpoint after the other (of ``step``, if given), from newest to oldest, until one
    verifies. Checkpoints of all worlds count; if two have the same one, that of the first world is taken first.
    ``keep_open``: gets the holds of the checkpoint's slots."""
    readers = [reader for world in worlds for reader in world.readers.values()]
    for _ in range(_ATTEMPTS):
        logs = [reader.commit_log() for reader in readers]
        common = [
            (id_, number, per_pool)
            for number, world in enumerate(worlds)
            for id_, per_pool in common_checkpoints(world, optimizers).items()
        ]
        rejected: list[RejectedCheckpoint] = []
        lost: RankError | None = None
        # The newest id first; of one id, that of the first world (the smallest number) first.
        for checkpoint_id, number, per_pool in sorted(common, key=lambda one: (one[0], -one[1]), reverse=True):
            if step is not None and checkpoint_id.step != step:
                continue
            try:
                return _take_checkpoint(directory, worlds[number], per_pool, rejected, take, keep_open)
            except DamagedError as err:
                rejected.append(RejectedCheckpoint(checkpoint_id.step, per_pool[0][0].record.generation, str(err)))
                lost = err.__cause__ if isinstance(err.__cause__, RankError) else lost
        if [reader.commit_log() for reader in readers] == logs:
            if lost is not None:
                raise lost
            raise _no_checkpoint_error(directory, step, sorted({id_ for id_, _, _ in common}, reverse=True), rejected)
    raise _in_use_error(directory)


def _in_use_error(directory: str) -> PoolLockedError:
    return PoolLockedError(
        f"The pools in {directory!r} are in use, and in each of {_ATTEMPTS} attempts their checkpoints were "
        "overwritten while they were read. The pools are not damaged. Try again, or end the training first."
    )


def _recover_together(
    directory: str, step: int | None, take: Take[T], meeting: Meeting, optimizers: OptimizersAtHand
) -> T:
    """As ``recover_newest``, for ranks that load parts. All ranks must load the same checkpoint: they agree on the
    newest one that all of them find (a training may have the pools open), and say whether they could load it. If one
    could not, they take the next older one."""
    failed_ids: set[CheckpointId] = set()
    rejected: list[RejectedCheckpoint] = []
    found_before: set[CheckpointId] = set()
    for _ in range(_ATTEMPTS**2):  # as many as ``recover_newest`` and ``_newest`` make together
        with open_worlds(directory) as worlds:
            found: dict[CheckpointId, tuple[World, CheckpointsPerPool]] = {}
            for world in reversed(worlds):
                found |= {id_: (world, per_pool) for id_, per_pool in common_checkpoints(world, optimizers).items()}
            own = [list(id_) for id_ in found if id_ not in failed_ids and step in (None, id_.step)]
            has_changed, found_before = set(found) != found_before, set(found)
            said = [msgpack.unpackb(one) for one in meeting.exchange("checkpoints", msgpack.packb([own, has_changed]))]
            common = frozenset.intersection(*(frozenset(CheckpointId(*id_) for id_ in ids) for ids, _ in said))
            if not common and not any(changed for _, changed in said):
                raise _no_checkpoint_error(directory, step, sorted(found, reverse=True), rejected)
            if not common:
                continue  # a training reuses the slots
            chosen, taken, problem = max(common), None, ""
            world, per_pool = found[chosen]
            try:
                taken = _take_checkpoint(directory, world, per_pool, rejected, take)
            except DamagedError as err:
                problem = str(err)
            problems = [one.decode("utf-8", "replace") for one in meeting.exchange("votes", problem.encode())]
            failed = next((one for one in problems if one), None)
            if failed is None:
                assert taken is not None, "this rank has loaded it"
                return taken
            failed_ids.add(chosen)
            rejected.append(RejectedCheckpoint(chosen.step, per_pool[0][0].record.generation, failed))
    raise _in_use_error(directory)


CheckpointsPerPool = list[list[RankCheckpoint]]
"""For each pool of a world: the checkpoints of one id, newest first. (There are two if a step was saved twice.)"""


def common_checkpoints(
    world: World, optimizers: OptimizersAtHand | None = None
) -> dict[CheckpointId, CheckpointsPerPool]:
    """Return the usable checkpoints that all pools of a world have. ``optimizers``: as in ``checkpoints_of``."""
    by_id = [usable_by_id(reader, optimizers) for reader in world.readers.values()]
    common = frozenset.intersection(*map(frozenset, by_id))
    return {checkpoint_id: [of_pool[checkpoint_id] for of_pool in by_id] for checkpoint_id in common}


def _take_checkpoint(
    directory: str,
    world: World,
    per_pool: CheckpointsPerPool,
    rejected: Sequence[RejectedCheckpoint],
    take: Take[T],
    keep_open: ExitStack | None = None,
) -> T:
    """Call ``take`` for one checkpoint. ``keep_open``: gets the holds of its slots; None: they are held only while
    ``take`` runs. Raises ``DamagedError``, and ``RankError`` as ``logical_of`` does."""
    logical = logical_of(directory, world, per_pool)
    with ExitStack() as holds:
        for stored in logical.of_ranks:
            holds.enter_context(stored.hold())
        taken = take(directory, logical, rejected)
        if not all(stored.owns_slot() for stored in logical.of_ranks):
            raise DamagedError("its slot was reused while it was read")
        if keep_open is not None:
            keep_open.push(holds.pop_all())
    return taken


def logical_of(
    directory: str, world: World, per_pool: CheckpointsPerPool, state_position: int = 0, *, warns: bool = True
) -> LogicalCheckpoint:
    """Return one checkpoint of a world as logical tensors. ``state_position``: as in ``LogicalCheckpoint``. If pools
    are missing, the others may hold everything; then this warns, if ``warns``. Raises ``DamagedError``; and
    ``RankError`` if the missing pools hold what no other has. If these pools may never have existed
    (``Contents.first_of_world``), the ``RankError`` is the cause of the ``DamagedError``, so that an older world is
    tried first."""
    try:
        logical = LogicalCheckpoint([intact_of(checkpoints) for checkpoints in per_pool], state_position)
    except DamagedError as err:
        if not world.missing:
            raise
        detail = f"Without it the checkpoint of step {per_pool[0][0].step} is not complete: {err}."
        if parse(per_pool[0][0]).first_of_world:
            detail += " (If the first save of these ranks was cut off, nothing is lost: it never counted.)"
            raise DamagedError(str(err)) from missing_error(directory, world, detail)
        raise missing_error(directory, world, detail) from None
    if world.missing and warns:
        many = "s" * (len(world.missing) > 1)
        log.warning(
            "lightck: the directory %r lacks the pool%s of rank%s %s. The other pools hold the whole of each tensor, "
            "so nothing is lost; but it could not be checked that all ranks held the same bytes",
            directory,
            many,
            many,
            listed(list(map(str, world.missing)), 8),
        )
    return logical


def intact_of(checkpoints: Sequence[RankCheckpoint]) -> RankCheckpoint:
    """Return the newest checkpoint that verifies. If all but the oldest fail, return the oldest unverified, because its
    bytes are verified when they are read. ``checkpoints``: the checkpoints of one step in one pool, newest first."""
    for stored in checkpoints[:-1]:
        try:
            stored.verify()
        except DamagedError:
            continue
        return stored
    return checkpoints[-1]


def _no_checkpoint_error(
    directory: str, step: int | None, common: Sequence[CheckpointId], rejected: Sequence[RejectedCheckpoint]
) -> Exception:
    """Return the error for pools that have no common checkpoint (of ``step``, if given) that verifies."""
    if rejected:
        reasons = tuple(map(str, rejected))
        return CorruptPoolError(
            f"No checkpoint that all ranks have in {directory!r} can be used: {'; '.join(reasons)}. Nothing was "
            "restored. Use another copy of the pools.",
            reasons,
        )
    steps = listed([str(one.step) for one in common], 8) or "none"
    wanted = "" if step is None else f" of step {step}"
    return NoCheckpointError(
        f"The ranks in {directory!r} have no checkpoint{wanted} in common. Steps that all of them have: {steps}. "
        "`lightck inspect` shows what each rank has."
    )


# -- callbacks for ``take`` --------------------------------------------------------------------------------------------


def _whole(
    directory: str,
    logical: LogicalCheckpoint,
    rejected: Sequence[RejectedCheckpoint],
    *,
    device: torch.device | str,
) -> Checkpoint:
    """Load a checkpoint as whole tensors."""
    source = in_memory(Relocated(logical, {}), device)
    _warn_differences(logical)
    return _checkpoint(directory, logical, rejected, lambda: source)


def _lazily(
    directory: str, logical: LogicalCheckpoint, rejected: Sequence[RejectedCheckpoint], *, open_pools: ExitStack
) -> Checkpoint:
    """Load a checkpoint without its tensors, which are read when they are used."""
    for stored in logical.of_ranks:
        if isinstance(stored, ReplayedCheckpoint):
            raise UnsupportedError(
                f"The pool {stored.path!r} holds gradient records, from which all tensors are made together. So they "
                "cannot be loaded one by one. Leave out lazy=True (of lightck inspect: --pieces)."
            )
    # Buffers usually differ between ranks, and a program may open the same checkpoint lazily many times. So there is no
    # warning about buffers.
    _warn_differences(logical, ("param", "optimizer"))
    ranges = RangeReader(open_pools, logical)
    return _checkpoint(directory, logical, rejected, ranges.all, ranges)


class _LoadedParts:
    """The parts of this process, in memory, and the checkpoint from which they were read."""

    def __init__(
        self, contents: Contents, source: MemorySource, checkpoint: Checkpoint, entries: Mapping[str, Entry]
    ) -> None:
        """``entries``: of all logical tensors."""
        self._contents, self._source, self._checkpoint, self._entries = contents, source, checkpoint, entries

    def refuse_tensors_without_holder(self, tensors: ModelTensors, meeting: Meeting) -> None:
        """Raise ``RankError`` if the checkpoint has a tensor that no rank holds. All ranks call this."""
        names = names_of_model(self._entries)
        flags = meeting.exchange("tensors that are held", flags_of(names, tensors.names))
        refuse_tensors_without_holder(names, self._entries, flags, f"The checkpoint of step {self._contents.step}")

    def into(
        self,
        model: nn.Module,
        optimizer: object,
        state: Mapping[str, object] | None,
        *,
        strict: bool,
        layout: Layout | None,
    ) -> Checkpoint:
        """Restore into a model whose tensors are parts. Returns the checkpoint, with whole tensors."""
        plan = plan_restore(self._contents, model, optimizer, state, strict=strict, of_rank=True, layout=layout)
        try:
            _restore.apply(plan, self._source)
        except BaseException as err:
            if plan.restored:
                poison(err, plan.restored.values(), model)
            raise
        self._checkpoint.record_restored(model, plan)
        return self._checkpoint


def _parts(
    directory: str,
    logical: LogicalCheckpoint,
    rejected: Sequence[RejectedCheckpoint],
    *,
    tensors: ModelTensors,
) -> _LoadedParts:
    """Load the parts of this process."""
    relocated = Relocated(logical, tensors.parts, held=held_by(tensors), ties=tensors.ties)
    source, contents = in_memory(relocated), parse(relocated)
    _warn_differences(logical)
    wanted = CheckpointId(logical.of_ranks[0].header.incarnation, logical.step)
    checkpoint = _checkpoint(directory, logical, rejected, lambda: _read_again(directory, wanted))
    return _LoadedParts(contents, source, checkpoint, logical.entries)


def _read_again(directory: str, wanted: CheckpointId) -> MemorySource:
    """Read the whole tensors of a checkpoint of which parts were restored. Raises ``NoCheckpointError`` if the pools no
    longer hold this step, and ``CorruptPoolError`` if they hold it as another session has saved it."""

    def take(_: str, logical: LogicalCheckpoint, __: object) -> MemorySource:
        found = CheckpointId(logical.of_ranks[0].header.incarnation, logical.step)
        if found != wanted:
            raise DamagedError(
                "it is not the checkpoint that was restored: a later session of the training has saved this step again"
            )
        return in_memory(Relocated(logical, {}))

    return recover_newest(directory, wanted.step, take)


def _checkpoint(
    directory: str,
    logical: LogicalCheckpoint,
    rejected: Sequence[RejectedCheckpoint],
    read_source: Callable[[], MemorySource],
    ranges: RangeReader | None = None,
) -> Checkpoint:
    """Return the public checkpoint with whole tensors."""
    whole = Relocated(logical, {})
    return Checkpoint(
        parse(whole), read_source, whole.record, directory, whole.uuid, rejected, pieces_of_ranks(logical), ranges
    )


def _warn_differences(logical: LogicalCheckpoint, roles: Sequence[str] = ("param", "buffer", "optimizer")) -> None:
    differing = logical.differing(roles)
    if logical.averaged:
        log.warning("lightck: step %d: %s", logical.step, describe_averaged(logical.averaged_names))
    if differing:
        log.warning(
            "lightck: ranks have different bytes in %d tensor%s of step %d, and those of rank 0 are taken: %s. Each "
            "rank has its own statistics of BatchNorm, so these may differ; parameters should not differ",
            len(differing),
            "s" * (len(differing) != 1),
            logical.step,
            listed(differing),
        )
