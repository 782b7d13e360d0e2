"""``lightck inspect``: a pool's geometry and medium, the process that has the pool open, and the checkpoints with their
contents.

The command reads structures, manifests and small state, but no payload; ``lightck verify`` reads the payload.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict

import click

from lightck.cli import directories, gradients, groups, inspect_tier, pieces, stored_checkpoints
from lightck.cli.base import BAD, OK, POOL, Command, any_store_option, json_option, step_option, usage_error
from lightck.cli.open_tier import is_tier
from lightck.cli.text import Facts, columns, count, listed, print_json, print_line, print_verdict, size, survives
from lightck.errors import FormatError, NotAPoolError
from lightck.events import ClosingEvent
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import SUPERBLOCK_NBYTES, SUPERBLOCK_OFFSETS, DamagedError, Superblock
from lightck.pool.reader import PoolReader, StoredCheckpoint
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.lock import holder_of

ROWS_MAX = 40
"""The largest number of rows in the table of modules. If there are more modules, a row stands for a group of them
(``folded``)."""


@click.command(
    "inspect", cls=Command, short_help="Show what a pool holds: checkpoints, layers, sizes, who has it open."
)
@click.argument("pool", type=POOL)
@step_option
@click.option("--tensors", is_flag=True, help="List every tensor by name.")
@click.option("--pieces", "shows_pieces", is_flag=True, help="List which ranks hold which parts of each tensor.")
@any_store_option
@json_option
def command(pool: str, step: int | None, tensors: bool, shows_pieces: bool, as_json: bool) -> int:
    """Show the geometry of POOL, its medium and its checkpoints. Nothing is written, and the pool may be in use. For
    the directory of a group of ranks, show what each rank has and what all of them have. With --pieces, show of one
    checkpoint which ranks hold which parts of each tensor. For a tier, show its claims and its checkpoints.

    Exit status 1 if checkpoints were committed and none of them (with --step N: none of step N) can be used.
    """
    if shows_pieces and tensors:
        usage_error("--tensors and --pieces are two lists. Pass one of them.")
    if is_tier(pool):
        if shows_pieces:
            usage_error("--pieces is for pools, and POOL is a tier. Leave it out: --tensors lists the tensors.")
        return inspect_tier.inspect(pool, step, as_json, lambda each: _contents(each, tensors), _show_contents)
    if shows_pieces:
        refuse_pieces(pool)
        return pieces.inspect(pool, step, as_json)
    if os.path.isdir(pool):
        directories.refuse_options_of_one_pool(step, tensors)
        return directories.inspect(pool, as_json)
    facts = pool_facts(pool, step, tensors)
    if as_json:
        print_json(facts)
    else:
        _show(facts, step)
    return BAD if facts["checkpoints"] and facts["shown"] is None else OK


def refuse_pieces(path: str) -> None:
    """Raise the error for ``--pieces`` of a pool with gradient records."""
    if os.path.isdir(path):
        return
    with stored_checkpoints.open_reader(path) as reader:
        if reader.superblock.has_gradients:
            usage_error(
                f"--pieces cannot be used for {path!r}: it is a pool with gradient records, which holds most tensors "
                "as they were at older steps. Leave out --pieces: then bases and records are listed. --tensors lists "
                "the tensors."
            )


# -- facts -----------------------------------------------------------------------------------------------------------


def pool_facts(path: str, step: int | None, tensors: bool) -> Facts:
    """Return the object that ``--json`` prints; docs/json.md lists its keys."""
    with stored_checkpoints.open_reader(path) as reader:
        found = stored_checkpoints.find_checkpoints(reader)
        wanted = found if step is None else stored_checkpoints.find_checkpoints(reader, step)
        shown = stored_checkpoints.first_usable(wanted, step)
        newest = stored_checkpoints.first_usable(found, None)
        checkpoints = [_checkpoint(each, each is newest) for each in found]
        backend = backend_for(reader.path)
        durability = backend.probe(reader.path)
        holder = holder_of(reader.path)
        return {
            "pool": _geometry(reader, backend.name),
            "group": groups.group_facts(reader.group),
            "holder": None if holder is None else asdict(holder),
            "durability": {name: getattr(durability, name) for name in ("process", "os", "power", "media", "medium")}
            | {"evidence": list(durability.evidence)},
            "checkpoints": checkpoints,
            "versions": checkpoints,  # the old name of the key
            "unfinished": [
                {"slot": slot, "generation": gen} for slot, gen in stored_checkpoints.unfinished(reader, found)
            ],
            "shown": None if shown is None else _contents(shown, tensors),
        }


def _geometry(reader: PoolReader, backend: str) -> Facts:
    sb = reader.superblock
    return {
        "path": reader.path,
        "backend": backend,
        "format": _format(reader),
        "uuid": sb.uuid.hex(),
        "file_nbytes": os.stat(reader.path).st_size or sb.nbytes,  # the size of a device file is 0
        "nbytes": sb.nbytes,
        "slots": len(sb.slots),
        "slot_nbytes": sb.slot_nbytes,
        "homes": len(sb.homes),
        "home_nbytes": sb.home_nbytes,
        "writable": reader.is_writable,
    }


def _format(reader: PoolReader) -> str:
    """Return the major and minor number of the pool's format, which are in the superblock: "1.0"."""
    for offset in SUPERBLOCK_OFFSETS:
        data = reader.read(offset, SUPERBLOCK_NBYTES)
        with contextlib.suppress(DamagedError, NotAPoolError, FormatError):
            Superblock.unpack(data)
            return ".".join(map(str, struct.unpack_from("<HH", data, 12)))
    return "unknown"


def _checkpoint(checkpoint: stored_checkpoints.FoundCheckpoint, newest: bool) -> Facts:
    return {
        "step": checkpoint.step,
        "iteration": None if checkpoint.stored is None else checkpoint.stored.iteration,
        "generation": checkpoint.generation,
        "incarnation": checkpoint.record.incarnation,
        "slot": checkpoint.record.slot,
        "state": checkpoint.state,
        "reason": checkpoint.reason,
        "newest": newest,
        "nbytes": checkpoint.nbytes,
        "updates": _updates(checkpoint),
    }


def _updates(checkpoint: stored_checkpoints.FoundCheckpoint) -> int | None:
    """Return how many updates a recovery of the checkpoint replays; None if it is not readable."""
    if checkpoint.stored is None:
        return None
    return 0 if isinstance(checkpoint.stored, StoredCheckpoint) else gradients.updates_to_replay(checkpoint.stored)


def _contents(checkpoint: stored_checkpoints.FoundCheckpoint, tensors: bool) -> Facts:
    assert checkpoint.stored is not None
    assert checkpoint.contents is not None
    contents, stored = checkpoint.contents, checkpoint.stored
    entries = contents.entries
    return {
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "nbytes": checkpoint.nbytes,
        "small_state_nbytes": len(stored.state),
        "tensors": len(entries),
        "parts": sum(entry.pieces is not None for entry in entries.values()),
        "layers": _layers(checkpoint),
        "tied": {name: entry.alias for name, entry in entries.items() if entry.alias is not None},
        "optimizers": _optimizers(checkpoint),
        "state": {name: len(packed) for name, packed in contents.state.items()},
        "extra_state": list(contents.extra),
        "loaders": sorted(map(str, contents.loaders)),
        "layout": None if contents.layout is None else contents.layout.to_value(),
        "rng": ["python", "numpy", "torch", *(f"cuda:{index}" for index, _ in contents.rng.cuda)],
        "closed_by": contents.event,
        "gradients": None if isinstance(stored, StoredCheckpoint) else gradients.contents(stored),
        "made_with": {str(key): str(value) for key, value in contents.fingerprint.items()},
        "all_tensors": [_tensor(entry) for entry in entries.values()] if tensors else None,
    }


def _tensor(entry: Entry) -> Facts:
    names = ("name", "role", "dtype", "device", "nbytes", "alias")
    plain = {name: getattr(entry, name) for name in names} | {"shape": list(entry.shape)}
    return plain | groups.part_facts(entry)


def _layers(checkpoint: stored_checkpoints.FoundCheckpoint) -> list[Facts]:
    """Return one row per module, in the model's order, with the sums over the module's own tensors (without those of
    submodules) and over the optimizer state of its parameters."""
    from lightck.restore.optimizer import keys_by_param

    assert checkpoint.contents is not None
    found: dict[str, Facts] = {}
    by_param: dict[str, Facts] = {}
    for saved in checkpoint.contents.optimizers:
        by_param |= keys_by_param(checkpoint.contents, saved)
    for name, entry in checkpoint.contents.model_entries.items():
        module = name.rpartition(".")[0]
        empty = {"module": module, "tensors": 0, "elements": 0, "model_nbytes": 0, "optimizer_nbytes": 0}
        row = found.setdefault(module, empty)
        row["tensors"] += 1
        row["model_nbytes"] += entry.nbytes
        row["elements"] += 0 if entry.alias else math.prod(entry.shape)
        row["optimizer_nbytes"] += sum(e.nbytes for e in by_param.get(name, {}).values())
    return list(found.values())


def _optimizers(checkpoint: stored_checkpoints.FoundCheckpoint) -> list[Facts]:
    from lightck.restore.optimizer import keys_by_param

    assert checkpoint.contents is not None
    rows = []
    for saved in checkpoint.contents.optimizers:
        by_param = keys_by_param(checkpoint.contents, saved)
        state = [entry for name in saved.all_names for entry in by_param.get(name, {}).values()]
        rows.append(
            {
                "class": saved.class_name,
                "groups": len(saved.groups),
                "params": len(saved.all_names),
                "tensors": len(state),
                "nbytes": sum(entry.nbytes for entry in state),
            }
        )
    return rows


# -- text ------------------------------------------------------------------------------------------------------------


def _show(facts: Facts, step: int | None) -> None:
    pool, shown = facts["pool"], facts["shown"]
    for line in columns(list(_head(facts))):
        print_line(line)
    print_line()
    _show_checkpoints(facts)
    if shown is not None:
        print_line()
        _show_contents(shown)
        if shown["gradients"] is not None:
            print_line()
            gradients.show(shown["gradients"], shown["step"])
    print_line()
    _show_next(pool["path"], facts, step)


def _head(facts: Facts) -> Iterator[tuple[str, str]]:
    pool, holder, durability = facts["pool"], facts["holder"], facts["durability"]
    yield "pool", pool["path"]
    slots = f"{pool['slots']} slots of {size(pool['slot_nbytes'])}"
    if pool["homes"]:
        homes = f"{pool['homes']} homes of {size(pool['home_nbytes'])}"
        slots = f"gradient records, {slots}, {homes}"
    yield "kind", f"{pool['backend']}, format {pool['format']}, {size(pool['file_nbytes'])}: {slots}"
    if not pool["writable"]:
        yield "", "written by a newer lightck: this lightck can read the pool, but attach cannot resume from it"
    if facts["group"] is not None:
        yield "group", groups.group_words(facts["group"])
        yield "", f"run {facts['group']['run_id']}, world {facts['group']['world_id']}"
    yield "open in", _who(holder)
    yield "medium", f"{durability['medium']}; survives {survives(durability)}"
    yield "", f"({'; '.join(durability['evidence'])})"


def _who(holder: Facts | None) -> str:
    if holder is None:
        return "no process"
    if holder["pid"] is None:
        return "a process that this one cannot see (another container?)"
    return f"pid {holder['pid']}: {holder['command'] or '(command not readable)'}"


def _show_checkpoints(facts: Facts) -> None:
    has_homes = bool(facts["pool"]["homes"])
    rows = [("step", "iteration", "incarnation", "generation", "slot", "size", *["updates"] * has_homes, "state")]
    for row in facts["checkpoints"]:
        step, incarnation, generation, slot = (str(row[key]) for key in ("step", "incarnation", "generation", "slot"))
        iteration = "-" if row["iteration"] is None else str(row["iteration"])
        nbytes = "-" if row["nbytes"] is None else size(row["nbytes"])
        updates = ["-" if row["updates"] is None else str(row["updates"])] * has_homes
        rows.append((step, iteration, incarnation, generation, slot, nbytes, *updates, _state(row)))
    if len(rows) == 1:
        print_line("no checkpoint was committed yet")
    else:
        for line in columns(rows, right=range(6 + has_homes)):
            print_line(line)
    for each in facts["unfinished"]:
        why = "is being written" if facts["holder"] else "was not finished: a kill cut it off, or lightck dropped it"
        what = "gradient record" if has_homes else "checkpoint"
        if has_homes and not facts["holder"]:
            why = (
                "is newer than the newest checkpoint: a kill came before the next checkpoint was committed, or lightck "
                "dropped the record"
            )
        print_line(f"slot {each['slot']}: the {what} of generation {each['generation']} {why}; it is not committed")


def _state(row: Facts) -> str:
    if row["state"] == stored_checkpoints.REJECTED:
        return f"rejected: {row['reason']}"
    if row["state"] == stored_checkpoints.DEAD:
        return "dead: training resumed from an older step; only recover(step=) returns it"
    if row["state"] == stored_checkpoints.RECORDED:
        return "no intact commit record: recovery returns it if newer ones are damaged, or if its step is requested"
    return "committed, newest" if row["newest"] else "committed"


def _show_contents(shown: Facts) -> None:
    print_line(f"step {shown['step']} holds {count(shown['tensors'], 'tensor')}, {size(shown['nbytes'])}:")
    for line in columns(list(_parts(shown))):
        print_line("  " + line)
    print_line()
    if shown["all_tensors"] is not None:
        _show_tensors(shown["all_tensors"])
    else:
        _show_layers(shown["layers"])


def _parts(shown: Facts) -> Iterator[tuple[str, str]]:
    elements = sum(row["elements"] for row in shown["layers"])
    model = sum(row["model_nbytes"] for row in shown["layers"])
    yield "model", f"{elements:,} elements in {count(len(shown['layers']), 'module')}, {size(model)}"
    if shown["tied"]:
        yield "tied", listed(f"{_short(a)} = {_short(b)}" for a, b in shown["tied"].items())
    if shown["parts"]:
        words = "is a part of a tensor" if shown["parts"] == 1 else "are parts of tensors"
        yield "parts", f"{count(shown['parts'], 'tensor')} {words} that the ranks hold together: --tensors shows which"
    if shown["layout"] is not None:
        layout = shown["layout"]
        of_stages = f", stage {layout['stage']} of {layout['stages']}" if layout["stages"] > 1 else ""
        yield "layout", f"rank {layout['rank']} of {layout['size']}{of_stages}: {layout['rules']}"
    for each in shown["optimizers"]:
        params = f"{count(each['params'], 'parameter')} in {count(each['groups'], 'group')}"
        yield "optimizer", f"{each['class']}: {params}, {count(each['tensors'], 'tensor')}, {size(each['nbytes'])}"
    if not shown["optimizers"]:
        yield "optimizer", "none"
    if shown["state"]:
        yield "state", listed(shown["state"])
    if shown["extra_state"]:
        yield "extra", listed(shown["extra_state"])
    if shown["loaders"]:
        yield "loaders", listed(shown["loaders"])
    # A save without a session stores random states too, but they are never restored, so they are not shown.
    if shown["closed_by"] != ClosingEvent.SAVE.value:
        yield "random", ", ".join(shown["rng"])
    yield "made with", ", ".join(f"{key} {value}" for key, value in shown["made_with"].items())


def _short(name: str) -> str:
    return name.removeprefix("model/")


def _show_tensors(tensors: list[Facts]) -> None:
    rows = [("tensor", "role", "dtype", "shape", "bytes")]
    for t in tensors:
        shape = groups.shape_words(t["shape"])
        if t["pieces"] is not None:
            shape += f" of {groups.shape_words(t['logical_shape'])}, {count(len(t['pieces']), 'piece')}"
        if t["share"] is not None:
            shape += f", its share of {groups.shape_words(t['share']['held_shape'])}"
        nbytes = f"= {_short(t['alias'])}" if t["alias"] is not None else f"{t['nbytes']:,}"
        rows.append((t["name"], t["role"], t["dtype"], shape, nbytes))
    for line in columns(rows, right=(4,)):
        print_line(line)


def _show_layers(layers: list[Facts]) -> None:
    rows = folded(layers)
    names = ("tensors", "elements", "model_nbytes", "optimizer_nbytes")
    table = [("module", "tensors", "elements", "model", "optimizer")]
    for row in rows:
        tensors, elements, model, optimizer = (row[name] for name in names)
        module = row["module"] or "(the model itself)"
        table.append((module, str(tensors), f"{elements:,}", size(model), size(optimizer)))
    for line in columns(table, right=range(1, 5)):
        print_line(line)
    if len(rows) < len(layers):
        print_line(
            f"{len(layers)} modules in {len(rows)} rows: modules whose names begin alike are summed; "
            "--tensors lists every tensor"
        )


def folded(layers: list[Facts], rows_max: int = ROWS_MAX) -> list[Facts]:
    """Return the sums over groups of modules: those whose names begin with the same n parts become one row. n is the
    largest number that gives at most ``rows_max`` rows, and at least 1."""
    paths = [layer["module"].split(".") for layer in layers]

    def names(depth: int) -> list[str]:
        return [".".join(path[:depth]) for path in paths]

    depths = range(1, max(map(len, paths), default=1) + 1)
    # Bisection finds the largest depth with at most ``rows_max`` rows, because the number of rows grows with the depth.
    fitting = bisect_right(depths, rows_max, key=lambda depth: len(set(names(depth))))
    rows: dict[str, Facts] = {}
    for name, layer in zip(names(max(fitting, 1)), layers, strict=True):
        row = rows.setdefault(name, dict.fromkeys(layer, 0) | {"module": name})
        for key in layer.keys() - {"module"}:
            row[key] += layer[key]
    return list(rows.values())


def _show_next(path: str, facts: Facts, step: int | None) -> None:
    shown, pool, name = facts["shown"], facts["pool"], shlex.quote(path)
    if not facts["checkpoints"]:
        start = "" if facts["group"] else " attach(..., resume=True) starts the training from its beginning."
        print_line("Nothing to recover yet." + start)
    elif shown is None:
        which = "No checkpoint" if step is None else f"No checkpoint of step {step}"
        print_verdict(f"{which} can be used. Next: lightck verify --deep {name}", good=False)
    elif facts["group"] is not None:
        which = "" if step is None else f"--step {step} "
        print_line(f"{groups.recovery_note(facts['group'])} To check every byte: lightck verify {which}{name}")
    elif step is None and shown["closed_by"] == ClosingEvent.SAVE.value:
        print_line(f"PoolWriter made this pool: load it with PoolReader. To check every byte: lightck verify {name}")
    elif step is None:
        how = "attach(..., resume=True)" + (" with the strategy Gradients" if pool["homes"] else "")
        print_line(f"{how} resumes from step {shown['step']}. To check every byte: lightck verify {name}")
    else:
        check = f"To check every byte: lightck verify --step {step} {name}"
        print_line(f"lightck.recover({path!r}, step={step}) reads this checkpoint. {check}")
