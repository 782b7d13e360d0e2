"""A process that becomes one of several ranks after it was attached alone. (Ranks that checkpoint together are in the
package ``lightck/ranks``.)"""

from __future__ import annotations

import logging

import torch

from lightck.errors import UnsupportedError

log = logging.getLogger("lightck")


def rank_and_world_size() -> tuple[int, int] | None:
    """Return the rank of this process and the number of ranks. Return None if there are fewer than two ranks."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return dist.get_rank(), dist.get_world_size()


def check_rank() -> bool:
    """Return whether this process, which was attached alone, is one of several ranks now, and warn if it is rank 0.
    Raises ``UnsupportedError`` on other ranks: with pools that know nothing of each other, ranks could resume at
    different steps without notice."""
    place = rank_and_world_size()
    if place is None:
        return False
    rank, n_ranks = place
    cure = "Call init_process_group before lightck.attach: then all ranks are saved together (see `lightck docs ranks`)"
    if rank:
        raise UnsupportedError(
            f"This process became rank {rank} of {n_ranks} after lightck.attach. Ranks whose pools know nothing of "
            f"each other could resume at different steps. {cure}."
        )
    log.warning(
        "lightck: this process became rank 0 of %d after lightck.attach, and its pool holds only the state of rank 0. "
        "%s; or pass group=False, if rank 0 alone is to be saved",
        n_ranks,
        cure,
    )
    return True
