"""The ranks of a host divide what they write: how they agree, in attach, on the share of each.

Without this, ranks that train with DistributedDataParallel would write the same parameters and the same optimizer state
once for each rank. A parameter is divided if DistributedDataParallel keeps it equal on all ranks of the group, and if
its bytes are equal now on all ranks of this host. The ranks compare digests. Optimizer state that exists already is
compared too; what differs is written whole by each rank. From then on ``CrossCheck`` compares what the ranks hold.

If one of the tensors of the model is a part (a DTensor), or if there is a layout, nothing is divided.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import msgpack
import numpy as np
import torch

from lightck.errors import listed
from lightck.following.ddp import replicated_parameters
from lightck.pool.format.layout import Entry
from lightck.pool.format.shares import Divisible, dim_to_divide, divided
from lightck.ranks.meet import Meeting
from lightck.session.capture import Capture
from lightck.session.group import Group
from lightck.state.blocks import BUDGET_NBYTES, Blocks, checksums
from lightck.state.device_transfers import is_dense_tensor, on_host, transfer_of
from lightck.state.inventory import Live, address_of, in_plain_memory, is_plain, param_of
from lightck.state.parts import is_part
from lightck.state.shares import Shares

log = logging.getLogger("lightck")


def shares_of(
    capture: Capture, entries: Iterable[Entry], group: Group, meeting: Meeting, directory_ids: Sequence[str]
) -> Shares:
    """Return the shares of this rank. All ranks call this, with their tensors as they will be trained.

    ``entries``: of all tensors of a checkpoint, those that are only predicted included. ``directory_ids``: for each
    rank, what identifies its host and its directory."""
    own = directory_ids[group.rank]
    of_host = [rank for rank, one in enumerate(directory_ids) if one == own]
    if capture.layout is not None:
        _warn_of_tensors_without_rule(capture, meeting)
        return Shares()
    if len(set(directory_ids)) == len(directory_ids):
        return Shares()  # no two ranks are on one host
    lives = [live for live in capture.tensors() if live.alias is None]
    candidates = _candidates(lives, replicated_parameters(capture.model.model, group.members))
    state = [live for live in lives if live.role == "optimizer" and f"model/{param_of(live.name)}" in candidates]
    agreed, differing = _compared(_digests([*candidates.values(), *state]), meeting, of_host)
    by_param = _row_weights(entries, candidates)
    tensors = [
        Divisible(name, tuple(live.tensor.shape), dim, by_param[name])
        for name, live in candidates.items()
        if name in agreed and (dim := _dim(live)) is not None
    ]
    shares = Shares(divided(tensors, len(of_host)), of_host.index(group.rank))
    shares.written_whole.update(differing)
    _report(shares, differing, is_first=group.rank == of_host[0])
    return shares


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
        _, differing = _compared(_digests(whole), meeting, range(meeting.world_size))
    if differing and meeting.rank == 0 and capture.layout.stages > 1:
        log.warning(
            "lightck: several ranks hold %s, and have different bytes there. Each rank gets its own back, but no other "
            "number of ranks or stages can load them. If they are other tensors, correct the names that rename of "
            "layout= makes; if they are parts, give them a rule",
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
    """Return the names of the tensors of which two of the ranks that hold them have different bytes. If the ranks of
    each stage have the same, only the first one of each stage sends the digests of its tensors."""
    together = [stage, blake2b(msgpack.packb(dict(own)), digest_size=16).digest()]
    found = [msgpack.unpackb(one) for one in meeting.exchange("digests of stages", msgpack.packb(together))]
    first_of = {of: rank for rank, (of, _) in reversed(list(enumerate(found)))}
    are_same = all(digest == found[first_of[of]][1] for of, digest in found)
    sends = not are_same or first_of[stage] == meeting.rank
    digests: dict[str, set[bytes]] = {}
    for data in meeting.exchange("digests of tensors", msgpack.packb(dict(own) if sends else {})):
        for name, digest in msgpack.unpackb(data).items():
            digests.setdefault(name, set()).add(digest)
    return sorted(name for name, of_name in digests.items() if len(of_name) > 1)


def _candidates(lives: Sequence[Live], replicated: set[int]) -> dict[str, Live]:
    """Return name -> parameter, of those that the ranks hold together and that can be divided."""
    if any(live.dtensor is not None and is_part(live.dtensor) for live in lives):
        return {}
    return {
        live.name: live
        for live in lives
        if live.role == "param" and live.dtensor is None and id(live.tensor) in replicated and _dim(live) is not None
    }


def _dim(live: Live) -> int | None:
    """Return the dimension that is divided; None for a tensor that is not: it has one element, or is not one run of
    memory."""
    if not is_dense_tensor(live.tensor):
        return None
    return dim_to_divide(tuple(live.tensor.shape), live.tensor.stride())


def _row_weights(entries: Iterable[Entry], candidates: Mapping[str, Live]) -> dict[str, int]:
    """Return, for each candidate, how many bytes a row of it and of its optimizer state have together."""
    found = dict.fromkeys(candidates, 0)
    for entry in entries:
        param = entry.name if entry.role == "param" else f"model/{param_of(entry.name)}"
        live = candidates.get(param)
        if live is not None and entry.alias is None and entry.shape == tuple(live.tensor.shape):
            dim = _dim(live)
            assert dim is not None, "a candidate can be divided"
            found[param] += entry.nbytes // entry.shape[dim]
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


def _compared(own: Mapping[str, bytes], meeting: Meeting, of_host: Sequence[int]) -> tuple[set[str], list[str]]:
    """Return the names of the tensors that are equal on all ranks of this host, and the names of the others. The ranks
    exchange one digest of all tensors; if the digests of two ranks differ, one of each tensor."""
    together = blake2b(msgpack.packb(dict(own)), digest_size=16).digest()
    if len(set(meeting.exchange("digests of all tensors", together))) == 1:
        return set(own), []
    found = [msgpack.unpackb(one) for one in meeting.exchange("digests of tensors", msgpack.packb(dict(own)))]
    of_mates = [found[rank] for rank in of_host]
    agreed = {name for name, digest in own.items() if all(one.get(name) == digest for one in of_mates)}
    return agreed, sorted({name for one in of_mates for name in one} - agreed)


def _report(shares: Shares, differing: Sequence[str], *, is_first: bool) -> None:
    if differing and is_first:
        log.warning(
            "lightck: the ranks of this host have different bytes in %s, although DistributedDataParallel should keep "
            "them equal. Each rank writes its own, as a whole",
            listed(list(differing), 3),
        )
    if shares.cuts:
        log.info(
            "lightck: the ranks of this host divide what they write: %d parameters, with their optimizer state "
            "(split=False: each rank writes all of it)",
            len(shares.cuts),
        )
