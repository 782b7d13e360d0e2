"""The position of a loader in a checkpoint of another number of ranks, for one of the ranks that load it.

A pass whose samples torch's ``DistributedSampler`` shares goes on after the samples that the old ranks together have
got (``sharing.py``). Any other pass begins again. A position between two passes stays between the same two passes.
Random states of a rank are derived from a key. Generators that belong to a loader stay as the script has built them:
those of one old rank would give all new ranks the same samples.

A moved position has no "length" in its identity, because another number of ranks has another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from lightck.dataloader.position import Identity, PassState, Position, RngSnapshot
from lightck.dataloader.sharing import sharing_of
from lightck.state.derived_rng import derive_states
from lightck.state.rng import RngState


class Moved(NamedTuple):
    """The position of one loader for a rank of another world."""

    value: dict[str, object]
    restarts: bool
    """Whether the pass begins again, so that samples of it are given twice."""


def moved_position(of_ranks: Sequence[Mapping[str, object]], key: bytes, script: RngState | None) -> Moved:
    """Return the position of a loader for a rank of another world. ``of_ranks``: its position on each rank of the old
    world. ``key``: the rank's random states are derived from it. ``script``: random states that the script has set
    itself (see ``derive_states``). Raises ``CorruptPoolError``."""
    positions = [Position.from_value(dict(value)) for value in of_ranks]
    first = positions[0]
    if not first.in_pass:
        return Moved(_at_beginning_of_pass(first).to_value(), restarts=False)
    given = _samples_given(positions)
    if given is None:
        return Moved(_at_beginning_of_pass(first).to_value(), restarts=True)
    assert first.state.at_iter is not None, "the position is in a pass"
    rng = derive_states(first.state.at_iter.rng, key, script)
    return Moved(_after(first, given, rng).to_value(), restarts=False)


def own_position(own: Mapping[str, object], of_ranks: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the position of a rank of another world that has as many ranks as the old one: each rank keeps the
    position that it had, ``own``. The number of samples that all ranks together have got is added, because ``adapted``
    needs it if the loader now shares the samples among fewer or more of the ranks. ``of_ranks``: as in
    ``moved_position``."""
    given = _samples_given([Position.from_value(dict(value)) for value in of_ranks])
    position = Position.from_value(dict(own))
    return dict(own) if given is None or not position.in_pass else replace(position, samples_given=given).to_value()


def adapted(position: Position, loader: object, kind: str, generators: tuple[torch.Tensor, ...]) -> Position:
    """Return a restored position, adapted to this loader. Two kinds of positions are changed: one that was moved, and
    one whose loader shared the samples among another number of ranks, or in other batches, than this loader. Any other
    position is returned as it is. ``kind``: "plain" or "stateful". ``generators``: the states of the loader's own
    generators, which a moved position leaves as they are."""
    now, saved = sharing_of(loader), position.sharing
    if position.samples_given is not None and position.in_pass and now is not None and saved is not None:
        if (now.ranks, now.batch_size) == (saved.ranks, saved.batch_size):
            return position
        assert position.state.at_iter is not None, "the position is in a pass"
        position = _after(position, position.samples_given, position.state.at_iter.rng)
    if "length" in position.identity:  # it was not moved
        return position
    state, at_iter = position.state, position.state.at_iter
    if at_iter is not None:
        state = replace(state, at_iter=RngSnapshot(at_iter.rng, generators))
    return replace(position, kind=position.kind if position.in_pass else kind, generators=generators, state=state)


def _after(position: Position, samples: int, rng: RngState) -> Position:
    """Return the position in the same pass after its first ``samples`` samples. ``rng``: the random states at the
    beginning of the pass."""
    kept: Identity = {"sampler": position.identity["sampler"]} if "sampler" in position.identity else {}
    state = PassState(RngSnapshot(rng, ()), samples_before=samples, pass_number=position.state.pass_number)
    return _moved(position, kept, state)


def _at_beginning_of_pass(position: Position) -> Position:
    """Return the position before the pass: the saved pass, if one was under way, is not counted as finished."""
    state = PassState(pass_number=position.state.pass_number)
    return _moved(replace(position, in_pass=False, trained=False), {}, state)


def _moved(position: Position, identity: Identity, state: PassState) -> Position:
    # Version 1: only the properties in ``identity`` are compared. Another world may use other batches and workers.
    return replace(
        position,
        identity=identity,
        version=1,
        generators=(),
        worker_rng=None,
        used_again=False,
        state=state,
        samples_given=None,
    )


def batches_before(position: Position, loader: object) -> int:
    """Return how many batches of ``loader`` there are in the samples that another number of ranks has given in this
    pass, rounded up."""
    sharing = sharing_of(loader) or position.sharing
    if not position.state.samples_before or sharing is None:
        return 0
    return -(-position.state.samples_before // (sharing.ranks * sharing.batch_size))


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
