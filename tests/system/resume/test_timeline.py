"""The checkpoint to which a restart returns: after a fall-back, after recover(step=), beside workers that live on."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import toys

import lightck
from lightck.pool.reader import StoredCheckpoint, open_pool

from .forkserver import ForkServer
from .harness import Chain, Kill, Mismatch, Reported, Survival, Training
from .scenarios import SCENARIOS

STOP = 6
BEFORE_THE_RECORD = ("header", "block", "manifest", "sealed")
SITES = (*BEFORE_THE_RECORD, "body", "word", "ack")


class Timeline:
    """The branching scenario, its processes on one pool, and the references that they are compared with."""

    def __init__(self, server: ForkServer, folder: Path, options: Mapping[str, Any] | None = None) -> None:
        self.training = Training(server, SCENARIOS["branching"], folder, options)
        self.pool = folder / "branching.pool"
        self.chain = Chain(self.training, self.training.reference(), self.pool, "timeline")
        self.survival = Survival()

    def trained_until_stop(self) -> None:
        """The pool holds updates STOP - 1 and STOP, and its training ended properly."""
        reported = self.training.process(self.pool, None, fresh=True, options={"stop_at": STOP})
        assert (reported.status, reported.updates, reported.closed) == (0, STOP, STOP)
        assert held_steps(self.pool) == [STOP, STOP - 1]

    def dies(self, kill: Kill, options: Mapping[str, Any] | None = None) -> None:
        before = len(self.survival.kills)
        assert not self.chain.step(kill, self.survival, options)
        assert len(self.survival.kills) == before + 1

    def finishes(self, options: Mapping[str, Any] | None = None) -> None:
        assert self.chain.step(None, self.survival, options)


def held_steps(pool: Path) -> list[int]:
    reader = open_pool(str(pool))
    try:
        return [v.step for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
    finally:
        reader.close()


def damage_newest(pool: Path) -> None:
    """Flip a bit in a weight of the newest checkpoint."""
    reader = open_pool(str(pool))
    checkpoint = next(v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint))
    slot = reader.superblock.slots[checkpoint.record.slot][0]
    at = slot + checkpoint.entries["model/3.weight"].offset
    reader.close()
    toys.flip(pool, at, 1)
    assert lightck.recover(pool).step == STOP - 1


@pytest.mark.parametrize("site", SITES)
def test_checkpoint_restored_by_a_fall_back_survives_a_crash_in_the_next_one(
    server: ForkServer, folder: Path, site: str
) -> None:
    line = Timeline(server, folder)
    line.trained_until_stop()
    damage_newest(line.pool)
    line.chain.begin_at(STOP - 1)
    line.dies(Kill("place", "after attach"))
    line.dies(Kill("site", site))
    assert held_steps(line.pool)[0] == (STOP - 1 if site in BEFORE_THE_RECORD else STOP)
    line.dies(Kill("site", site))
    line.finishes()


def test_restarts_that_all_fail_do_not_evict_the_checkpoint_that_a_fall_back_restored(
    server: ForkServer, folder: Path
) -> None:
    line = Timeline(server, folder)
    line.trained_until_stop()
    damage_newest(line.pool)
    line.chain.begin_at(STOP - 1)
    for n in range(40):
        line.dies(Kill("site", "header") if n % 2 else Kill("place", "after attach"))
    assert held_steps(line.pool) == [STOP - 1]
    line.finishes()


def test_restarts_that_all_fail_keep_the_newest_checkpoint_and_the_one_before(server: ForkServer, folder: Path) -> None:
    line = Timeline(server, folder)
    line.trained_until_stop()
    line.chain.begin_at(STOP)
    for _ in range(40):
        line.dies(Kill("place", "after attach"))
    assert held_steps(line.pool) == [STOP, STOP - 1]
    damage_newest(line.pool)
    line.chain.begin_at(STOP - 1)
    line.finishes()


@pytest.mark.parametrize("site", ["after attach", *SITES])
def test_crash_after_a_step_back_comes_back_to_that_timeline(server: ForkServer, folder: Path, site: str) -> None:
    """recover(step=older) and attach; from there on the training takes another way, to which each restart returns."""
    branch = {"branch_at": STOP - 1}
    line = Timeline(server, folder, branch)
    line.trained_until_stop()
    line.chain.begin_at(STOP - 1)
    kill = Kill("place", site) if site == "after attach" else Kill("site", site)
    line.dies(kill, {**branch, "recover_step": STOP - 1})
    assert held_steps(line.pool)[0] == (STOP - 1 if site in ("after attach", *BEFORE_THE_RECORD) else STOP)
    line.dies(kill)
    line.dies(Kill("place", "update", 2))
    line.finishes()


def test_other_timeline_is_distinguished(server: ForkServer, folder: Path) -> None:
    """The test above can fail: a restart that went on with the old timeline is found out."""
    line = Timeline(server, folder, {"branch_at": STOP - 1})
    line.trained_until_stop()
    line.chain.begin_at(STOP)
    with pytest.raises(Mismatch, match="the loss of update"):
        line.finishes()


def test_worker_that_outlives_a_killed_trainer_does_not_block_the_restart(server: ForkServer, folder: Path) -> None:
    training = Training(server, SCENARIOS["held-worker"], folder)
    reference = training.reference()
    pool, hold = folder / "held.pool", folder / "hold"
    first = training.process(pool, None, fresh=True, options={"hold": str(hold)})
    assert (first.status, first.updates) == (-signal.SIGKILL, 4)
    worker = int(hold.read_text())
    try:
        assert is_alive(worker)
        second = training.process(pool, None, fresh=False)
        assert is_alive(worker), "the worker was to outlive the restart too"
    finally:
        os.kill(worker, signal.SIGKILL)
    assert second.status == 0
    assert second.start in (3, 4)
    check_equal(second, reference)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def check_equal(reported: Reported, reference: Reported) -> None:
    assert reported.digests == reference.digests
    assert reported.losses.items() <= reference.losses.items()
