"""Trainings of several processes: only rank 0 may be attached, and the pool holds only the state of rank 0."""

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
    """Return whether this process is one of several ranks, and warn if it is rank 0. Raises ``UnsupportedError`` on
    other ranks: with one pool each, ranks could resume at different steps without notice."""
    place = rank_and_world_size()
    if place is None:
        return False
    rank, n_ranks = place
    if rank:
        raise UnsupportedError(
            f"This process is rank {rank} of {n_ranks}. lightck saves single processes: ranks with one pool each could "
            "resume at different steps after a kill. Attach on rank 0 only, and give the other ranks the model and "
            "optimizer of rank 0 at the start (`lightck docs ranks` shows how)."
        )
    log.warning(
        "lightck: this process is rank 0 of %d, and the pool holds only the state of rank 0. At the start, give "
        "the other ranks the model and optimizer of rank 0. The random states of the other ranks, and the positions of "
        "their loaders, are not restored (see `lightck docs ranks`)",
        n_ranks,
    )
    return True
