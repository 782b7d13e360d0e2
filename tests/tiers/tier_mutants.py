"""Rules for tiers that look right and are not. Each is the model with one thing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightck.tiers import decisions
from lightck.tiers.decisions import Listing
from lightck.tiers.names import Claim, ManifestName, ObjectName, Writer
from tiers.tier_model import CLEANING, GRACE, SWEEPING, Drain, Model, State, named


class SharesAcrossClaims(Model):
    """A checkpoint names objects of an older claim again."""

    def objects_to_reuse(self, state: State, writer: Writer) -> Mapping[str, ObjectName]:
        found = named(state.store)
        older = (each for each in found if each.claim < writer.claim and each.rank == writer.rank)
        shared = {name.content: name for each in older for name in found[each]}
        return {**shared, **super().objects_to_reuse(state, writer)}


class SharesAcrossRanks(Model):
    """A checkpoint names objects of another rank."""

    def objects_to_reuse(self, state: State, writer: Writer) -> Mapping[str, ObjectName]:
        found = named(state.store)
        others = (each for each in found if each.claim == writer.claim and each.rank != writer.rank)
        shared = {name.content: name for each in others for name in found[each]}
        return {**shared, **super().objects_to_reuse(state, writer)}


class OlderClaimsDelete(Model):
    """A drain that was superseded goes on deleting, and what counts is the step alone."""

    def is_superseded(self, listing: Listing, claim: Claim) -> bool:
        return False

    def manifests_to_delete(self, state: State, listing: Listing, drain: Drain) -> list[ManifestName]:
        newest = max((each.step for each in decisions.complete(listing)), default=0)
        return sorted(each for each in listing.manifests if each.step < newest and drain.writer.rank == 0)


class MeasuresByItsOwnClock(Model):
    """The clock of a drain's machine is an hour ahead of that of the store."""

    def manifests_to_delete(self, state: State, listing: Listing, drain: Drain) -> list[ManifestName]:
        return super().manifests_to_delete(state, replace(listing, now=listing.now + GRACE), drain)


class DeletesObjectsFirst(Model):
    """The objects of a checkpoint are deleted before its manifest."""

    def deletions(self, state: State, listing: Listing, drain: Drain) -> tuple[int, list[Any]]:
        manifests = self.manifests_to_delete(state, listing, drain)
        contents = dict(state.store.manifests)
        stay = {name for each, names in contents.items() if each not in manifests for name in names}
        objects = sorted({name for each in manifests for name in contents.get(each, ())} - stay)
        if objects:
            return SWEEPING, [*objects, *manifests]
        return (CLEANING, list(manifests)) if manifests else super().deletions(state, listing, drain)


class CollectsBelowTheHighest(Model):
    """``lightck gc`` deletes below each claim that is not the highest."""

    def collected(self, state: State, listing: Listing) -> list[Any]:
        highest = max(listing.claims)
        found = self.named_in(state, listing)
        return sorted(
            each
            for each, time in listing.objects.items()
            if each.writer.claim < highest and listing.now - time >= GRACE and each not in found[each.writer]
        )


class DeletesAtOnceAfterAStart(Model):
    """A drain that has just begun takes its first listing for the whole."""

    def objects_to_delete(self, state: State, listing: Listing, drain: Drain) -> list[ObjectName]:
        return super().objects_to_delete(state, listing, drain._replace(is_old=True))


class UsesWhatItFinds(Model):
    """A drain uses any object again that lies below its prefix."""

    def objects_to_reuse(self, state: State, writer: Writer) -> Mapping[str, ObjectName]:
        return {each.content: each for each in sorted(state.store.objects) if each.writer == writer}
