"""The model of a relayout as it is built: the new file holds what the rank carries over, and then takes the name.

(In ``Model`` the file of before stays beside the new one instead. Both are safe.)
"""

from __future__ import annotations

from collections.abc import Iterator

from lightck.ranks.rule import CheckpointId, Knowledge, PoolView
from ranks.model import COMMITTED, FREE, VISIBLE, WRITING, Choice, Model, Move, Rank, Slot, State, in_order, view_of


class Carries(Model):
    """During a relayout, ``Rank.slots`` are those of the new file, and ``Rank.files`` has what lies in the file of
    before. The relayout ends at the boundary. The change of the name is visible and durable when the record of the new
    checkpoint is; a crash before brings back the file of before."""

    def carried(self, state: State, rank: Rank, knowledge: Knowledge) -> frozenset[CheckpointId]:
        """The checkpoints that the rank carries over."""
        return frozenset(one for one in in_slots(rank) if not knowledge.may_overwrite(one))

    def choices(self, state: State, i: int) -> set[Choice]:
        return {Choice(choice.slot, state.ranks[i].files) for choice in super().choices(state, i)}

    def visible_to_others(self, rank: Rank) -> PoolView:
        has_name = any(slot.status == VISIBLE for slot in rank.slots)
        return view_of(rank._replace(files=()) if has_name else rank)

    def _begins(self, state: State, i: int) -> Iterator[Move]:
        yield from super()._begins(state, i)
        rank = state.ranks[i]
        checkpoint = CheckpointId(state.incarnation, rank.step)
        for carried in {self.carried(state, rank, each) for each in self.knowledge(state, i)}:
            if len(carried) < self.slots:
                slots = [*(Slot(one, COMMITTED) for one in carried), Slot(checkpoint, WRITING)]
                slots += [FREE] * (self.slots - len(slots))
                after = rank._replace(at=rank.at + 1, slots=in_order(slots), files=(in_slots(rank),))
                yield self._move("lays its pool out anew for", state, i, after, checkpoint, is_progress=False)

    def _copies(self, state: State, i: int) -> Iterator[Move]:
        for move in super()._copies(state, i):
            rank = move.state.ranks[i]
            if rank.files and move.kind == "has committed":
                move = self._move(move.kind, state, i, rank._replace(files=()), move.what)
            yield move

    def _crashes(self, state: State) -> Iterator[Move]:
        for move in super()._crashes(state):
            yield move._replace(state=move.state._replace(ranks=tuple(map(with_one_file, move.state.ranks))))


def in_slots(rank: Rank) -> frozenset[CheckpointId]:
    return frozenset(slot.checkpoint for slot in rank.slots if slot.status == COMMITTED)


def with_one_file(rank: Rank) -> Rank:
    """The rank after a crash in a relayout: the new file has the pool's name, or the file of before has it again."""
    if not rank.files:
        return rank
    if any(slot.status == VISIBLE for slot in rank.slots):
        return rank._replace(files=())
    before = [Slot(one, COMMITTED) for one in rank.files[0]]
    return rank._replace(slots=in_order([*before, *[FREE] * (len(rank.slots) - len(before))]), files=())
