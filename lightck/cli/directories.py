"""What ``inspect`` and ``verify`` say of a directory of a group: the pools of its ranks, and what all of them have."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict

from lightck.cli import groups, stored_checkpoints
from lightck.cli.base import BAD, OK
from lightck.cli.text import Facts, columns, count, listed, print_json, print_line, print_verdict
from lightck.errors import PoolError, PoolPathError, RankError
from lightck.pool.reader import open_pool
from lightck.pool.storage.lock import holder_of
from lightck.ranks.copy_file import is_peer_copy
from lightck.ranks.directory import World, existing_pools, missing_error, open_worlds


def inspect(directory: str, as_json: bool) -> int:
    """Show the pools of a group: ranks and their checkpoints, what is common, and which rank is missing. Exit status 1
    if no checkpoint is common, a pool is missing, or the pools do not belong together."""
    facts = _facts(directory)
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    return OK if facts["common"] and facts["problem"] is None else BAD


def verify(directory: str, as_json: bool, pool_facts: Callable[[str], Facts]) -> int:
    """Verify every pool of a group, and put the newest common checkpoint together. ``pool_facts``: returns the facts of
    one pool for its path. Exit status 1 if anything is damaged or missing."""
    facts = _facts(directory)
    pools = [pool_facts(one["path"]) for one in facts["pools"] if one["error"] is None]
    facts |= {"verified": pools, "recoverable_step": None}
    if facts["problem"] is None:
        import lightck

        try:
            facts["recoverable_step"] = lightck.recover(directory).step
        except (PoolError, RankError) as err:
            facts["problem"] = str(err)
    facts["ok"] = facts["problem"] is None and all(one["ok"] for one in pools)
    if as_json:
        print_json(facts)
    else:
        _show(facts)
        _show_verified(facts)
    return OK if facts["ok"] else BAD


def _facts(directory: str) -> Facts:
    """Return the object for ``--json``; docs/json.md lists its keys."""
    pools = [_pool(str(path)) for path in existing_pools(directory)]
    problem, common = None, []
    try:
        with open_worlds(directory) as worlds:
            paths_of_newest_world = {reader.path for reader in worlds[0].readers.values()}
            pools += [_pool(worlds[0].readers[rank].path) for rank in worlds[0].ranks_from_copies]
            if worlds[0].missing:
                problem = str(missing_error(directory, worlds[0]))
                if _hold_whole_tensors(worlds[0]):
                    problem += (
                        " Here the other pools hold the whole of each tensor, so attach(..., resume=True) also works "
                        "without what is missing."
                    )
        of_ranks = [pool["checkpoints"] for pool in pools if pool["path"] in paths_of_newest_world]
        held = [{(one["incarnation"], one["step"]) for one in checkpoints} for checkpoints in of_ranks]
        common = sorted(set.intersection(*held), reverse=True)
    except (PoolError, RankError) as err:
        problem = str(err)
    return {
        "directory": os.path.abspath(directory),
        "pools": pools,
        "common": [{"incarnation": incarnation, "step": step} for incarnation, step in common],
        "problem": problem,
    }


def _hold_whole_tensors(world: World) -> bool:
    """Whether every pool holds the whole of each tensor: no pool has a mesh (of DTensors or of ``layout=``), and no
    tensor has pieces."""
    readers = world.readers.values()
    is_plain = all(reader.group is None or not reader.group.mesh_shape for reader in readers)
    return is_plain and all(entry.pieces is None for reader in readers for entry in reader.entries)


def _pool(path: str) -> Facts:
    facts: Facts = {"path": path, "group": None, "holder": None, "checkpoints": [], "error": None}
    facts["is_copy"] = is_peer_copy(path)
    try:
        with closing(open_pool(path, gradients=True)) as reader:
            found = stored_checkpoints.find_checkpoints(reader)
            holder = holder_of(path)
            facts["group"] = groups.group_facts(reader.group)
            facts["holder"] = None if holder is None else asdict(holder)
            facts["checkpoints"] = [
                # The incarnation in the slot header, not that in the commit record: the record of an adoption has a new
                # incarnation, and perhaps not all ranks have written it yet.
                {"incarnation": each.stored.header.incarnation, "step": each.step}
                for each in found
                if each.stored is not None and each.state == stored_checkpoints.COMMITTED
            ]
    except PoolError as err:
        facts["error"] = str(err)
    return facts


# -- text --------------------------------------------------------------------------------------------------------------


def _show(facts: Facts) -> None:
    copies = [pool for pool in facts["pools"] if pool["is_copy"]]
    also = f", and {count(len(copies), 'peer copy')} in the place of pools on other hosts" if copies else ""
    print_line(f"{facts['directory']}: {count(len(facts['pools']) - len(copies), 'pool')} of ranks{also}")
    print_line()
    common = {(one["incarnation"], one["step"]) for one in facts["common"]}
    rows = [("rank", "checkpoints (*: all ranks have this one)", "open in", "file")]
    for pool in facts["pools"]:
        group, holder = pool["group"], pool["holder"]
        steps = [f"{one['step']}{'*' * ((one['incarnation'], one['step']) in common)}" for one in pool["checkpoints"]]
        rows.append(
            (
                "?" if group is None else f"{group['rank']} of {group['world_size']}",
                ("cannot be read" if pool["error"] else "") or listed((f"step {step}" for step in steps), 8) or "none",
                "" if holder is None else f"process {holder['pid']}",
                os.path.relpath(pool["path"], facts["directory"]),
            )
        )
    for line in columns(rows):
        print_line(line)
    print_line()
    for pool in facts["pools"]:
        if pool["error"] is not None and pool["error"] != facts["problem"]:
            print_verdict(pool["error"], good=False)
    if any(pool["holder"] for pool in facts["pools"]):
        print_line("A training has these pools open. They were read one after the other, so the steps may differ.")
    if facts["problem"] is not None:
        print_verdict(facts["problem"], good=False)
    elif facts["common"]:
        print_verdict(f"step {facts['common'][0]['step']} is the newest that all ranks have", good=True)
    else:
        print_verdict("the ranks have no checkpoint in common", good=False)


def _show_verified(facts: Facts) -> None:
    for one in facts["verified"]:
        if not one["ok"]:
            print_verdict(f"{one['pool']}: damaged (`lightck verify --deep` of this file says where)", good=False)
    if facts["recoverable_step"] is not None:
        step = facts["recoverable_step"]
        print_verdict(f"step {step} is intact on all ranks, and the parts of its tensors are complete", good=True)


def refuse_options_of_one_pool(step: int | None, tensors: bool = False) -> None:
    """Raise ``PoolPathError`` if an option was given that is for one pool only."""
    if step is not None or tensors:
        raise PoolPathError(
            "--step and --tensors are for the pool of one rank, and this is the directory of all ranks. Pass the file "
            "of a rank. Or list the parts of all tensors of a step: `lightck inspect --pieces --step N DIRECTORY`."
        )
