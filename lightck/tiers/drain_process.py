"""The drain: a process that sends checkpoints of a running training to its tiers. It runs without torch.

    settings     come over the socket, never by the command line, which others can read
    lock         POOL.drain: one drain per pool. That of a training that was killed finishes first, if it does so soon
    wait         for an offer, for the time of a tier, or for the end of the training
    hold, send   the checkpoint to each tier for which it is due, one after the other, compressed if the tier says so
                 (``sending.py``)
    feed         an object store is sent what lies in a folder tier then, so that no slot is held meanwhile
                 (``feeding.py``). Between two pieces, folders get what is due for them
    pace         at the rate of a tier, until a signal has come or the training was killed
    retain       remove from the tier what need not stay (``decisions.py``)
    end          the training is closed, or is gone: send the newest checkpoint to each tier that lacks it, and end

Invariants: only checkpoints are sent whose small state names the claim that this drain serves, or the one from which
the training went on. The training waits for nothing here but at its close.

Failure cases: a checkpoint is overwritten while it is sent (a newer one is sent); a tier takes nothing (again after a
pause, which grows; this is reported); another process claims a tier (nothing more is written there); the training
is killed (the newest checkpoint is sent first, for ten minutes at most); this process is killed (whole objects are
found by their names, and what is not named is removed later).
"""

from __future__ import annotations

import contextlib
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
from lightck.tiers.feeding import checkpoint_in_tier
from lightck.tiers.held_checkpoint import OverwrittenError, held, record_of
from lightck.tiers.last_of_group import generations_at_end
from lightck.tiers.names import TierCheckpoint, Writer
from lightck.tiers.open_store import is_url, open_store
from lightck.tiers.outlet import PAUSE_SECONDS, Outlet, pause_after
from lightck.tiers.rates import Pacer
from lightck.tiers.rereading import Rereading
from lightck.tiers.tier_manifest import TierManifest
from lightck.tiers.tier_writer import TierWriter

NICENESS = 10
_POLL_SECONDS = 1.0
"""How often the process looks whether the training still lives, if the socket does not say so."""
_PROGRESS_SECONDS = 1.0
"""How often progress is reported."""
_PAUSE_SECONDS_MAX_AT_END, _PAUSE_SECONDS_ALONE = 5.0, 0.2
_ORPHAN_SECONDS_MAX = 600.0
"""How long the process outlives its training."""
_OTHER_SECONDS_MAX, _OTHER_SECONDS_MAX_AT_END = 30.0, 5.0
"""How long the process waits for the drain of an earlier training: usually, and when its own training has ended."""
_FEED_MAX = 4
"""How many checkpoints may wait to be sent from one tier to another; then the training offers no more."""
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
        self._feeder = next((each for each in self._outlets if not is_url(each.settings.root)), None)
        """The folder tier from which object stores are fed; None: there is none."""
        for each in self._outlets:
            each.is_fed = self._feeder is not None and is_url(each.settings.root)
        self._is_feeding = self._is_serving_others = False
        self._state = DrainState(tiers=[each.state for each in self._outlets])
        self._rereading = Rereading(settings, self._own, self._state, [each.hashes for each in self._outlets])
        self._offer: tuple[int, list[int]] | None = None
        """Generation of a checkpoint that the training holds for this process, and the numbers of the tiers for which
        it is due."""
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._is_closing = self._is_alone = self._is_unreported = False
        self._is_urgent = self._is_urgent_for_fed = False
        """Whether the newest checkpoint is to be sent now, because this machine or job may be about to end: at
        once; when the store that is fed has got the present one."""
        self._persists = False
        """Whether the training will not wait for the end: then attempts go on as after a killed one."""
        self._reported_at = 0.0
        """When the progress of a checkpoint was reported last."""
        self._grace = 0.0
        """How long after its first signal this process ignores others, because they say the same."""
        self._signalled_at: float | None = None
        began = time.monotonic()
        for each in self._outlets:
            each.next_at = began + (each.settings.every_seconds or 0.0)

    def run(self) -> None:
        """Serve the training until it ends."""
        lock = DrainLock(self._settings.pool)
        try:
            began = time.monotonic()
            while not lock.take():
                has_ended = self._is_closing or self._is_alone
                if time.monotonic() - began > (_OTHER_SECONDS_MAX_AT_END if has_ended else _OTHER_SECONDS_MAX):
                    break  # two drains disturb each other's holds, and nothing else
                self._wait()
            while not self._is_closing and not self._is_alone:
                self._serve()
                self._wait(self._rereading.next_at)
                self._reread()
            self._serve()  # what was offered before the end
            self._finish(time.monotonic() + _ORPHAN_SECONDS_MAX)
        finally:
            lock.release()

    def terminated(self, number: int, _: object = None) -> None:
        """Handle SIGTERM and other signals, which a container or a batch system sends to all processes, and after some
        seconds SIGKILL: send the newest checkpoint now, and go on. The second one ends the process, if it comes after
        the grace that the training has named."""
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at, self._is_urgent = now, True
            self._lift_rates()
        elif now >= self._signalled_at + self._grace:
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
            self._grace = message.get("grace", self._grace)
            if "newest" in message or "persists" in message:  # a signal has come, and so much time is left
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
            if self._is_feeding:
                self._serve_others()

    def _pace(self, outlet: Outlet, nbytes: int) -> None:
        """Wait until a piece may be put to a tier. 0 bytes: earlier ones are waited for."""
        if nbytes:
            outlet.pacer.spend(nbytes)
            self._report_progress()
        if outlet.is_fed and outlet.to_feed:
            self._serve_others()

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
        is_urgent = self._is_urgent or self._is_urgent_for_fed
        self._is_urgent = self._is_urgent_for_fed = False
        due = [each for each in self._outlets if not self._is_of_group and (is_urgent or self._is_due(each, now))]
        if is_urgent and self._is_of_group:
            for last in self._generations_at_end():
                self._send(self._outlets, last)
        self._send_due(due, now)
        self._is_no_longer_busy()

    def _send_due(self, due: list[Outlet], now: float) -> None:
        for each in due:
            each.lacks_first = False
            each.next_at = now + (each.settings.every_seconds or 0.0)  # later, if this attempt fails
        if due:
            self._send(due)

    def _is_no_longer_busy(self) -> None:
        if self._state.is_busy:
            self._state.is_busy = False
            self._report()

    def _is_due(self, outlet: Outlet, now: float) -> bool:
        """Whether a tier is due by its time. In a group of ranks the trainings watch the time, and this process only
        that of the next attempt."""
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
            return [None]  # the error is found again, and reported

    def _finish(self, until: float) -> None:
        """Send the newest checkpoint to each tier that lacks it. ``until``: when to give up."""
        for generation in self._generations_at_end():
            self._finish_with(generation, until)
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
            is_last = n_attempts >= _N_ATTEMPTS_AT_END and not self._is_alone and not self._persists
            if not left or is_last or time.monotonic() > until:
                break
            time.sleep(min(PAUSE_SECONDS * 2 ** (n_attempts - 1), _PAUSE_SECONDS_MAX_AT_END))

    def _send(self, outlets: Iterable[Outlet], generation: int | None = None, *, is_last: bool = False) -> None:
        """Send one checkpoint to these tiers, and remove what need not stay. ``generation``: of the checkpoint; None:
        the newest. ``is_last``: the training has ended, so the checkpoint from which it went on counts too."""
        outlets = list(outlets)
        fed = [each for each in outlets if self._can_feed(each)]
        direct = [each for each in outlets if each not in fed and not (each.is_fed and self._is_feeding)]
        self._is_urgent_for_fed |= len(fed) + len(direct) < len(outlets)  # when the store has got the present one
        if fed and self._feeder is not None and self._feeder not in direct:
            direct.insert(0, self._feeder)
        if direct:
            self._send_directly(direct, generation, is_last=is_last)
        if fed and not self._plan_to_feed(fed, generation):
            if self._is_feeding:
                self._is_urgent_for_fed = True
            else:
                self._send_directly(fed, generation, is_last=is_last)
        self._feed()

    def _can_feed(self, outlet: Outlet) -> bool:
        feeder = self._feeder
        return outlet.is_fed and feeder is not None and not feeder.n_failures and not feeder.state.is_superseded

    def _plan_to_feed(self, outlets: list[Outlet], generation: int | None) -> bool:
        """Plan to send to these tiers what the folder tier has received. Returns False if it did not receive it."""
        feeder = self._feeder
        sent = None if feeder is None or feeder.writer is None or feeder.n_failures else feeder.writer.newest
        if sent is None or generation not in (None, sent.manifest.record.payload_generation):
            return False
        for each in outlets:
            if self._is_sent(sent.manifest.record, each):
                each.n_failures = 0
            elif sent.manifest not in each.to_feed:
                if len(each.to_feed) > 1 and not self._needs_each(each):
                    each.to_feed.pop()  # the newer one will do
                each.to_feed.append(sent.manifest)
        return True

    def _needs_each(self, outlet: Outlet) -> bool:
        """Whether each checkpoint that is due must be sent: ranks send the same ones."""
        return self._is_of_group or outlet.settings.keep_every is not None or outlet.settings.keep_best is not None

    def _feed(self) -> None:
        """Send to the object stores what is planned. No slot is held, so the training may offer more meanwhile."""
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while (outlet := next((each for each in self._outlets if each.to_feed), None)) is not None:
                self._state.is_busy = self._is_closing or self._is_queue_full
                self._report()
                self._feed_one(outlet, outlet.to_feed[0])
                outlet.to_feed.popleft()
        finally:
            self._is_feeding = False

    @property
    def _is_queue_full(self) -> bool:
        return any(len(each.to_feed) >= _FEED_MAX for each in self._outlets)

    def _feed_one(self, outlet: Outlet, manifest: TierManifest) -> None:
        feeder = None if self._feeder is None else self._feeder.writer
        assert feeder is not None, "it was planned"
        try:
            with checkpoint_in_tier(feeder.store, manifest) as stored:
                self._send_until_it_is_there(outlet, stored)
        except (DamagedError, PoolError, TierError) as err:
            self._failed(outlet, f"The checkpoint of step {manifest.step} cannot be read from a tier: {err}")
            outlet.is_damage = True
        if outlet.is_damage:  # or it was removed: this tier is too slow to be fed
            outlet.is_fed = outlet.is_damage = False

    def _serve_others(self) -> None:
        """Called between two pieces for a store that is fed: send to the folders what is due for them."""
        if self._is_serving_others or self._is_closing or self._is_alone:
            return
        self._is_serving_others = True
        try:
            self._read()
            if self._offer is not None and not self._is_queue_full:
                (generation, numbers), self._offer = self._offer, None
                self._send([self._outlets[number] for number in numbers], generation)
            if self._is_urgent and not self._is_of_group:
                self._is_urgent = False
                self._send(self._outlets)
            now = time.monotonic()
            self._send_due([each for each in self._outlets if not each.is_fed and self._is_due(each, now)], now)
            if not self._is_queue_full:
                self._is_no_longer_busy()
        finally:
            self._is_serving_others = False

    def _send_directly(
        self, outlets: Iterable[Outlet], generation: int | None = None, *, is_last: bool = False
    ) -> None:
        """Send a checkpoint from the pool: as ``_send``."""
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
                each.n_failures = 0
        except (PoolError, UnsupportedError, DamagedError) as err:
            for each in left:
                self._failed(each, f"The checkpoint cannot be read: {err}")
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
                each.n_failures = 0
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
                    if not self._belongs(stored, each, is_last=is_last):
                        each.n_failures = 0  # there is nothing left to try again
                    elif not self._send_until_it_is_there(each, stored):
                        return outlets[number:]
        except OverwrittenError:
            return outlets
        return []

    def _send_until_it_is_there(self, outlet: Outlet, stored: StoredCheckpoint) -> bool:
        """Send a held checkpoint to a tier. A rank of a group tries again and again, because the other ranks send this
        checkpoint too, and no other one helps. Returns False if it was overwritten meanwhile."""
        until = time.monotonic() + _ORPHAN_SECONDS_MAX
        while self._send_to(outlet, stored):
            is_over = not self._is_of_group or not outlet.n_failures or outlet.is_damage or time.monotonic() > until
            while not is_over and time.monotonic() < outlet.next_at:
                self._wait()
                if self._is_feeding:
                    self._serve_others()
                is_over = self._is_closing or self._is_alone
            if is_over:
                return True
        return False

    def _is_sent(self, record: CommitRecord, outlet: Outlet) -> bool:
        """Whether a checkpoint, with what was logged at its step, was sent to a tier."""
        return outlet.sent == (record.payload_generation, self._metrics.get(record.step))

    def _belongs(self, stored: StoredCheckpoint, outlet: Outlet, *, is_last: bool) -> bool:
        """Whether a checkpoint is of this training, and is not in the tier yet. Raises ``DamagedError``."""
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
            if not stored.owns_slot():
                return False
            is_damage = isinstance(err, DamagedError)
            where = "" if self._feeder is None or not outlet.to_feed else f" in {self._feeder.settings.root!r}"
            text = f"The checkpoint of step {stored.step}{where} is damaged: {err}" if is_damage else str(err)
            self._failed(outlet, text)
            outlet.is_damage = is_damage
            return True
        outlet.sent, outlet.n_failures = (stored.record.payload_generation, metrics), 0
        state = outlet.state
        state.step, state.sent_at, state.seconds = stored.step, time.time(), time.monotonic() - began
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
        """Remove what need not stay. What could not be removed is removed after the next checkpoint."""
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
            for number in ANNOUNCING_SIGNALS:
                signal.signal(number, process.terminated)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ANNOUNCING_SIGNALS)  # ``drain_start.py`` has blocked them
            process.run()
    except Exception as err:
        kind = "" if isinstance(err, LightckError) else f"{type(err).__name__}: "
        send_message(connection, DrainState(fatal=f"{kind}{err}").packed())
        raise
