"""The drain: a process that sends checkpoints of a running training to its tiers. It runs without torch.

    settings     come over the socket, never by the command line, which others can read
    lock         POOL.drain (``drain_lock.py``). The drain of a training that was killed finishes first, if it does so
                 soon
    wait         for an offer, for the time of a tier, or for the end of the training
    hold, send   the checkpoint to each tier for which it is due, one after the other, compressed if the tier says so
                 (``sending.py``)
    feed         an object store that has a drain of its own: what lies in a folder is sent to it. The pool is read
                 only if the folder gives nothing usable, after a signal, and at the end (``feeding.py``)
    pace         at the rate of a tier, until a signal has come or the training was killed
    retain       remove from the tier what need not stay (``decisions.py``)
    end          the training is closed, or is gone: send the newest checkpoint to each tier that lacks it, and end

Invariants: only checkpoints are sent whose small state names the claim that this drain serves, or the one from which
the training went on. The training waits until something is sent only when it must stop, and at its close.

Failure cases: a checkpoint is overwritten while it is sent (a newer one is sent, but not in a group); a tier takes
nothing (more attempts follow, after growing pauses); another process claims a tier (nothing more is written there); the
training is killed (the newest checkpoint is sent first, for ten minutes at most); this process is killed (the next one
sends the checkpoint again; what no manifest names is removed later).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from lightck.errors import (
    LightckError,
    PoolError,
    PoolNotFoundError,
    TierClaimedError,
    TierError,
    UnsupportedError,
)
from lightck.pool.format.saved_by import saved_by
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.tiers.checkpoint_in_tier import FolderUnreachableError, checkpoint_in_tier
from lightck.tiers.claiming import claim_of
from lightck.tiers.drain_lock import DrainLock
from lightck.tiers.drain_messages import (
    ANNOUNCING_SIGNALS,
    PROCESS_NAME,
    DrainSettings,
    DrainState,
    receive_message,
    send_message,
)
from lightck.tiers.due_steps import Metrics
from lightck.tiers.feeding import LOOK_SECONDS, Feed
from lightck.tiers.folder import FolderStore
from lightck.tiers.held_checkpoint import OverwrittenError, held, record_of
from lightck.tiers.last_of_group import generations_at_end
from lightck.tiers.names import ManifestName, TierCheckpoint, Writer
from lightck.tiers.open_store import open_store
from lightck.tiers.outlet import Outlet
from lightck.tiers.pauses import PAUSE_SECONDS, pause_after
from lightck.tiers.rates import Pacer
from lightck.tiers.rereading import Rereading
from lightck.tiers.tier_manifest import read_manifest
from lightck.tiers.tier_writer import TierWriter

NICENESS = 10
_NICENESS_FED = 5
"""Added for a drain that is fed from a folder: at the end the folder gets the newest checkpoint first."""
_POLL_SECONDS = 1.0
"""How often the process looks whether the training still lives, if the socket does not say so."""
_PROGRESS_SECONDS = 1.0
"""How often progress is reported."""
_PAUSE_SECONDS_MAX_AT_END, _PAUSE_SECONDS_ALONE = 5.0, 0.2
_ORPHAN_SECONDS_MAX = 600.0
"""How long the process outlives its training."""
_OTHER_SECONDS_MAX, _OTHER_SECONDS_MAX_AT_END = 30.0, 5.0
"""How long the process waits for the drain of an earlier training: usually, and when its own training has ended."""
_N_ATTEMPTS_AT_END, _N_OVERTAKEN_MAX = 3, 20
_N_METRICS_MAX = 1000
"""Of how many steps the metrics are remembered."""


class DrainProcess:
    """The work of the process."""

    def __init__(self, connection: socket.socket, settings: DrainSettings, parent_pid: int) -> None:
        self._connection, self._settings, self._parent_pid = connection, settings, parent_pid
        claim = claim_of(settings.claim)
        assert claim is not None, "the training has made it"
        self._own = Writer(claim, settings.rank, settings.world_size)
        self._outlets = [
            Outlet(each, Pacer(each.bytes_per_second, wait=self._wait_for_rate)) for each in settings.tiers
        ]
        self._state = DrainState(tiers=[each.state for each in self._outlets])
        self._rereading = Rereading(settings, self._own, self._state, [each.hashes for each in self._outlets])
        self._lock = DrainLock(settings.pool, settings.number)
        self._feed: Feed | None = None
        """What lies in the folder from which the only tier is fed; None also before the store was reached."""
        self._next_look_at = 0.0
        """When the folder is listed next."""
        self._stale_up_to = 0
        """Checkpoints of this step and of earlier ones are not sent from the folder any more."""
        self._fed_step: int | None = None
        """Of the checkpoint that is being sent from the folder."""
        self._offer: tuple[int, list[int]] | None = None
        """Generation of a checkpoint that the training holds for this process, and the numbers of the tiers for which
        it is due."""
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._is_closing = self._is_alone = self._is_unreported = False
        self._is_urgent = False
        """Whether the newest checkpoint is to be sent now, because this machine or job may be about to end."""
        self._persists = False
        """Whether the training ends without waiting for this process: then attempts go on as if it was killed."""
        self._reported_at = 0.0
        """When the progress of a checkpoint was reported last."""
        self._signal_grace = 0.0
        """How long after its first signal this process ignores others, because they say the same."""
        self._signalled_at: float | None = None
        for each in self._outlets:
            each.begin(time.monotonic())

    def run(self) -> None:
        """Serve the training until it ends."""
        lock = self._lock
        try:
            began = time.monotonic()
            while not lock.take():
                has_ended = self._is_closing or self._is_alone
                if time.monotonic() - began > (_OTHER_SECONDS_MAX_AT_END if has_ended else _OTHER_SECONDS_MAX):
                    break  # two drains disturb each other's holds, and nothing else
                self._wait()
            while not self._is_closing and not self._is_alone:
                lock.take()
                self._serve()
                self._wait(min(self._rereading.next_at, self._next_look_at if self.is_fed else math.inf))
                self._reread()
            if not (self.is_fed and self._is_alone):  # a fed drain that is alone sends the pool's newest first
                self._serve()  # what was offered before the end
            self._finish(time.monotonic() + _ORPHAN_SECONDS_MAX)
        finally:
            lock.release()

    def terminated(self, number: int, _: object = None) -> None:
        """Handle SIGTERM and the other signals that a container or a batch system sends to all processes some seconds
        before SIGKILL: send the newest checkpoint now, and go on. A later signal ends this process if it comes after
        the grace that the training has named."""
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at, self._is_urgent = now, True
            self._lift_rates()
        elif now >= self._signalled_at + self._signal_grace:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # -- the training

    def _wait(self, until: float = float("inf")) -> None:
        """Wait until there is something to do, until this time at most, and read what the training says."""
        if self._is_alone:
            time.sleep(_PAUSE_SECONDS_ALONE)
            return
        now = time.monotonic()
        timed = [each.next_at for each in self._outlets if self._is_due(each, float("inf"))]
        seconds = min(_POLL_SECONDS, max(0.0, min(timed, default=float("inf")) - now), max(0.0, until - now))
        select.select([self._connection], [], [], seconds)
        self._read()

    def _read(self) -> None:
        """Read what the training has said."""
        while (message := receive_message(self._connection)) != {}:
            if message is None:
                self._is_alone = True
                break
            if "offer" in message:
                self._offer = message["offer"], message["tiers"]
            for number in message.get("first", ()):
                self._outlets[number].lacks_first = not self._outlets[number].state.checkpoints
            if "metrics" in message:
                self._metrics[message["step"]] = message["metrics"]
                for step in sorted(self._metrics)[:-_N_METRICS_MAX]:
                    del self._metrics[step]
            self._is_closing |= "close" in message
            self._is_urgent |= "newest" in message
            self._persists |= "persists" in message
            self._signal_grace = message.get("signal_grace", self._signal_grace)
            self._stale_up_to = message.get("stale_up_to", self._stale_up_to)
            if "look" in message:
                self._next_look_at = 0.0
            if "newest" in message or "persists" in message:  # after a signal, little time may be left
                self._lift_rates()
        self._is_alone |= os.getppid() != self._parent_pid
        if self._is_alone:  # what killed the training may end this process too
            self._lift_rates()
        if self._is_unreported:
            self._report()

    def _lift_rates(self) -> None:
        for each in self._outlets:
            each.pacer.lift()

    def _wait_for_rate(self, seconds: float) -> None:
        """Wait before the next piece, and read meanwhile what the training says."""
        if not self._is_alone:
            select.select([self._connection], [], [], seconds)
            self._read()
            self._report_progress()

    def _pace(self, outlet: Outlet, nbytes: int) -> None:
        """Wait until a piece may be put to a tier."""
        outlet.pacer.spend(nbytes)
        self._report_progress()
        if self._fed_step is not None:  # no slot says whether these bytes are stale, only the training
            self._read()
            if self._fed_step <= self._stale_up_to:
                raise DamagedError("it may hold old bytes, because lightck noticed a write too late")

    def _report_progress(self) -> None:
        self._state.progress += 1
        now = time.monotonic()
        if now - self._reported_at >= _PROGRESS_SECONDS:
            self._reported_at = now
            self._report()

    def _report(self) -> None:
        self._is_unreported = not send_message(self._connection, self._state.packed())

    # -- what is sent

    def _serve(self) -> None:
        """Send what is due."""
        now = time.monotonic()
        offer, self._offer = self._offer, None
        if offer is not None:
            generation, numbers = offer
            self._send([self._outlets[number] for number in numbers], generation)
        is_urgent, self._is_urgent = self._is_urgent, False
        due = [each for each in self._outlets if not self._is_of_group and (is_urgent or self._is_due(each, now))]
        if is_urgent and self._is_of_group:
            for last in self._generations_at_end():
                self._send(self._outlets, last)
        if self.is_fed and not is_urgent:
            due = self._serve_from_folder(self._outlets[0], is_time=bool(due))
        if due:
            self._send(due)
        for each in due:
            each.served(now)
        if self._state.is_busy:
            self._state.is_busy = False
            self._report()

    @property
    def is_fed(self) -> bool:
        """Whether the only tier is fed from a folder."""
        return self._settings.fed_from is not None

    def _serve_from_folder(self, outlet: Outlet, *, is_time: bool, newest_first: bool = False) -> list[Outlet]:
        """Send the tier one checkpoint that has come into the folder. ``is_time``: whether the time of the tier, or of
        the next attempt, has come. Returns the tier if it is to be sent the pool's newest checkpoint instead."""
        now, is_retry = time.monotonic(), outlet.n_failures > 0
        if not is_time and now < self._next_look_at:
            return []
        self._next_look_at = now + LOOK_SECONDS
        if outlet.state.is_superseded or (is_retry and not is_time):
            return []
        feed = self._feed_of(outlet)
        if feed is None:
            return []
        feed.look(self._stale_up_to)
        outlet.state.waiting = feed.n_waiting
        name = feed.choose(is_time=is_time, newest_first=newest_first)
        if name is None:
            return [outlet] if is_time and (is_retry or not self._wait_for_folder(outlet, feed, now)) else []
        try:
            metrics = self._send_from_folder(outlet, feed, name)
        except (FolderUnreachableError, TierError):  # of the folder, whose own drain reports it
            feed.postpone(name)
            return [outlet] if is_time else []
        except (DamagedError, PoolError) as err:
            self._state.report(
                f"The checkpoint of step {name.step} could not be read in {str(feed.folder)!r}: {err}. "
                f"{outlet.settings.root!r} is sent the pool's newest one instead"
            )
            feed.done(name, None)
            self._next_look_at = 0.0
            return [outlet]
        if outlet.n_failures or outlet.state.is_superseded:
            return []
        feed.done(name, metrics)
        outlet.lacks_first, outlet.state.waiting = False, feed.n_waiting
        if is_time and feed.newest is None:
            outlet.next_at = now + (outlet.settings.every_seconds or 0.0)
        self._next_look_at = 0.0  # there may be more, but what the training has said meanwhile comes first
        return []

    def _finish_folder(self, until: float) -> None:
        """Send the checkpoints of the folder that the tier needs and lacks. After a kill the drain of the folder may
        still be sending. ``until``: when to give up after a kill."""
        outlet, n_attempts, n_waiting = self._outlets[0], 0, 0
        while not outlet.state.is_superseded and not (self._is_alone and time.monotonic() > until):
            is_coming = self._is_alone and self._lock.is_another_at_work(0)
            self._next_look_at, n_sent = 0.0, outlet.state.checkpoints
            self._serve_from_folder(outlet, is_time=outlet.n_failures > 0)
            if not self._is_alone:
                self._read()
            n_before, n_waiting = n_waiting, 0 if self._feed is None else self._feed.n_waiting
            if not outlet.n_failures and not n_waiting and not is_coming:
                return
            if outlet.state.checkpoints == n_sent and n_waiting >= n_before:
                outlet.end_if_superseded()  # then the drain that holds the lock is that of the next training
                n_attempts += not is_coming
                if n_attempts >= _N_ATTEMPTS_AT_END and not self._is_alone and not self._persists:
                    break
                time.sleep(min(PAUSE_SECONDS * 2 ** min(n_attempts, 8), _PAUSE_SECONDS_MAX_AT_END))
        if n_waiting:
            self._state.report(f"{n_waiting} checkpoints that {outlet.settings.root!r} was to keep were not sent to it")

    def _wait_for_folder(self, outlet: Outlet, feed: Feed, now: float) -> bool:
        """Plan to look again soon, and return True, if a tier that is due by time should wait for the next checkpoint
        of the folder. It waits for one period at most after the last one came there; then return False."""
        period = outlet.settings.every_seconds or 0.0
        if now >= feed.came_at + period:
            return False
        outlet.next_at = self._next_look_at = now + min(LOOK_SECONDS, period)
        return True

    def _feed_of(self, outlet: Outlet) -> Feed | None:
        """Return what lies in the folder; None if it is not known, because the store was not reached."""
        if self._feed is None:
            assert self._settings.fed_from is not None, "asked before"
            try:
                writer = self._writer_of(outlet)
            except TierError as err:
                self._failed(outlet, str(err))
                return None
            folder = FolderStore(self._settings.other_tiers[self._settings.fed_from].root)
            self._feed = Feed(folder, self._own, outlet.settings, writer.sent())
        return self._feed

    def _send_from_folder(self, outlet: Outlet, feed: Feed, name: ManifestName) -> Metrics:
        """Send a checkpoint that lies in the folder, and return the metrics with which it is sent. Raises
        ``DamagedError``, ``PoolError`` and ``TierError`` if it cannot be read there; if the store fails, the next
        attempt is planned."""
        self._state.is_busy, self._fed_step = True, name.step
        self._report()
        try:
            manifest = read_manifest(feed.folder, name)
            if manifest.metrics:
                self._metrics.setdefault(name.step, manifest.metrics)
            metrics = self._metrics.get(name.step, {})
            with checkpoint_in_tier(feed.folder, manifest) as stored:
                self._send_to(outlet, stored)
        finally:
            self._fed_step = None
        return metrics

    def _is_due(self, outlet: Outlet, now: float) -> bool:
        """Whether a tier is due by its time. In a group of ranks the training decides when, and this process only when
        to try again."""
        return outlet.is_due(now) and (not self._is_of_group or outlet.n_failures > 0)

    def _reread(self) -> None:
        """Read a piece of the pool or of a tier again, unless there is something else to do."""
        is_busy = self._offer is not None or self._is_urgent or self._is_closing or self._is_alone
        is_busy |= any(self._is_due(each, time.monotonic()) for each in self._outlets)
        if not is_busy and self._rereading.work():
            self._report()

    @property
    def _is_of_group(self) -> bool:
        """Whether this is the drain of one of several ranks. Such a drain sends only what all ranks send."""
        return self._settings.world_size > 1

    def _generations_at_end(self) -> list[int | None]:
        """Return the generations of the checkpoints that are sent at the end; None stands for the newest one. Ranks
        that close their sessions end with the same step."""
        if not self._is_of_group or self._is_closing:
            return [None]
        try:
            return generations_at_end(self._settings.pool, self._settings.pools_of_ranks)
        except PoolError:
            return [None]  # ``_send`` meets the error too, and reports it

    def _finish(self, until: float) -> None:
        """Send the newest checkpoint to each tier that lacks it. ``until``: when to give up."""
        if self.is_fed and self._is_closing:  # the folder has got the newest one before
            self._serve_from_folder(self._outlets[0], is_time=True, newest_first=True)
        for generation in self._generations_at_end():
            self._finish_with(generation, until)
        if self.is_fed:
            self._finish_folder(until)
        self._state.is_busy, self._state.is_done = False, True
        self._report()

    def _finish_with(self, generation: int | None, until: float) -> None:
        left, n_attempts = self._outlets, 0
        while True:
            self._send(left, generation, is_last=True)
            n_attempts += 1
            left = [each for each in left if each.n_failures and not each.state.is_superseded]
            if not self._is_alone:
                self._read()  # has the training ended meanwhile?
            is_last_attempt = n_attempts >= _N_ATTEMPTS_AT_END and not self._is_alone and not self._persists
            if not left or is_last_attempt or time.monotonic() > until:
                break
            time.sleep(min(PAUSE_SECONDS * 2 ** (n_attempts - 1), _PAUSE_SECONDS_MAX_AT_END))

    def _send(self, outlets: Iterable[Outlet], generation: int | None = None, *, is_last: bool = False) -> None:
        """Send one checkpoint to these tiers, and apply retention. ``generation``: of the checkpoint; None: the newest.
        ``is_last``: the training has ended, so the checkpoint from which it went on may be sent too."""
        left = [each for each in outlets if not each.state.is_superseded]
        self._state.is_busy = True
        self._report()
        offered = generation
        try:
            for _ in range(_N_OVERTAKEN_MAX):
                with contextlib.closing(open_pool(self._settings.pool, gradients=True)) as reader:
                    left = self._send_from(reader, left, generation, is_last=is_last)
                if not left:
                    return
                if self._is_of_group:
                    raise DamagedError("it was overwritten while it was sent")
                generation = None  # it was overwritten: now the newest one
            raise DamagedError(
                "each checkpoint was overwritten while it was sent. In a pool with gradient records this comes if "
                "updates are made faster than they can be made again: use strategy=lightck.FullState() there"
            )
        except PoolNotFoundError:  # not made yet, or removed: there is nothing to send
            for each in left:
                each.clear_failures()
        except (PoolError, UnsupportedError, DamagedError) as err:
            for each in left:
                self._failed(each, f"The checkpoint cannot be read: {str(err).rstrip('.')}.")
        finally:
            if offered is not None and self._state.answered != offered:
                self._answer(offered)

    def _answer(self, generation: int) -> None:
        """Tell the training that it need not hold an offered checkpoint any more."""
        self._state.answered = generation
        self._report()

    def _send_from(
        self, reader: PoolReader, outlets: list[Outlet], generation: int | None, *, is_last: bool
    ) -> list[Outlet]:
        """Send one checkpoint of an open pool. Returns the tiers that lack it because it was overwritten meanwhile.
        Raises ``DamagedError`` and ``PoolError``."""
        record = record_of(reader, generation)
        if record is None or all(self._is_sent(record, each) for each in outlets):
            for each in outlets:
                each.clear_failures()
            if record is not None and generation is not None:
                self._answer(generation)
            return []
        try:
            with held(reader, generation) as stored:
                if stored is None:
                    return outlets
                if generation is not None:
                    self._answer(generation)
                for number, each in enumerate(outlets):
                    if not self._is_to_be_sent(stored, each, is_last=is_last):
                        each.clear_failures()
                    elif not self._send_with_retries(each, stored):
                        return outlets[number:]
        except OverwrittenError:
            return outlets
        return []

    def _send_with_retries(self, outlet: Outlet, stored: StoredCheckpoint) -> bool:
        """Send a held checkpoint to a tier. A rank of a group tries again and again, because the other ranks send this
        checkpoint too, and it is complete only with all parts. Returns False if it was overwritten meanwhile."""
        until = time.monotonic() + _ORPHAN_SECONDS_MAX
        while self._send_to(outlet, stored):
            is_over = not self._is_of_group or not outlet.n_failures or outlet.is_damage or time.monotonic() > until
            while not is_over and time.monotonic() < outlet.next_at:
                self._wait()
                is_over = self._is_closing or self._is_alone
            if is_over:
                return True
        return False

    def _is_sent(self, record: CommitRecord, outlet: Outlet) -> bool:
        """Whether a checkpoint, with what was logged at its step, was sent to a tier."""
        return outlet.sent == (record.payload_generation, self._metrics.get(record.step))

    def _is_to_be_sent(self, stored: StoredCheckpoint, outlet: Outlet, *, is_last: bool) -> bool:
        """Whether to send a checkpoint: it is of this training, or (``is_last``) it is the one from which the training
        went on and the tier lacks it; and it is not the one that this process has sent last. Raises
        ``DamagedError``."""
        generation, parent = stored.record.payload_generation, self._settings.parent
        if self._is_sent(stored.record, outlet):
            return False
        if saved_by(stored.state).claim == self._settings.claim:
            return True
        return is_last and parent is not None and not outlet.settings.has_parent and parent.generation == generation

    def _send_to(self, outlet: Outlet, stored: StoredCheckpoint) -> bool:
        """Send a held checkpoint to a tier. Returns False if it was overwritten meanwhile."""
        began, metrics = time.monotonic(), self._metrics.get(stored.step)
        try:
            writer = self._writer_of(outlet)
            sent = writer.send(stored, metrics)
        except TierClaimedError as err:
            outlet.state.is_superseded, outlet.state.error = True, str(err)
            self._report()
            return True
        except (DamagedError, PoolError, TierError) as err:
            if self._fed_step is not None and not isinstance(err, TierError):
                raise
            if not stored.owns_slot():
                return False
            is_damage = isinstance(err, DamagedError)
            self._failed(outlet, f"The checkpoint of step {stored.step} is damaged: {err}." if is_damage else str(err))
            outlet.is_damage = is_damage
            return True
        generation, state, outlet.n_failures = stored.record.payload_generation, outlet.state, 0
        if outlet.sent is None or generation >= outlet.sent[0]:
            outlet.sent = generation, metrics
        state.step = max(stored.step, state.step or 0)
        if self._feed is not None and self._fed_step is None:
            self._feed.came_from_pool(stored.step, metrics or {})
        state.sent_at, state.seconds = time.time(), time.monotonic() - began
        state.checkpoints += 1
        state.sent_nbytes += sent.nbytes
        if state.failing_since is not None:
            state.error = state.failing_since = None
        self._report()
        self._retain(outlet, writer)
        return True

    def _writer_of(self, outlet: Outlet) -> TierWriter:
        """Return what writes to a tier; at its first use, read what lies in the tier already."""
        if outlet.writer is None:
            store = open_store(outlet.settings.root, outlet.settings.options)
            retention, grace = outlet.settings.retention, self._settings.grace
            pace, codec = partial(self._pace, outlet), outlet.settings.compress
            writer = TierWriter(store, self._own, self._settings.written_by, retention, grace, pace, codec)
            writer.use_own()
            parent = self._settings.parent
            parent_claim = None if parent is None else claim_of(parent.claim)
            if parent is not None and parent_claim is not None and outlet.settings.has_parent:
                checkpoint = TierCheckpoint(parent_claim, parent.step)
                for name in store.listing().manifests:
                    # A step may have been sent more than once.
                    if name.checkpoint == checkpoint and name.writer == self._own._replace(claim=parent_claim):
                        writer.use_parent(name, parent.generation)
            outlet.writer = writer
        return outlet.writer

    def _retain(self, outlet: Outlet, writer: TierWriter) -> None:
        """Remove what is no longer needed. What could not be removed is removed after the next checkpoint."""
        before = outlet.state.error
        try:
            writer.retain()
            outlet.state.error = None
        except TierError as err:
            outlet.state.error = f"Checkpoints that need not stay in a tier were not removed. {err}"
        if outlet.state.error != before:
            self._report()

    def _failed(self, outlet: Outlet, reason: str) -> None:
        """Plan the next attempt."""
        outlet.n_failures += 1
        outlet.next_at = time.monotonic() + pause_after(outlet.n_failures)
        outlet.state.error = reason
        outlet.state.failing_since = outlet.state.failing_since or time.time()
        self._report()


def main(fd: int) -> None:
    """Run a drain. ``fd``: its end of the connection to the training."""
    parent_pid = os.getppid()
    connection = socket.socket(fileno=fd)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        Path("/proc/self/comm").write_text(PROCESS_NAME)  # for top and ps
    try:
        select.select([connection], [], [])
        settings = receive_message(connection)
        if settings:
            process = DrainProcess(connection, DrainSettings.unpacked(settings), parent_pid)
            if process.is_fed:
                with contextlib.suppress(OSError):
                    os.nice(_NICENESS_FED)
            for number in ANNOUNCING_SIGNALS:
                signal.signal(number, process.terminated)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ANNOUNCING_SIGNALS)  # ``drain_start.py`` has blocked them
            process.run()
    except Exception as err:
        kind = "" if isinstance(err, LightckError) else f"{type(err).__name__}: "
        send_message(connection, DrainState(fatal=f"{kind}{err}").packed())
        raise
