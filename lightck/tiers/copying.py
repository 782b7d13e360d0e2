"""``lightck copy``: one checkpoint of a pool into a tier, or one of a tier into a new pool (the checkpoint of a group:
into a new directory with a pool for each rank).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.pool.storage.backends import pool_path
from lightck.pool.storage.lock import PoolLock
from lightck.ranks.directory import lost_claim_in, lost_claims_text, make_directory, pool_name
from lightck.restore.compact import Progress
from lightck.tiers.candidates import Candidate, Rejected, candidates_of, no_checkpoint_error, none_intact_error
from lightck.tiers.claiming import refuse_other_runs
from lightck.tiers.decisions import Listing, Retention, complete
from lightck.tiers.fetching import fetch, filled_pool, refuse_existing_pool
from lightck.tiers.names import TierCheckpoint
from lightck.tiers.open_store import Options, open_store
from lightck.tiers.pool_sender import Copied, PoolSender


def copy_to_tier(
    pool: str | os.PathLike[str],
    tier: str | os.PathLike[str],
    *,
    step: int | None = None,
    written_by: str,
    progress: Progress,
    options: Options | None = None,
    bytes_per_second: float | None = None,
    codec: str | None = None,
) -> Copied:
    """Send the newest checkpoint of a pool, or that of ``step``, to a tier: a folder, or a URL (``options``: of an
    object store). ``written_by``: this release of lightck. ``bytes_per_second``: the largest rate. ``codec``: as for
    ``TierWriter``. Raises ``PoolError``, ``TierError``, and ``UnsupportedError`` if the pool is that of a rank, or if
    its gradient records need an optimizer of another class than those of ``torch.optim``."""
    sender = pool_sender(pool, tier, written_by, options=options, bytes_per_second=bytes_per_second, codec=codec)
    before = open_store(tier, options).listing()
    copied = sender.send(step, progress)
    assert copied is not None, "this sender has sent nothing before"
    return replace(copied, notes=_notes_on_larger_steps(before, copied.step))


def pool_sender(
    pool: str | os.PathLike[str],
    tier: str | os.PathLike[str],
    written_by: str,
    retention: Retention | None = None,
    *,
    options: Options | None = None,
    bytes_per_second: float | None = None,
    codec: str | None = None,
) -> PoolSender:
    """Return what sends the checkpoints of a pool to a tier. ``codec``: as for ``TierWriter``. Raises as ``open_store``
    does, and ``TierError`` if the folder cannot be a tier, or if the library for the codec is missing."""
    lost = lost_claim_in(os.fspath(pool))
    if lost is not None:
        raise TierError(f"{os.fspath(pool)!r} is no pool. {lost_claims_text(lost)}")
    if os.path.isdir(pool):
        raise TierError(
            f"{os.fspath(pool)!r} is a folder that holds no claim of a tier (NUMBER-TAG/claim.json), so there is "
            "nothing to fetch in it; and lightck copy does not send the pools of a group of ranks yet. Name a tier, or "
            "a pool."
        )
    store = open_store(tier, options)
    store.refuse_foreign_contents()
    return PoolSender(pool, store, written_by, retention, bytes_per_second=bytes_per_second, codec=codec)


def copy_from_tier(
    tier: str | os.PathLike[str],
    pool: str | os.PathLike[str],
    *,
    step: int | None = None,
    progress: Progress,
    options: Options | None = None,
) -> Copied:
    """Make a pool from the newest complete checkpoint of a tier that verifies, or from that of ``step``. If a group of
    ranks has sent it, make a directory at ``pool``, with a pool for each rank. Raises ``PoolError`` and
    ``TierError``."""
    store, path = open_store(tier, options), pool_path(pool)
    refuse_existing_pool(path)
    listing = store.listing()
    refuse_other_runs(store, listing)
    rejected: list[Rejected] = []
    for found in candidates_of(store, listing, step, rejected):
        checkpoint = found.checkpoint
        try:
            found.refuse_stale()
            with progress(f"step {checkpoint.step}", found.nbytes) as advance:
                if found.world_size == 1:
                    fetch(store, found.manifests[0], path, advance)
                else:
                    _fetch_group(found, path, advance)
        except DamagedError as err:
            rejected.append(Rejected(checkpoint, str(err)))
            continue
        remarks = (*map(str, rejected), *_remarks_on_older(listing, checkpoint))
        notes = () if step is None else _notes_on_newer(listing, checkpoint)
        return Copied(checkpoint.step, path, found.nbytes, found.nbytes, remarks, notes)
    raise none_intact_error(store, rejected) if rejected else no_checkpoint_error(store, listing, step)


def _fetch_group(found: Candidate, directory: str, advance: Callable[[int], None]) -> None:
    """Make a directory with the pools of all ranks. They get their names when all of them are whole."""
    make_directory(directory)
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, directory)
        new = []
        for rank, manifest in enumerate(found.manifests):
            path = os.path.join(directory, pool_name(rank, found.world_size))
            stack.callback(PoolLock(path).release)
            new.append(stack.enter_context(filled_pool(found.store, manifest, path, advance)))
        for container in new:
            container.publish()


def _remove_if_empty(directory: str) -> None:
    with suppress(OSError):
        os.rmdir(directory)


def _notes_on_newer(listing: Listing, taken: TierCheckpoint) -> tuple[str, ...]:
    """Say how to continue from a checkpoint that is not the newest."""
    if not any(each > taken for each in complete(listing)):
        return ()
    return (
        "The tier holds newer checkpoints, and attach(POOL, resume=True, tiers=...) replaces the pool by the newest "
        f"one. To continue from step {taken.step}: lightck.recover(POOL, model, optimizer), then "
        "attach(POOL, tiers=...) without resume=True; in a group of ranks, attach(POOL, resume=True) with a new "
        "folder in tiers=.",
    )


def _notes_on_larger_steps(before: Listing, sent: int) -> tuple[str, ...]:
    """Return a note on each checkpoint that was in the tier, and whose step is larger than that which was sent: what
    was sent counts as newer all the same."""
    larger = sorted(each for each in complete(before) if each.step > sent)
    return tuple(
        f"Step {each.step} of claim {each.claim} is in the tier too. Step {sent} was sent after it, and so counts as "
        f"the newest; --step {each.step} fetches the other one."
        for each in larger
    )


def _remarks_on_older(listing: Listing, taken: TierCheckpoint) -> list[str]:
    """Return a remark on each older checkpoint that a reader may have expected in place of ``taken``, because its step
    is the same or a larger one."""
    older = sorted(each for each in complete(listing) if each < taken and each.step >= taken.step)
    return [
        f"step {each.step} of claim {each.claim}: step {taken.step} was sent after it, under claim {taken.claim}"
        for each in older
    ]
