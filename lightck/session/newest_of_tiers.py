"""At attach: continue from the newest checkpoint of the pool and its tiers.

    compare    the pool's newest checkpoint, and those of the tiers, by (claim, incarnation, step)
    fetch      if one of a tier is newer: make the pool anew from it. The old file stays until the new one is whole
    go on      as from any pool

Failure cases: a checkpoint of a tier is damaged (the next one counts); the pool is damaged (its own error is raised,
and nothing is fetched over it); the tiers hold another run (``TierClaimedError``).
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from lightck.errors import PoolError, TierClaimedError, UnsupportedError
from lightck.pool.format.saved_by import saved_by
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, open_pool
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.devdax import DevdaxBackend
from lightck.restore.recover import erased_log_error
from lightck.restore.usable import checkpoints_of
from lightck.tiers.candidates import Candidate, Order, Rejected, newest_of_all, none_intact_error, run_of
from lightck.tiers.claiming import ResumePoint, refuse_other_training
from lightck.tiers.fetching import fetch
from lightck.tiers.store import Store

log = logging.getLogger("lightck")


class _InPool(NamedTuple):
    """The newest checkpoint of a pool that can be read."""

    order: Order
    run_id: str


def replace_pool_from_tier(path: str, backend: Backend, stores: Sequence[Store]) -> Candidate | None:
    """If a tier holds a newer checkpoint than the pool at ``path``, make the pool anew from it. Returns the newest
    checkpoint of the tiers if the pool stays; None if it was made anew, if the tiers hold nothing of use, or if the
    pool cannot be opened (``attach`` raises that error later). The caller holds the lock of the pool. Raises
    ``PoolError``, ``TierError``, and ``UnsupportedError`` if the pool is a device."""
    try:
        in_pool = _newest_in_pool(path, backend)
    except PoolError:  # attach says what is wrong with the pool
        _log_hint(path, stores)
        return None
    rejected: list[Rejected] = []
    for store in stores:
        _refuse_other_run(store, in_pool, path)
    pool_to_compare = f"the pool {path!r}", None if in_pool is None else in_pool.order
    for found in newest_of_all(stores, rejected, pool_to_compare):
        if in_pool is not None and found.order <= in_pool.order:
            return found
        if in_pool is not None:
            refuse_other_training(found.store, in_pool.order.claim, found.order.claim, f"the pool {path!r}")
        if isinstance(backend, DevdaxBackend):  # it has no room for a second pool beside the present one
            raise UnsupportedError(
                f"The pool {path!r} is a device, and {found} is newer than what it holds. lightck can rebuild a pool "
                f"from a tier only in a file. Name a file as the pool; or fetch it: lightck copy {found.store} "
                "NEW.pool."
            )
        try:
            found.refuse_stale()
            fetch(found.store, found.of_single_process(), path, is_locked=True, backend=backend)
        except DamagedError as err:
            rejected.append(Rejected(found.checkpoint, str(err)))
            continue
        _tell(path, in_pool, found, rejected)
        return None
    if rejected and in_pool is None:
        raise none_intact_error(stores[0], rejected)
    return None


def _log_hint(path: str, stores: Sequence[Store]) -> None:
    newest = next(newest_of_all(stores, []), None)
    if newest is not None:
        log.warning(
            "lightck: the pool %r cannot be used, but a tier has a checkpoint: %s. To continue from it, move the pool "
            "away (if it is a device: name a file as the pool), and attach again with resume=True",
            path,
            newest,
        )


def warn_of_damage(path: str, newest: Candidate | None, restored: ResumePoint, incarnation: int) -> None:
    """Warn if a tier holds a newer checkpoint of the same claim than the one that was restored. It was not fetched,
    because the newest checkpoint of the pool was not older; then the restore could not use that checkpoint of the pool.
    ``newest``: what ``replace_pool_from_tier`` has returned. ``incarnation``: of the restored checkpoint."""
    if newest is None or newest.order.claim != restored.claim:
        return
    if newest.order[1:] <= (incarnation, restored.step):
        return
    log.warning(
        "lightck: the newest checkpoint of the pool %r cannot be used, and the training continues from step %d. A tier "
        "has a newer one: %s. To continue from that one, end this training, and run: lightck copy %s NEW.pool --step "
        "%d (the command verifies the copy, and says how to go on)",
        path,
        restored.step,
        newest,
        shlex.quote(str(newest.store)),
        newest.order.step,
    )


def _newest_in_pool(path: str, backend: Backend) -> _InPool | None:
    """Return the newest checkpoint of the pool at this path; None if there is no pool, or if it never held one. Raises
    ``PoolError``."""
    try:
        reader = open_pool(path, backend.name, gradients=True)
    except FileNotFoundError:
        return None
    with closing(reader):
        if reader.commit_log().is_empty:
            lost = erased_log_error(reader)
            if lost is not None:
                raise lost
            return None
        return _newest_of(reader)


def _newest_of(reader: PoolReader) -> _InPool:
    for stored in checkpoints_of(reader):
        if isinstance(stored, RejectedCheckpoint):
            continue
        try:
            by = saved_by(stored.state)
        except DamagedError:
            continue  # the restore skips it too
        order = Order.of(by.claim, stored.header.incarnation, stored.step)
        return _InPool(order, by.run_id or reader.superblock.uuid.hex())
    raise PoolError("no checkpoint of the pool can be read")


def _refuse_other_run(store: Store, in_pool: _InPool | None, path: str) -> None:
    run = run_of(store, store.listing())
    if in_pool is not None and run is not None and run != in_pool.run_id:
        raise TierClaimedError(
            f"The tier {str(store)!r} holds another run than the pool {path!r}. Nothing was changed. To go on with "
            "the run of the pool, pass another folder in tiers=; to go on with that of the tier, pass a pool path at "
            "which nothing lies yet."
        )


def _tell(path: str, in_pool: _InPool | None, found: Candidate, rejected: Sequence[Rejected]) -> None:
    for reason in rejected:
        log.warning("lightck: a newer checkpoint of a tier cannot be used, and an older one is fetched: %s", reason)
    had = "was not there, or held no checkpoint"
    if in_pool is not None:
        is_same = in_pool.order[:2] == found.order[:2]
        had = f"held step {in_pool.order.step}" + ("" if is_same else " of an earlier start of the training")
    log.warning(
        "lightck: the pool %r %s, and was rebuilt from %s. Updates after that step, if there were any, are lost",
        path,
        had,
        found,
    )
