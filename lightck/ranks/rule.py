"""The commit rule of a group of ranks: which checkpoint all of them have, and which slot a rank may overwrite.

Each rank of a training saves its own part into its own pool. After a crash all ranks must come back to the same step.
They can, whoever died and whenever, because of one rule:

    A rank overwrites a checkpoint only if it is older than one which the rank knows all ranks have committed, or if it
    can never become common.

A checkpoint is *common* if every rank has committed it. The newest one that a rank knows of is that rank's *k*.

*Proof.* Let g be the largest k of any rank at some moment. All ranks have committed g. No rank has overwritten g as an
older checkpoint: for that it would have to know a newer common one, and g is the largest. And none has overwritten it
as one that can never become common, because it is common. So g is in every pool, at every moment, whatever the timing,
the topology, and whoever died. ``never_common`` proves its own claim. The largest k never becomes older: within an
attempt a rank forgets nothing, and a recovery chooses a checkpoint at least as new as g, from which all ranks go on.

The rule only makes ranks wait; which checkpoints they lose to a crash is decided by where they wait. The functions here
are pure: they see sets of checkpoints and give decisions. ``tests/ranks/`` runs them through every interleaving of
small groups, and says what that found. The proof and the functions ask four things of the code around them:

- A rank commits its checkpoints in the order of their ids, and leaves out fewer in a row than it has slots.
- Only durable records count as committed, for the rank itself and for others.
- What a rank publishes of its pool includes the file that the pool had before a relayout, as long as that is kept.
- ``PoolView.newest`` is not read later than ``PoolView.committed``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class CheckpointId(NamedTuple):
    """The name of a checkpoint in all pools of a group. Of two checkpoints, the one with the larger id is newer."""

    incarnation: int
    """The recovery after which the checkpoint was written, counted from 1; all ranks have the same number. A rank that
    lost a step in a crash makes it again, and may make other bytes. So checkpoints of one step from two incarnations
    are different ones."""
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

    The oldest of the ranks' newest checkpoints would be wrong. As soon as two ranks skip different checkpoints, other
    ranks may not have it.
    """
    sets = [frozenset(each) for each in committed]
    return max(frozenset.intersection(*sets), default=None) if sets else None


def counts(checkpoint: CheckpointId, adoption: Adoption | None) -> bool:
    """Whether a checkpoint in a rank's pool still counts after the rank's last adoption (None: it never had one).

    What is newer than the adopted checkpoint, and of an older incarnation, belongs to a history that the group has
    left. No rank reports it in a recovery, and each may overwrite it.
    """
    if adoption is None or checkpoint.incarnation >= adoption.incarnation:
        return True
    return adoption.adopted is not None and checkpoint <= adoption.adopted


def reported(committed: Iterable[CheckpointId], adoption: Adoption | None) -> frozenset[CheckpointId]:
    """Return the checkpoints that a rank reports in a recovery. ``committed``: those in its pool that verify."""
    return frozenset(checkpoint for checkpoint in committed if counts(checkpoint, adoption))


def next_incarnation(seen: Iterable[int]) -> int:
    """Return the incarnation that a recovery begins. ``seen``: the incarnations of all checkpoints and adoptions in all
    pools, also of those that do not count."""
    return 1 + max(seen, default=0)


def may_start_from_nothing(reports: Iterable[Collection[CheckpointId]]) -> bool:
    """Whether ranks that have nothing in common may start a new training. They may if none of them holds a step above
    0. Then no ``attach`` has returned on any rank, because it returns when all ranks hold step 0."""
    return all(checkpoint.step == 0 for report in reports for checkpoint in report)


# -- while training runs -----------------------------------------------------------------------------------------------


class PoolView(NamedTuple):
    """What others know of a rank's pool, or of the pools of several ranks together (of all ranks on a host)."""

    committed: frozenset[CheckpointId]
    """The checkpoints that all of these ranks have committed. Old news is right: that a rank has committed a checkpoint
    stays true."""
    newest: CheckpointId | None
    """All of these ranks have committed this checkpoint or a newer one, so none of them will commit an older one; None
    if one of them has committed nothing. Of one rank it is the newest that it ever committed, even if it holds that no
    longer: else the rank could seem to fall back. It must be read before ``committed``, or at the same moment. Else a
    checkpoint that was committed between the two reads would look as if it were missing for ever."""

    @classmethod
    def of(cls, committed: Iterable[CheckpointId], newest: CheckpointId | None = None) -> PoolView:
        """Return the view of one pool at one moment: what is committed in it, and the newest that ever was (None: it is
        still there)."""
        held = frozenset(committed)
        return cls(held, max((*held, newest) if newest is not None else held, default=None))

    @classmethod
    def together(cls, views: Collection[PoolView]) -> PoolView:
        """Return one view of the pools of several ranks, from a view of each (at least one)."""
        newest = [view.newest for view in views if view.newest is not None]
        committed = frozenset.intersection(*(view.committed for view in views))
        return cls(committed, min(newest) if len(newest) == len(views) else None)


def never_common(own: Iterable[CheckpointId], others: Collection[PoolView]) -> frozenset[CheckpointId]:
    """Return those checkpoints of a rank that can never become common: another rank lacks the checkpoint, and has
    committed a newer one. ``own``: the checkpoints that are committed in this rank's pool.

    *Proof.* A rank commits in the order of ids. So the other rank, which has committed a newer checkpoint, will not
    commit this one any more; and it does not hold it. It does not matter why: it gave the checkpoint up, or left it
    out, or it has overwritten it (then it knew that a newer one is common, or that this one cannot be). After a crash
    it still does not hold it, and it will not commit it, because a new incarnation has larger ids. So the checkpoint is
    in no intersection of all ranks' checkpoints, now or later, and to overwrite it changes no recovery.

    *What others must publish* is the set of committed checkpoints and the newest of them, as in ``PoolView``. A view of
    several ranks together says less, and says it later: that each of them has gone past the checkpoint, and that one of
    them lacks it.

    Without this function a group can stop for ever. If ranks give up checkpoints in turn, the slots of each rank fill
    with checkpoints that the other lacks, and each waits for a common one.
    """
    views = [(view.newest, view.committed) for view in others if view.newest is not None]
    return frozenset(
        checkpoint
        for checkpoint in own
        if any(checkpoint <= newest and checkpoint not in committed for newest, committed in views)
    )


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a rank knows of the group when it chooses a slot. All of it stays true until the next recovery, so late news
    only delay an overwrite."""

    common: CheckpointId | None = None
    """The newest checkpoint that the rank knows to be committed by all ranks; None if it knows of none."""
    adoption: Adoption | None = None
    """The last adoption of this rank. Training goes on when all ranks have adopted, so no rank needs what does not
    count any more."""
    never_common: frozenset[CheckpointId] = frozenset()
    """Checkpoints of this rank that can never become common. All are newer than ``common``."""

    @classmethod
    def at_start(cls, adoption: Adoption) -> Knowledge:
        """Return what every rank knows when all ranks have adopted: they all can restore the adopted checkpoint."""
        return cls(adoption.adopted, adoption)

    def learn(self, own: Collection[CheckpointId], others: Collection[PoolView]) -> Knowledge:
        """Return what the rank knows after it has seen the pools of all other ranks. ``own``: the checkpoints that are
        committed in its own pool.

        A checkpoint up to ``common`` is never said to be useless. It needs no such permission, and the adopted one must
        stay even if a rank lacks it: that rank lost its pool, and restored its tensors from others.
        """
        found = newest_common([own, *(view.committed for view in others)])
        common = self.common if found is None or (self.common is not None and found < self.common) else found
        useless = never_common(own, others) | (self.never_common & frozenset(own))
        return replace(self, common=common, never_common=frozenset(c for c in useless if common is None or c > common))

    def may_overwrite(self, content: CheckpointId | None) -> bool:
        """Whether the rank may overwrite this checkpoint. None: the slot is empty, or its checkpoint was never
        committed."""
        if content is None or self._is_useless(content):
            return True
        return self.common is not None and content < self.common

    def slot_to_write(self, contents: Mapping[int, CheckpointId | None]) -> int | None:
        """Return the slot for the next checkpoint; None if no slot may be overwritten, so that the rank waits until it
        knows more. ``contents``: slot -> its checkpoint (None: none that was committed), of the slots that no
        copy uses.

        An empty slot comes first, then a checkpoint to which no recovery can come back, then the oldest one. So the
        checkpoints before the common one stay as long as possible, for the case that the common one is damaged.
        """
        free = [slot for slot, content in contents.items() if self.may_overwrite(content)]
        return min(free, key=lambda slot: self._worth(contents[slot]), default=None)

    def may_remove(self, contents: Iterable[CheckpointId]) -> bool:
        """Whether a file may be removed that the pool had before a relayout. ``contents``: the checkpoints in it. A
        pool that is laid out anew keeps that file, because the newest common checkpoint may lie there alone. This is
        the rule once more: each checkpoint in the file must be one that the rank may overwrite."""
        return all(self.may_overwrite(content) for content in contents)

    def _is_useless(self, content: CheckpointId) -> bool:
        return not counts(content, self.adoption) or content in self.never_common

    def _worth(self, content: CheckpointId | None) -> tuple[int, CheckpointId]:
        if content is None:
            return 0, CheckpointId(0, 0)
        return 1 if self._is_useless(content) else 2, content


def commits_within_boundary(begun: CheckpointId | None, committed: CheckpointId | None) -> bool:
    """Whether the next checkpoint must be copied at the boundary and committed before the boundary returns, and must
    not be left out. ``begun``: the last checkpoint that this rank began in this incarnation, and has committed or given
    up since; ``committed``: the last one that it committed.

    It must if the last one was given up. A rank that gives up as many in a row as there are slots can stop the group
    for ever: the others have no slot left and wait until they know more, and this rank waits for them in a collective.
    """
    return begun is not None and begun != committed
