"""The position of a loader in a checkpoint of another number of ranks, for one of the ranks that load it.

A pass whose samples torch's ``DistributedSampler`` shares goes on where the old ranks stood together (``sharing.py``).
Any other pass begins again. A position between two passes stays what it is. Random states of a rank follow from a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightck.dataloader.position import Identity, PassState, Position, RngSnapshot
from lightck.dataloader.sharing import sharing_of
from lightck.state.derived_rng import derived


class Moved(NamedTuple):
    """The position of one loader for a rank of another world."""

    value: dict[str, object]
    restarts: bool
    """Whether the pass begins again, so that samples of it are given twice."""


def moved_position(of_ranks: Sequence[Mapping[str, object]], key: bytes) -> Moved:
    """Return the position of a loader for a rank of another world. ``of_ranks``: its position on each rank of the old
    world. ``key``: from what the random states of this rank follow. Raises ``CorruptPoolError``."""
    positions = [Position.from_value(dict(value)) for value in of_ranks]
    first = positions[0]
    kept: Identity = {"sampler": first.identity.get("sampler")} if "sampler" in first.identity else {}
    # Version 1: only the properties in ``identity`` are compared. Another world may use other batches and workers.
    moved = replace(first, identity={}, version=1, worker_rng=None, used_again=False)
    if not first.in_pass:
        state = PassState(pass_number=first.state.pass_number)
        return Moved(replace(moved, state=state).to_value(), restarts=False)
    given = _samples_given(positions)
    if given is None:
        state = PassState(pass_number=first.state.pass_number)
        return Moved(replace(moved, in_pass=False, trained=False, state=state).to_value(), restarts=True)
    assert first.state.at_iter is not None, "the position is in a pass"
    at_iter = RngSnapshot(derived(first.state.at_iter.rng, key), first.state.at_iter.generators)
    state = PassState(at_iter=at_iter, samples_before=given, pass_number=first.state.pass_number)
    return Moved(replace(moved, identity=kept, state=state).to_value(), restarts=False)


def batches_before(position: Position, loader: object) -> int:
    """Return how many batches of ``loader`` there are in the samples that another number of ranks has given in this
    pass, rounded up."""
    one = sharing_of(loader) or position.sharing
    if not position.state.samples_before or one is None:
        return 0
    return -(-position.state.samples_before // (one.ranks * one.batch_size))


def _samples_given(positions: Sequence[Position]) -> int | None:
    """Return how many samples of the pass the ranks have got together; None if this is unknown, or if they are not the
    first samples of the pass."""
    first = positions[0]
    if first.kind != "plain" or first.sharing is None:
        return None
    same = {(one.sharing, one.in_pass, one.state.given, one.state.samples_before) for one in positions}
    if len(same) > 1 or first.state.raised:
        return None
    if first.has_given_all:
        return first.sharing.samples
    given = first.state.given * first.sharing.batch_size * first.sharing.ranks
    return min(first.state.samples_before + given, first.sharing.samples)
