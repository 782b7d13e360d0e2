"""The replica of one session (``strategy/replica.py``): what it holds, which updates it makes, and when it is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim.optimizer import Optimizer

from lightck.events import StepListener
from lightck.hooks.captured_update import CapturedStep, CapturedUpdate, CopyResult, GradientClass, HeldGradient
from lightck.hooks.consumed import ConsumedGradients
from lightck.hooks.gradient_checksums import plain_tensor
from lightck.interrupts import deferred
from lightck.pipeline.guard import Rejection
from lightck.pipeline.in_flight import InFlightCheckpoint
from lightck.pool.format.structures import BLOCK_MAX
from lightck.pool.writer import PoolWriter
from lightck.restore.tensor_writes import ordinary_tensors
from lightck.session.capture import Capture
from lightck.session.outside_writes import OutsideWrites
from lightck.session.replica_comparison import Difference, ReplicaComparison
from lightck.session.replica_work import ReplicaUpdate
from lightck.session.replica_worker import ReplicaGroup, ReplicaWorker
from lightck.state.blocks import checksums
from lightck.state.device_transfers import StreamPoint, transfer_of
from lightck.state.inventory import Live
from lightck.state.neutral_settings import neutral_settings, settings_reason
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.stand_ins import StandIn
from lightck.state.unit_replicas import UnitReplica, UnitTensors, unit_tensors
from lightck.state.update_record import has_dense_memory
from lightck.stats import Meter

log = logging.getLogger("lightck")
GROUPS_MAX = 8
"""The largest number of groups of copies. The pipeline copies each group as soon as it is complete."""
GROUP_NBYTES_MIN = 1 << 20
"""If there are several groups, they have on average at least this many bytes."""


class ReplicaUpdates(StepListener):
    """Keeps the copies of ``Replica()`` up to date. It is the ``GradientCopier`` of its ``consumed_gradients`` (another
    listener, which must be registered too), and the ``StandIns`` of ``Capture``; ``validate`` is a validator of the
    pipeline."""

    def __init__(
        self,
        capture: Capture,
        meter: Meter,
        *,
        own_optimizers: bool,
        reads_all: bool,
        stop: Callable[[], None],
    ) -> None:
        """``own_optimizers``: as for ``Replica``. ``reads_all``: read all bytes to find writes and differences.
        ``stop``: called when the replica is used no more."""
        self._capture, self._meter, self._own_optimizers, self._stop = capture, meter, own_optimizers, stop
        self._reads_all = reads_all
        self.consumed_gradients = ConsumedGradients(self, self._names_of, block=BLOCK_MAX)
        self._outside, self._worker = OutsideWrites(reads_all=reads_all), ReplicaWorker(meter)
        self._replicas: dict[str, UnitReplica] = {}
        """Name of a parameter -> the copies of its unit."""
        self._groups: list[ReplicaGroup] = []
        self._comparison = ReplicaComparison([], reads_all=reads_all)
        self.are_assigned = True
        self._has_update = False
        """Whether an update was seen. Before, there may be no optimizer state to copy."""
        self._is_over = False
        """Whether the replica is used no more."""
        self._running: list[ReplicaUpdate] = []
        """The last update of each unit, until it is settled."""
        self._copies: dict[HeldGradient, tuple[torch.Tensor, ...]] = {}
        """Gradients that were copied to memory, because something would have overwritten them."""
        self._partials: dict[int, tuple[PartialOptimizer, str]] = {}
        """Number of an optimizer -> what replays its running step, and why a replay is impossible ("" if it is not)."""
        self._overwritten: dict[str, list[str]] = {}
        """Name of a unit whose copy read a gradient after it had been overwritten -> names of the unit's tensors."""
        self._failure = ""
        """Why the copies cannot make an update."""
        self._arrivals: list[StreamPoint] = []
        """For each device, when its work until the last boundary has ended."""
        self._token: object = None
        """``Capture.token`` for which ``_replicas`` was made, or found unchanged."""
        self._watched: tuple[object, list[Live]] = None, []
        """The live tensors of ``_replicas``, and an object that identifies this list."""
        self._logged: set[str] = set()
        meter.replica_drift = 0.0

    def _names_of(self, optimizer: Optimizer) -> list[list[str]]:
        self._capture.refresh()
        return next((view.names for view in self._capture.optimizers if view.optimizer is optimizer), [])

    def forget(self) -> None:
        """End the thread and release everything, after the hooks were removed."""
        self._worker.end()
        self.consumed_gradients.forget()
        self._outside.forget()
        self._drop_replicas()
        self._copies.clear()
        self._partials.clear()
        self._watched, self._token = (None, []), None

    def _drop_replicas(self) -> None:
        self._replicas, self._groups, self._running = {}, [], []
        self._comparison = ReplicaComparison([], reads_all=self._reads_all)
        self.are_assigned = False

    # -- an update ---------------------------------------------------------------------------------------

    def gate(self) -> None:
        if self._running:
            with self._meter.stall("replica"), self._meter.wait():
                self.settle()

    def gradients_final(self, index: int, optimizer: Optimizer) -> None:
        self._find_writes()
        partial = PartialOptimizer.of(optimizer)
        reason = settings_reason(type(optimizer))
        if not (partial.is_torch or self._own_optimizers):
            reason = f"{type(optimizer).__name__} is not a class of torch.optim"
        self._partials[index] = partial, reason

    def after_step(self, index: int) -> None:
        if self._replicas:
            token, lives = self._watched
            self._outside.step_ended(lives, token)

    def skipped_step(self, index: int) -> None:
        self._outside.rebaseline()  # a fused step moves version counters even if it changes nothing

    def _find_writes(self) -> None:
        """Mark the copies of units that were written between updates as out of date."""
        written = set(self._outside.written_names()) if self._replicas else set()
        if written:
            # If no bytes were compared, an unannounced write to any other tensor would not show.
            outdates_all = not self._outside.has_compared_bytes
            for name, replica in self._replicas.items():
                if outdates_all or any(live.name in written for live in replica.lives):
                    self._outdate(name, "it was written between two updates")

    def _find_exchanged(self) -> None:
        """Mark the copies of units whose tensors were exchanged for others, or moved in memory, as out of date."""
        lives, token = self._capture.tensors(), self._capture.token
        if token is None or token is not self._token:
            found = {one.name: one for one in unit_tensors(lives, self._capture.optimizers)}
            self._token = token if found.keys() == self._replicas.keys() else None
            for name, replica in self._replicas.items():
                if not replica.is_of(found.get(name)):
                    self._token = None
                    self._outdate(name, "its tensors were exchanged for others")

    def _outdate(self, name: str, reason: str) -> None:
        self._replicas[name].is_current = False
        if reason not in self._logged:
            self._logged.add(reason)
            log.info("lightck: the copy of %r is renewed from the training's tensors, because %s", name, reason)

    # -- gradients: a ``GradientCopier`` -----------------------------------------------------------------

    def copies_due_now(self, gradients: Sequence[HeldGradient]) -> None:
        for gradient in gradients:
            if self._is_wanted(gradient):
                self._copy(gradient)

    def _is_wanted(self, gradient: HeldGradient) -> bool:
        replica = self._replicas.get(gradient.name)
        return replica is not None and replica.is_current

    def _copy(self, gradient: HeldGradient) -> None:
        copies = tuple(plain_tensor(tensor).clone() for tensor in gradient.tensors)
        if self.consumed_gradients.copied(gradient, [checksums(one, BLOCK_MAX) for one in copies]):
            self._copies[gradient] = copies

    def overwritten(self, gradient: HeldGradient, reason: str) -> None:
        log.info("lightck: the gradient of %r was overwritten: %s", gradient.name, reason)

    def discarded(self, step: CapturedStep) -> None:
        for gradient in step.present_gradients():
            self._copies.pop(gradient, None)

    def consumed(self, update: CapturedUpdate) -> None:
        """Let the copies make an update that the training has made. Signals are deferred: if a handler raised between
        ``ReplicaGroup.begin`` and the thread's work, the group would never be complete, and the next update would wait
        for it without end."""
        with deferred():
            self.settle()
            self._has_update = True
            self._overwritten.clear()
            updates = self._updates_of(update)
            wanted = {gradient for one in updates for gradient in one.gradients}
            self.consumed_gradients.give_up(gradient for gradient in update.gradients() if gradient not in wanted)
            self._copies.clear()
            self._partials.clear()
            self._begin(updates)

    def _updates_of(self, update: CapturedUpdate) -> list[ReplicaUpdate]:
        """Return what the copies have to make. Units that cannot make it are not current any more."""
        if not self._replicas:
            return []
        self._find_exchanged()
        arrivals = self._arrivals_now()
        found = {name: ReplicaUpdate(one, update.threads, arrivals) for name, one in self._replicas.items()}
        for reason in update.reasons[:1]:
            self._outdate_all(found, reason)
        for step in update.optimizer_steps:
            partial, reason = self._partials.get(step.optimizer, (None, "its gradients were not seen"))
            if partial is None or reason:
                self._outdate_all(step.gradients, reason)
                continue
            group_indexes = {name: g for g, group in enumerate(step.groups) for name in group.parameters}
            for name, group_index in group_indexes.items():
                gradient = step.gradients[name]
                if not self._can_be_updated(name) or (gradient is None and partial.is_torch):
                    continue
                tensors = () if gradient is None else self._tensors_of(gradient)
                if gradient is None or tensors:
                    found[name].add(step, group_index, gradient, tensors, partial)
                else:
                    self._outdate(name, "its gradient was overwritten, or has gaps or overlaps in its memory")
        return [one for name, one in found.items() if one.has_steps and self._replicas[name].is_current]

    def _can_be_updated(self, name: str) -> bool:
        replica = self._replicas.get(name)
        return replica is not None and replica.is_current

    def _outdate_all(self, names: Iterable[str], reason: str) -> None:
        for name in names:
            if self._can_be_updated(name):
                self._outdate(name, reason)

    def _tensors_of(self, gradient: HeldGradient) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a gradient, or their copies; none if it cannot be used."""
        if not (gradient.is_sparse or has_dense_memory(gradient)):
            return ()
        if gradient.result is CopyResult.HELD and gradient.kind is GradientClass.VIEW:
            self._copy(gradient)  # the next backward pass writes into its memory
        return gradient.tensors or self._copies.get(gradient, ())

    def _arrivals_now(self) -> list[StreamPoint]:
        """For each device that has tensors of the replica, return when its present work has ended."""
        on_device = [one.lives[0].tensor for one in self._replicas.values() if one.is_on_device]
        transfers = dict.fromkeys(transfer for tensor in on_device if (transfer := transfer_of(tensor)) is not None)
        return [transfer.mark() for transfer in transfers]

    def _begin(self, updates: list[ReplicaUpdate]) -> None:
        """Make updates: on the thread, or now, where only this thread gives the same bits."""
        if not updates:
            return
        self._running = updates
        by_name, on_thread, now = {one.replica.name: one for one in updates}, list[Callable[[], None]](), []
        for group in self._groups:
            of_group = [by_name[replica.name] for replica in group.replicas if replica.name in by_name]
            group.begin(len(of_group))
            for one in of_group:
                one.group = group
                if one.may_run_on_thread:
                    on_thread.append(one.run)
                else:
                    now.append(one)
        if on_thread:
            self._worker.submit(on_thread)
        if now:
            with self._meter.stall("replica"), neutral_settings(), ordinary_tensors():
                for one in now:
                    one.run()

    def settle(self) -> None:
        """Wait until the copies have made their updates, and let go of the gradients. Which copies are wrong is known
        then."""
        if not self._running:
            return
        self._worker.wait_idle()
        running, self._running = self._running, []
        for one in running:
            name, is_right = one.replica.name, True
            for gradient in one.gradients:
                is_right &= self.consumed_gradients.was_read(gradient)
            if one.failure:
                self._failure = self._failure or one.failure
            if not is_right:
                self._overwritten[name] = [live.name for live in one.replica.lives]
            if one.failure or not is_right:
                self._outdate(name, one.failure or "its gradient was overwritten before the copy had used it")

    # -- the checkpoint: ``StandIns``, and a validator ---------------------------------------------------

    def prepare(self, step: int) -> None:
        if not self._has_update or self._is_over:
            return
        self._find_writes()
        self._find_exchanged()
        if self._token is None or not self._replicas:
            try:
                self._allocate()
            except MemoryError as err:
                self._end()
                log.warning(
                    "lightck: there is no memory for the copies of Replica() (%s). Every checkpoint is taken from the "
                    "tensors of the training, as with FullState(). Use strategy=FullState(), or a machine with more "
                    "memory",
                    str(err).partition("\n")[0],
                )
                return
        self._arrivals = self._arrivals_now()
        if all(one.is_current for one in self._replicas.values()):
            return
        self.settle()
        for arrival in self._arrivals:
            arrival.synchronize()
        with ordinary_tensors():
            for name, replica in self._replicas.items():
                if not replica.is_current:
                    self._meter.replica_renewed += replica.was_copied
                    self._overwritten.pop(name, None)
                    replica.renew()
        self._outside.step_ended(self._watched[1], None)

    def _allocate(self) -> None:
        """Allocate copies for the units whose tensors are new or were replaced. Their content is filled in later.
        Raises ``MemoryError``."""
        lives, token = self._capture.tensors(), self._capture.token
        found = {one.name: one for one in unit_tensors(lives, self._capture.optimizers)}
        old = self._replicas
        if found.keys() == old.keys() and all(old[name].is_of(one) for name, one in found.items()):
            self._token = token
            return
        self.settle()
        with ordinary_tensors():
            self._replicas = {
                name: old[name] if name in old and old[name].is_of(one) else _new_replica(one)
                for name, one in found.items()
            }
        for name in self._replicas.keys() & old.keys():
            self._replicas[name].was_copied = old[name].was_copied
        replicas = list(self._replicas.values())
        self._groups = _grouped(replicas)
        self._comparison = ReplicaComparison(replicas, reads_all=self._reads_all)
        self._watched = object(), [live for one in replicas for live in one.lives]
        self.are_assigned = False
        self._token = token

    def assign(self, lives: Sequence[Live]) -> None:
        self.are_assigned = True
        live_of = {live.name: live for live in lives}
        for group in self._groups:
            for replica in group.replicas:
                now = [live_of.get(known.name) for known in replica.lives]
                pairs = [
                    (live, copy)
                    for live, known, copy in zip(now, replica.lives, replica.copies, strict=True)
                    if live is not None and live.tensor is known.tensor
                ]
                for live, copy in pairs if len(pairs) == len(now) else ():
                    live.stand_in = StandIn(copy, group)

    @property
    def inexact_reason(self) -> str:
        if not any(one.is_on_device for one in self._replicas.values()):
            return ""
        drift, name = self._meter.replica_drift, self._meter.replica_drift_tensor
        seen = "" if name is None else f" (largest difference seen: {drift:.3g}, of {name!r})"
        return (
            "Replica() took parameters and optimizer state from a copy that made the updates in host memory, and the "
            f"device of the training computes other bits{seen}"
        )

    def validate(self, checkpoint: InFlightCheckpoint, writer: PoolWriter) -> Rejection | None:
        """Return why a checkpoint must not commit, or None."""
        if not self._replicas:
            return None
        self.settle()
        generation = checkpoint.pending.record.generation
        if self._failure:
            names = [one.name for one in self._replicas.values() if not one.is_current]
            return self._no_more(f"the copy of Replica() cannot make an update of the training: {self._failure}", names)
        if self._overwritten:
            names = [name for of_unit in self._overwritten.values() for name in of_unit]
            return Rejection(
                "something wrote to a gradient before the copy of Replica() had used it",
                names,
                consequence="The copy of this tensor is renewed from the training, and from now on its gradient is "
                "copied before the update. You need not do anything.",
            )
        differences = self._comparison.differences(generation)
        written = set(self._outside.written_names()) if differences else set()
        differences = [one for one in differences if one.name not in written]
        self._note(differences)
        if differences:
            largest = max(one.largest for one in differences)
            reason = f"the copy of Replica() has other bits than the training (largest difference {largest:.3g})"
            verified = self._comparison.verified_until
            return self._no_more(reason, [one.name for one in differences], verified)
        self._measure_devices()
        return None

    def _measure_devices(self) -> None:
        if any(one.is_on_device for one in self._replicas.values()):
            for arrival in self._arrivals:
                arrival.synchronize()
            written = set(self._outside.written_names())
            differences, n_renewed = self._comparison.measure_next(
                lambda one: one.is_current and not any(live.name in written for live in one.lives)
            )
            self._note(differences)
            self._meter.replica_renewed += n_renewed

    def _note(self, differences: Sequence[Difference]) -> None:
        meter = self._meter
        for one in differences:
            if meter.replica_drift_tensor is None or one.largest > (meter.replica_drift or 0.0):
                meter.replica_drift, meter.replica_drift_tensor = one.largest, one.name

    def _end(self) -> None:
        self._drop_replicas()
        self._is_over = True
        self._stop()

    def _no_more(self, reason: str, names: list[str], verified_until: int | None = None) -> Rejection:
        """Use the replica no more. ``verified_until``: as for ``Rejection``."""
        self._end()
        return Rejection(
            reason,
            names,
            verified_until=verified_until,
            consequence="Something that lightck does not see changes the training, or a replay of an update does not "
            "give the same bits. From now on every checkpoint is taken from the tensors of the training, as with "
            "FullState(). Use strategy=FullState() for this training.",
        )


def _new_replica(tensors: UnitTensors) -> UnitReplica:
    """Raises ``MemoryError``."""
    try:
        return UnitReplica(tensors)
    except RuntimeError as err:  # torch's error for memory that cannot be allocated
        raise MemoryError(str(err)) from err


def _grouped(replicas: Sequence[UnitReplica]) -> list[ReplicaGroup]:
    """Return groups of nearly equal bytes, in the order of the units."""
    total = sum(one.nbytes for one in replicas)
    n_groups = max(1, min(GROUPS_MAX, total // GROUP_NBYTES_MIN))
    groups: list[list[UnitReplica]] = [[] for _ in range(n_groups)]
    before = 0
    for one in replicas:
        groups[min(before * n_groups // max(total, 1), n_groups - 1)].append(one)
        before += one.nbytes
    return [ReplicaGroup(group) for group in groups if group]
