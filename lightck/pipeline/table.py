"""What a new pool file is laid out for: the tensors of its layout table, and their order. Reads no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightck.pool.create import RESERVE_MIN
from lightck.pool.format.layout import Entry
from lightck.pool.writer import PoolWriter

Table = dict[str, Entry]


def room_for(old: PoolWriter | None, now: Sequence[Entry], held: Sequence[Entry]) -> tuple[Table, list[Entry]]:
    """The layout table of the file that follows ``old``, and what else its reserve has to take: held tensors that are
    of another kind now.

    Without ``now`` the training's tensors are what ``old`` was used for. What an optimizer will have is kept in mind,
    what a user's object had is not.
    """
    current = {entry.name: entry for entry in now}
    table = _foreseen(old, current) if old is not None else {}
    table |= {entry.name: entry for entry in (*held, *now)}
    tied = {e.name for e in table.values() if e.alias is not None}
    table = {n: e for n, e in table.items() if e.alias is None or (e.alias in table and e.alias not in tied)}
    return table, [e for e in held if e.name not in table or not table[e.name].same_bytes_as(e)]


def _foreseen(old: PoolWriter, now: Mapping[str, Entry]) -> Table:
    """Optimizer state that was laid out for a parameter which has none yet: it may still wake."""
    used = {name: old.entries[number] for name, number in old.numbers.items()}
    if not now:
        return {name: entry for name, entry in used.items() if entry.role != "state"}
    params = {e.name.removeprefix("model/") for e in now.values() if e.role == "param"}
    return {name: entry for name, entry in used.items() if entry.role == "optimizer" and _param_of(entry) in params}


def spare_nbytes(old: PoolWriter | None, table: Table) -> int:
    """Room for growth: what changed its size may double, and each new layout has more for what is new. So a training
    that grows at every step is laid out anew ever more seldom."""
    if old is None:
        return 0
    nbytes = sum(entry.nbytes for entry in table.values())
    grew = sum(table[name].nbytes for name in old.grew & table.keys())
    return 2 * grew + max(RESERVE_MIN, nbytes >> max(2, 4 - old.layouts))


def _param_of(entry: Entry) -> str:
    return entry.name.removeprefix("optimizer/").rpartition("/")[0]


def in_order_of_need(entries: Iterable[Entry]) -> list[Entry]:
    """Each parameter followed by its optimizer state, in the order of the modules: what the next step touches
    together lies together, and is free again together."""
    entries = list(entries)
    owner = {e.name.removeprefix("model/"): i for i, e in enumerate(entries) if e.role in ("param", "buffer")}

    def key(item: tuple[int, Entry]) -> tuple[int, int]:
        i, entry = item
        if entry.role != "optimizer":
            return (i if entry.role != "state" else len(entries)), -1
        return owner.get(_param_of(entry), len(entries)), i

    return [entry for _, entry in sorted(enumerate(entries), key=key)]
