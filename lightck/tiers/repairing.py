"""Mend by hand what is damaged in a tier or in a pool (``lightck repair``), from another copy of the content.

A tier:

    find      read each object that a manifest names, and compare the SHA-256 of its bytes with its name
    get       the same bytes: an object of another tier with the same SHA-256; or the content, from an object of another
              tier that is compressed in another way, or from a pool that still holds the checkpoint, compressed again.
              Whatever comes back counts only if its SHA-256 is the name
    put       under the same name, in place of the damaged file; then read it once more

A pool that no process has open:

    compare   the newest checkpoint of the pool that is intact with those of the tier, as a resume does
    fetch     a newer one into a new file, verified; only then it takes the place of the old file

Invariants: an object gets only the bytes that its name says. A pool is replaced only by a checkpoint of its run that is
newer than the newest intact one in the pool. Manifests, claims, and pools that are no plain files are not mended, but
reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from lightck.errors import (
    CorruptPoolError,
    NoCheckpointError,
    NotAPoolError,
    PoolError,
    PoolNotFoundError,
    PoolTruncatedError,
    TierClaimedError,
    UnsupportedError,
)
from lightck.pool.commit_log import candidates
from lightck.pool.format.saved_by import saved_by
from lightck.pool.format.structures import DamagedError, Superblock
from lightck.pool.reader import STRUCK_REASON, PoolReader, open_pool
from lightck.pool.storage.backends import backend_for, pool_path
from lightck.pool.storage.lock import PoolLock
from lightck.restore.compact import Progress
from lightck.tiers.candidates import (
    Candidate,
    Order,
    Rejected,
    newest_of_all,
    no_checkpoint_error,
    none_intact_error,
    run_of,
)
from lightck.tiers.claiming import refuse_other_runs
from lightck.tiers.decisions import Listing
from lightck.tiers.fetching import fetch
from lightck.tiers.names import ManifestName
from lightck.tiers.object_copies import Copies, damage_of, is_named
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import SentObject, TierManifest, read_manifest


class Unrepaired(NamedTuple):
    name: str
    reason: str


@dataclass
class Repaired:
    """What was mended. objects: the objects of a tier that were written anew. step: the step of the checkpoint from
    which a pool was rebuilt; None: no pool was rebuilt."""

    objects: list[SentObject] = field(default_factory=list)
    step: int | None = None
    left: list[Unrepaired] = field(default_factory=list)
    """What is damaged still."""
    rejected: list[str] = field(default_factory=list)
    """Newer checkpoints that were skipped, each with the reason."""


# -- a tier


def repair_tier(store: Store, tiers: Sequence[Store], pools: Sequence[PoolReader], progress: Progress) -> Repaired:
    """Write the damaged objects of a tier anew, from other tiers and pools. Raises ``TierError`` and
    ``PoolIOError``."""
    listing, done = store.listing(), Repaired()
    refuse_other_runs(store, listing)
    manifests = _manifests(store, listing, done)
    damaged = _damaged(store, manifests, progress)
    sources = Copies(tiers, pools)
    for sent, reason in damaged.items():
        named_by = [(name, manifest) for name, manifest in manifests.items() if sent in manifest.objects]
        data = sources.bytes_of(sent, [manifest for _, manifest in named_by])
        if data is None:
            done.left.append(Unrepaired(str(sent.name), f"{reason}; {sources.why_not(sent)}"))
        elif is_named(store, named_by):  # else a drain has removed the checkpoint meanwhile
            store.put(str(sent.name), data)
            again = damage_of(store, sent, reads=True)
            if again is None:
                done.objects.append(sent)
            else:
                done.left.append(Unrepaired(str(sent.name), f"it was written anew, and {again}. Look at the medium"))
    return done


def _manifests(store: Store, listing: Listing, done: Repaired) -> dict[ManifestName, TierManifest]:
    """Return the manifests that can be read. The others are left damaged: nothing says which bytes they had."""
    found = {}
    for name in sorted(listing.manifests, reverse=True):
        try:
            found[name] = read_manifest(store, name)
        except DamagedError as err:
            reason = f"the manifest cannot be used ({err}), and manifests are not repaired: send the checkpoint again"
            done.left.append(Unrepaired(str(name), reason))
    return found


def _damaged(store: Store, manifests: Mapping[ManifestName, TierManifest], progress: Progress) -> dict[SentObject, str]:
    """Return each damaged object, with what is wrong with it."""
    objects = {sent.name: sent for manifest in manifests.values() for sent in manifest.objects}
    found = {}
    with progress("reading objects", sum(sent.nbytes for sent in objects.values())) as advance:
        for sent in objects.values():
            reason = damage_of(store, sent, reads=True)
            if reason is not None:
                found[sent] = reason
            advance(sent.nbytes)
    return found


# -- a pool


class _Pool(NamedTuple):
    """What is intact in a damaged pool."""

    uuid: bytes | None
    """None: its superblocks cannot be read."""
    run: str | None
    """Id of its run; None: not known."""
    order: Order | None
    """Of its newest intact checkpoint; None: none is intact."""
    is_damaged: bool
    struck: frozenset[int]
    """The generations that its training has struck."""


def repair_pool(path: str | os.PathLike[str], tiers: Sequence[Store], progress: Progress) -> Repaired:
    """Make a damaged pool anew from the newest checkpoint of tiers of its run. Raises ``PoolError`` (also if a process
    has the pool open, or if what it holds is as new), ``TierError``, and ``UnsupportedError``."""
    target = pool_path(path)
    _refuse_other_kinds(target)
    with ExitStack() as stack:
        stack.callback(PoolLock(target).release)
        pool, done = _examined(target, progress), Repaired()
        if not pool.is_damaged:
            return done
        rejected: list[Rejected] = []
        _refuse_other_run(target, pool, tiers)
        for found in newest_of_all(tiers, rejected):
            if pool.order is not None and found.order <= pool.order:
                raise _is_newest_error(target, pool.order)
            try:
                _refuse_struck(found, pool)
                found.refuse_stale()
                manifest = found.of_single_process()
                with progress(f"step {found.checkpoint.step}", found.nbytes) as advance:
                    fetch(found.store, manifest, target, advance, is_locked=True)
            except DamagedError as err:
                rejected.append(Rejected(found.checkpoint, str(err)))
                continue
            done.step, done.rejected = found.checkpoint.step, list(map(str, rejected))
            return done
        raise none_intact_error(tiers[0], rejected) if rejected else _empty_error(tiers)


def _refuse_other_kinds(path: str) -> None:
    if not os.path.lexists(path):
        raise PoolNotFoundError(
            f"There is no pool at {path!r}. Nothing was written. To make one from a tier: lightck copy TIER {path}."
        )
    if os.path.islink(path) or not os.path.isfile(path) or backend_for(path).name != "file":
        raise UnsupportedError(
            f"{path!r} is not a pool in a plain file, and lightck repairs no other ones. Nothing was written. Make a "
            "plain file from the tier, lightck copy TIER NEW.pool, and pass that path to attach."
        )


def _examined(path: str, progress: Progress) -> _Pool:
    """Verify the checkpoints of a pool, newest first, until one is intact. Raises ``PoolError`` for what is no pool."""
    try:
        reader = open_pool(path, "file", gradients=True)
    except NotAPoolError:
        raise  # it may be anything: nothing replaces it
    except (CorruptPoolError, PoolTruncatedError):
        return _Pool(None, None, None, True, frozenset())
    with closing(reader):
        if reader.superblock.has_gradients or reader.superblock.has_group:
            kind = "has gradient records" if reader.superblock.has_gradients else "is that of a rank"
            raise UnsupportedError(
                f"The pool {path!r} {kind}, and lightck repairs no such pool. Nothing was written. lightck verify "
                f"{path} says which of its own checkpoints can be recovered. If there is none, move the pool away: "
                "attach(..., resume=True, tiers=[...]) then continues from the tier."
            )
        return _examined_checkpoints(reader, progress)


def _examined_checkpoints(reader: PoolReader, progress: Progress) -> _Pool:
    run, order, is_damaged = None, None, bool(reader.generations_of_erased_records())
    struck = set()
    for record in candidates(reader.commit_log()):
        try:
            stored = reader.checkpoint(record)
            by = saved_by(stored.state)
            run = run or by.run_id or reader.superblock.uuid.hex()
            if order is None:
                with progress(f"verifying step {stored.step}", sum(each.nbytes for each in stored.entries.values())):
                    stored.verify()
                order = Order.of(by.claim, stored.header.incarnation, stored.step)
        except DamagedError as err:
            if str(err) == STRUCK_REASON:
                struck.add(record.payload_generation)
            elif not reader.has_lost_slot(record):  # a slot that was written since is no damage
                is_damaged = True
    return _Pool(reader.superblock.uuid, run, order, is_damaged, frozenset(struck))


def _refuse_other_run(path: str, pool: _Pool, tiers: Sequence[Store]) -> None:
    if pool.run is None and pool.uuid is not None and not any(_has_pool(store, pool.uuid) for store in tiers):
        raise TierClaimedError(
            f"No checkpoint of the pool {path!r} says of which run it is, and no tier that was named holds one of this "
            "very pool. So it may be of another run. Nothing was changed. To continue from the tier nevertheless, move "
            f"the pool away, and make a new one: lightck copy {tiers[0]} {path}."
        )
    for store in tiers:
        run = run_of(store, store.listing())
        if pool.run is not None and run is not None and run != pool.run:
            raise TierClaimedError(
                f"The tier {str(store)!r} holds another run than the pool {path!r}. Nothing was changed. Name a tier "
                "of the run of this pool; or remove the pool, if nobody needs it: lightck copy makes one from any tier."
            )


def _has_pool(store: Store, uuid: bytes) -> bool:
    """Whether a tier holds a checkpoint that was sent from the pool with this uuid."""
    for name in store.listing().manifests:
        with suppress(DamagedError):
            if Superblock.unpack(read_manifest(store, name).superblock).uuid == uuid:
                return True
    return False


def _refuse_struck(found: Candidate, pool: _Pool) -> None:
    """Raise ``DamagedError`` for a checkpoint that the pool's training has struck after it was sent."""
    manifest = found.of_single_process()
    record = manifest.record
    is_of_pool = Superblock.unpack(manifest.superblock).uuid == pool.uuid
    if is_of_pool and record.payload_generation in pool.struck:
        raise DamagedError(STRUCK_REASON)


def _empty_error(tiers: Sequence[Store]) -> NoCheckpointError:
    return no_checkpoint_error(tiers[0], tiers[0].listing(), None)


def _is_newest_error(path: str, order: Order) -> PoolError:
    return PoolError(
        f"The pool {path!r} is damaged, but its step {order.step} is intact, and nothing newer lies in the tier. "
        "Nothing was changed. attach(..., resume=True) continues from that step; to write it into a new pool: lightck "
        f"compact {path} NEW."
    )
