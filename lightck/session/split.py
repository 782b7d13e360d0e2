"""Ranks of a host divide what they write: how they agree, in attach, on the share of each.

Without this, ranks that train with DistributedDataParallel would write the same parameters and the same optimizer state
once for each rank; and so would ranks that hold the same shard of a DTensor (a mesh dimension with ``Replicate``). A
parameter is divided among the ranks of this host that should hold the same of it, according to DistributedDataParallel
or to the placement of the DTensor (``_ranks_with_same``), if its bytes are equal on them now. The ranks compare
digests. Optimizer state that exists already is compared too; what differs is written whole by each rank. From then on
``CrossCheck`` compares what the ranks hold.

If there is a layout, nothing is divided.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import msgpack
import numpy as np
import torch

from lightck.errors import listed
from lightck.following.ddp import replicated_parameters
from lightck.pool.format.boxes import Ints
from lightck.pool.format.layout import Entry, held_entry
from lightck.pool.format.shares import Cut, Divisible, dim_to_divide, divide
from lightck.ranks.meet import Meeting
from lightck.session.capture import Capture
from lightck.session.group import Group
from lightck.state.blocks import BUDGET_NBYTES, Blocks, checksums
from lightck.state.device_transfers import is_dense_tensor, on_host, transfer_of
from lightck.state.inventory import Live, address_of, in_plain_memory, is_plain, param_of
from lightck.state.parts import replicas_of
from lightck.state.shares import Shares

log = logging.getLogger("lightck")


def shares_of(
    capture: Capture, entries: Iterable[Entry], group: Group, meeting: Meeting, directory_ids: Sequence[str]
) -> Shares:
    """Return the shares of this rank. All ranks call this, with their tensors as they will be trained.

    ``entries``: of all tensors of a checkpoint, those that are only predicted included. ``directory_ids``: for each
    rank, what identifies its host and its directory."""
    own = directory_ids[group.rank]
    of_host = tuple(rank for rank, one in enumerate(directory_ids) if one == own)
    if capture.layout is not None:
        _warn_of_tensors_without_rule(capture, meeting)
        return Shares()
    if len(set(directory_ids)) == len(directory_ids):
        return Shares()  # no two ranks are on one host
    lives = [live for live in capture.tensors() if live.alias is None]
    candidates = _candidates(lives, capture, group, of_host)
    ranks_with_same = {name: ranks for name, (_, ranks) in candidates.items()}
    state = [live for live in lives if live.role == "optimizer" and f"model/{param_of(live.name)}" in candidates]
    ranks_with_same |= {live.name: ranks_with_same[f"model/{param_of(live.name)}"] for live in state}
    digests = _digests([*(live for live, _ in candidates.values()), *state])
    found = _compared({name: (ranks_with_same[name], digest) for name, digest in digests.items()}, meeting)
    shares = Shares(_cuts(candidates, found.agreed, _row_weights(entries, candidates)), group.rank)
    shares.written_whole.update(found.differing[group.rank])
    of_this_host = sorted(set().union(*(found.differing[rank] for rank in of_host)))
    _report(shares, of_this_host, is_first=group.rank == of_host[0])
    return shares


def _cuts(
    candidates: Mapping[str, tuple[Live, Ints]], agreed: Collection[str], weights: Mapping[str, int]
) -> dict[str, Cut]:
    """Return name -> cut of the candidates that agree. The ranks that hold the same tensors divide these among
    themselves."""
    of_ranks: dict[Ints, list[Divisible]] = {}
    for name, (live, ranks) in candidates.items():
        dim = _dim(live)
        if name in agreed and dim is not None:
            of_ranks.setdefault(ranks, []).append(Divisible(name, tuple(live.tensor.shape), dim, weights[name]))
    return {name: cut for ranks, tensors in of_ranks.items() for name, cut in divide(tensors, ranks).items()}


def _warn_of_tensors_without_rule(capture: Capture, meeting: Meeting) -> None:
    """With a layout: warn if a parameter without a rule has different bytes on two ranks. It may be a part whose rule
    is missing. All ranks call this."""
    assert capture.layout is not None, "the caller has checked it"
    lives = [live for live in capture.tensors() if live.role == "param" and live.alias is None and live.part is None]
    averaged = capture.layout.averaged(live.name.removeprefix("model/") for live in lives)
    whole = [live for live in lives if live.dtensor is None and live.name.removeprefix("model/") not in averaged]
    if capture.layout.stages > 1:
        differing = _differing_between_stages(_digests(whole), capture.layout.stage, meeting)
    else:
        everyone = tuple(range(meeting.world_size))
        found = _compared({name: (everyone, digest) for name, digest in _digests(whole).items()}, meeting)
        differing = sorted(found.differing[meeting.rank])
    if differing and meeting.rank == 0 and capture.layout.stages > 1:
        log.warning(
            "lightck: several ranks hold %s, and have different bytes there. Each rank gets its own back, but no other "
            "number of ranks or stages can load them. If these are different tensors with the same name, correct the "
            "names that rename of layout= makes; if they are parts of one tensor, give them a rule",
            listed(differing, 3),
        )
    elif differing and meeting.rank == 0:
        log.warning(
            "lightck: layout= has no rule for %s, and the ranks have different bytes there. Each rank gets its own "
            "back, but no other number of ranks can load them, and recover and export take those of rank 0. If they "
            "are parts, give them a rule",
            listed(differing, 3),
        )


def _differing_between_stages(own: Mapping[str, bytes], stage: int, meeting: Meeting) -> list[str]:
    """Return the names of the tensors that have different bytes on two of the ranks that hold them. If the ranks of
    each stage have the same, only the first one of each stage sends the digests of its tensors."""
    together = [stage, blake2b(msgpack.packb(dict(own)), digest_size=16).digest()]
    found = [msgpack.unpackb(one) for one in meeting.exchange("digests of stages", msgpack.packb(together))]
    first_of = {its_stage: rank for rank, (its_stage, _) in reversed(list(enumerate(found)))}
    are_same = all(digest == found[first_of[its_stage]][1] for its_stage, digest in found)
    sends = not are_same or first_of[stage] == meeting.rank
    digests: dict[str, set[bytes]] = {}
    for data in meeting.exchange("digests of tensors", msgpack.packb(dict(own) if sends else {})):
        for name, digest in msgpack.unpackb(data).items():
            digests.setdefault(name, set()).add(digest)
    return sorted(name for name, different in digests.items() if len(different) > 1)


def _candidates(lives: Sequence[Live], capture: Capture, group: Group, of_host: Ints) -> dict[str, tuple[Live, Ints]]:
    """Return name -> parameter that can be divided, and the ranks of this host that divide it."""
    of_ddp = replicated_parameters(capture.model.model, group.members)
    found: dict[str, tuple[Live, Ints]] = {}
    for live in lives:
        if live.role == "param" and _dim(live) is not None:
            ranks = tuple(rank for rank in of_host if rank in _ranks_with_same(live, of_ddp, group))
            if len(ranks) > 1:
                found[live.name] = live, ranks
    return found


def _ranks_with_same(live: Live, of_ddp: Collection[int], group: Group) -> Collection[int]:
    """Return the ranks that hold the same as this rank in a parameter, this rank included: all, if
    DistributedDataParallel keeps it equal (``of_ddp``); for a DTensor, those along the dimensions of its mesh on which
    its placement is ``Replicate``. If nothing says so, return no ranks."""
    if live.dtensor is None:
        return range(group.world_size) if id(live.tensor) in of_ddp else ()
    return [group.members.index(one) for one in replicas_of(live.dtensor) if one in group.members]


def _dim(live: Live) -> int | None:
    """Return the dimension that is divided; None for a tensor that is not: it has one element, or is not one run of
    memory."""
    if not is_dense_tensor(live.tensor):
        return None
    return dim_to_divide(tuple(live.tensor.shape), live.tensor.stride())


def _row_weights(entries: Iterable[Entry], candidates: Mapping[str, tuple[Live, Ints]]) -> dict[str, int]:
    """Return, for each candidate, how many bytes a row of it and of its optimizer state have together."""
    found = dict.fromkeys(candidates, 0)
    for entry in entries:
        param = entry.name if entry.role == "param" else f"model/{param_of(entry.name)}"
        live, _ = candidates.get(param, (None, ()))
        if live is not None and entry.alias is None and entry.held_shape == tuple(live.tensor.shape):
            dim = _dim(live)
            assert dim is not None, "a candidate can be divided"
            found[param] += held_entry(entry).nbytes // entry.held_shape[dim]
    return found


# -- the comparison ----------------------------------------------------------------------------------------------------


def _digests(lives: Sequence[Live]) -> dict[str, bytes]:
    """Return name -> digest of a tensor's bytes, and of how they are interpreted."""
    plain = [live for live in lives if is_plain(live.tensor) and live.tensor.nbytes]
    blocks = Blocks.of(
        [address_of(live.tensor) for live in plain],
        [live.tensor.nbytes for live in plain],
        [0] * len(plain),
        BUDGET_NBYTES,
    )
    crcs = blocks.checksums()
    of_tensors = np.split(crcs, np.searchsorted(blocks.owners, np.arange(1, len(plain))))
    # strict=False: if there is no plain tensor, np.split returns one empty array all the same.
    found = {live.name: of_tensor for live, of_tensor in zip(plain, of_tensors, strict=False)}
    for live in lives:
        if live.name not in found:
            transfer = transfer_of(live.tensor)
            if transfer is not None:
                transfer.mark().synchronize()  # what the script has begun on the device
            found[live.name] = checksums(in_plain_memory(on_host(live.tensor.detach())), BUDGET_NBYTES)
    return {live.name: _digest(live.tensor, found[live.name]) for live in lives}


def _digest(tensor: torch.Tensor, crcs: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> bytes:
    kind = repr((str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()))).encode()
    return blake2b(kind + crcs.tobytes(), digest_size=8).digest()


@dataclass(slots=True)
class _Comparison:
    agreed: set[str]
    """Names of this rank's tensors that are equal on all ranks that should hold the same."""
    differing: list[set[str]]
    """For each rank, the names of its tensors that are not."""


def _compared(own: Mapping[str, tuple[Ints, bytes]], meeting: Meeting) -> _Comparison:
    """Compare tensors. All ranks call this. ``own``: name -> the ranks that should hold the same, and the digest. The
    ranks exchange one digest for all tensors of the same ranks; if two ranks differ there, one for each tensor."""
    of_ranks: dict[Ints, dict[str, bytes]] = {}
    for name, (ranks, digest) in own.items():
        of_ranks.setdefault(ranks, {})[name] = digest
    together = [[ranks, blake2b(msgpack.packb(one), digest_size=16).digest()] for ranks, one in of_ranks.items()]
    if not any(_differing(_exchanged("digests of all tensors", together, meeting))):
        return _Comparison(set(own), [set() for _ in range(meeting.world_size)])
    each = [[[*ranks], digest, name] for name, (ranks, digest) in own.items()]
    differing = _differing(_exchanged("digests of tensors", each, meeting))
    return _Comparison(own.keys() - differing[meeting.rank], differing)


_Digests: TypeAlias = dict[tuple[Ints, str], bytes]
"""Ranks that should hold the same, and name of a tensor ("": all tensors that these ranks divide) -> digest."""


def _exchanged(what: str, own: list[list[Any]], meeting: Meeting) -> list[_Digests]:
    """Return what each rank has sent. ``own``: what this rank sends: for each digest its ranks, the digest, and the
    name of the tensor, which is left out if the digest is that of all tensors."""
    sent = [msgpack.unpackb(one) for one in meeting.exchange(what, msgpack.packb(own))]
    return [{(tuple(ranks), "".join(name)): digest for ranks, digest, *name in one} for one in sent]


def _differing(of_ranks: Sequence[_Digests]) -> list[set[str]]:
    """Return for each rank the names of tensors that another rank has with another digest, or does not have."""
    found: list[set[str]] = [set() for _ in of_ranks]
    for one in of_ranks:
        for key, digest in one.items():
            ranks, name = key
            if any(of_ranks[rank].get(key) != digest for rank in ranks):
                for rank in ranks:
                    found[rank].add(name)
    return found


def _report(shares: Shares, differing: Sequence[str], *, is_first: bool) -> None:
    if differing and is_first:
        log.warning(
            "lightck: the ranks of this host have different bytes in %s, although DistributedDataParallel or the "
            "placement of a DTensor should keep them equal. Each rank writes its own, as a whole",
            listed(list(differing), 3),
        )
    if shares.cuts:
        log.info(
            "lightck: the ranks of this host divide what they write: %d parameters, with their optimizer state "
            "(split=False: each rank writes all of it)",
            len(shares.cuts),
        )
