"""What ``lightck inspect`` says of a tier: its claims, its checkpoints, what they share, and what the newest one holds.

It reads the tier's manifests, and of one checkpoint also the pool's layout table and the manifest of its slot. It reads
no tensor.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from lightck.cli import stored_checkpoints, tier_checkpoints
from lightck.cli.base import BAD, OK
from lightck.cli.open_tier import open_tier
from lightck.cli.stored_checkpoints import FoundCheckpoint
from lightck.cli.text import Facts, columns, count, print_json, print_line, print_verdict, size

if TYPE_CHECKING:
    from lightck.tiers.candidates import Candidate
    from lightck.tiers.decisions import Listing
    from lightck.tiers.names import Claim, ObjectName
    from lightck.tiers.store import Store

ContentsOf = Callable[[FoundCheckpoint], Facts]
"""Returns the object of what a checkpoint holds."""


def inspect(
    path: str, step: int | None, as_json: bool, contents_of: ContentsOf, show_contents: Callable[[Facts], None]
) -> int:
    """Show what lies in a tier. ``show_contents``: prints what ``contents_of`` returns. Exit status 1 if there are
    checkpoints and none of them (of those of ``step``, if given) can be used."""
    facts = tier_facts(path, step, contents_of)
    if as_json:
        print_json(facts)
    else:
        _show(facts, step, show_contents)
    return BAD if facts["shown"] is None and (facts["checkpoints"] or facts["unreadable"]) else OK


# -- facts -----------------------------------------------------------------------------------------------------------


def tier_facts(path: str, step: int | None, contents_of: ContentsOf) -> Facts:
    """Return the object that ``--json`` prints; docs/json-tiers.md lists its keys."""
    from lightck.tiers.candidates import no_checkpoint_error, run_of
    from lightck.tiers.claiming import refuse_other_runs

    store = open_tier(path)
    listing = store.listing()
    refuse_other_runs(store, listing)
    found = tier_checkpoints.find(store, listing)
    wanted = [each for each in found.candidates if step is None or each.checkpoint.step == step]
    if step is not None and not wanted:
        raise no_checkpoint_error(store, listing, step)
    claims = list(_claims(store, listing, found.candidates))
    return {
        "tier": path,
        "run": run_of(store, listing),
        "nbytes": sum(each["nbytes"] for each in claims),
        "compressed": _compressed(found.candidates),
        "claims": claims,
        "checkpoints": _checkpoints(store, listing, found.without_repeats),
        "unreadable": found.unreadable,
        "shown": _shown(wanted, contents_of, found.unreadable),
    }


def _claims(store: Store, listing: Listing, candidates: Sequence[Candidate]) -> Iterator[Facts]:
    from lightck.tiers.claiming import claim_if_there

    checkpoints = {each.checkpoint for each in candidates}
    sizes = _named_objects(candidates)
    for claim in sorted(listing.claims, reverse=True):
        content = claim_if_there(store, claim)
        own = {name: nbytes for name, nbytes in sizes.items() if name.writer.claim == claim}
        unnamed = [each for each in listing.objects if each.writer.claim == claim and each not in own]
        yield {
            "claim": str(claim),
            "written_by": None if content is None else content.written_by,
            "path": [{"claim": str(each.claim), "step": each.step} for each in (content.path if content else ())],
            "checkpoints": sum(each.claim == claim for each in checkpoints),
            "objects": len(own),
            "nbytes": sum(own.values()),
            "unnamed_objects": len(unnamed),
            "unnamed_nbytes": _nbytes_of(store, unnamed),
        }


def _named_objects(candidates: Sequence[Candidate]) -> Mapping[ObjectName, int]:
    return {sent.name: sent.nbytes for each in candidates for sent in each.objects}


def _compressed(candidates: Sequence[Candidate]) -> list[Facts]:
    """Return one row for each codec: how many objects of the tier it compressed, and their bytes after and before."""
    objects = {sent.name: sent for each in candidates for sent in each.objects if sent.coding is not None}
    found: dict[str, Facts] = {}
    for sent in objects.values():
        assert sent.coding is not None, "taken above"
        empty: Facts = {"codec": sent.coding.codec, "objects": 0, "nbytes": 0, "content_nbytes": 0}
        row = found.setdefault(sent.coding.codec, empty)
        row["objects"] += 1
        row["nbytes"] += sent.nbytes
        row["content_nbytes"] += sent.content_nbytes
    return [found[codec] for codec in sorted(found)]


def _nbytes_of(store: Store, names: Sequence[ObjectName]) -> int | None:
    """Return how many bytes these objects have; None if the store does not say."""
    if not store.knows_sizes:
        return None
    return sum(store.nbytes_of(str(name)) or 0 for name in names)


def _checkpoints(store: Store, listing: Listing, candidates: Sequence[Candidate]) -> list[Facts]:
    """Return one row for each checkpoint, newest first."""
    from lightck.tiers.claiming import claim_if_there
    from lightck.tiers.decisions import on_path

    highest = max(listing.claims, default=None)
    content = claim_if_there(store, highest) if highest is not None else None
    path = () if content is None else content.path
    history = on_path((each.checkpoint for each in candidates), highest, path) if highest is not None else set()
    known: dict[Claim, set[ObjectName]] = {}
    rows = []
    for each in reversed(candidates):
        objects = {sent.name: sent.nbytes for sent in each.objects}
        older = known.setdefault(each.checkpoint.claim, set())
        new = sum(nbytes for name, nbytes in objects.items() if name not in older)
        older.update(objects)
        first = each.manifests[0]
        more = {"generation": first.record.payload_generation, "incarnation": first.incarnation}
        row = tier_checkpoints.row(each) | more
        row |= {"objects": len(objects), "new_nbytes": new, "on_path": each.checkpoint in history}
        rows.append(row | {"codecs": sorted(set().union(*(manifest.codecs for manifest in each.manifests)))})
    return rows[::-1]


def _shown(candidates: Sequence[Candidate], contents_of: ContentsOf, unreadable: list[Facts]) -> Facts | None:
    """Return what the first usable checkpoint holds. Those before it, which cannot be used, are appended to
    ``unreadable``."""
    from lightck.errors import CorruptPoolError
    from lightck.pool.format.structures import DamagedError
    from lightck.tiers.fetching import metadata_to_memory

    for each in candidates:
        reason: str | None = None
        try:
            each.refuse_stale()
            with closing(metadata_to_memory(each.store, each.manifests[0])) as reader:
                (found,) = stored_checkpoints.find_checkpoints(reader)
                if found.stored is not None:
                    return {"ranks": each.world_size, **contents_of(found)}
                reason = found.reason
        except (DamagedError, CorruptPoolError) as err:
            reason = str(err)
        at: Facts = {"step": each.checkpoint.step, "claim": str(each.checkpoint.claim)}
        unreadable.append(at | {"reason": reason})
    return None


# -- text ------------------------------------------------------------------------------------------------------------


def _show(facts: Facts, step: int | None, show_contents: Callable[[Facts], None]) -> None:
    claims, checkpoints = facts["claims"], facts["checkpoints"]
    objects = sum(each["objects"] for each in claims)
    for line in columns(
        [
            ("tier", facts["tier"]),
            ("run", f"{str(facts['run'])[:8]}, {count(len(claims), 'claim')}"),
            ("size", f"{size(facts['nbytes'])} in {count(objects, 'object')}"),
            *(_codec_row(each) for each in facts["compressed"]),
        ]
    ):
        print_line(line)
    print_line()
    head = ("claim", "by", "continues from", "checkpoints", "size")
    for line in columns([head, *map(_claim_row, claims)], right=(3, 4)):
        print_line(line)
    print_line()
    if not checkpoints:
        print_line("no checkpoint was sent whole yet")
    for line in tier_checkpoints.table(checkpoints):
        print_line(line)
    for line in _remarks(facts):
        print_line(line)
    if facts["shown"] is not None:
        print_line()
        if facts["shown"]["ranks"] > 1:
            print_line(f"the part of rank 0 of {facts['shown']['ranks']}:")
        show_contents(facts["shown"])
    print_line()
    _show_next(facts, step)


def _codec_row(each: Facts) -> tuple[str, str]:
    ratio = each["content_nbytes"] / each["nbytes"]
    made_from = f"{size(each['content_nbytes'])} became {size(each['nbytes'])}"
    return each["codec"], f"{count(each['objects'], 'object')}: {made_from}, {ratio:.2f} times smaller"


def _claim_row(each: Facts) -> tuple[str, str, str, str, str]:
    last = each["path"][-1] if each["path"] else None
    begin = "the beginning" if last is None else f"step {last['step']} of {last['claim']}"
    return each["claim"], f"lightck {each['written_by']}", begin, str(each["checkpoints"]), size(each["nbytes"])


def _remarks(facts: Facts) -> Iterator[str]:
    for each in facts["checkpoints"]:
        if not each["on_path"]:
            at = f"step {each['step']} (claim {each['claim']})"
            yield f"{at}: the newest training did not go on from it, nor from a later checkpoint of its claim"
    for each in facts["unreadable"]:
        yield f"step {each['step']} (claim {each['claim']}) cannot be used: {each['reason']}"
    unnamed = sum(each["unnamed_objects"] for each in facts["claims"])
    if unnamed:
        sizes = [each["unnamed_nbytes"] for each in facts["claims"]]
        nbytes = "" if None in sizes else f", {size(sum(sizes))}"
        manifest = "readable manifest" if facts["unreadable"] else "manifest"
        yield f"{count(unnamed, 'object')} that no {manifest} names{nbytes}: being sent, or left over (lightck gc)"


def _show_next(facts: Facts, step: int | None) -> None:
    name, shown = shlex.quote(facts["tier"]), facts["shown"]
    if shown is not None:
        which = "" if step is None else f" --step {step}"
        print_line(f"recover() and `lightck copy {name} NEW.pool{which}` read step {shown['step']}.")
        print_line(f"To check every byte: lightck verify --deep{which} {name}")
    elif facts["checkpoints"] or facts["unreadable"]:
        print_verdict(f"No checkpoint can be used. Next: lightck verify --deep {name}", good=False)
    else:
        print_line("Nothing to recover yet.")
