"""Read and check what lies in a tier, in memory only: no file of a pool is made."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader
from lightck.restore.compact import Progress
from lightck.tiers.candidates import Rejected, candidates_of, no_checkpoint_error, none_intact_error
from lightck.tiers.decisions import Listing, manifests_of
from lightck.tiers.fetching import fetched_to_memory
from lightck.tiers.names import TierCheckpoint
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import MANIFEST_NBYTES_MAX


def newest_in_memory(
    store: Store,
    listing: Listing,
    step: int | None,
    rejected: list[Rejected],
    progress: Progress = lambda *_: nullcontext(lambda _: None),
) -> list[PoolReader]:
    """Fetch the newest checkpoint of a tier that is whole, or that of ``step``, to memory, which takes as many bytes as
    the checkpoint has. Returns the pool of each rank; one for a single process. What is not whole is added to
    ``rejected``. Raises ``NoCheckpointError``, ``CorruptPoolError`` and ``TierError``."""
    for found in candidates_of(store, listing, step, rejected):
        with ExitStack() as stack:
            readers: list[PoolReader] = []
            try:
                found.refuse_stale()
                with progress(f"step {found.checkpoint.step}", found.nbytes) as advance:
                    for manifest in found.manifests:
                        readers.append(fetched_to_memory(store, manifest, advance))
                        stack.callback(readers[-1].close)
                stack.pop_all()
                return readers
            except DamagedError as err:
                rejected.append(Rejected(found.checkpoint, str(err)))
    raise none_intact_error(store, rejected) if rejected else no_checkpoint_error(store, listing, step)


def is_gone(store: Store, listing: Listing, checkpoint: TierCheckpoint) -> bool:
    """Whether a checkpoint of a listing has been removed since. (Its manifests are removed before its objects.) Raises
    ``TierError``."""
    for name in manifests_of(listing, checkpoint):
        try:
            store.get(str(name), MANIFEST_NBYTES_MAX)
        except FileNotFoundError:
            return True
        except DamagedError:
            continue
    return False
