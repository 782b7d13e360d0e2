"""Which checkpoints of a folder tier are sent to an object store.

An object store may take hours for what a folder takes in seconds. Sent from the folder, it holds no slot of the pool
meanwhile, and keeps no other tier waiting.

    look    list what this training has written to the folder (``FolderStore.manifests_of``)
    choose  the newest checkpoint, if one is due by its step or by time; in turn with it those of exactly the steps that
            the store needs (``keep_every``, ``keep_best``), oldest first
    done    it lies in the store, or is damaged or gone: it is not chosen again

Failure case: the folder gets no more checkpoints, or gets them rarely. If ``every`` of the store is a time, the store
is sent the pool's newest when none has come into the folder for so long (``drain_process.py``). If it is a number of
updates, the training offers the store the pool's newest while the folder fails (``drains.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.tiers.drain_messages import TierSettings
from lightck.tiers.due_steps import Metrics, is_due, needs_step
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import ManifestName, Writer
from lightck.tiers.tier_manifest import read_manifest

LOOK_SECONDS = 5.0
"""How often the folder is listed if the training does not say that something has come."""


class Feed:
    """What lies in the folder for the store."""

    def __init__(self, folder: FolderStore, own: Writer, settings: TierSettings, sent: Mapping[int, Metrics]) -> None:
        """``own``: the writer below whose prefix the checkpoints lie, in the folder and in the store. ``settings``: of
        the store. ``sent``: the steps that the store holds below that prefix, each with its metrics."""
        self.folder, self._own, self._settings = folder, own, settings
        self._sent = dict(sent)
        self._newest_sent_before = max(self._sent, default=0)
        """The newest step that an earlier process has sent below the prefix; 0: none."""
        self._last = max(self._sent, default=settings.newest_step)
        """The step of the last checkpoint that was due by its step, or lies in the store; None: there is none."""
        self._seen: set[ManifestName] = set()
        self._needed: list[ManifestName] = []
        """The checkpoints of exactly the steps that the store needs."""
        self._due: ManifestName | None = None
        self.newest: ManifestName | None = None
        """The newest checkpoint, if the store has no newer one."""
        self._is_needed_next = True
        self.came_at = time.monotonic()
        """When the last checkpoint was found in the folder, or when this began."""

    @property
    def n_waiting(self) -> int:
        """How many checkpoints are to be sent."""
        is_one_more = self._due is not None and self.newest is not None and self.newest not in self._needed
        return len(self._needed) + is_one_more

    def look(self, stale_up_to: int) -> None:
        """List the folder. What cannot be read now is found again later. ``stale_up_to``: checkpoints of this step and
        of earlier ones may hold old bytes."""
        with suppress(TierError):
            for name in self.folder.manifests_of(self._own):
                if name not in self._seen:
                    with suppress(TierError):
                        self._found(name, stale_up_to)

    def _found(self, name: ManifestName, stale_up_to: int) -> None:
        metrics = self._metrics_of(name)
        self._seen.add(name)
        self.came_at = time.monotonic()
        if name.step <= stale_up_to:
            return
        needs_it = needs_step(self._settings, name.step, metrics or {}) and not self._was_removed(name.step, metrics)
        # A step that the store holds is sent again only if it is needed, and other metrics were logged since.
        if name.step in self._sent and not (needs_it and metrics not in (None, self._sent[name.step])):
            return
        if needs_it:
            self._needed.append(name)
        if self.newest is None or name.step > self.newest.step:
            self.newest = name
        if self._last is None or is_due(self._settings, name.step, self._last):
            self._due, self._last = name, name.step

    def _metrics_of(self, name: ManifestName) -> Metrics | None:
        """Return the metrics of a checkpoint; None if the store does not ask for any. Raises ``TierError``."""
        if self._settings.keep_best is None:
            return None
        with suppress(DamagedError):  # the damage is reported when the checkpoint is sent
            return read_manifest(self.folder, name).metrics
        return {}

    def _was_removed(self, step: int, metrics: Metrics | None) -> bool:
        """Whether an earlier process has sent the checkpoint, and has removed it, because there are better ones."""
        best, every = self._settings.keep_best, self._settings.keep_every
        if best is None or step > self._newest_sent_before or (every is not None and step % every == 0):
            return False
        name, n, mode = best
        sign = 1 if mode == "max" else -1
        value = (metrics or {}).get(name)
        if value is None:
            return False
        there = [(sign * each[name], at) for at, each in self._sent.items() if name in each]
        return sum(each > (sign * value, step) for each in there) >= n  # of two equal ones the newer one is better

    def choose(self, *, is_time: bool, newest_first: bool = False) -> ManifestName | None:
        """Return what is to be sent next; None: nothing. If the newest checkpoint is due, and others are needed, they
        take turns. ``is_time``: whether one is due by time. ``newest_first``: it need not take turns."""
        newest = self.newest if is_time or self._due is not None else None
        if self._needed and (newest is None or (self._is_needed_next and not newest_first)):
            return self._needed[0]
        return newest

    def postpone(self, name: ManifestName) -> None:
        """A checkpoint cannot be read at the moment."""
        if name in self._needed:
            self._needed.append(self._needed.pop(self._needed.index(name)))
        self._is_needed_next = not self._is_needed_next

    def done(self, name: ManifestName, metrics: Metrics | None) -> None:
        """A checkpoint lies in the store, with these metrics, or is damaged or gone (None)."""
        if metrics is not None:
            self._sent[name.step] = metrics
        self._is_needed_next = name not in self._needed
        self._needed = [each for each in self._needed if each != name]
        if self.newest == name:
            self.newest = None
        self._passed(name.step)

    def came_from_pool(self, step: int, metrics: Metrics) -> None:
        """The store holds the checkpoint of this step, with these metrics, which was not sent from the folder."""
        self._sent[step] = metrics
        self._needed = [each for each in self._needed if each.step != step]
        self._passed(step)

    def _passed(self, step: int) -> None:
        """The store holds a checkpoint of this step: older ones are not due any more."""
        if self._due is not None and self._due.step <= step:
            self._due = None
        if self.newest is not None and self.newest.step <= step:
            self.newest = None
        self._last = step if self._last is None else max(self._last, step)
