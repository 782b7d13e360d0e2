"""Rules that look right and are not. Each is the model with one thing changed; its row names what must be found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from lightck.ranks.rule import CheckpointId, Knowledge, PoolView
from ranks.carrying import Carries, in_slots
from ranks.copying import Copies, copy_of
from ranks.model import COMMITTED, DOWN, NOTHING, Choice, Copy, Model, Move, Rank, State, committed, stored


class CountsSlots(Model):
    """A rank overwrites its oldest checkpoint, whatever the others have."""

    def choices(self, state: State, i: int) -> set[Choice]:
        contents = self.contents(state.ranks[i])
        return {Choice(min(contents, key=lambda slot: contents[slot] or NOTHING), ())}


class MinimumOfNewest(Model):
    """The oldest of the ranks' newest checkpoints is taken for common."""

    def knowledge(self, state: State, i: int) -> Iterable[Knowledge]:
        oldest = min(max(committed(rank)) for rank in state.ranks)
        return [Knowledge(oldest, state.ranks[i].adoption)]


class NoIncarnation(Model):
    """Ranks know a checkpoint by its step alone."""

    def newest_common(self, sets: Iterable[Collection[CheckpointId]]) -> CheckpointId | None:
        return super().newest_common([{CheckpointId(1, each.step) for each in held} for held in sets])

    def verdict(self, state: State) -> CheckpointId | None:
        """The step is agreed; each rank restores the newest checkpoint that it has of it."""
        step = self.newest_common([self.reported(rank, stored(rank)) for rank in state.ranks])
        if step is None:
            return None
        chosen = [max(each for each in stored(rank) if each.step == step.step) for rank in state.ranks]
        return max(chosen)

    def reported(self, rank: Rank, held: frozenset[CheckpointId]) -> frozenset[CheckpointId]:
        return held


class ReadsUnacknowledged(Model):
    """A record counts as soon as it is visible, before it is durable."""

    def visible_to_others(self, rank: Rank) -> PoolView:
        return PoolView.of(stored(rank), rank.newest)


class DropsPredecessor(Model):
    """The file of before a relayout is removed when the new one is there."""

    def files_after_relayout(self, rank: Rank) -> tuple[frozenset[CheckpointId], ...]:
        return ()


class DropsPredecessorAfterCommit(Model):
    """The file of before a relayout is removed when the new one has a checkpoint."""

    def choices(self, state: State, i: int) -> set[Choice]:
        has_own = any(slot.status == COMMITTED for slot in state.ranks[i].slots)
        return {Choice(choice.slot, () if has_own else choice.files) for choice in super().choices(state, i)}


class HidesPredecessor(Model):
    """Others see only the new file of a pool that was laid out anew."""

    def visible_to_others(self, rank: Rank) -> PoolView:
        return PoolView.of(committed(rank._replace(files=())), rank.newest)


class CarriesNewestAlone(Carries):
    """A relayout carries over the newest checkpoint alone."""

    def carried(self, state: State, rank: Rank, knowledge: Knowledge) -> frozenset[CheckpointId]:
        return frozenset({max(in_slots(rank))})


class CarriesCommonAlone(Carries):
    """A relayout carries over the checkpoint that the rank knows to be common, and none that is newer."""

    def carried(self, state: State, rank: Rank, knowledge: Knowledge) -> frozenset[CheckpointId]:
        found = super().carried(state, rank, knowledge)
        return frozenset({min(found)}) if found else found


class CarriesUnderNewNames(Carries):
    """A checkpoint that is carried over gets the incarnation of the session."""

    def carried(self, state: State, rank: Rank, knowledge: Knowledge) -> frozenset[CheckpointId]:
        found = super().carried(state, rank, knowledge)
        return frozenset(CheckpointId(state.incarnation, one.step) for one in found)


class NeverForces(Model):
    """The checkpoint after one that was given up is one like all others."""

    def must_commit_within_boundary(self, rank: Rank) -> bool:
        return False


class KnownFromAnotherAttempt(Model):
    """After a recovery, ranks read that step s is common, of the attempt before, and take it for step s of this one."""

    def _back_at(self, rank: Rank, common: CheckpointId) -> Rank:
        known = common if rank.adoption is None else CheckpointId(rank.adoption.incarnation, common.step)
        return super()._back_at(rank, common)._replace(known=known)


class NewestReadLate(Model):
    """A rank reads which checkpoints another has committed, and its newest one later."""

    def views(self, state: State, i: int) -> tuple[PoolView, ...]:
        seen = zip(state.ranks[i].views, state.ranks, strict=True)
        return tuple(PoolView(view.committed, rank.newest) for j, (view, rank) in enumerate(seen) if j != i)


class NewestStillHeld(Model):
    """A rank publishes the newest checkpoint that it still holds, and so may seem to fall back."""

    def visible_to_others(self, rank: Rank) -> PoolView:
        return PoolView.of(committed(rank))


class NoCounts(Model):
    """After an adoption, ranks report what is newer than the adopted checkpoint."""

    def reported(self, rank: Rank, held: frozenset[CheckpointId]) -> frozenset[CheckpointId]:
        return held


class ReportsOfAnotherAttempt(Model):
    """Rank 0 decides, and reads what the others reported in the recovery before. (Their reports are kept in
    ``Rank.views``, which these models do not need.)"""

    def views(self, state: State, i: int) -> tuple[PoolView, ...]:
        return super().views(state._replace(ranks=tuple(rank._replace(views=()) for rank in state.ranks)), i)

    def verdict(self, state: State) -> CheckpointId | None:
        fresh = self.reports(state)
        stale = [rank.views[0].committed if rank.views else now for rank, now in zip(state.ranks, fresh, strict=True)]
        return self.newest_common([fresh[0], *stale[1:]])

    def reports(self, state: State) -> list[frozenset[CheckpointId]]:
        return [self.reported(rank, stored(rank)) for rank in state.ranks]

    def moves(self, state: State) -> Iterator[Move]:
        has_agreed = state.ranks[0].phase == DOWN and state.verdict is None
        kept = (
            [(PoolView.of(each),) for each in self.reports(state)]
            if has_agreed
            else [rank.views for rank in state.ranks]
        )
        for move in super().moves(state):
            ranks = zip(move.state.ranks, kept, strict=True)
            after = move.state._replace(ranks=tuple(rank._replace(views=views) for rank, views in ranks))
            yield move._replace(state=after)


class ForgetsAdoption(Model):
    """A rank keeps what an adoption has left behind, as if it could still be needed."""

    def knowledge(self, state: State, i: int) -> Iterable[Knowledge]:
        return [Knowledge(each.common, None, each.never_common) for each in super().knowledge(state, i)]


class CountsNeverForces(CountsSlots, NeverForces):
    """Both."""


class DropsOlderThanCommon(Copies):
    """A copy drops what is older than the newest checkpoint in all pools, not in all copies."""

    def may_drop_copy(self, known: Knowledge, content: CheckpointId) -> bool:
        return super().may_drop_copy(known, content) or (known.common is not None and content < known.common)


class KeepsNoCopied(Knowledge):
    def _is_for_copies(self, content: CheckpointId) -> bool:
        return self._is_due(content)


class KeepsNoDue(Knowledge):
    def _is_for_copies(self, content: CheckpointId) -> bool:
        return content == self.copied


class OverwritesCopied(Copies):
    """A pool overwrites the newest checkpoint in all copies when a newer one is common."""

    knowledge_type = KeepsNoCopied


class OverwritesDue(Copies):
    """A pool overwrites a checkpoint that is due for the copies when a newer one is common."""

    knowledge_type = KeepsNoDue


class CopiedTooEarly(Copies):
    """A rank publishes a checkpoint of its copy before it is durable there."""

    def copied(self, rank: Rank) -> frozenset[CheckpointId]:
        reading = copy_of(rank).reading
        return super().copied(rank) | ({reading} if reading != NOTHING else frozenset())


class CopiesOverTheOlder(Copies):
    """A copy drops the checkpoint that it has when the next one begins to be copied."""

    def held_beside(self, copy: Copy) -> frozenset[CheckpointId]:
        return frozenset()


class TrimsAtCommon(Copies):
    """Of a pool on its host, a rank reads only what is not older than the newest common checkpoint."""

    def trimmed_at(self, known: Knowledge) -> CheckpointId | None:
        return known.common


class CopiesOnItsHost(Copies):
    """The copy of a pool lies on the host of the pool."""

    def host_of_copy(self, i: int) -> int:
        return self._host[i]


class WritesWhileCopied(Copies):
    """A slot may be overwritten while its checkpoint is copied."""

    def contents(self, rank: Rank) -> dict[int, CheckpointId | None]:
        return Model.contents(self, rank)


class ForgetsInCopy(Copies):
    """What a pool has overwritten as never common stays in its copy."""

    def known_from(self, rank: Rank, views: tuple[PoolView, ...]) -> list[Knowledge]:
        held = committed(rank)
        return [replace(each, never_common=each.never_common & held) for each in super().known_from(rank, views)]


class KeepsAdoptedAlone(Copies):
    """After a recovery, a copy drops everything but the adopted checkpoint."""

    def kept_in_recovery(self, state: State) -> frozenset[CheckpointId]:
        return frozenset() if state.verdict is None else frozenset({state.verdict})


class KeepsAllInRecovery(Copies):
    """After a recovery, a copy drops only what is dead."""

    def kept_in_recovery(self, state: State) -> frozenset[CheckpointId]:
        return frozenset().union(*(self.copied(rank) for rank in state.ranks))


class GoesOnWithoutCopies(Copies):
    """After a recovery, training goes on before the copies have the adopted checkpoint, which counts as copied."""

    def are_whole(self, state: State) -> bool:
        return True
