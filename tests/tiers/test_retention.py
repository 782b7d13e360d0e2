"""How much a tier holds after many trainings, by the rules alone (their safety: ``test_tier_model.py``)."""

from __future__ import annotations

import pytest

from lightck.tiers.decisions import GRACE_SECONDS, Listing, Retention, kept, manifests_to_delete, objects_to_delete
from lightck.tiers.names import Claim, ManifestName, ObjectName, TierCheckpoint, Writer

EVERY_SECONDS, KEEP_LAST = 300, 3


def sent_by_sessions(minutes: int, n_sessions: int) -> tuple[list[ManifestName], list[ObjectName]]:
    """What lies in a tier after sessions that each go on from the last step of the one before, and send a checkpoint
    every five minutes, with one object each."""
    manifests: dict[ManifestName, float] = {}
    objects: dict[ObjectName, float] = {}
    named: dict[ManifestName, ObjectName] = {}
    claims, path, now, step = list[Claim](), list[TierCheckpoint](), 0.0, 0
    for number in range(1, n_sessions + 1):
        claims.append(Claim(number, f"{number:08x}"))
        writer, began = Writer(claims[-1], 0, 1), now
        for _ in range(minutes * 60 // EVERY_SECONDS):
            now, step = now + EVERY_SECONDS, step + 100
            name = ManifestName(writer, step, f"{step:08x}")
            named[name] = ObjectName(writer, f"{step:064x}", name.nonce)
            manifests[name] = objects[named[name]] = now
            listing = Listing(frozenset(claims), dict(manifests), dict(objects), now)
            stays = kept(listing, Retention(keep_last=KEEP_LAST), claims[-1], path)
            while gone := manifests_to_delete(listing, stays, writer):
                for each in gone:
                    assert now - min(t for n, t in manifests.items() if n.checkpoint > each.checkpoint) >= GRACE_SECONDS
                    del manifests[each]
                listing = Listing(frozenset(claims), dict(manifests), dict(objects), now)
            of_writers: dict[Writer, set[ObjectName]] = {each.writer: set() for each in objects}
            for each in manifests:
                of_writers[each.writer].add(named[each])
            for unused in objects_to_delete(listing, of_writers, writer, began):
                del objects[unused]
        path.append(TierCheckpoint(claims[-1], step))
    return list(manifests), list(objects)


@pytest.mark.parametrize("minutes", [10, 30, 45, 60, 65, 120])
def test_sessions_that_are_shorter_than_the_grace_fill_no_tier(minutes):
    """Preempted machines and short jobs: no session lives until a checkpoint of its own is an hour old."""
    sizes = [len(sent_by_sessions(minutes, n)[0]) for n in (20, 40)]
    in_an_hour = GRACE_SECONDS / EVERY_SECONDS
    of_a_session = minutes * 60 / EVERY_SECONDS
    assert max(sizes) <= in_an_hour + 2 * of_a_session + KEEP_LAST
    assert sizes[1] <= sizes[0], "it does not grow"


@pytest.mark.parametrize("minutes", [30, 65])
def test_objects_of_removed_checkpoints_go_too(minutes):
    manifests, objects = sent_by_sessions(minutes, 30)
    assert len(objects) <= len(manifests) + 2 * minutes * 60 / EVERY_SECONDS
