"""What ``lightck verify`` says of a tier: its claims, the manifests and objects of each checkpoint, and their bytes.

The manifest of each checkpoint is checked, and whether its objects exist and have the right lengths. Checkpoints are
fetched to memory, the newest first, until one is intact: each block is compared with the checksum that the training
computed. ``--deep`` fetches all checkpoints, and compares the SHA-256 of each object with its name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightck.cli import tier_checkpoints
from lightck.cli.base import BAD, OK
from lightck.cli.open_tier import open_tier
from lightck.cli.output import progress_bar
from lightck.cli.text import Facts, columns, count, print_json, print_line, print_verdict, size

if TYPE_CHECKING:
    from lightck.tiers.candidates import Candidate
    from lightck.tiers.decisions import Listing
    from lightck.tiers.names import ObjectName
    from lightck.tiers.store import Store

SHOWN_MAX = 10
"""The largest number of damaged objects of one checkpoint that the text names."""


def verify(path: str, step: int | None, as_json: bool, *, deep: bool) -> int:
    """Verify a tier. Exit status 1 if anything is damaged."""
    facts = tier_facts(path, step, deep=deep)
    if as_json:
        print_json(facts)
    else:
        _show(facts)
    return OK if facts["ok"] else BAD


# -- facts -----------------------------------------------------------------------------------------------------------


def tier_facts(path: str, step: int | None, *, deep: bool) -> Facts:
    """Return the object that ``--json`` prints; docs/json-tiers.md lists its keys."""
    from lightck.tiers.candidates import no_checkpoint_error
    from lightck.tiers.claiming import refuse_other_runs

    store = open_tier(path)
    listing = store.listing()
    claims = list(_claims(store, listing))
    are_claims_good = not any(each["damaged"] for each in claims)
    if are_claims_good:
        refuse_other_runs(store, listing)
    checkpoints = _checkpoints(store, listing, step, deep=deep)
    if step is not None and not checkpoints:
        raise no_checkpoint_error(store, listing, step)
    usable = [row for row in checkpoints if row["recoverable"]] if are_claims_good else []
    return {
        "tier": path,
        "deep": deep,
        "ok": are_claims_good and not any(row["damage"] for row in checkpoints),
        "structures": claims,
        "checkpoints": checkpoints,
        "recoverable_step": usable[0]["step"] if usable else None,
    }


def _claims(store: Store, listing: Listing) -> Iterator[Facts]:
    from lightck.errors import TierError
    from lightck.tiers.claiming import claim_if_there

    for claim in sorted(listing.claims, reverse=True):
        try:
            claim_if_there(store, claim)
        except TierError as err:
            yield {"name": f"claim {claim}", "damaged": True, "note": str(err)}
        else:
            yield {"name": f"claim {claim}", "damaged": False, "note": None}


def _checkpoints(store: Store, listing: Listing, step: int | None, *, deep: bool) -> list[Facts]:
    """Return one row for each checkpoint that was not removed meanwhile, newest first."""
    from lightck.tiers.reading import is_gone

    found = tier_checkpoints.find(store, listing, step)
    known: dict[ObjectName, str | None] = {}
    rows, is_one_whole = [], False
    for each in found.candidates:
        is_read = deep or step is not None or not is_one_whole
        checked = _checked(store, each, known, is_read=is_read, deep=deep)
        if checked["damage"] and is_gone(store, listing, each.checkpoint):
            continue
        rows.append(checked)
        is_one_whole = is_one_whole or checked["recoverable"]
    rows += [_unreadable(each) for each in found.unreadable]
    return sorted(rows, key=lambda row: (row["claim"], row["step"], row["generation"] or 0), reverse=True)


def _unreadable(one: Facts) -> Facts:
    nothing: Facts = dict.fromkeys(("generation", "incarnation", "ranks", "nbytes"))
    return {
        "step": one["step"],
        "claim": one["claim"],
        **nothing,
        "objects": 0,
        "blocks": "not read",
        "recoverable": False,
        "stale": False,
        "damage": [{"object": None, "reason": f"its manifest cannot be used: {one['reason']}"}],
    }


def _checked(
    store: Store, found: Candidate, known: dict[ObjectName, str | None], *, is_read: bool, deep: bool
) -> Facts:
    """Check one checkpoint. ``known``: a cache of object -> its damage (None: it is intact), because several
    checkpoints may use one object."""
    from lightck.pool.format.structures import DamagedError

    row: Facts = {
        "step": found.checkpoint.step,
        "claim": str(found.checkpoint.claim),
        "generation": found.manifests[0].record.payload_generation,
        "incarnation": found.manifests[0].incarnation,
        "ranks": found.world_size,
        "nbytes": found.nbytes,
        "objects": len({each.name for each in found.objects}),
        "blocks": "not read",
        "recoverable": False,
        "stale": False,
        "damage": [],
    }
    try:
        found.refuse_stale()
    except DamagedError:
        row["stale"] = True
        is_read = is_read and deep
    damage = _damaged_objects(store, found, known, reads=deep)
    if is_read:
        reason = None if damage else _block_damage(store, found)
        if reason is not None:  # which objects are the cause?
            named = [] if deep else _damaged_objects(store, found, {}, reads=True)
            damage = named or [{"object": None, "reason": reason}]
        row["blocks"] = "damaged" if damage else "verified"
        row["recoverable"] = not damage and not row["stale"]
    return row | {"damage": damage}


def _damaged_objects(
    store: Store, found: Candidate, known: dict[ObjectName, str | None], *, reads: bool
) -> list[Facts]:
    from lightck.tiers.object_copies import damage_of

    objects = {each.name: each for each in found.objects}
    nbytes = sum(each.nbytes for each in objects.values() if each.name not in known)
    with progress_bar(f"objects of step {found.checkpoint.step}", nbytes if reads else 0) as advance:
        for name, sent in objects.items():
            if name not in known:
                known[name] = damage_of(store, sent, reads=reads)
                advance(sent.nbytes)
    return [{"object": str(name), "reason": known[name]} for name in objects if known[name] is not None]


def _block_damage(store: Store, found: Candidate) -> str | None:
    """Fetch a checkpoint to memory, and return what is wrong with it; None if nothing is."""
    from lightck.errors import CorruptPoolError
    from lightck.pool.format.structures import DamagedError
    from lightck.tiers.fetching import fetched_to_memory

    try:
        with progress_bar(f"verifying step {found.checkpoint.step}", found.nbytes) as advance:
            for manifest in found.manifests:
                fetched_to_memory(store, manifest, advance).close()
    except (DamagedError, CorruptPoolError) as err:
        return str(err)
    return None


# -- text ------------------------------------------------------------------------------------------------------------


def _show(facts: Facts) -> None:
    claims = facts["structures"]
    bad = [each for each in claims if each["damaged"]]
    rows = [("claims", "damaged" if bad else "OK", count(len(claims), "claim") + " checked")]
    rows += [("", "", each["note"]) for each in bad]
    for checkpoint in facts["checkpoints"]:
        rows += _rows(checkpoint, deep=facts["deep"])
    for line in columns(rows):
        print_line(line)
    print_line()
    _show_verdict(facts)


def _rows(checkpoint: Facts, *, deep: bool) -> list[tuple[str, str, str]]:
    name = f"step {checkpoint['step']} (claim {checkpoint['claim']})"
    reasons = [_damage_words(each) for each in checkpoint["damage"]]
    if reasons:
        rows = [(name if i == 0 else "", "damaged" if i == 0 else "", reason) for i, reason in enumerate(reasons)]
        if len(rows) > SHOWN_MAX:
            rows[SHOWN_MAX:] = [("", "", f"and {count(len(rows) - SHOWN_MAX, 'more object')} (--json lists them)")]
        return rows
    nbytes, objects = size(checkpoint["nbytes"]), count(checkpoint["objects"], "object")
    if checkpoint["stale"]:
        return [(name, "-", "recovery skips it: a newer checkpoint says that this one may hold wrong bytes")]
    if checkpoint["blocks"] == "verified":
        and_names = " and every object its SHA-256" if deep else ""
        return [(name, "OK", f"every block matches its checksum{and_names} ({nbytes} in {objects})")]
    return [(name, "OK", f"its {objects} are there; their bytes were not read (--deep reads them)")]


def _damage_words(damage: Facts) -> str:
    return str(damage["reason"]) if damage["object"] is None else f"object {damage['object']}: {damage['reason']}"


def _show_verdict(facts: Facts) -> None:
    step, name = facts["recoverable_step"], shlex.quote(facts["tier"])
    if facts["ok"]:
        if step is not None:
            print_verdict(f"OK: step {step} can be recovered.", good=True)
        elif facts["checkpoints"]:
            print_verdict("OK: nothing that was read is damaged.", good=True)
        else:
            print_verdict("OK, and empty: no checkpoint was sent whole yet.", good=True)
    elif any(each["damaged"] for each in facts["structures"]):
        print_verdict(
            "DAMAGED. Nothing is recovered from this tier until the damaged claims are moved out of it.", good=False
        )
    elif step is None:
        print_verdict(
            "DAMAGED, and no checkpoint that was checked can be recovered. Use the pool, or another tier.", good=False
        )
    else:
        print_verdict(f"DAMAGED. Step {step} is whole: attach(..., resume=True) and recover() use it.", good=False)
        ranks = next(row["ranks"] for row in facts["checkpoints"] if row["step"] == step and row["recoverable"])
        what, new = ("a pool", "NEW.pool") if ranks == 1 else ("the pools of all ranks", "NEW_DIRECTORY")
        print_line(f"To make {what} from step {step}: lightck copy {name} {new} --step {step}")
