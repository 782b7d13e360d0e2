"""Read and check what lies in a tier, without making a pool of it."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, nullcontext

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader
from lightck.restore.compact import Progress
from lightck.tiers.candidates import Rejected, candidates_of, no_checkpoint_error, none_whole_error
from lightck.tiers.decisions import Listing, manifests_of
from lightck.tiers.fetching import fetched_to_memory
from lightck.tiers.names import TierCheckpoint
from lightck.tiers.store import KnowsSizes, Store
from lightck.tiers.tier_manifest import NBYTES_MAX, SentObject

_GONE = "it is gone, or no file"


def newest_in_memory(
    store: Store,
    listing: Listing,
    step: int | None,
    rejected: list[Rejected],
    progress: Progress = lambda *_: nullcontext(lambda _: None),
) -> list[PoolReader]:
    """Fetch the newest checkpoint of a tier that is whole, or that of ``step``, to memory: as much as the checkpoint
    has. Returns the pool of each rank; one for a single process. What is not whole is added to ``rejected``. Raises
    ``NoCheckpointError``, ``CorruptPoolError`` and ``TierError``."""
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
    raise none_whole_error(store, rejected) if rejected else no_checkpoint_error(store, listing, step)


def damage_of(store: Store, sent: SentObject, *, reads: bool) -> str | None:
    """Return what is wrong with an object; None if nothing is. ``reads``: read its bytes, and compare their SHA-256
    with its name; else only its length is looked at. Raises ``TierError``."""
    if isinstance(store, KnowsSizes):
        nbytes = store.nbytes_of(str(sent.name))
        damage = _GONE if nbytes is None else _length_damage(nbytes, sent)
        if damage is not None or not reads:
            return damage
    try:
        data = store.get(str(sent.name), sent.nbytes)
    except FileNotFoundError:
        return _GONE
    except DamagedError as err:
        return str(err)
    except TierError as err:
        if err.errno is None:
            raise
        return f"it cannot be read: {err}"
    if len(data) == sent.nbytes and hashlib.sha256(data).hexdigest() != sent.name.content:
        return "its bytes do not match its name, which is their SHA-256"
    return _length_damage(len(data), sent)


def _length_damage(nbytes: int, sent: SentObject) -> str | None:
    return None if nbytes == sent.nbytes else f"it has {nbytes} bytes, not {sent.nbytes}"


def is_gone(store: Store, listing: Listing, checkpoint: TierCheckpoint) -> bool:
    """Whether a checkpoint of a listing has been removed since: its manifests go before its objects. Raises
    ``TierError``."""
    for name in manifests_of(listing, checkpoint):
        try:
            store.get(str(name), NBYTES_MAX)
        except FileNotFoundError:
            return True
        except DamagedError:
            continue
    return False
