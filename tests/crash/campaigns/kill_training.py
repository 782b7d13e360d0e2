"""``kill-training``: real trainings through the public API, killed again and again, end with the same bits.

A trial is one training from nothing to its end with a few kills: at random instants of its steps, of attach, creation,
restore and adoption, and at the native library's kill points. What it ends with (weights, optimizer, scheduler, random
states, each loss on the way) is compared with a run that lightck never saw.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import lightck
from crash import victims
from crash.campaign import Campaign, Order, Tally
from crash.ledger import BrokenError
from crash.trainings import KINDS, UPDATES, Follow, compression_of
from crash.victims import CHECKPOINT_SITES, Kill, Story, Tell, story
from lightck.errors import NoCheckpointError, PoolNotFoundError
from lightck.pool.storage import temporary

KILLS = 4
"""In one training."""
_REFERENCE_SEED = 0


@dataclass(frozen=True, slots=True)
class Truth:
    """What a run without lightck came to."""

    losses: dict[int, str]
    digest: str


@dataclass(slots=True)
class _Chain:
    """The processes of one training."""

    truth: Truth
    path: str
    interval: int
    slots: int
    finished: int = 0
    """The newest update that a process reported since it started."""
    floor: int = 0
    """What the newest process that attached started from."""

    def check(self, reported: Story) -> None:
        """Raises ``BrokenError``."""
        for trace in reported.of("error"):
            raise BrokenError(f"an error in the training: {trace}")
        for start in reported.of("attached"):
            least = max(self.floor, self.finished - self.interval * (self.slots - 1))
            if not least <= start <= self.finished:
                raise BrokenError(f"it started at update {start}; {least} to {self.finished} were possible")
            self.floor = self.finished = start
        for update, loss in reported.of("finished"):
            self.finished = update
            if self.truth.losses.get(update) != loss:
                raise BrokenError(f"the loss of update {update} is {loss}, not {self.truth.losses.get(update)}")
        for ended in reported.of("ended"):
            if ended != self.truth.digest:
                raise BrokenError("weights, optimizer, scheduler or random states differ at the end")

    def holds_nothing(self) -> bool:
        try:
            lightck.recover(self.path)
        except (NoCheckpointError, PoolNotFoundError):
            return True
        return False


@dataclass(frozen=True, slots=True)
class Saving:
    """How a training is saved. interval, slots: they bound how many updates a kill may lose. options: of ``attach``."""

    interval: int
    slots: int
    options: dict[str, object]


def full_state(rng: random.Random) -> Saving:
    interval, slots = rng.choice((1, 1, 1, 3)), rng.choice((2, 2, 3))
    return Saving(interval, slots, {"interval": interval, "slots": slots})


def run(order: Order) -> Tally:
    return play(order, tuple(KINDS), full_state)


def play(order: Order, names: Sequence[str], drawn: Callable[[random.Random], Saving]) -> Tally:
    """Run the trials of an order with trainings of these kinds. ``drawn``: how the training of a trial is saved."""
    tally = Tally()
    victims.be_ready(order.backend)
    truths: dict[tuple[str, str], Truth] = {}
    for trial in order.trials:
        name = names[trial % len(names)]
        rng = order.rng(trial)
        saving = drawn(rng)
        which = name, repr(compression_of(saving.options))
        if which not in truths:
            truths[which] = _truth(name, saving.options)
        try:
            _trial(order, trial, name, truths[which], saving, rng, tally)
        except BrokenError as err:
            tally.found(trial, f"{name}: {err}")
        if trial % 10 == 9:
            order.say(f"{trial + 1} trainings, {tally.counts['kills']} kills, {len(tally.findings)} findings")
    return tally


def _truth(name: str, options: dict[str, object]) -> Truth:
    reported = story(partial(_reference, name, options))
    assert reported.status == 0, f"the reference failed: {reported}"
    losses = dict(reported.of("finished"))
    assert len(losses) == UPDATES, "the reference makes all updates"
    return Truth(losses, reported.of("ended")[0])


def _reference(name: str, options: dict[str, object], tell: Tell) -> None:
    KINDS[name](Follow(tell, None, _REFERENCE_SEED, options))


def _train(name: str, path: str, seed: int, options: dict[str, object], tell: Tell) -> None:
    KINDS[name](Follow(tell, path, seed, options))


def _trial(order: Order, trial: int, name: str, truth: Truth, saving: Saving, rng: random.Random, tally: Tally) -> None:
    chain = _Chain(truth, os.path.join(order.folder, f"{trial}.pool"), saving.interval, saving.slots)
    options = {**saving.options, "backend": order.backend}
    tally.counts["trainings"] += 1
    history = []
    for kill in (*(_draw(rng, number) for number in range(KILLS)), None):
        seed = _REFERENCE_SEED if chain.holds_nothing() else rng.randrange(1, 1 << 30)
        reported = story(partial(_train, name, chain.path, seed, options), kill)
        history.append(f"{kill}: {reported}")
        try:
            chain.check(reported)
            if not reported.was_killed and not reported.of("closed"):
                raise BrokenError(f"a process ended with status {reported.status}")
        except BrokenError as err:
            raise BrokenError(f"{err}; options {options}; processes: {'; '.join(history)}") from err
        _count(tally, reported, kill, seed)
    for left in (chain.path, chain.path + ".lock", temporary.path_of(chain.path)):
        if os.path.exists(left):
            os.unlink(left)


def _draw(rng: random.Random, number: int) -> Kill:
    where = rng.random()
    if where < 0.3:
        site = rng.choice(CHECKPOINT_SITES)
        return Kill(site=site, nth=rng.randint(1, 60 if site == "block" else 4))
    if where < 0.55:
        return Kill("attaches", delay=rng.uniform(0.0, 0.016 if number else 0.025))
    word = rng.choice(("attached", "finished", "finished"))
    return Kill(word, 1 if word == "attached" else rng.randint(1, 5), delay=rng.uniform(0.0, 0.006))


def _count(tally: Tally, reported: Story, kill: Kill | None, seed: int) -> None:
    if kill is None or not reported.was_killed:
        tally.counts["ends that were bit-identical"] += bool(reported.of("ended"))
        return
    tally.counts["kills"] += 1
    where = f"at kill point {kill.site}" if kill.site else f"at a random instant after: {reported.last}"
    tally.counts[f"killed {where}"] += 1
    tally.counts["killed before there was a version"] += seed == _REFERENCE_SEED and not reported.of("finished")


CAMPAIGN = Campaign(
    "kill-training",
    "SIGKILL in real trainings: each ends bit-identical to a run that was never killed",
    small=3,
    long=90,
    run=run,
)
