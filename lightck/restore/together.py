"""The ranks that recover parts of tensors meet, to agree on one checkpoint (``restore/directory.py``)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch

from lightck.ranks.meet import Meeting, Store
from lightck.state.inventory import Live
from lightck.state.local_tensors import is_dtensor

log = logging.getLogger("lightck")
TIMEOUT = 600.0
"""Seconds that a rank waits for the others, unless ``timeout=`` of attach says otherwise."""


def store_of(group: Any) -> Store:
    """Return a connection of this thread's own to the store of a process group. On a shared connection a blocking call
    of one thread blocks every other thread."""
    module = torch.distributed.distributed_c10d
    store: Any = module._get_process_group_store(module._get_default_group() if group is None else group)
    try:
        store = store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):  # some stores cannot be cloned
        log.debug(
            "lightck: the store %s of the process group cannot be cloned, so lightck uses the same connection as "
            "torch, and one may have to wait for the other",
            type(store).__name__,
        )
    own: Store = store
    return own


def meeting_of(lives: Iterable[Live]) -> Meeting:
    """Return the meeting of the ranks that hold parts of these tensors: those of the largest device mesh."""
    dist: Any = torch.distributed
    meshes = [live.dtensor.device_mesh for live in lives if is_dtensor(live.dtensor)]
    ranks = sorted(max(meshes, key=lambda mesh: mesh.size()).mesh.flatten().tolist())
    # Ranks of another mesh may recover at the same time.
    prefix = f"lightck-recover-{blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
    return Meeting(dist.PrefixStore(prefix, store_of(None)), ranks.index(dist.get_rank()), len(ranks), TIMEOUT)
