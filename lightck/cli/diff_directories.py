"""What ``lightck diff`` says where a side is the directory of a group of ranks.

Each rank has some state of its own: random states, positions of loaders, buffers that differ. If two directories have
equal numbers of ranks and equal meshes, and the ranks wrote shares in both or in neither, they are compared rank by
rank, the ranks' own state included. Otherwise whole tensors are put together and compared, and only rank 0's own state
is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightck.cli.open_tier import is_of_ranks
from lightck.cli.stored_checkpoints import ATTEMPTS
from lightck.cli.text import Facts
from lightck.errors import NoCheckpointError, PoolLockedError
from lightck.pool.storage.lock import holder_of
from lightck.ranks.directory import existing_pools, open_all

if TYPE_CHECKING:
    from lightck.restore.checkpoint import Checkpoint

Steps = tuple[int | None, int | None]
ComparePools = Callable[[str, str, Steps], Facts]
"""Compares two pools, named by their paths, and returns the object for ``--json``."""


def differences(a: str, b: str, steps: Steps, compare_pools: ComparePools) -> Facts:
    """Return the object that ``--json`` prints; docs/json.md lists its keys. ``steps``: see ``diff.differences``.
    ``compare_pools``: compares the pools of two ranks."""
    for _ in range(ATTEMPTS):
        try:
            return _compared(a, b, steps, compare_pools)
        except NoCheckpointError:
            if steps != (None, None) or not (_is_in_use(a) or _is_in_use(b)):
                raise
    raise PoolLockedError(
        f"The pools in {a!r} and {b!r} could not be compared: a training has them open, and in each of {ATTEMPTS} "
        "attempts it overwrote checkpoints that were not compared yet. The pools are not damaged. Try again, or stop "
        "the training first. Pools without gradient records can also be given more slots: attach(..., slots=8)."
    )


def _is_in_use(path: str) -> bool:
    return is_of_ranks(path) and any(holder_of(str(pool)) for pool in existing_pools(path))


def _compared(a: str, b: str, steps: Steps, compare_pools: ComparePools) -> Facts:
    groups = [_group(path, step) for path, step in zip((a, b), steps, strict=True)]
    if groups[0] is None or groups[1] is None or groups[0][0] != groups[1][0]:
        return _compared_whole_tensors(a, b, steps)
    return _rank_by_rank((a, groups[0]), (b, groups[1]), compare_pools)


GroupShape = tuple[int, tuple[int, ...], bool]
"""Number of ranks, mesh, and whether the ranks wrote shares. Two groups of the same shape are compared rank by rank."""
Group = tuple[GroupShape, list[str], int]
"""The shape of a group, the path of each rank's pool, and the step that is compared."""


def _group(path: str, step: int | None) -> Group | None:
    """Return the group of a directory; None for a file, and for a tier."""
    from lightck.restore.logical import has_shares_in_table
    from lightck.restore.usable import usable_by_id

    if not is_of_ranks(path):
        return None
    with open_all(path) as readers:
        identity = readers[0].group
        held = [usable_by_id(reader) for reader in readers]
        common = [one for one in frozenset.intersection(*map(frozenset, held)) if step is None or one.step == step]
        if not common:
            wanted = "" if step is None else f" of step {step}"
            raise NoCheckpointError(
                f"The ranks in {path!r} have no checkpoint{wanted} in common. `lightck inspect {path}` shows what each "
                "rank has."
            )
        # A directory may hold the pool of a single process, which has no identity: it counts as the pool of one rank.
        has_shares = any(map(has_shares_in_table, readers))
        shape = (1, (), False) if identity is None else (identity.world_size, identity.mesh_shape, has_shares)
        return shape, [reader.path for reader in readers], max(common).step


def _rank_by_rank(a: tuple[str, Group], b: tuple[str, Group], compare_pools: ComparePools) -> Facts:
    (path_a, (_, pools_a, step_a)), (path_b, (_, pools_b, step_b)) = a, b
    found: Facts = {
        "equal": True,
        "a": {"pool": path_a, "step": step_a, "generation": None},
        "b": {"pool": path_b, "step": step_b, "generation": None},
        "compared_tensors": 0,
        "tensors": [],
        "values": [],
    }
    for rank, pools in enumerate(zip(pools_a, pools_b, strict=True)):
        one = compare_pools(*pools, (step_a, step_b))
        found["equal"] = found["equal"] and one["equal"]
        found["compared_tensors"] += one["compared_tensors"]
        found["tensors"] += [{**each, "rank": rank} for each in one["tensors"]]
        found["values"] += [{**each, "rank": rank} for each in one["values"]]
    return found


def _compared_whole_tensors(a: str, b: str, steps: Steps) -> Facts:
    """Compare whole tensors, which are put together from the parts of all ranks."""
    import lightck
    from lightck.cli import compare
    from lightck.cli.open_tier import options_of

    one, other = (
        lightck.recover(path, step=step, options=options_of(path)) for path, step in zip((a, b), steps, strict=True)
    )
    tensors = list(compare.tensors(one.source, other.source, lambda nbytes: None))
    values = list(compare.small_state(one.contents, other.contents))
    return {
        "equal": not tensors and not values,
        "a": _location(a, one),
        "b": _location(b, other),
        "compared_tensors": len(one.contents.entries.keys() | other.contents.entries.keys()),
        "tensors": tensors,
        "values": values,
    }


def _location(path: str, checkpoint: Checkpoint) -> Facts:
    return {"pool": path, "step": checkpoint.step, "generation": None}
