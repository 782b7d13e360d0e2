"""``lightck copy``: one checkpoint of a pool into a tier, or one of a tier into a new pool."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lightck.errors import CorruptPoolError, NoCheckpointError, TierError, UnsupportedError
from lightck.pool.format.structures import DamagedError, Superblock
from lightck.pool.storage.backends import pool_path
from lightck.restore.compact import Progress
from lightck.restore.usable import STALE_REASON
from lightck.tiers.claiming import refuse_other_runs
from lightck.tiers.decisions import Listing, Retention, complete, manifests_of
from lightck.tiers.drain import Copied, Drain
from lightck.tiers.fetching import fetch, refuse_existing_pool, stale_after
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import ManifestName, TierCheckpoint
from lightck.tiers.tier_manifest import TierManifest, read_manifest


def is_tier(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder in which a claim of a tier lies."""
    folder = os.path.abspath(os.fspath(path))
    return os.path.isdir(folder) and bool(FolderStore(folder).listing().claims)


def copy_to_tier(
    pool: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    written_by: str,
    progress: Progress,
) -> Copied:
    """Send the newest checkpoint of a pool, or that of ``step``, to a tier. ``written_by``: this release of lightck.
    Raises ``PoolError``, ``TierError``, and ``UnsupportedError`` if the pool is that of a rank, or has gradient
    records."""
    copied = drain_to(pool, folder, written_by).send(step, progress)
    assert copied is not None, "nothing was sent before"
    return copied


def drain_to(
    pool: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    written_by: str,
    retention: Retention | None = None,
) -> Drain:
    """Return what sends the checkpoints of a pool to a tier. Raises ``TierError`` if the folder cannot be one."""
    if os.path.isdir(pool):
        raise TierError(
            f"{os.fspath(pool)!r} is a folder that holds no claim of a tier (NUMBER-TAG/claim.json), so there is "
            "nothing to fetch in it; and lightck copy does not send the pools of a group of ranks yet. Name a tier, or "
            "a pool."
        )
    store = FolderStore(os.path.abspath(os.fspath(folder)))
    _refuse_other_folder(store)
    return Drain(pool, store, written_by, retention)


def copy_from_tier(
    folder: str | os.PathLike[str], pool: str | os.PathLike[str], *, step: int | None = None, progress: Progress
) -> Copied:
    """Make a pool from the newest complete checkpoint of a tier that verifies, or from that of ``step``. Raises
    ``PoolError`` and ``TierError``."""
    store, path = FolderStore(os.path.abspath(os.fspath(folder))), pool_path(pool)
    refuse_existing_pool(path)
    listing = store.listing()
    refuse_other_runs(store, listing)
    rejected: list[str] = []
    for checkpoint in _offered(store, listing, step):
        try:
            name = _only_rank(manifests_of(listing, checkpoint), store)
            manifest = read_manifest(store, name)
            _refuse_stale(store, listing, checkpoint, manifest)
            with progress(f"step {checkpoint.step}", manifest.nbytes) as advance:
                fetch(store, manifest, path, advance)
            remarks = (*rejected, *_also_there(listing, checkpoint))
            return Copied(checkpoint.step, path, manifest.nbytes, manifest.nbytes, remarks)
        except DamagedError as err:
            rejected.append(f"step {checkpoint.step} (claim {checkpoint.claim}): {err}")
    raise CorruptPoolError(
        f"No checkpoint of the tier {store.root!r} is whole. "
        + "; ".join(rejected)
        + ". Nothing was written. Look for the checkpoint in another tier, or in the pool.",
        tuple(rejected),
    )


def _offered(store: FolderStore, listing: Listing, step: int | None) -> Iterator[TierCheckpoint]:
    """Yield the complete checkpoints of a tier, newest first. Raises ``NoCheckpointError`` if there is none."""
    found = sorted(complete(listing), reverse=True)
    if not found:
        raise NoCheckpointError(
            f"The tier {store.root!r} holds no complete checkpoint. A checkpoint is complete when it was sent whole. "
            "Recover from the pool, or from another tier."
        )
    chosen = [each for each in found if step is None or each.step == step]
    if not chosen:
        steps = ", ".join(str(each) for each in sorted({each.step for each in found})[-20:])
        raise NoCheckpointError(
            f"The tier {store.root!r} does not hold step {step}. It holds {steps}. Ask for one of these steps, or for "
            "none, to get the newest."
        )
    yield from chosen


def _refuse_stale(store: FolderStore, listing: Listing, taken: TierCheckpoint, manifest: TierManifest) -> None:
    """Raise ``DamagedError`` if a newer checkpoint of the same pool in the tier says that this one is stale."""
    for newer in sorted(each for each in complete(listing) if each > taken):
        try:
            other = read_manifest(store, manifests_of(listing, newer)[0])
            if Superblock.unpack(other.superblock).uuid != Superblock.unpack(manifest.superblock).uuid:
                continue
            after = stale_after(store, other)
        except (DamagedError, CorruptPoolError):
            continue  # it cannot be read, so it says nothing
        if after is not None and after < manifest.record.payload_generation < other.record.payload_generation:
            raise DamagedError(STALE_REASON)


def _also_there(listing: Listing, taken: TierCheckpoint) -> list[str]:
    """Name what a reader may have expected in place of the checkpoint that was taken: one of the same step, or of a
    later one, that was sent before it."""
    older = sorted(each for each in complete(listing) if each < taken and each.step >= taken.step)
    return [
        f"step {each.step} of claim {each.claim}: step {taken.step} was sent after it, under claim {taken.claim}"
        for each in older
    ]


def _only_rank(manifests: list[ManifestName], store: FolderStore) -> ManifestName:
    if len(manifests) != 1:
        raise UnsupportedError(
            f"The tier {store.root!r} holds the checkpoints of a group of {len(manifests)} ranks, and lightck copy "
            "makes the pool of a single process only. Install a newer lightck."
        )
    return manifests[0]


def _refuse_other_folder(store: FolderStore) -> None:
    """Raise ``TierError`` for a folder that is no tier, and in which something lies."""
    if os.path.lexists(store.root) and not store.exists():
        raise TierError(
            f"{store.root!r} is no folder, and a tier is one. Nothing was written. Name a folder, or a name in an "
            "existing folder."
        )
    foreign = None if store.listing().claims else store.foreign()
    if foreign is not None:
        raise TierError(
            f"The folder {store.root!r} is not empty, and is no tier: {foreign!r} lies in it. Nothing was written. "
            "Name an empty folder, or one that does not exist yet."
        )
