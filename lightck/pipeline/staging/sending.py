"""What a version has on devices is sent, while it is begun: by the way that the user named, or by the one chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from lightck.errors import BackgroundError
from lightck.interrupts import raise_if_interrupted
from lightck.pipeline.staging.groups import GROUPS_MAX, Group, laid_out, parted
from lightck.pipeline.staging.kinds import Direct, Host, Kind
from lightck.pipeline.staging.methods import DeviceMethod, DirectMethod, HostMethod, TransferMethod, UnavailableError
from lightck.pipeline.staging.pump import Pump
from lightck.pipeline.submission import Submission
from lightck.pipeline.trial import Margin, Trial
from lightck.pipeline.write_table import NONE, StagedTensor
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter, Reservation
from lightck.stats import Meter

log = logging.getLogger("lightck")

_SPARE = 2
"""The device has to have so many times the memory of a copy before one is made there unasked."""
_ROUNDS, _WARM_UP, _LEAD_IN = 3, 2, 1
"""The first steps of a training are unlike the others. And the first version by another way waits for what is under way
by the last one, and pins or registers memory."""
_LESS_STALL = Margin(0.1, 0.0002)
"""A way that needs more has to hold the training up for less: by a tenth and 0.2 ms."""


class Staging:
    """Of one session. ``is_on`` False: tensors on devices are copied at the boundary itself.

    ``runs_behind``: versions may commit after the next update, so that a way need not be as fast as a step.
    """

    def __init__(
        self, meter: Meter, kind: Kind | None = None, *, runs_behind: bool = False, is_on: bool = True
    ) -> None:
        self.is_on = is_on
        self._meter = meter
        self._kind, self._runs_behind = kind, runs_behind
        self._trial: Trial[TransferMethod] | None = None
        self._stall_seconds = 0.0
        """Of the session, when the last version was begun."""
        self._method: TransferMethod | None = None
        """That of the last version."""
        self._pump: Pump | None = None

    @contextmanager
    def sending(
        self, writer: PoolWriter, slot: Slot, submission: Submission, reservation: Reservation | None, room: int
    ) -> Iterator[tuple[Reservation | None, npt.NDArray[np.int64]]]:
        """Send what a version has on devices, while it is begun: its draft, and the numbers of the records that are
        under way. What finds no room in the engine (``room`` jobs) is copied at the boundary itself. A draft that was
        made here is given up where the version cannot be begun."""
        if self._method is not None and self._method.settles:
            self._settle(raise_if_interrupted)
        if not self.is_on or not submission.staged or room < 1:
            submission.copy_at_boundary(submission.staged)
            yield reservation, NONE
            return
        own = reservation or writer.reservation(slot)
        try:
            yield own, self._send(writer, own, submission, room)
        except BaseException:
            if own is not reservation:
                own.drop()
            raise

    def _send(
        self, writer: PoolWriter, reservation: Reservation, submission: Submission, room: int
    ) -> npt.NDArray[np.int64]:
        try:
            method = self._prepared(writer, submission.staged)
            groups, left = _groups(method, reservation, submission.staged, room)
            submission.copy_at_boundary(left)
            self._start(groups)
        except RuntimeError as err:
            raise BackgroundError(
                f"A checkpoint could not be begun: tensors did not leave their device ({err}). The versions committed "
                "before are intact. Look at the device (its log, its memory), then start again with resume=True."
            ) from err
        if method.beside:
            submission.follow([one for group in groups if not group.in_order for one in group.tensors])
        return np.array([one.record.number for group in groups for one in group.tensors], np.int64)

    # -- by which way

    def _prepared(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> TransferMethod:
        """A way that is ready for this version."""
        if self._trial is None:
            rounds = _ROUNDS if self._kind is None else 0
            self._trial = Trial(self._methods(), [_LESS_STALL], rounds=rounds, warm_up=_WARM_UP, lead_in=_LEAD_IN)
        trial, is_chosen = self._trial, self._trial.is_over
        before, self._stall_seconds = self._stall_seconds, self._meter.stall_seconds
        if self._method is not None:
            trial.note(self._stall_seconds - before)
        method = trial.begin()
        while True:
            if trial.is_over and not is_chosen:
                self._chosen(trial)  # first: memory is not given back under what this version sends
            try:
                method.prepare(writer, staged)
            except UnavailableError as why:
                self._forget([method])
                log.info("lightck: tensors do not leave their device by %s: %s", method.kind, why)
                if self._kind is not None:
                    log.warning(
                        "lightck: staging=%s is not possible here (%s). lightck.Host() is used.", method.kind, why
                    )
                trial.withdraw(method)
                method, is_chosen = trial.turn, False
                continue
            self._method, self._meter.staging = method, str(method.kind)
            self._meter.staging_trial = not trial.is_over
            return method

    def _chosen(self, trial: Trial[TransferMethod]) -> None:
        """Versions go by one way from here on. The others give back what they hold."""
        others = [method for method in trial.alternatives if method is not trial.turn]
        if others:
            costs = [
                f"{method.kind} {1e3 * stall:.2f} ms"
                for method in trial.alternatives
                for stall in trial.medians(method)
            ]
            reported = f"tensors leave their device by {trial.turn.kind} from here on"
            log.info("lightck: %s (a version held the training up: %s)", reported, ", ".join(costs))
        self._forget(others)

    def _methods(self) -> list[TransferMethod]:
        direct, host = DirectMethod(self._settle), HostMethod()
        if self._kind is None:
            return [direct, host, *([DeviceMethod(_SPARE)] if self._runs_behind else [])]
        if isinstance(self._kind, Host):
            return [host]
        return [direct if isinstance(self._kind, Direct) else DeviceMethod(), host]

    def _forget(self, methods: Sequence[TransferMethod]) -> None:
        if methods:
            self._settle()
        for method in methods:
            method.forget()

    def _settle(self, pause: Callable[[], None] | None = None) -> None:
        """Nothing is under way afterwards. ``pause`` may raise."""
        if self._pump is not None:
            with self._meter.wait():
                self._pump.settle(pause)

    # -- the groups of a version

    def _start(self, groups: list[Group]) -> None:
        """On the training thread: sends what must go in order, marks what the device has to do, and leaves the rest."""
        if not groups:
            return
        try:
            for group in groups:
                if group.in_order:
                    group.send_in_order()
            if self._pump is None:
                self._pump = Pump(self._meter)
            transfers = {one.transfer for group in groups for one in group.tensors}
            self._pump.take(groups, {transfer: transfer.mark() for transfer in transfers})
        except BaseException:
            for group in groups:
                group.drain()
            raise

    # -- the end

    @property
    def is_here(self) -> bool:
        """The caller is on the thread that waits for devices."""
        return self._pump is not None and self._pump.is_here

    def close(self) -> None:
        """End the thread. No version may be begun afterwards; those that are under way go on to their end first."""
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.end()
        trial, self._trial = self._trial, None
        for method in trial.alternatives if trial is not None else ():
            method.forget()


def _groups(
    method: TransferMethod, reservation: Reservation, staged: Sequence[StagedTensor], room: int
) -> tuple[list[Group], list[StagedTensor]]:
    """Groups whose jobs are submitted, held; and what is left."""
    in_order = [one for one in staged if one.in_order and method.beside]
    later = [one for one in staged if not (one.in_order and method.beside)]
    parts = parted(later, min(room - bool(in_order), GROUPS_MAX))
    plans = ([(in_order, True)] if in_order else []) + [(part, False) for part in parts]
    if later and not parts:
        return [], list(staged)
    nbytes_max = max((laid_out(part)[1] for part in parts), default=0)
    groups: list[Group] = []
    for number, (tensors, is_first) in enumerate(plans):
        group = method.group(reservation, tensors, laid_out(tensors)[1] if is_first else nbytes_max, in_order=is_first)
        if group is None:
            return groups, [one for rest, _ in plans[number:] for one in rest]
        groups.append(group)
    return groups, []
