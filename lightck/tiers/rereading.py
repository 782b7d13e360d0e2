"""Read everything in the pool and in the tiers again and again, and find what is damaged (``Tier(reread=...)``).

    round     each byte of one place (the pool, a tier) once, at an even pace, so that a round takes the period
    piece     what is read in one go, if the drain has nothing else to do. So a due checkpoint waits for one piece at
              most
    damage    is read a second time, after a pause. If it is there still, it is mended or reported
              (``rereading_tier.py``, ``rereading_pool.py``)

The drain's one thread does it, with the drain's low priority. Not a thread of idle priority: it would hold Python's
lock while the processors are busy, and a due checkpoint would wait for it.

Failure cases: a place cannot be read (its round begins anew after a pause; nothing is reported here, because the next
attempt to send reports the failure); the training is dead (no piece is read any more); this process is killed (the next
one begins a round, in another order).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress

from lightck.errors import PoolError, TierError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import open_pool
from lightck.tiers.drain_messages import DrainSettings, DrainState, Reread, TierState
from lightck.tiers.names import ManifestName, ObjectName, Writer
from lightck.tiers.object_copies import Copies
from lightck.tiers.open_store import open_store
from lightck.tiers.rereading_pool import PoolRereading
from lightck.tiers.rereading_tier import TierRereading
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import TierManifest

Round = Generator[float, None, bool]
"""A round. Each item is the time at which its next piece is due, of ``time.monotonic``. The result says whether
everything was read."""
_FIRST_SECONDS_MAX, _AGAIN_SECONDS_MAX = 60.0, 300.0
"""The longest pauses before the first round, and before a new one after a round that failed."""
_FAILING_SECONDS = 10.0
_REPORT_SECONDS = 5.0
"""How often the training hears how much was read."""


class _Place:
    """The rounds over one place."""

    def __init__(
        self, begin: Callable[[float], Round], period: float, reread: Reread, tier: TierState | None = None
    ) -> None:
        """``tier``: the state of the tier, if the place is one: nothing is read while it takes nothing."""
        self._begin, self._period, self._reread, self._tier = begin, period, reread, tier
        self._round: Round | None = None
        self._began = 0.0
        self.next_at = time.monotonic() + min(_FIRST_SECONDS_MAX, period / 10)

    def work(self) -> None:
        """Read the piece that is due."""
        if self._tier is not None and self._tier.failing_since is not None:
            self.next_at = time.monotonic() + _FAILING_SECONDS
            return
        if self._round is None:
            self._began = time.monotonic()
            self._round = self._begin(self._began)
        is_whole = False
        try:
            self.next_at = next(self._round)
            return
        except StopIteration as end:
            is_whole = end.value
        except (TierError, PoolError, DamagedError):
            pass
        self._round = None
        self._reread.rounds += is_whole
        pause = self._period if is_whole else min(_AGAIN_SECONDS_MAX, self._period)
        self.next_at = (self._began if is_whole else time.monotonic()) + pause


class Rereading:
    """All places of one drain."""

    def __init__(
        self,
        settings: DrainSettings,
        own: Writer,
        state: DrainState,
        hashes: Sequence[Callable[[], Mapping[ManifestName, bytes]]],
    ) -> None:
        """``own``: the writer below whose prefix this drain writes. ``state``: gets what was found. ``hashes``: returns
        for each tier the SHA-256 of the manifests that this process has written."""
        self._settings, self._state = settings, state
        self._tiers = (*settings.tiers, *settings.other_tiers)
        self._places: list[_Place] = []
        self._stores: dict[int, Store] = {}
        self._said: tuple[object, ...] = ()
        self._reported_at = 0.0
        periods = [each.reread_seconds for each in settings.tiers]
        for number, period in enumerate(periods):
            if period is not None:
                reread = state.tiers[number].reread
                work = TierRereading(
                    self._store(number), own, period, reread, state.report, self._copies_for(number), hashes[number]
                )
                self._places.append(_Place(work.round, period, reread, state.tiers[number]))
        given = [each.reread_seconds for each in self._tiers if each.reread_seconds is not None]
        if given and not settings.number:
            pool = PoolRereading(settings.pool, min(given), state, is_of_group=settings.world_size > 1)
            self._places.append(_Place(pool.round, min(given), state.pool))

    @property
    def next_at(self) -> float:
        """When the next piece is due, of ``time.monotonic``; infinity: never."""
        return min((each.next_at for each in self._places), default=float("inf"))

    def work(self) -> bool:
        """Read one piece, if one is due. Returns whether there is something to report to the training."""
        now = time.monotonic()
        due = [each for each in self._places if each.next_at <= now]
        if not due:
            return False
        min(due, key=lambda each: each.next_at).work()
        state = self._state
        rereads = state.pool, *(each.reread for each in state.tiers)
        said = state.n_reports, *((each.rounds, each.damaged, each.mended) for each in rereads)
        if said == self._said and now - self._reported_at < _REPORT_SECONDS:
            return False
        self._said, self._reported_at = said, now
        return True

    def _store(self, number: int) -> Store:
        if number not in self._stores:
            tier = self._tiers[number]
            self._stores[number] = open_store(tier.root, tier.options)
        return self._stores[number]

    def _copies_for(self, number: int) -> Callable[[ObjectName, Mapping[ManifestName, TierManifest]], bytes | None]:
        """Return what finds the bytes of an object of a tier elsewhere: in the pool, or in another tier."""
        others = [each for each in range(len(self._tiers)) if each != number]
        random.shuffle(others)

        def find(name: ObjectName, named_by: Mapping[ManifestName, TierManifest]) -> bytes | None:
            sent = [
                (each, manifest) for manifest in named_by.values() for each in manifest.objects if each.name == name
            ]
            with suppress(PoolError), closing(open_pool(self._settings.pool)) as reader:
                copies = Copies((), [reader])
                for each, manifest in sent:
                    if (data := copies.bytes_of(each, [manifest])) is not None:
                        return data
            for other in others:
                with suppress(TierError):  # it cannot be reached: perhaps the next one can
                    if (data := Copies([self._store(other)], ()).bytes_of(sent[0][0], ())) is not None:
                        return data
            return None

        return find
