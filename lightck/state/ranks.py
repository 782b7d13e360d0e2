"""Trainings of several processes: one of them may be attached, and its pool holds its state alone."""

from __future__ import annotations

import logging

import torch

from lightck.errors import UnsupportedError

log = logging.getLogger("lightck")


def rank_and_world_size() -> tuple[int, int] | None:
    """Rank and number of ranks, where this process is in a process group of several; else None."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    return dist.get_rank(), dist.get_world_size()


def check_rank() -> bool:
    """Warns where this is the first of several ranks. Raises ``UnsupportedError`` on the others: with a pool for each
    rank they would resume at different steps, and nothing would say so."""
    place = rank_and_world_size()
    if place is None:
        return False
    rank, n_ranks = place
    if rank:
        raise UnsupportedError(
            f"This process is rank {rank} of {n_ranks}. lightck saves single processes: ranks with a pool each would "
            "resume at different steps after a kill. Attach on rank 0 only, and give the other ranks its model and "
            "optimizer at the start (docs/ranks.md has the lines)."
        )
    log.warning(
        "lightck: this process is rank 0 of %d, and the pool holds its state alone. At the start the other ranks have "
        "to be given its model and optimizer; their random states and the positions of their loaders are not restored "
        "(docs/ranks.md)",
        n_ranks,
    )
    return True
