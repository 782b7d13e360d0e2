"""Small trainings to record, saved by ``Gradients``: each shows one thing that a pool with gradient records does."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from weakref import WeakKeyDictionary

import numpy as np
import torch
from topk_by_hand import TopKByHand
from torch import nn

import lightck
from crash.recorded import Average, Pair, Workload, one_step
from crash.recording import Recorder
from lightck.pool.format.layout import GRADIENT_PREFIX
from lightck.pool.gradient_reader import GradientCheckpoint, checkpoint_of, committed
from lightck.pool.reader import open_pool
from lightck.strategy.gradients import Gradients
from lightck.strategy.topk import TopK


class Sleeper(nn.Module):
    """A layer that is used in some steps only: ``is_awake`` says whether in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sleeper = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
        self.is_awake = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y + self.sleeper(x) if self.is_awake else y


def seeded() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def built(frozen: bool = False) -> Pair:
    """A model of three parameters, with Adam: two tensors and a count of updates for each of them."""
    seeded()
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
    if frozen:
        model[0].bias.requires_grad_(False)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def with_momentum() -> Pair:
    """A model of two parameters, with SGD."""
    seeded()
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def with_sleeper() -> Pair:
    seeded()
    model = Sleeper()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(recorder: Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    """Make steps, and change the learning rate after each, as a scheduler does: an update that is made again with other
    options shows."""
    for number in range(start, start + steps):
        one_step(model, optimizer, number)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 2)
        recorder.note(model, optimizer)


def newest(recorder: Recorder) -> tuple[int, int]:
    """The step of the newest checkpoint of a closed pool, and that of the oldest base that it names."""
    with closing(open_pool(recorder.path, gradients=True)) as reader:
        checkpoint: GradientCheckpoint = checkpoint_of(reader, committed(reader)[0])
        return checkpoint.step, min(base.step for base in checkpoint.bases())


def workload(
    run: Callable[[Recorder, Gradients], None],
    base_every: int,
    build: Callable[[], Pair] = with_momentum,
    interval: int = 1,
    compress: TopK | None = None,
) -> Workload:
    strategy = Gradients(base_every, compress=compress)
    options = {"strategy": strategy, "interval": interval}
    beside = live_residuals if compress is not None and compress.error_feedback else lambda recorder: {}
    return Workload(lambda recorder: run(recorder, strategy), build, options=options, beside=beside)


def plain(steps: int, build: Callable[[], Pair] = with_momentum) -> Callable[[Recorder, Gradients], None]:
    def run(recorder: Recorder, strategy: Gradients) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer, strategy=strategy):
            train(recorder, model, optimizer, steps)
        assert newest(recorder) == (steps, steps - int(strategy.base_every) + 1), "it does not show what it is for"

    return run


def sleeping(recorder: Recorder, strategy: Gradients) -> None:
    """A unit has no update in some steps, in which it needs no record, and then has updates again."""
    model, optimizer = with_sleeper()
    assert isinstance(model, Sleeper)
    with recorder.attach(model, optimizer, strategy=strategy):
        for number in range(8):
            model.is_awake = number not in (2, 3, 4)
            train(recorder, model, optimizer, 1, number)


def frozen(recorder: Recorder, strategy: Gradients) -> None:
    """A parameter that no update changes is written once to each home at most."""
    model, optimizer = built(frozen=True)
    with recorder.attach(model, optimizer, strategy=strategy):
        train(recorder, model, optimizer, 5)


def given_up(recorder: Recorder, strategy: Gradients) -> None:
    """Gradients are written behind the boundary, before their copies are compared: the checkpoint is given up, and the
    next one is full."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy) as session:
        train(recorder, model, optimizer, 5)
        consumed = [p.grad for p in model.parameters() if p.grad is not None]
        first = next(model.children())
        hook = first.register_forward_pre_hook(lambda *_: [gradient.zero_() for gradient in consumed] and None)
        train(recorder, model, optimizer, 1, 5)
        hook.remove()
        assert session.stats().skipped == 1, "the workload does not show what it is for"
        session.flush()
        assert newest(recorder) == (6, 6)
        train(recorder, model, optimizer, 2, 6)


def clamped(recorder: Recorder, strategy: Gradients) -> None:
    """A parameter is written between two updates: that checkpoint is full."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy):
        for number in range(6):
            one_step(model, optimizer, number)
            if number == 3:
                with torch.no_grad():
                    next(model.parameters()).clamp_(-0.1, 0.1)
            recorder.note(model, optimizer)


def adoption(recorder: Recorder, strategy: Gradients) -> None:
    """A pool that is reopened twice, and trained on each time."""
    for _ in range(3):
        model, optimizer = with_momentum()
        with recorder.attach(model, optimizer, resume=True, strategy=strategy) as session:
            train(recorder, model, optimizer, 3, session.step)


def failed_restarts(recorder: Recorder, strategy: Gradients) -> None:
    """Restarts that end before their first step write only adoption records."""
    for restart in range(6):
        model, optimizer = with_momentum()
        with recorder.attach(model, optimizer, resume=True, strategy=strategy) as session:
            if restart in (0, 5):
                train(recorder, model, optimizer, 3, session.step)


def growing(recorder: Recorder, strategy: Gradients) -> None:
    """What a record holds beside gradients outgrows it: first into the reserve, then a new file replaces the pool."""
    model, optimizer = with_momentum()
    average = Average(200)
    with recorder.attach(model, optimizer, state={"average": average}, strategy=strategy):
        for number, numel in enumerate((200, 300, 400, 400, 400_000, 400_000)):
            one_step(model, optimizer, number)
            average.values = torch.full((numel,), float(number))
            recorder.note(model, optimizer, average=average)


def damaged_base(recorder: Recorder, strategy: Gradients) -> None:
    """A base is damaged. The training resumes from the older one, which must not be overwritten until the next
    checkpoint is committed."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy):
        train(recorder, model, optimizer, 7)
    with closing(open_pool(recorder.path, gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        base = min(checkpoint.bases(), key=lambda base: base.step)
        byte = reader.read(base.offset, 1)[0]
    recorder.damage(base.offset, bytes([byte ^ 1]), left=checkpoint.header.generation)
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, resume=True, strategy=strategy) as session:
        assert session.step == 7
        train(recorder, model, optimizer, 3, session.step)


def damaged_record(recorder: Recorder, strategy: Gradients) -> None:
    """The oldest record that the newest checkpoint needs is damaged. The training resumes from the step before it."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy):
        train(recorder, model, optimizer, 8)
    with closing(open_pool(recorder.path, gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        record = checkpoint_of(reader, checkpoint.needed_records()[0])
        gradient = next(one for name, one in record.in_record.items() if name.startswith(GRADIENT_PREFIX))
        byte = reader.read(gradient.offset, 1)[0]
    recorder.damage(gradient.offset, bytes([byte ^ 1]), left=record.header.generation - 1)
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, resume=True, strategy=strategy) as session:
        assert session.step == record.step - 1
        train(recorder, model, optimizer, 4, session.step)


def going_back(recorder: Recorder, strategy: Gradients) -> None:
    """The user continues from an older step: the newer ones are dead from then on."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy):
        train(recorder, model, optimizer, 7)
    model, optimizer = with_momentum()
    lightck.recover(recorder.path, model, optimizer, step=6)
    with recorder.attach(model, optimizer, strategy=strategy):
        train(recorder, model, optimizer, 4, 10)


def late_sleeper(recorder: Recorder, strategy: Gradients) -> None:
    """A unit has its first update late, so its optimizer state is created after bases without it were written."""
    model, optimizer = with_sleeper()
    assert isinstance(model, Sleeper)
    with recorder.attach(model, optimizer, strategy=strategy):
        for number in range(8):
            model.is_awake = number in (4, 6, 7)
            train(recorder, model, optimizer, 1, number)


class Counting(nn.Module):
    """With buffers that each forward changes, which no update makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.layer(x))
        return y * torch.arange(3.0)


def with_buffers() -> Pair:
    seeded()
    model = Counting()
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def saved_again(recorder: Recorder, strategy: Gradients) -> None:
    """The last step is saved a second time, as the end of the training."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy) as session:
        train(recorder, model, optimizer, 4)
        session.flush()
        session.close(done=True)
    assert newest(recorder) == (4, 4)


LOWERED = Gradients(base_every="auto", mtbf=1e-9)
"""With failures that come so soon, two is best."""


def lowered(recorder: Recorder) -> None:
    """``base_every`` is chosen at attach, and lowered after ten steps: that checkpoint is full."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=LOWERED) as session:
        train(recorder, model, optimizer, 9)
        session.flush()
        assert (session.stats().base_every, newest(recorder)) == (4, (9, 8)), "it does not show what it is for"
        train(recorder, model, optimizer, 1, 9)
        session.flush()
        assert (session.stats().base_every, newest(recorder)) == (2, (10, 10))
        train(recorder, model, optimizer, 3, 10)


def background(recorder: Recorder, strategy: Gradients) -> None:
    """Gradients and units too large for the boundary are copied by other threads while the loop goes on."""
    model, optimizer = wide()
    with recorder.attach(model, optimizer, strategy=strategy):
        train(recorder, model, optimizer, 4)


def wide() -> Pair:
    seeded()
    model = nn.Sequential(nn.Linear(2, 2000), nn.Tanh())
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


# -- compressed gradients, with error feedback -------------------------------------------------------------------------


class Residuals:
    """What an object with residuals has to have in a checkpoint."""

    def __init__(self, key: str, tensors: dict[str, torch.Tensor]) -> None:
        self._state = {key: tensors}

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        return self._state


def feedback(recorder: Recorder, strategy: Gradients) -> None:
    """What was left out of a gradient is added to the next one, computed by hand beside the training. Each checkpoint
    has the residuals of its step, or each of them of the step at which its parameter was written last."""
    (model, optimizer), topk = wide(), strategy.compress
    assert topk is not None
    names = [name for name, _ in model.named_parameters()]
    twins = [torch.zeros_like(p) for p in model.parameters()]
    by_hand, after = TopKByHand(twins, topk), [dict[str, torch.Tensor]()]
    older = set[int]()
    with recorder.attach(model, optimizer, strategy=strategy) as session:
        for number in range(4):
            optimizer.zero_grad()
            model(torch.tensor([[1.0, number], [0.5, -1.0]])).square().sum().backward()
            for p, twin in zip(model.parameters(), twins, strict=True):
                twin.grad = p.grad.clone() if p.grad is not None else None
            by_hand()
            after.append({name: one.clone() for name, one in zip(names, by_hand.residuals, strict=True)})
            optimizer.step()
            session.flush()
            step = number + 1
            of = dict.fromkeys(names, step) if topk.residual == "step" else base_steps(recorder, step)
            older |= {step - one for one in of.values()}
            key = "residuals" if topk.residual == "step" else "residuals_of_bases"
            residuals = Residuals(key, {name: after[of[name]][name] for name in names})
            recorder.note(model, optimizer, TopK=residuals)
    assert any(older) == (topk.residual == "base"), "the workload does not show what it is for"
    assert all(bool(one.any()) for one in after[-1].values())


_seen: WeakKeyDictionary[Recorder, dict[int, dict[str, torch.Tensor]]] = WeakKeyDictionary()
"""Step -> the residuals that a session had after it."""


def live_residuals(recorder: Recorder) -> dict[str, Residuals]:
    """What the checkpoint of the present step has to hold, by what the session has had since it began."""
    session = recorder._session
    assert session is not None
    compression = session._steps._compression
    assert compression is not None
    assert compression.residuals is not None
    ((key, tensors),) = compression.residuals.state_dict().items()
    after = _seen.setdefault(recorder, {})
    after[session.step] = {name: tensor.clone() for name, tensor in tensors.items()}
    session.flush()
    of = dict.fromkeys(tensors, session.step) if key == "residuals" else base_steps(recorder, session.step)
    return {"TopK": Residuals(key, {name: after[of[name]][name] for name in tensors})}


def base_steps(recorder: Recorder, step: int) -> dict[str, int]:
    """Parameter -> the step of its base, by the pool's newest checkpoint."""
    with closing(open_pool(recorder.path, gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        assert checkpoint.step == step
        bases = [base for base in checkpoint.bases() if base.entry.role == "param"]
        return {base.entry.name.removeprefix("model/"): base.step for base in bases}


# -- with an interval: not every record is committed -------------------------------------------------------------------


def every(
    interval: int, steps: int, build: Callable[[], Pair] = with_momentum
) -> Callable[[Recorder, Gradients], None]:
    """Records between the commits, and at the end one that close() commits although its turn had not come."""

    def run(recorder: Recorder, strategy: Gradients) -> None:
        model, optimizer = build()
        with recorder.attach(model, optimizer, strategy=strategy, interval=interval) as session:
            train(recorder, model, optimizer, steps)
            assert session.stats().checkpoints == (steps - 1) // interval
        assert newest(recorder)[0] == steps

    return run


def given_up_between(recorder: Recorder, strategy: Gradients) -> None:
    """A record between two commits is given up, and the next checkpoint is full."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy, interval=3) as session:
        train(recorder, model, optimizer, 7)
        consumed = [p.grad for p in model.parameters() if p.grad is not None]
        first = next(model.children())
        hook = first.register_forward_pre_hook(lambda *_: [gradient.zero_() for gradient in consumed] and None)
        train(recorder, model, optimizer, 1, 7)
        hook.remove()
        assert session.stats().skipped == 1, "the workload does not show what it is for"
        train(recorder, model, optimizer, 5, 8)


def clamped_between(recorder: Recorder, strategy: Gradients) -> None:
    """A parameter is written between two updates, of which none is committed."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy, interval=3):
        for number in range(13):
            one_step(model, optimizer, number)
            if number == 6:
                with torch.no_grad():
                    next(model.parameters()).clamp_(-0.1, 0.1)
            recorder.note(model, optimizer)


def flushed_between(recorder: Recorder, strategy: Gradients) -> None:
    """flush() commits steps whose turn has not come, also one whose record is written already."""
    model, optimizer = with_momentum()
    with recorder.attach(model, optimizer, strategy=strategy, interval=3) as session:
        for number in range(11):
            train(recorder, model, optimizer, 1, number)
            if number in (4, 7):
                session.end_step() if number == 7 else None
                assert session.flush() == number + 1


def adoption_between(recorder: Recorder, strategy: Gradients) -> None:
    """The loop dies between two commits, and continues from the last one: its later records are of no use."""
    for steps in (8, 5, 4):
        model, optimizer = with_momentum()
        session = recorder.attach(model, optimizer, resume=True, strategy=strategy, interval=3)
        train(recorder, model, optimizer, steps, session.step)
        session.abandon()


def sleeping_between(recorder: Recorder, strategy: Gradients) -> None:
    model, optimizer = with_sleeper()
    assert isinstance(model, Sleeper)
    with recorder.attach(model, optimizer, strategy=strategy, interval=2):
        for number in range(11):
            model.is_awake = number not in (4, 5, 6, 9)
            train(recorder, model, optimizer, 1, number)


GRADIENT_WORKLOADS: dict[str, Workload] = {
    "two turns": workload(plain(5), 2),
    "three turns": workload(plain(8), 3),
    "adam": workload(plain(4, built), 2, built),
    "sleeping": workload(sleeping, 2, with_sleeper),
    "frozen": workload(frozen, 2, lambda: built(frozen=True)),
    "given up": workload(given_up, 3),
    "clamped": workload(clamped, 3),
    "adoption": workload(adoption, 2),
    "failed restarts": workload(failed_restarts, 2),
    "growing": Workload(
        lambda recorder: growing(recorder, Gradients(2)),
        with_momentum,
        lambda: {"average": Average(10)},
        {"strategy": Gradients(2)},
    ),
    "damaged base": workload(damaged_base, 3),
    "damaged record": workload(damaged_record, 3),
    "going back": workload(going_back, 3),
    "late sleeper": workload(late_sleeper, 3, with_sleeper),
    "buffers": workload(plain(5, with_buffers), 2, with_buffers),
    "saved again": workload(saved_again, 2),
    "lowered": Workload(lowered, with_momentum, options={"strategy": LOWERED}),
    "background": workload(background, 2, wide),
    "compressed": workload(background, 2, wide, compress=TopK(0.05)),
    "feedback, of steps": workload(feedback, 3, wide, compress=TopK(0.05, error_feedback=True, residual="step")),
    "feedback, of bases": workload(feedback, 3, wide, compress=TopK(0.05, error_feedback=True)),
    "interval of two": workload(every(2, 9), 3, interval=2),
    "interval of three": workload(every(3, 13), 6, interval=3),
    "interval beyond a round": workload(every(5, 12), 2, interval=5),
    "interval in the background": workload(every(2, 6, wide), 2, wide, 2),
    "interval, adam": workload(every(2, 5, built), 2, built, 2),
    "interval, buffers": workload(every(2, 6, with_buffers), 3, with_buffers, 2),
    "interval, given up": workload(given_up_between, 3, interval=3),
    "interval, clamped": workload(clamped_between, 3, interval=3),
    "interval, flushed": workload(flushed_between, 3, interval=3),
    "interval, adoption": workload(adoption_between, 3, interval=3),
    "interval, sleeping": workload(sleeping_between, 2, with_sleeper, 2),
}
