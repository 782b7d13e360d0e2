"""Small trainings to record: each shows one thing that a pool does. They run through the public API only."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Any
from unittest.mock import patch

import pytest
import slow_transfers
import torch
from crash.recorded import Average, Workload, build, one_step, train
from crash.recording import Recorder
from torch import nn

import lightck
from lightck.pipeline import eager_copies
from lightck.pipeline.sources import UnchangedTensors
from lightck.pipeline.staging import methods
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.writer import PoolWriter


def plain(slots: int, steps: int) -> Workload:
    def run(recorder: Recorder) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer, slots=slots):
            train(recorder, model, optimizer, steps)

    return Workload(run)


def frozen() -> Workload:
    """A parameter that never changes is left out from the third checkpoint on."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build(frozen=True)
        with recorder.attach(model, optimizer) as session:
            train(recorder, model, optimizer, 5)
            left_out = session.stats().left_out
        assert left_out > 0, "the workload does not show what it is for"

    return Workload(run, lambda: build(frozen=True))


def struck(slots: int) -> Workload:
    """A frozen parameter is written unannounced, and that is found two checkpoints later: one is written whole, and
    when it is committed those with the old bytes are struck. A pool that lost its newest checkpoint meanwhile would
    show it."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build(frozen=True)
        with recorder.attach(model, optimizer, slots=slots) as session:
            train(recorder, model, optimizer, 4)
            with patch.object(UnchangedTensors, "reread", lambda *args: (set(), 0)):
                train(recorder, model, optimizer, 2, 4)
                session.flush()  # with the bytes that are the truth of step 6, and will be old
            model[0].weight.data.mul_(0.5)
            train(recorder, model, optimizer, 2, 6)
        with closing(open_pool(recorder.path)) as pool:
            assert sorted(v.step for v in pool.checkpoints() if isinstance(v, StoredCheckpoint)) == [7, 8]

    return Workload(run, lambda: build(frozen=True))


def adoption() -> Workload:
    """A pool that is reopened, trained on, reopened."""

    def run(recorder: Recorder) -> None:
        for _ in range(3):
            model, optimizer = build()
            with recorder.attach(model, optimizer, resume=True) as session:
                train(recorder, model, optimizer, 2, session.step)

    return Workload(run)


def failed_restarts() -> Workload:
    """Restarts that die before their first step write only adoption records."""

    def run(recorder: Recorder) -> None:
        for restart in range(6):
            model, optimizer = build()
            with recorder.attach(model, optimizer, resume=True) as session:
                if restart in (0, 5):
                    train(recorder, model, optimizer, 2, session.step)

    return Workload(run)


def going_back(slots: int, then: int = 2) -> Workload:
    """The user continues from an older step: the newer ones are dead from then on."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer, slots=slots):
            train(recorder, model, optimizer, 3)
        model, optimizer = build()
        lightck.recover(recorder.path, model, optimizer, step=2)
        with recorder.attach(model, optimizer):
            train(recorder, model, optimizer, then, 10)

    return Workload(run)


def media_error(slots: int) -> Workload:
    """The newest checkpoint is damaged; the training resumes from the one before, whose slot is reused last."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer, slots=slots):
            train(recorder, model, optimizer, 4)
        newest = lightck.recover(recorder.path)
        with closing(open_pool(recorder.path)) as pool:
            at = pool.superblock.slots[newest.record.slot][0] + newest.contents.entries["model/0.weight"].offset
            recorder.damage(at, bytes([pool.read(at, 1)[0] ^ 1]), left=newest.record.generation - 1)
        model, optimizer = build()
        with recorder.attach(model, optimizer, resume=True) as session:
            assert session.step == 3
            train(recorder, model, optimizer, 1, session.step)
        pool = open_pool(recorder.path)
        assert sorted(v.step for v in pool.checkpoints() if isinstance(v, StoredCheckpoint)) == [2, 3, 4][-slots:]
        pool.close()

    return Workload(run)


def relayout() -> Workload:
    """More slots are asked for: a new file replaces the pool at the first boundary."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer):
            train(recorder, model, optimizer, 2)
        model, optimizer = build()
        with recorder.attach(model, optimizer, resume=True, slots=3) as session:
            train(recorder, model, optimizer, 2, session.step)

    return Workload(run)


def pinned(*, release: bool) -> Workload:
    """A checkpoint is pinned: the pool moves to a larger file, and the next checkpoints go beside it."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer) as session:
            train(recorder, model, optimizer, 2)
            pin = session.pin()
            train(recorder, model, optimizer, 3, 2)
            if release:
                pin.release()
                train(recorder, model, optimizer, 3, 5)

    return Workload(run)


def background() -> Workload:
    """Tensors too large for the boundary are copied by other threads while the loop goes on."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build(700)
        with recorder.attach(model, optimizer, slots=3):
            train(recorder, model, optimizer, 4)

    return Workload(run, lambda: build(700))


def by_a_device(staging: Any) -> Workload:
    """All tensors are on a device. By ``Direct`` it writes into the slot by itself; what is recorded is what a copy
    thread reads back and makes durable."""

    def run(recorder: Recorder) -> None:
        transfer = slow_transfers.SlowTransfer(1, seconds=0.001)
        with pytest.MonkeyPatch.context() as on_a_device:
            on_a_device.setattr(
                methods, "MEDIUM_DISK", None
            )  # what is recorded does not depend on the kernel's part in it
            slow_transfers.install(on_a_device, lambda tensor: transfer)
            model, optimizer = build(700)
            with recorder.attach(model, optimizer, staging=staging) as session:
                train(recorder, model, optimizer, 4)
                assert session.stats().staging == str(staging)

    return Workload(run, lambda: build(700))


def layered(slots: int) -> Workload:
    """Layers are updated, and begin to be copied, inside the backward pass; once it dies in the middle of one."""

    def run(recorder: Recorder) -> None:
        class Died(Exception):
            pass

        def die(_grad: torch.Tensor) -> None:
            raise Died

        parts: list[int] = []
        submit = PoolWriter.submit_part

        def counted(*args: Any) -> Any:
            parts.append(1)
            return submit(*args)

        with patch.object(eager_copies, "EAGER_JOB_NBYTES_MIN", 1), patch.object(PoolWriter, "submit_part", counted):
            for steps in (3, 2):
                model, optimizer = build(1100)
                lightck.layerwise(model, optimizer)
                with suppress(Died), recorder.attach(model, optimizer, slots=slots, resume=True) as session:
                    train(recorder, model, optimizer, steps, session.step)
                    model[0].weight.register_hook(die)
                    before = len(parts)
                    one_step(model, optimizer, 9)
                assert len(parts) > before, "the last layer was under way when the loop died"

    return Workload(run, lambda: build(1100))


def dropped() -> Workload:
    """The loop dies with an uncommitted checkpoint; the next attach overwrites it."""

    def run(recorder: Recorder) -> None:
        class Died(Exception):
            pass

        model, optimizer = build(700)
        try:
            with recorder.attach(model, optimizer):
                train(recorder, model, optimizer, 3)
                model(torch.ones(1, 2))
                raise Died
        except Died:
            pass
        model, optimizer = build(700)
        with recorder.attach(model, optimizer, resume=True) as session:
            train(recorder, model, optimizer, 2, session.step)

    return Workload(run, lambda: build(700))


def growth(slots: int) -> Workload:
    """State that outgrows its pool: first into the reserve, then a new file replaces the pool."""

    def run(recorder: Recorder) -> None:
        model, optimizer = build()
        average = Average(2000)
        with recorder.attach(model, optimizer, state={"average": average}, slots=slots):
            for number, numel in enumerate((2000, 3000, 4000, 4000, 400_000)):
                one_step(model, optimizer, number)
                average.values = torch.full((numel,), float(number))
                recorder.note(model, optimizer, average=average)

    return Workload(run, state=lambda: {"average": Average(10)})


def late() -> Workload:
    """Nothing is known of the optimizer at attach: the pool becomes visible with its first checkpoint."""

    def run(recorder: Recorder) -> None:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
        with recorder.attach(model, None):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(recorder, model, optimizer, 2)

    return Workload(run)


def overwrite() -> Workload:
    """The user discards what the pool holds."""

    def run(recorder: Recorder) -> None:
        for steps in (3, 2):
            model, optimizer = build()
            with recorder.attach(model, optimizer, overwrite=True):
                train(recorder, model, optimizer, steps)

    return Workload(run)


def wrapped() -> Workload:
    """So many restarts that records of the commit log are overwritten."""

    def run(recorder: Recorder) -> None:
        for restart in range(18):
            model, optimizer = build()
            with recorder.attach(model, optimizer, resume=True) as session:
                if restart in (0, 17):
                    train(recorder, model, optimizer, 2, session.step)

    return Workload(run)


WORKLOADS: dict[str, Workload] = {
    "one checkpoint": plain(2, 1),
    "two slots": plain(2, 3),
    "three slots": plain(3, 4),
    "frozen": frozen(),
    "struck": struck(2),
    "struck, four slots": struck(4),
    "adoption": adoption(),
    "failed restarts": failed_restarts(),
    "going back": going_back(2),
    "going back, three slots": going_back(3),
    "going back, no step": going_back(3, 0),
    "media error": media_error(2),
    "media error, three slots": media_error(3),
    "relayout": relayout(),
    "pinned": pinned(release=True),
    "growth": growth(2),
    "growth, three slots": growth(3),
    "late": late(),
    "overwrite": overwrite(),
    "background": background(),
    "layered": layered(2),
    "layered, three slots": layered(3),
    "by a device, direct": by_a_device(lightck.Direct()),
    "by a device, copied": by_a_device(lightck.Device()),
    "dropped": dropped(),
    "wrapped": wrapped(),
}
