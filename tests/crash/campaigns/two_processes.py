"""``two-processes``: a pool that somebody else touches while a training has it open.

A second process wants it, at any moment of the first one's life and while that dies by SIGKILL; a forked worker lives
longer than its killed parent; the file is deleted or truncated.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch

import lightck
from crash import known, victims
from crash.campaign import Campaign, Order, Tally
from crash.known import Known
from crash.ledger import BrokenError
from crash.lives import Life
from crash.victims import Story, Tell, Victim
from lightck.errors import BackgroundError, PoolError, PoolLockedError, SessionError

ROUNDS = 3
"""On one pool."""
_WORDS = ("attaches", "attached", "begins", "finished", "committed")

Scenario: TypeAlias = Callable[[Life, random.Random, "Counter[str]"], None]


def run(order: Order) -> Tally:
    return play(order, known.draw)


def play(order: Order, drawn: Callable[[random.Random], known.Plan]) -> Tally:
    """Run the trials of an order. ``drawn``: the training of a trial."""
    tally = Tally()
    victims.be_ready(order.backend)
    for trial in order.trials:
        name = list(SCENARIOS)[trial % len(SCENARIOS)]
        rng = order.rng(trial)
        life = Life(drawn(rng), os.path.join(order.folder, f"{trial}.pool"), order.backend)
        try:
            with life.reported():
                SCENARIOS[name](life, rng, tally.counts)
        except BrokenError as err:
            tally.found(trial, f"{name}: {err}")
        life.remove()
        if trial % 10 == 9:
            order.say(f"{trial + 1} pools, {len(tally.findings)} findings")
    return tally


def _train(life: Life, tell: Tell, *, patient: bool = False, aside: known.Aside | None = None) -> None:
    """A process that may be refused the pool; a patient one asks until it has it."""
    while True:
        try:
            return known.train(life.plan, life.path, tell, steps=12, slots=2, backend=life.backend, aside=aside)
        except PoolLockedError as err:
            tell("refused", str(err))
            if not patient:
                return None


def _check_refusals(reported: Story, holder: int, counts: Counter[str]) -> None:
    for message in reported.of("refused"):
        counts["refused by name"] += 1
        if f"pid {holder}:" not in message:
            raise BrokenError(f"the holder is pid {holder}, and the error says: {message}")


# -- a second process ------------------------------------------------------------------------------------------------


def wants_it_too(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """At a random moment of a training that closes by itself: one of the two has the pool, the other is refused."""
    for _ in range(ROUNDS):
        first = Victim(partial(_train, life))
        first.hear(rng.choice(_WORDS), rng.randint(1, 4))
        time.sleep(rng.uniform(0.0, 0.004))
        second = Victim(partial(_train, life))
        tales = second.end(), first.end()
        life.history.append(f"second {tales[0]}, first {tales[1]}")
        _check_refusals(tales[0], first.pid, counts)
        _check_refusals(tales[1], second.pid, counts)
        for reported in sorted(tales, key=lambda each: max(each.of("attached"), default=0)):
            life.ledger.note(reported, 2)
        life.judge()
        counts["both had it, one after the other"] += all(reported.of("closed") for reported in tales)


def wants_it_at_once(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """The first one is killed. The second asks without a pause meanwhile, or once when the first is dead."""
    for _ in range(ROUNDS):
        first = Victim(partial(_train, life))
        first.hear("attached")
        is_patient = rng.random() < 0.6
        second = Victim(partial(_train, life, patient=True)) if is_patient else None
        first.hear("finished", rng.randint(1, 8))
        time.sleep(rng.uniform(0.0, 0.004))
        first.kill()
        dead = first.end()
        reported = (second or Victim(partial(_train, life))).end()
        life.history.append(f"first {dead}, second {reported}")
        _check_refusals(reported, first.pid, counts)
        if reported.of("refused") and not is_patient:
            raise BrokenError(f"the holder is dead, and its lock is not: {reported}")
        for each in (dead, reported):
            life.ledger.note(each, 2)
        life.judge()
        counts["a dead holder's pool was taken over"] += bool(reported.of("attached")) and dead.was_killed


# -- a worker that lives on ------------------------------------------------------------------------------------------


def worker_lives_on(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """A forked child of the training outlives it, and uses what it inherited, while the restart trains."""
    for _ in range(ROUNDS):
        trainer = Victim(partial(_train, life, aside=partial(_fork_worker, rng.randint(1, 4), [])))
        worker = trainer.hear("worker")
        if worker is None:
            raise BrokenError(f"no worker was forked: {trainer.end()}")
        time.sleep(rng.uniform(0.0, 0.003))
        trainer.kill()
        trainer.wait()
        reported = Victim(partial(_train, life)).end()
        is_inert = trainer.hear("inert")
        os.kill(worker, signal.SIGKILL)
        dead = trainer.end()
        life.history.append(f"parent of the worker {dead}, restart {reported}")
        if reported.of("refused") or not is_inert:
            raise BrokenError(f"the worker kept the pool, or its handle works: {reported}")
        for each in (dead, reported):
            life.ledger.note(each, 2)
        life.judge()
        counts["workers outlived their parent, and the restart attached at once"] += 1


def _fork_worker(
    after: int, forked: list[int], step: int, session: lightck.Session, model: Known, optimizer: torch.optim.Optimizer
) -> None:
    forked.append(step)
    if len(forked) != after:
        return
    tell, parent = victims.telling(), os.getpid()
    pid = os.fork()
    if pid:
        tell("worker", pid)
        return
    while os.getppid() == parent:
        time.sleep(0.0002)
    for number in range(5):
        model(step)
        model.make_gradients(step)
        optimizer.step()
        try:
            session.flush()
            session.pin()
        except SessionError:
            continue
        os._exit(number)
    tell("inert", True)
    time.sleep(victims.HANG_SECONDS)


# -- the file is taken away ------------------------------------------------------------------------------------------


def deleted_in_use(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """The training gets an error at a step and is not harmed: it attaches again and goes on."""
    for _ in range(ROUNDS):
        _taken_away(life, rng, counts, "deleted", os.unlink)
        life.ledger.least = life.ledger.most = 0
        life.ledger.held.clear()


def truncated_in_use(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """To any size. What verifies is used; what is left of the file is refused by a typed error."""
    for _ in range(ROUNDS):
        _taken_away(life, rng, counts, "truncated", lambda path: os.truncate(path, rng.choice(_sizes(path, rng))))
        try:
            lightck.recover(life.path)
            raise BrokenError("a truncated pool was recovered")
        except PoolError:
            life.remove()
        life.ledger.least = life.ledger.most = 0
        life.ledger.held.clear()


def _sizes(path: str, rng: random.Random) -> tuple[int, int, int]:
    size = os.stat(path).st_size
    return 0, rng.randrange(size), size // 2


def _taken_away(life: Life, rng: random.Random, counts: Counter[str], what: str, take: Callable[[str], None]) -> None:
    life.plan = life.ledger.plan = replace(life.plan, pins_every=0, grows_by=10)  # no move to a new file
    victim = Victim(partial(_trained_through_it, life))
    victim.hear("committed", rng.randint(1, 4))
    time.sleep(rng.uniform(0.0, 0.004))
    take(life.path)
    reported = victim.end()
    life.history.append(f"{what}: {reported}")
    if reported.status or reported.of("error") or not reported.of("whole"):
        raise BrokenError(f"the pool was {what} in use, and the process ended so: {reported}")
    counts[f"{what} in use: the training was warned"] += bool(reported.of("warned"))
    counts[f"{what} in use: too late to be seen"] += not reported.of("warned")


def _trained_through_it(life: Life, tell: Tell) -> None:
    seen: list[tuple[int, Known, torch.optim.Optimizer]] = []

    def aside(step: int, session: lightck.Session, model: Known, optimizer: torch.optim.Optimizer) -> None:
        seen[:] = [(step, model, optimizer)]
        time.sleep(0.0005)

    try:
        known.train(life.plan, life.path, tell, steps=60, slots=2, backend=life.backend, aside=aside)
    except BackgroundError as err:
        tell("warned", str(err))
    tell("whole", known.is_whole(life.plan, *seen[0]))


SCENARIOS: dict[str, Scenario] = {
    "wants it too": wants_it_too,
    "wants it at once": wants_it_at_once,
    "worker": worker_lives_on,
    "deleted": deleted_in_use,
    "truncated": truncated_in_use,
}

CAMPAIGN = Campaign(
    "two-processes",
    "a pool that others touch: a second process, a worker that outlives its parent, a deleted or truncated file",
    small=5,
    long=60,
    run=run,
)
