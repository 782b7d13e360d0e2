"""Sends the tensors of a checkpoint that lie on devices, by the transfer method that the user or a trial chose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lightck.errors import BackgroundError
from lightck.interrupts import raise_if_interrupted
from lightck.pipeline.staging.groups import Group
from lightck.pipeline.staging.kinds import Direct, Host, StagingOption
from lightck.pipeline.staging.methods import DeviceMethod, DirectMethod, HostMethod, TransferMethod, UnavailableError
from lightck.pipeline.staging.parts import Parts, split
from lightck.pipeline.staging.transfer_thread import TransferThread
from lightck.pipeline.submission import Submission
from lightck.pipeline.trial import Margin, Trial
from lightck.pipeline.write_table import NO_RECORDS, StagedTensor
from lightck.pool.reservation import Reservation
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter
from lightck.stats import Meter

log = logging.getLogger("lightck")

_FREE_FACTOR = 2
"""A trial makes a copy on the device only if ``_FREE_FACTOR`` times the bytes of the copy are free there."""
_ROUNDS, _WARM_UP, _LEAD_IN = 3, 2, 1
"""Arguments of ``Trial``. The warm-up leaves out the first steps of a training, which are slower than later ones. The
lead-in leaves out the first checkpoint after a change of the method, because that checkpoint waits for transfers by the
old method, and pins or registers memory."""
_LESS_STALL = Margin(0.1, 0.0002)
"""A method that needs more resources must stall the training less: by a tenth plus 0.2 ms."""


class Staging:
    """The device transfers of one session. ``is_on=False``: tensors on devices are copied at the boundary.
    ``commits_after_update``: whether a checkpoint may still be uncommitted when the next update begins, so that its
    transfer may take longer than a step."""

    def __init__(
        self, meter: Meter, kind: StagingOption | None = None, *, commits_after_update: bool = False, is_on: bool = True
    ) -> None:
        self.is_on = is_on
        self._meter = meter
        self._kind, self._commits_after_update = kind, commits_after_update
        self._trial: Trial[TransferMethod] | None = None
        self._stall_seconds = 0.0
        """The session's total stall, in seconds, when the last checkpoint began."""
        self._method: TransferMethod | None = None
        """The method of the last checkpoint."""
        self._thread: TransferThread | None = None
        self._staged: tuple[list[list[StagedTensor]], list[StagedTensor]] = [], []
        """The tensors of the last checkpoint, as the lists of its write tables and as one list."""
        self._parts: tuple[tuple[PoolWriter, TransferMethod, int], Parts] | None = None
        """The parts of the last checkpoint, and what they were computed for; None: to be computed."""

    def send(
        self, writer: PoolWriter, slot: Slot, submission: Submission, reservation: Reservation | None, jobs_max: int
    ) -> tuple[Reservation | None, npt.NDArray[np.int64]]:
        """Begin to send the tensors of a checkpoint that lie on devices. Return the reservation of the checkpoint (None
        if ``reservation`` is None and nothing is sent), and the record numbers that are being sent. If this raises, a
        reservation that was made here is dropped. ``reservation``: the reservation of the eager and late copies, or
        None. ``jobs_max``: the largest number of jobs to use; tensors for which no job is left are copied at the
        boundary."""
        if self._method is not None and self._method.ends_before_next:
            self._wait_idle(raise_if_interrupted)
        if not self.is_on or not submission.staged or jobs_max < 1:
            submission.copy_at_boundary(submission.staged)
            return reservation, NO_RECORDS
        used = reservation or writer.reserve(slot)
        try:
            return used, self._send(writer, used, submission, jobs_max)
        except BaseException:
            if used is not reservation:
                used.drop()
            raise

    def _send(
        self, writer: PoolWriter, reservation: Reservation, submission: Submission, jobs_max: int
    ) -> npt.NDArray[np.int64]:
        """Begin to send tensors. Return the record numbers that are being sent. Raises ``BackgroundError``."""
        try:
            staged = self._staged_of(submission)
            method = self._prepared_method(writer, staged)
            parts = self._parts_of(writer, staged, method, jobs_max)
            groups, left = _groups(method, reservation, parts)
            submission.copy_at_boundary(left)
            self._start(groups)
        except RuntimeError as err:
            raise BackgroundError(
                f"A checkpoint could not be begun: tensors did not leave their device ({err}). The checkpoints "
                "committed before are intact. Look at the device (its log, its memory), then start again with "
                "resume=True."
            ) from err
        if method.reads_during_step:
            submission.add_from_devices([one for group in groups if not group.in_order for one in group.part.tensors])
        if len(groups) == len(parts.parts):
            return parts.records  # if this is the same object as last time, the writer reuses what it computed for it
        return np.concatenate([NO_RECORDS, *(group.part.records for group in groups)])

    def _staged_of(self, submission: Submission) -> list[StagedTensor]:
        """Return the checkpoint's tensors on devices: the same object as for the checkpoint before if the write tables
        are the same objects."""
        lists = [table.staged for table in submission.plan.tables]
        known, _ = self._staged
        if len(lists) != len(known) or any(a is not b for a, b in zip(lists, known, strict=True)):
            self._staged, self._parts = (lists, submission.staged), None
        return self._staged[1]

    def _parts_of(
        self, writer: PoolWriter, staged: list[StagedTensor], method: TransferMethod, parts_max: int
    ) -> Parts:
        """Return the parts of these tensors, computed anew only if something changed."""
        key = writer, method, parts_max
        if self._parts is None or self._parts[0] != key:
            self._parts = key, split(staged, parts_max, reads_during_step=method.reads_during_step)
        return self._parts[1]

    # -- the transfer method

    def _prepared_method(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> TransferMethod:
        """Return the transfer method of this checkpoint, after its ``prepare``."""
        if self._trial is None:
            rounds = _ROUNDS if self._kind is None else 0
            self._trial = Trial(self._methods(), [_LESS_STALL], rounds=rounds, warm_up=_WARM_UP, lead_in=_LEAD_IN)
        trial, was_over = self._trial, self._trial.is_over
        before, self._stall_seconds = self._stall_seconds, self._meter.stall_seconds
        if self._method is not None:
            trial.finish(self._stall_seconds - before)
        method = trial.begin()
        while True:
            if trial.is_over and not was_over:
                self._end_trial(trial)  # now, because it releases memory that this checkpoint may need
            try:
                method.prepare(writer, staged)
            except UnavailableError as why:
                self._release([method])
                log.info("lightck: the transfer method %s is unavailable: %s", method.kind, why)
                if self._kind is not None:
                    log.warning(
                        "lightck: staging=%s is not possible here (%s). lightck.Host() is used.", method.kind, why
                    )
                trial.withdraw(method)
                method, was_over = trial.current, False  # the withdrawal may have decided the trial
                continue
            self._method, self._meter.staging = method, str(method.kind)
            self._meter.staging_trial = not trial.is_over
            return method

    def _end_trial(self, trial: Trial[TransferMethod]) -> None:
        """Keep the winner of the trial. The other methods release their memory."""
        others = [method for method in trial.alternatives if method is not trial.current]
        if others:
            costs = [
                f"{method.kind} {1e3 * stall:.2f} ms"
                for method in trial.alternatives
                for stall in trial.medians(method)
            ]
            log.info(
                "lightck: from now on tensors leave their device by %s (median stall of the training per checkpoint: "
                "%s)",
                trial.current.kind,
                ", ".join(costs),
            )
        self._release(others)

    def _methods(self) -> list[TransferMethod]:
        direct, host = DirectMethod(self._wait_idle), HostMethod()
        if self._kind is None:
            return [direct, host, *([DeviceMethod(_FREE_FACTOR)] if self._commits_after_update else [])]
        if isinstance(self._kind, Host):
            return [host]
        return [direct if isinstance(self._kind, Direct) else DeviceMethod(), host]

    def _release(self, methods: Sequence[TransferMethod]) -> None:
        if methods:
            self._wait_idle()
            self._parts = None  # they hold on to memory of a method
        for method in methods:
            method.release()

    def _wait_idle(self, pause: Callable[[], None] | None = None) -> None:
        """Wait until no transfer is under way. ``pause`` is called repeatedly during the wait, and ends it if it
        raises."""
        if self._thread is not None:
            with self._meter.wait():
                self._thread.wait_idle(pause)

    # -- the groups of a checkpoint

    def _start(self, groups: list[Group]) -> None:
        """Send the groups with ``in_order``, mark the end of each device's work, and pass all groups to the transfer
        thread."""
        if not groups:
            return
        try:
            for group in groups:
                if group.in_order:
                    group.send_in_order()
            if self._thread is None:
                self._thread = TransferThread(self._meter)
            transfers = dict.fromkeys(transfer for group in groups for transfer, _ in group.part.devices)
            self._thread.submit(groups, {transfer: transfer.mark() for transfer in transfers})
        except BaseException:
            for group in groups:
                group.wait_for_transfers()
            raise

    # -- the end

    @property
    def is_transfer_thread(self) -> bool:
        """Whether the caller runs on the transfer thread."""
        return self._thread is not None and self._thread.is_transfer_thread

    def close(self) -> None:
        """Finish the transfers that are under way and end the thread. No checkpoint may begin afterwards."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.end()
        self._staged, self._parts = ([], []), None
        trial, self._trial = self._trial, None
        for method in trial.alternatives if trial is not None else ():
            method.release()


def _groups(method: TransferMethod, reservation: Reservation, parts: Parts) -> tuple[list[Group], list[StagedTensor]]:
    """Submit a job for each part, which waits until it is started. Return the groups, and the tensors for which no job
    was free."""
    groups: list[Group] = []
    for number, part in enumerate(parts.parts):
        group = method.group(reservation, part, parts)
        if group is None:
            return groups, [one for rest in parts.parts[number:] for one in rest.tensors]
        groups.append(group)
    return groups, parts.left
