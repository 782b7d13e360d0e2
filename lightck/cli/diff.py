"""``lightck diff``: the tensors and values in which two checkpoints differ. Exit status 1 means different."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

import click

from lightck.cli import diff_directories, stored_checkpoints
from lightck.cli.base import BAD, OK, POOL, ComparingCommand, any_store_option, json_option, usage_error
from lightck.cli.open_tier import is_of_ranks
from lightck.cli.output import progress_bar
from lightck.cli.text import Facts, columns, count, print_json, print_line, print_verdict
from lightck.errors import CorruptPoolError, NoCheckpointError, PoolLockedError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint
from lightck.pool.storage.lock import holder_of

if TYPE_CHECKING:
    from lightck.restore.contents import Source

ROWS_MAX = 20
"""Without ``--all``, the text names at most ``ROWS_MAX`` differing tensors, and as many differing values."""

IN_MEMORY_NBYTES_MAX = 1 << 30
"""The size of the largest checkpoint that is read into memory before it is compared, if the pool is in use."""


class _OverwrittenError(Exception):
    """A training overwrote the slot of a checkpoint while the checkpoint was compared."""


@click.command("diff", cls=ComparingCommand, short_help="Show how two checkpoints, or two pools, differ.")
@click.argument("a", type=POOL)
@click.argument("b", type=POOL, required=False)
@click.option(
    "--steps", type=(click.IntRange(0), click.IntRange(0)), metavar="M N", help="Compare step M of A with step N of B."
)
@click.option(
    "--all", "everything", is_flag=True, help="List every difference; without it, the first 20 tensors and 20 values."
)
@any_store_option
@json_option
def command(a: str, b: str | None, steps: tuple[int, int] | None, everything: bool, as_json: bool) -> int:
    """Compare the newest checkpoints of the pools A and B or, with --steps M N, two checkpoints of one pool.

    A and B can be tiers, whose checkpoints are fetched to memory, or directories of groups of ranks. Of such a
    directory the newest checkpoint that all ranks have is compared.

    Equal means equal in bits. Exit status: 0 equal, 1 different, 2 the checkpoints could not be compared.
    """
    if b is None and steps is None:
        usage_error("One pool alone cannot be compared: name a second pool, or two steps of this pool (--steps M N).")
    b = a if b is None else b
    sides = a, b, steps or (None, None)
    if is_of_ranks(a) or is_of_ranks(b):
        facts = diff_directories.differences(*sides, compare_pools=differences)
    else:
        facts = differences(*sides)
    if as_json:
        print_json(facts)
    else:
        _show(facts, None if everything else ROWS_MAX)
    return OK if facts["equal"] else BAD


# -- facts -----------------------------------------------------------------------------------------------------------


def differences(a: str, b: str, steps: tuple[int | None, int | None]) -> Facts:
    """Return the object that ``--json`` prints; docs/json.md lists its keys. ``steps``: for each pool the step of the
    checkpoint to compare; None stands for the newest checkpoint."""
    with ExitStack() as stack:
        wanted = zip((a, b), steps, strict=True)
        readers = [stack.enter_context(stored_checkpoints.open_reader(path, step)) for path, step in wanted]
        for _ in range(stored_checkpoints.ATTEMPTS):
            sides = [_side(reader, step) for reader, step in zip(readers, steps, strict=True)]
            try:
                return _compared(sides)
            except _OverwrittenError:
                continue
    raise PoolLockedError(
        f"The pools {a!r} and {b!r} could not be compared: one of them is in use, and in each of "
        f"{stored_checkpoints.ATTEMPTS} attempts its checkpoints were overwritten while they were read. The pools are "
        "not damaged. Try again, or stop the training first."
    )


def _side(reader: PoolReader, step: int | None) -> stored_checkpoints.FoundCheckpoint:
    """Return the checkpoint of a pool that is compared. Raises ``NoCheckpointError`` or ``CorruptPoolError``."""
    checkpoints = stored_checkpoints.find_checkpoints(reader, step)
    chosen = stored_checkpoints.first_usable(checkpoints, step)
    if chosen is not None:
        return chosen
    if not checkpoints:
        raise NoCheckpointError(
            f"The pool {reader.path!r} holds no checkpoint to compare: no step was committed yet. Train a step first."
        )
    reasons = tuple(f"step {each.step}: {each.reason}" for each in checkpoints)
    raise CorruptPoolError(
        f"No checkpoint in the pool {reader.path!r} can be compared ({'; '.join(reasons)}). "
        f"lightck verify {reader.path} shows the damage.",
        reasons,
    )


def _compared(sides: list[stored_checkpoints.FoundCheckpoint]) -> Facts:
    from lightck.cli import compare

    contents = [side.contents for side in sides]
    assert contents[0] is not None
    assert contents[1] is not None
    try:
        a, b = (_source(side) for side in sides)
        names = a.entries.keys() | b.entries.keys()
        with progress_bar("comparing", sides[0].nbytes or 0) as advance:
            tensors = list(compare.tensors(a, b, advance))
    except DamagedError as error:
        _refuse_damage(sides, error)
    if not all(_is_in_slot(side) for side, source in zip(sides, (a, b), strict=True) if source is side.stored):
        raise _OverwrittenError
    values = list(compare.small_state(contents[0], contents[1]))
    return {
        "equal": not tensors and not values,
        "a": _location(sides[0]),
        "b": _location(sides[1]),
        "compared_tensors": len(names),
        "tensors": tensors,
        "values": values,
    }


def _source(side: stored_checkpoints.FoundCheckpoint) -> Source:
    """Return the source of the tensors: the slot, or a copy in memory if a process has the pool open and the checkpoint
    is not larger than ``IN_MEMORY_NBYTES_MAX``. (If updates must be replayed, the result is kept in memory, and the
    other tensors are read from the pool.)"""
    from lightck.restore.contents import in_memory

    assert side.stored is not None
    if not isinstance(side.stored, StoredCheckpoint):
        _ = side.stored.entries  # replays the updates
        return side.stored
    if (side.nbytes or 0) > IN_MEMORY_NBYTES_MAX or holder_of(side.stored.reader.path) is None:
        return side.stored
    source = in_memory(side.stored)
    if not _is_in_slot(side):
        raise _OverwrittenError
    return source


def _location(side: stored_checkpoints.FoundCheckpoint) -> Facts:
    assert side.stored is not None
    return {"pool": side.stored.reader.path, "step": side.step, "generation": side.generation}


def _is_in_slot(side: stored_checkpoints.FoundCheckpoint) -> bool:
    assert side.stored is not None
    return stored_checkpoints.is_in_slot(side.stored.reader, side.record)


def _refuse_damage(sides: list[stored_checkpoints.FoundCheckpoint], error: DamagedError) -> NoReturn:
    """Raise ``CorruptPoolError`` for a bad block, or ``_OverwrittenError`` if a slot was overwritten meanwhile."""
    if any(stored_checkpoints.is_overwritten(side) for side in sides):
        raise _OverwrittenError from error
    named = " or ".join(f"step {side.step} of {_location(side)['pool']!r}" for side in sides)
    raise CorruptPoolError(
        f"A tensor of {named} cannot be compared: {error}. `lightck verify --deep POOL` shows which checkpoints "
        "are intact."
    ) from error


# -- text ------------------------------------------------------------------------------------------------------------


def _show(facts: Facts, most: int | None) -> None:
    for name in ("a", "b"):
        print_line(f"{name.upper()}  step {facts[name]['step']} of {facts[name]['pool']}")
    print_line()
    tensors, values = facts["tensors"], facts["values"]
    if facts["equal"]:
        print_verdict(
            f"EQUAL, bit for bit: {count(facts['compared_tensors'], 'tensor')} and every other saved value.", good=True
        )
        return
    if tensors:
        _show_tensors(tensors, most)
        print_line()
    if values:
        for row in values[:most]:
            print_line(f"{_of_rank(row)}{row['path']}: {row['change']}")
        _show_more(len(values), most, "value")
        print_line()
    print_verdict(
        f"DIFFERENT: {len(tensors)} of {count(facts['compared_tensors'], 'tensor')}, {count(len(values), 'value')}.",
        good=False,
    )


def _show_tensors(tensors: list[Facts], most: int | None) -> None:
    """Print the tensors in three groups: tensors that exist on one side only or differ in dtype, shape, tied name or
    strides; tensors with another number of NaN elements; all others.

    Within a group the model's tensors come first. Among the model's tensors, and among all other tensors, the largest
    distance comes first.
    """
    ordered = sorted(tensors, key=_sort_key)
    rows = [("tensor", "differing", "max abs", "max rel", "")]
    rows += [_row(each) for each in ordered[:most]]
    for line in columns(rows, right=(1, 2, 3)):
        print_line(line)
    _show_more(len(tensors), most, "tensor")


def _sort_key(each: Facts) -> tuple[int, int, float]:
    found = each["distance"]
    other_role = int(not each["tensor"].startswith("model/"))
    if found is None:
        return 0, other_role, 0.0
    distance = math.inf if found["max_rel"] is None else float(found["max_rel"])  # an unknown distance comes first
    return (1 if found["nan_a"] != found["nan_b"] else 2), other_role, -distance


def _of_rank(row: Facts) -> str:
    """Return the rank whose part differs, as the beginning of a line; "" where no ranks are compared one by one."""
    return f"rank {row['rank']}: " if "rank" in row else ""


def _row(each: Facts) -> tuple[str, str, str, str, str]:
    found, name = each["distance"], _of_rank(each) + each["tensor"]
    if found is None:
        return name, "-", "-", "-", each["change"]
    nan = f"NaN: {found['nan_a']:,} -> {found['nan_b']:,}" if found["nan_a"] or found["nan_b"] else ""
    share = f"{found['differing']:,} of {found['elements']:,}"
    apart, relative = ("-" if found[key] is None else f"{float(found[key]):.3g}" for key in ("max_abs", "max_rel"))
    return name, share, apart, relative, nan


def _show_more(number: int, most: int | None, thing: str) -> None:
    if most is not None and number > most:
        print_line(f"and {count(number - most, thing)} more (--all lists them)")
