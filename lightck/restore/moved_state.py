"""The small state of a checkpoint of several ranks, adapted to a rank of another world.

Random states are new. They follow from the run and the step; in ``attach`` also from the states that the script has
set; in ``lightck reshard`` also from the number of the rank, unless all old ranks had the same random states. Positions
in loaders are adapted (``dataloader/moved_position.py``). A rank that continues the part of one old rank (``key=None``)
keeps the random states of that rank, and its positions in loaders. All else is that of the rank whose small state
counts (``LogicalCheckpoint.state_position``); pipeline stages are merged (``stages.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightck.dataloader.moved_position import moved_position, own_position
from lightck.errors import CorruptPoolError, RankError, listed
from lightck.pool.format.structures import DamagedError
from lightck.restore.contents import OptimizerContents, Saved
from lightck.restore.logical import ROLES_THAT_MUST_AGREE, LogicalCheckpoint
from lightck.restore.relocated import Relocated
from lightck.restore.saved_layout import SavedLayout
from lightck.restore.stages import differing_options
from lightck.restore.usable import parse
from lightck.state import values
from lightck.state.derived_rng import derive_states
from lightck.state.rng import RngState


def key_of_rank(run_id: bytes, step: int, rank: int) -> bytes:
    """Return the key from which a rank that takes a checkpoint of other ranks derives its random states. ``rank``: 0 if
    the key is to be the same on all ranks."""
    return run_id + step.to_bytes(8, "little") + rank.to_bytes(8, "little")


def new_random_states(stored: Saved, key: bytes, script_rng: RngState | None = None) -> dict[str, object]:
    """Return random states that follow from ``key``, in place of those of ``stored``. ``script_rng``: the random states
    that the script has set (``script`` of ``derive_states``)."""
    contents = parse(stored)
    state: dict[str, object] = {"rng": derive_states(contents.rng, key, script_rng).to_value()}
    if contents.rng_forward is not None:
        state["rng_forward"] = derive_states(contents.rng_forward, key + b"forward", script_rng).to_value()
    return state


def have_same_random_states(logical: LogicalCheckpoint) -> bool:
    """Whether all ranks had the same random states."""
    states = [values.pack(parse(stored).rng.to_value(), path="rng") for stored in logical.of_ranks]
    return len(set(states)) == 1


def moved_state(
    relocated: Relocated,
    n_saved: int,
    key: bytes | None,
    script_rng: RngState | None = None,
    layout: SavedLayout | None = None,
) -> tuple[dict[str, object], list[str]]:
    """Return the values that replace those of ``relocated`` in the small state of a rank of another world, and the
    names of the loaders whose pass over the data begins again. ``n_saved``: number of ranks of the old world. ``key``:
    the random states of this rank follow from it; None if the rank keeps its random states and its positions in loaders
    from the old world. ``script_rng``: as in ``new_random_states``. ``layout``: of this rank. Raises
    ``DamagedError``."""
    changed: dict[str, object] = {"stale_after": None, "copied_from": None, "from_world": n_saved}
    changed["layout"] = None if layout is None else layout.to_value()
    if key is None:
        return changed | {"loaders": _own_positions(relocated)}, []
    positions, restarted = _positions(relocated.logical, key, script_rng)
    return changed | new_random_states(relocated, key, script_rng) | {"loaders": positions}, restarted


def _own_positions(relocated: Relocated) -> dict[str, object]:
    """Return the positions of a rank that keeps its own. Raises ``DamagedError``."""
    positions = [parse(stored).loaders for stored in relocated.logical.of_ranks]
    with _as_damage():
        return {
            name: own_position(value, [one[name] for one in positions if name in one])
            for name, value in parse(relocated).loaders.items()
        }


@contextmanager
def _as_damage() -> Iterator[None]:
    try:
        yield
    except CorruptPoolError as err:
        raise DamagedError(str(err)) from err


def describe_restarted(names: Sequence[str]) -> str:
    """Return what to say about loaders whose pass over the data begins again."""
    return (
        f"the pass over {listed(names, 3)} begins again, so samples of it are given twice (only a DataLoader with "
        "torch's DistributedSampler goes on in the middle of a pass with another number of ranks)"
    )


def _positions(
    logical: LogicalCheckpoint, key: bytes, script_rng: RngState | None
) -> tuple[dict[str, object], list[str]]:
    """Return the position of each loader for this rank, and the names of the loaders whose pass over the data begins
    again. ``key``: the random states of this rank follow from it. Raises ``DamagedError``."""
    saved = [parse(stored).loaders for stored in logical.of_ranks]
    positions: dict[str, object] = {}
    restarted: list[str] = []
    for name in saved[0]:
        with _as_damage():
            moved = moved_position([one[name] for one in saved if name in one], key + name.encode(), script_rng)
        positions[name] = moved.value
        if moved.restarts:
            restarted.append(name)
    return positions, restarted


def _without_tensors(one: OptimizerContents) -> tuple[object, ...]:
    """Return the parts of an optimizer, apart from its tensors, that must be equal on all ranks."""
    return one.class_name, one.wraps, one.names, one.packed_param_state, one.packed_other_state, one.groups


def refuse_disagreeing_ranks(logical: LogicalCheckpoint) -> None:
    """Raise ``RankError`` if ranks that should hold the same have different bytes, so that nobody knows which of them
    are right."""
    differing = logical.differing(ROLES_THAT_MUST_AGREE)
    optimizers = [] if logical.is_of_stages else [parse(stored).optimizers for stored in logical.of_ranks]
    if logical.is_of_stages:
        differing += differing_options(logical.of_ranks)
    for of_rank in optimizers[1:]:
        differing += [
            f"the optimizer {one.class_name} (its class, parameters, options or other state)"
            for one, other in zip(optimizers[0], of_rank, strict=False)
            if _without_tensors(one) != _without_tensors(other)
        ]
        differing += ["the number of optimizers"] if len(of_rank) != len(optimizers[0]) else []
    if differing:
        raise RankError(
            f"The checkpoint of step {logical.step} cannot be loaded into other ranks: those that saved it should have "
            f"the same bytes in {listed(list(dict.fromkeys(differing)), 3)}, and have different ones, so nobody knows "
            "which are right. Nothing was changed. Start as many ranks as saved it, sharded in the same way: each "
            "continues with its own."
        )
