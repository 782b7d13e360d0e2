"""The commit rule of a group of ranks: which checkpoint all of them have, and which slot a rank may overwrite.

Each rank of a training saves its own part into its own pool. After a crash all ranks must come back to the same step.
One rule makes this possible after every crash, whichever ranks ended first. A checkpoint is *common* if every rank has
committed it.

    A rank overwrites a checkpoint only in two cases: the rank knows a newer checkpoint that is common, or the
    checkpoint can never become common.

*Proof.* Let k of a rank be the newest checkpoint that the rank knows to be common, and let g be the largest k of any
rank at some moment. All ranks have committed g. No rank has overwritten g in the first case, because it would have to
know a newer common checkpoint, and g is the largest k. No rank has overwritten g in the second case, because g is
common. So g is in every pool at every moment, whatever the timing and the topology. (``never_common`` proves that its
result is right.) The largest k never becomes older: a rank forgets nothing until it ends, and a recovery chooses a
checkpoint at least as new as g, from which all ranks go on.

A rank may also have a *peer copy* of its pool on another host (``replicas=2``). The checkpoints whose steps are
multiples of one number are *due* for it. A checkpoint is *copied* if all ranks have it in their copies.

    A rank overwrites neither the newest checkpoint that it knows to be copied, nor a newer one that is due. It drops a
    checkpoint from its copy only if it knows a newer one that is copied, or if the checkpoint can never become common.

*Proof* that any one host can be lost. Let c be the newest checkpoint that any rank knows to be copied at some moment.
Each rank had c in its pool when it copied c, and has kept c there since then: c is due until the rank knows that c is
copied, and from then on c is the newest one that is. No rank has dropped c from its copy. So c is in every pool and in
every copy, and a host takes the pools of its ranks with it, but not their copies.

The rule only makes ranks wait. The points at which they wait decide how many steps a crash loses. The functions here
are pure: they take sets of checkpoints and return decisions. ``tests/ranks/test_model.py`` and ``test_copying.py`` run
them through every interleaving of small groups, with a row for each claim. The proofs and the functions require four
things of the code around them:

- A rank commits its checkpoints in the order of their ids, and leaves out fewer in a row than it has slots.
- Only durable records count as committed, for the rank itself and for others.
- Before a relayout gives the pool's name to the new file, the new file holds every checkpoint that the rank may not
  overwrite, under its id. The change of the name then counts as an overwrite of all other checkpoints in the old file.
  (It would be as safe to keep the old file beside the new one: ``Knowledge.may_remove``. Then other ranks would read
  the checkpoints of both files.)
- ``PoolView.newest`` is not read later than ``PoolView.committed``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class CheckpointId(NamedTuple):
    """The name of a checkpoint in all pools of a group. Of two checkpoints, the one with the larger id is newer."""

    incarnation: int
    """Number of the start or recovery after which the checkpoint was written, from 1; the same on all ranks. A rank
    that lost a step in a crash computes it again, perhaps with other bytes. So two checkpoints of one step from two
    incarnations are different checkpoints."""
    step: int


class Adoption(NamedTuple):
    """What a rank records in its pool when a recovery ends."""

    adopted: CheckpointId | None
    """The checkpoint from which all ranks go on; None: all ranks start from nothing."""
    incarnation: int
    """The incarnation of the checkpoints that the rank writes from now on."""


# -- recovery ----------------------------------------------------------------------------------------------------------


def newest_common(committed: Iterable[Collection[CheckpointId]]) -> CheckpointId | None:
    """Return the newest checkpoint that every rank has committed; None if there is none. ``committed``: for each rank,
    the checkpoints that are durable in its pool.

    To take each rank's newest checkpoint, and return the oldest of these, would be wrong: if two ranks have left out
    different checkpoints, some rank may lack that one.
    """
    sets = [frozenset(each) for each in committed]
    return max(frozenset.intersection(*sets), default=None) if sets else None


def is_dead(checkpoint: CheckpointId, adoption: Adoption | None) -> bool:
    """Whether the group went back to an older checkpoint than this one. ``adoption``: the rank's last adoption (None:
    it never had one).

    A checkpoint is dead if it was written before the adoption and is newer than the adopted checkpoint. If none was
    adopted, all checkpoints from before the adoption are dead. No rank reports a dead checkpoint in a recovery,
    and each rank may overwrite it.
    """
    if adoption is None or checkpoint.incarnation >= adoption.incarnation:
        return False
    return adoption.adopted is None or checkpoint > adoption.adopted


def reported(committed: Iterable[CheckpointId], adoption: Adoption | None) -> frozenset[CheckpointId]:
    """Return the checkpoints that a rank reports in a recovery. ``committed``: the checkpoints in its pool that
    verify."""
    return frozenset(checkpoint for checkpoint in committed if not is_dead(checkpoint, adoption))


def copies_to_keep(adopted: CheckpointId, in_copies: Iterable[Collection[CheckpointId]]) -> frozenset[CheckpointId]:
    """Return the checkpoints that no rank drops from its peer copy after a recovery, until the copies of all ranks hold
    the adopted checkpoint and training goes on. ``in_copies``: for each rank, the checkpoints in its peer copy that it
    reports in the recovery.

    The newest checkpoint in all copies is in all pools too, so it is enough for the loss of any one host. There is none
    if a host was lost: the copies on it are empty. The adopted checkpoint is then enough if the same host is lost again
    (but not if another one is).
    """
    newest = newest_common(in_copies)
    return frozenset({adopted} if newest is None else {adopted, newest})


def next_incarnation(seen: Iterable[int]) -> int:
    """Return the incarnation that a recovery begins. ``seen``: the incarnations of all checkpoints and adoptions in all
    pools, dead checkpoints included."""
    return 1 + max(seen, default=0)


def may_start_from_nothing(reports: Iterable[Collection[CheckpointId]]) -> bool:
    """Whether ranks that have no checkpoint in common may start a new training. They may if none of them holds a step
    above 0: then ``attach`` has not returned on any rank, because it returns only when all ranks hold step 0."""
    return all(checkpoint.step == 0 for report in reports for checkpoint in report)


# -- while training runs -----------------------------------------------------------------------------------------------


class PoolView(NamedTuple):
    """What others know of a rank's pool, or of the pools of several ranks together (of all ranks on a host)."""

    committed: frozenset[CheckpointId]
    """The checkpoints that all of these ranks have committed. An old view is still true: that the ranks have committed
    a checkpoint remains a fact after a pool has overwritten it."""
    newest: CheckpointId | None
    """For one rank: the newest checkpoint that the rank ever committed, even if its pool no longer holds it (otherwise
    this field could become older). For several ranks: the oldest of these. None if a rank has committed nothing. So
    none of the ranks will commit a checkpoint that is older than this one.

    This field must be read before ``committed``, or at the same moment. Otherwise a checkpoint that is committed
    between the two reads would look as if the rank lacked it for ever."""
    copied: frozenset[CheckpointId] = frozenset()
    """The checkpoints that all of these ranks have in their peer copies."""

    @classmethod
    def of(
        cls,
        committed: Iterable[CheckpointId],
        newest: CheckpointId | None = None,
        copied: Iterable[CheckpointId] = (),
    ) -> PoolView:
        """Return the view of one pool at one moment. ``committed``: the checkpoints in it. ``newest``: the newest that
        was ever committed in it (None: it is among ``committed``). ``copied``: those in its peer copy."""
        held = frozenset(committed)
        found = max(held, default=None)
        newest = newest if found is None or (newest is not None and newest > found) else found
        return cls(held, newest, frozenset(copied))

    @classmethod
    def together(cls, views: Collection[PoolView]) -> PoolView:
        """Return one view of the pools of several ranks, from a view of each (at least one)."""
        newest = [view.newest for view in views if view.newest is not None]
        committed = frozenset.intersection(*(view.committed for view in views))
        copied = frozenset.intersection(*(view.copied for view in views))
        return cls(committed, min(newest) if len(newest) == len(views) else None, copied)


def never_common(own: Iterable[CheckpointId], others: Collection[PoolView]) -> frozenset[CheckpointId]:
    """Return those checkpoints of a rank that can never become common: another rank lacks the checkpoint, and has
    committed a newer one, or once this one. ``own``: the checkpoints that are committed in this rank's pool.

    *Proof.* The other rank does not hold the checkpoint. (It gave the checkpoint up, left it out, or overwrote it. The
    reason does not matter.) Nor will the other rank commit it later: a rank commits in the order of ids, it has
    committed a newer one, and after a crash a new incarnation has larger ids. So the checkpoint is in no intersection
    of all ranks' checkpoints, now or later, and a rank that overwrites it changes no recovery.

    Each other rank must publish the set of its committed checkpoints and the newest of them, as in ``PoolView``. A view
    of several ranks together shows less, and shows it later: that each of them has committed a newer checkpoint, and
    that one of them lacks this one.

    Without this function a group can stop for ever. If ranks give up checkpoints in turn, the slots of each rank fill
    with checkpoints that another rank lacks, and each rank waits for a common one.
    """
    views = [(view.newest, view.committed) for view in others if view.newest is not None]
    return frozenset(
        checkpoint
        for checkpoint in own
        if any(checkpoint <= newest and checkpoint not in committed for newest, committed in views)
    )


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a rank knows of the group when it chooses a slot. All of it stays true until the next recovery. So if a rank
    learns something late, it only overwrites later."""

    common: CheckpointId | None = None
    """The newest checkpoint that the rank knows to be committed by all ranks; None if it knows of none."""
    adoption: Adoption | None = None
    """The last adoption of this rank. Training goes on only after all ranks have adopted, so no rank needs dead
    checkpoints any more."""
    never_common: frozenset[CheckpointId] = frozenset()
    """Checkpoints in this rank's pool or peer copy that can never become common. All are newer than ``floor``."""
    copied: CheckpointId | None = None
    """The newest checkpoint that the rank knows to be in the peer copies of all ranks; None if there are no copies."""
    copy_every: int = 0
    """A checkpoint is due for the peer copies if its step is a multiple of this number; 0: none is."""

    @classmethod
    def at_start(cls, adoption: Adoption) -> Knowledge:
        """Return what every rank knows when all ranks have adopted: they all can restore the adopted checkpoint."""
        return cls(adoption.adopted, adoption)

    @property
    def floor(self) -> CheckpointId | None:
        """The rank needs no news of checkpoints older than this one. None: it needs all news."""
        return self.common if self.copied is None or self.common is None else min(self.copied, self.common)

    def learn(
        self,
        own: Collection[CheckpointId],
        others: Collection[PoolView],
        copied: Collection[CheckpointId] = (),
        in_copy: Collection[CheckpointId] = (),
    ) -> Knowledge:
        """Return what the rank knows after it has seen the pools of all other ranks. ``own``: the checkpoints that are
        committed in its own pool. ``copied``: those that are in the peer copies of all ranks. ``in_copy``: those in
        the peer copy of its own pool. The pool may have overwritten one of these as one that can never become common.
        ``never_common`` of the result contains it too; otherwise it would never be dropped from the copy, which would
        have no room for another.

        ``never_common`` of the result contains only checkpoints newer than ``floor``. Older ones may be overwritten in
        any case. So it does not contain the adopted checkpoint, which is common when training begins. That checkpoint
        must stay even if a rank lacks it: a rank that lost its pool has restored its tensors from others.
        """
        # The copies may still hold dead checkpoints, which the ranks have not dropped yet.
        copied = [one for one in copied if not is_dead(one, self.adoption)]
        found = [newest_common([own, *(view.committed for view in others)]), self.common, *copied]
        common = max((one for one in found if one is not None), default=None)
        newest_copy = max((one for one in (self.copied, *copied) if one is not None), default=None)
        held = frozenset(own).union(in_copy)
        never = never_common(held, others) | (self.never_common & held)
        known = replace(self, common=common, copied=newest_copy)
        return replace(known, never_common=frozenset(c for c in never if known.floor is None or c > known.floor))

    def may_overwrite(self, content: CheckpointId | None) -> bool:
        """Whether the rank may overwrite this checkpoint. ``content``: None if the slot is empty, or if its checkpoint
        was never committed."""
        if content is None or self._is_useless(content):
            return True
        return self.common is not None and content < self.common and not self._is_for_copies(content)

    def next_to_copy(self, own: Iterable[CheckpointId], in_copy: Collection[CheckpointId]) -> CheckpointId | None:
        """Return the checkpoint that the rank copies next: the oldest one that is due. None if there is none. ``own``:
        the checkpoints that are committed in its pool; ``in_copy``: those in its peer copy."""
        due = (one for one in own if self._is_due(one) and one not in in_copy and not self._is_useless(one))
        return min(due, default=None)

    def waits_for_copies(self, own: Iterable[CheckpointId]) -> bool:
        """Whether the rank could overwrite one of these checkpoints if it were not due for the peer copies."""
        return any(self.common is not None and one < self.common and self._is_due(one) for one in own)

    def may_drop_copy(self, content: CheckpointId) -> bool:
        """Whether the rank may drop this checkpoint from its peer copy."""
        return self._is_useless(content) or (self.copied is not None and content < self.copied)

    def slot_to_write(self, contents: Mapping[int, CheckpointId | None]) -> int | None:
        """Return the slot for the next checkpoint; None if no slot may be overwritten, so that the rank has to wait.
        ``contents``: slot -> its checkpoint (None: no committed one), for each slot that is not written now.

        An empty slot is chosen first, then a checkpoint to which no recovery can come back, then the oldest checkpoint.
        So the checkpoints before the common one stay as long as possible, for the case that the common one is damaged.

        Only the model in ``tests/ranks/`` calls this. In a training, ``Slots.choose`` chooses among the slots that
        ``GroupRule.held`` leaves.
        """
        free = [slot for slot, content in contents.items() if self.may_overwrite(content)]
        return min(free, key=lambda slot: self._priority(contents[slot]), default=None)

    def may_remove(self, contents: Iterable[CheckpointId]) -> bool:
        """Whether the pool's old file may be removed after a relayout that has carried nothing over. ``contents``: the
        checkpoints in that file. It may be removed if the rank may overwrite each of them. Until then it stays, because
        it may be the only file with the newest common checkpoint. Only the model in ``tests/ranks/`` calls this,
        because lightck carries checkpoints over."""
        return all(self.may_overwrite(content) for content in contents)

    def _is_due(self, content: CheckpointId) -> bool:
        """Whether a checkpoint must be in the peer copies of all ranks, and is not yet known to be."""
        is_newer = self.copied is not None and content > self.copied
        return is_newer and self.copy_every > 0 and content.step % self.copy_every == 0

    def _is_for_copies(self, content: CheckpointId) -> bool:
        return content == self.copied or self._is_due(content)

    def _is_useless(self, content: CheckpointId) -> bool:
        """Whether no recovery can come back to this checkpoint."""
        return is_dead(content, self.adoption) or content in self.never_common

    def _priority(self, content: CheckpointId | None) -> tuple[int, CheckpointId]:
        """Return a key for sorting: the content with the least key is overwritten first."""
        if content is None:
            return 0, CheckpointId(0, 0)
        return 1 if self._is_useless(content) else 2, content


def commits_within_boundary(begun: CheckpointId | None, committed: CheckpointId | None) -> bool:
    """Whether the next checkpoint must not be left out, and must be copied and committed within its boundary: True if
    the last one was given up.

    begun: the last checkpoint that this rank began in this incarnation; it is committed or given up. committed: the
    last checkpoint that this rank committed.

    A rank that gives up as many checkpoints in a row as a pool has slots can stop the group for ever. The other ranks
    then have no slot that they may overwrite, and wait for this rank, and this rank waits for them in a collective.
    """
    return begun is not None and begun != committed
