"""The ranks that recover parts of tensors meet, to agree on one checkpoint (``restore/directory.py``)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgpack
import torch

from lightck.errors import LayoutError, RankError, capitalized
from lightck.layout import Layout, uncovered
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


def meeting_of(lives: Iterable[Live], layout: Layout | None = None) -> Meeting | None:
    """Return the meeting of the ranks that hold parts of these tensors: those of the largest device mesh; with a
    layout, all ranks of the process group. None if no ranks have to meet: no tensor is a DTensor, and there is no
    layout of several ranks or no process group."""
    dist: Any = torch.distributed
    meshes = [live.dtensor.device_mesh for live in lives if is_dtensor(live.dtensor)]
    if layout is not None and max(layout.mesh_shape) > 1 and dist.is_available() and dist.is_initialized():
        ranks = list(range(dist.get_world_size()))
    elif meshes:
        ranks = sorted(max(meshes, key=lambda mesh: mesh.size()).mesh.flatten().tolist())
    else:
        return None
    # Ranks of another mesh may recover at the same time.
    prefix = f"lightck-recover-{blake2b(repr(ranks).encode(), digest_size=8).hexdigest()}"
    store, rank = dist.PrefixStore(prefix, store_of(None)), ranks.index(dist.get_rank())
    return Meeting(store, rank, len(ranks), TIMEOUT, call="lightck.recover")


def refuse_other_layouts(layout: Layout | None, meeting: Meeting) -> None:
    """Raise ``RankError`` unless all ranks have the same layout, and each place in it is held. All ranks call this."""
    own = None if layout is None else [layout.description, layout.place.rank, layout.ranges, layout.stage]
    found = [msgpack.unpackb(one) for one in meeting.exchange("layouts", msgpack.packb(own))]
    # Of each rank: the text of its layout, its place, its ranges of ``Flat``, its stage.
    texts = ["no layout" if one is None else one[0] for one in found]
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise RankError(
            f"{capitalized(meeting.name_of(0))} and {meeting.name_of(other)} have different layouts: {texts[0]} and "
            f"{texts[other]}. Nothing was changed. Pass the same rules and the same size in layout= on all ranks."
        )
    if layout is None:
        return
    gap = uncovered([one[2] for one in found]) if layout.stages == 1 else None
    if gap is not None:
        raise RankError(
            f"No rank holds {gap}: the ranges of Flat in layout= do not cover the tensor. Nothing was changed. Pass "
            "the range that each rank holds, and as shape= the shape of the whole tensor."
        )
    missing = set(range(layout.place.size)) - {one[1] for one in found}
    if missing:
        raise RankError(
            f"No process has the place {min(missing)} in the layout of {layout.place.size} ranks, so parts of "
            "tensors are missing. Nothing was changed. Pass each process its own tensor parallel rank: Layout(..., "
            "rank=...)."
        )
    held = {(one[3], one[1]) for one in found}
    places = ((stage, rank) for stage in range(layout.stages) for rank in range(layout.place.size))
    missing_at = next((place for place in places if place not in held), None)
    if missing_at is not None:
        raise RankError(
            f"No process is stage {missing_at[0]} of {layout.stages} at the place {missing_at[1]} of "
            f"{layout.place.size} in the layout, so tensors are missing. Nothing was changed. Pass each process its "
            "own pipeline stage: Layout(..., stage=..., stages=...)."
        )


def refuse_unused_rules(layout: Layout | None, names: Iterable[str], meeting: Meeting) -> None:
    """Raise ``LayoutError`` if a rule of a layout with stages matches no tensor of any rank, and ``RankError`` if the
    ranges of ``Flat`` do not cover a tensor. All ranks call this. ``names``: of this rank's tensors, in the pool."""
    if layout is None or layout.stages == 1:
        return
    unused = layout.unused([name.removeprefix("model/") for name in names])
    ranges = {pattern: one for pattern, one in layout.ranges.items() if pattern not in unused}
    found = [msgpack.unpackb(one) for one in meeting.exchange("rules", msgpack.packb([unused, ranges]))]
    nowhere = next((pattern for pattern in unused if all(pattern in one for one, _ in found)), None)
    if nowhere is not None:
        raise LayoutError(
            f"The rule {nowhere!r} of layout= matches no parameter and no buffer on any stage. A pattern matches the "
            "whole name, as rename has made it. Correct the pattern, or remove the rule."
        )
    for pattern in layout.ranges:
        gap = uncovered([{pattern: one[pattern]} for _, one in found if pattern in one])
        if gap is not None:
            raise RankError(
                f"No rank holds {gap}: the ranges of Flat in layout= do not cover the tensor. Nothing was changed. "
                "Pass the range that each rank holds."
            )
