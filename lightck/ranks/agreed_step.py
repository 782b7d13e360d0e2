"""The ranks of a group agree on a step that lies ahead of all of them: they will do something at that step together.

A step that rank 0 chose alone might have passed on another rank already, because no rank waits for another here. So
each rank is asked first:

    propose   rank 0 writes a step that lies some checkpoints ahead
    answer    each rank writes whether it takes part; it does not if it is not ready, or has passed the step
    verdict   rank 0 writes whether all take part, or else why not

*Data flow.* A helper thread of each rank does this through the key-value store of the process group, over a connection
of its own. The training thread never uses the store. It calls ``propose`` on rank 0, and finds out by the callbacks
what was decided.

*Invariant.* A rank acts at the step only after a verdict, and the verdict is ``ACCEPTED`` only if every rank has
answered so before it passed the step. Each rank answers a proposal once, and rank 0 makes the next one after the
verdict; so no rank can take an old verdict for a new one.

*Failure cases.* A rank is killed or stands still: it does not answer, and nothing is decided. The store fails: the
helper tries again each second. The ranks are restarted: what the earlier attempt left in the store has another nonce
in its keys, and is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack

from lightck.ranks.meet import Store
from lightck.ranks.store_thread import SLEEP_SECONDS_MAX, StoreThread

_POLL_SECONDS = 0.1
"""Seconds between two looks for a proposal. In a group of more than ``_SLOWER_ABOVE_RANKS`` ranks the time is longer in
proportion."""
_SLOWER_ABOVE_RANKS = 64


class Proposal(NamedTuple):
    """A step that rank 0 proposes."""

    step: int
    items: Sequence[int]
    """What is to be done at this step, as numbers whose meaning the caller knows."""


ACCEPTED, NOT_READY, PASSED = 0, 1, 2
"""Answers of a rank. The verdict is the largest of them."""


class Participant(Protocol):
    """What takes part on one rank. The helper thread calls these methods."""

    def answer(self, proposal: Proposal) -> int:
        """Return ``ACCEPTED`` if this rank takes part, and is prepared for the step from now on; ``NOT_READY`` if it
        cannot now; ``PASSED`` if it has passed the step."""
        ...

    def decided(self, proposal: Proposal, verdict: int) -> None:
        """Called on a rank that takes part, and on rank 0, when the verdict is known: ``ACCEPTED`` if all ranks take
        part."""
        ...


class StepAgreement(StoreThread):
    """The agreements of one group, on one rank."""

    def __init__(
        self, store: Store, key: Callable[[str, int], str], rank: int, world_size: int, participant: Participant
    ) -> None:
        """``store``: over a connection that belongs to this object from now on. ``key``: (what, rank) -> key of the
        store."""
        super().__init__(store, "lightck-agree")
        self._rank, self._participant = rank, participant
        self._proposal_key, self._verdict_key = key("step-proposal", 0), key("step-verdict", 0)
        self._answer_keys = [key("step-answer", one) for one in range(world_size)]
        self._to_propose: Proposal | None = None
        self._number = 0
        """Number of the last proposal that this rank has answered."""
        self._answered: Proposal | None = None
        """A proposal that this rank has answered, as long as its verdict is not known."""
        self._own_answer, self._is_answer_written = ACCEPTED, False
        self._poll_seconds = _POLL_SECONDS * max(1.0, world_size / _SLOWER_ABOVE_RANKS)
        self._begin()

    # -- the training thread -----------------------------------------------------------------------------

    def propose(self, proposal: Proposal) -> None:
        """Let all ranks be asked. Called on rank 0, when the last proposal was decided."""
        self._to_propose = proposal
        self._wake.set()

    def close(self) -> None:
        """End the helper. Returns after a second even if the store does not answer."""
        self._end()

    # -- the helper --------------------------------------------------------------------------------------

    def _longest_sleep(self) -> float | None:
        if self._answered is not None:
            return SLEEP_SECONDS_MAX
        return self._poll_seconds if self._rank else None

    def _exchange(self) -> bool:
        """Do the next thing that can be done. Returns whether there was one."""
        if self._answered is not None:
            self._write_answer()
            return self._learn_verdict()
        if self._rank == 0:
            return self._propose()
        found = self._read(self._proposal_key)
        if found is None or found[0] <= self._number:
            return False
        self._answer_proposal(found[0], Proposal(found[1], found[2]))
        return True

    def _propose(self) -> bool:
        proposal = self._to_propose
        if proposal is None:
            return False
        number = self._number + 1
        self._store.set(self._proposal_key, msgpack.packb([number, proposal.step, list(proposal.items)]))
        self._to_propose = None
        self._answer_proposal(number, proposal)
        return True

    def _answer_proposal(self, number: int, proposal: Proposal) -> None:
        self._own_answer, self._is_answer_written = self._participant.answer(proposal), False
        self._number, self._answered = number, proposal

    def _write_answer(self) -> None:
        if not self._is_answer_written:
            self._store.set(self._answer_keys[self._rank], msgpack.packb([self._number, self._own_answer]))
            self._is_answer_written = True

    def _learn_verdict(self) -> bool:
        verdict = self._verdict_of_all() if self._rank == 0 else self._read(self._verdict_key)
        if verdict is None or verdict[0] != self._number:
            return False
        proposal, self._answered = self._answered, None
        assert proposal is not None, "it was answered"
        if self._own_answer == ACCEPTED or self._rank == 0:
            self._participant.decided(proposal, verdict[1])
        return True

    def _verdict_of_all(self) -> list[int] | None:
        """Return the verdict, and write it, as soon as all answers are there."""
        if not self._store.check(self._answer_keys):
            return None
        answers = [msgpack.unpackb(one) for one in self._store.multi_get(self._answer_keys)]
        if any(number != self._number for number, _ in answers):
            return None
        verdict = [self._number, max(answer for _, answer in answers)]
        self._store.set(self._verdict_key, msgpack.packb(verdict))
        return verdict

    def _read(self, key: str) -> list[Any] | None:
        if not self._store.check([key]):
            return None
        found: list[Any] = msgpack.unpackb(self._store.multi_get([key])[0])
        return found
