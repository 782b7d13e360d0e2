"""With ``Gradients(compress=TopK(...))`` an update consumes the largest entries of each gradient, a record holds only
these, and a training that was killed goes on bit for bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from topk_by_hand import TopKByHand
from torch import nn
from toys import batch, crashed, everything, flip, is_step, kill_at, killed_child, same

import lightck
from lightck import Gradients, TopK
from lightck.errors import DriftError, UnsupportedError
from lightck.hooks.compression import GradientCompression
from lightck.pool.gradient_reader import GradientCheckpoint, checkpoint_of, committed
from lightck.pool.reader import open_pool

WIDE = 64
RATIO = 0.05
Made = tuple[nn.Module, torch.optim.Optimizer]
VARIANTS = [TopK(RATIO), TopK(RATIO, error_feedback=True, residual="step")]
"""Those with which a resume is exact."""


def net(seed: int = 0, width: int = WIDE) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def make(seed: int = 0, width: int = WIDE) -> Made:
    model = net(seed, width)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def iterate(model: nn.Module, optimizer: Any, first: int, steps: int, after: Callable[[], Any] = lambda: None) -> None:
    """``after``: called between backward and step."""
    for number in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(number)).square().sum().backward()
        after()
        optimizer.step()


def uninterrupted(topk: TopK, steps: int) -> Any:
    model, optimizer = make()
    iterate(model, optimizer, 0, steps, TopKByHand(model.parameters(), topk))
    return everything(model, optimizer)


def strategy(topk: TopK, n: int = 3) -> Gradients:
    return Gradients(base_every=n, compress=topk)


def newest(pool: Path, see: Callable[[GradientCheckpoint], Any]) -> Any:
    with closing(open_pool(str(pool), gradients=True)) as reader:
        return see(checkpoint_of(reader, committed(reader)[0]))


def stored_gradients(checkpoint: GradientCheckpoint) -> set[str]:
    return {
        name.removeprefix("gradient/") for name, one in checkpoint.in_record.items() if one.entry.role == "gradient"
    }


def assert_each_step_is_recovered(pool: Path, make: Callable[[], Any], step: Callable[..., None], topk: TopK) -> None:
    """``make``: returns a model and its optimizers. ``step``: makes one iteration."""
    model, *optimizers = make()
    with lightck.attach(model, pool, optimizer=optimizers, strategy=strategy(topk)) as session:
        for number in range(8):
            step(number, model, *optimizers)
            session.flush()
            assert session.committed == session.step
            other, *others = make()
            checkpoint = lightck.recover(pool, other, others)
            assert (checkpoint.step, checkpoint.rejected) == (session.step, ())
            assert same(everything(other, *others), everything(model, *optimizers))


# -- what is consumed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [*VARIANTS, TopK(RATIO, error_feedback=True)], ids=str)
def test_the_training_is_that_of_a_selection_by_hand(pool, topk):
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)):
        iterate(model, optimizer, 0, 8)
    assert same(everything(model, optimizer), uninterrupted(topk, 8))


def test_selection_comes_after_clipping_and_the_hooks_of_the_user(pool):
    """A hook that is registered last of all leaves one entry of each gradient that is not zero."""
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(TopK(RATIO))) as session:
        iterate(model, optimizer, 0, 2)

        def only_the_last(optimizer: Any, *_: Any) -> None:
            for p in model.parameters():
                kept = p.grad.reshape(-1)[-1].clone()
                p.grad.zero_().view(-1)[-1] = kept

        optimizer.register_step_pre_hook(only_the_last)
        iterate(model, optimizer, 2, 4, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        session.flush()
        assert all(torch.count_nonzero(p.grad) == 1 for p in model.parameters())
        assert is_step(lightck.recover(pool), everything(model, optimizer))


# -- what is stored --------------------------------------------------------------------------------------------------


def test_large_gradients_are_stored_by_index_and_small_ones_dense(pool):
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(TopK(RATIO))):
        iterate(model, optimizer, 0, 7)
    small = {"0.weight", "0.bias", "2.bias", "4.weight", "4.bias"}
    assert newest(pool, stored_gradients) == {"2.weight/indices", "2.weight/values"} | small


def test_a_pool_of_one_percent_is_small_and_so_are_its_records(folder):
    """Beside the share of the bases, a checkpoint writes less than 3 % of the state."""

    def run(name: str, compress: TopK | None) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters())
        path = folder / name
        with lightck.attach(model, path, optimizer=optimizer, strategy=Gradients(6, compress=compress)) as session:
            for number in range(16):
                if number == 10:
                    session.flush()
                    before = session.stats().bytes_written
                optimizer.zero_grad()
                model(batch(number).repeat(1, 150)).square().sum().backward()
                optimizer.step()
            session.flush()
            assert is_step(lightck.recover(path), everything(model, optimizer))
            return session.stats().bytes_written - before, os.stat(path).st_size

    state = 3 * 6 * 4 * (600 * 600 + 600)
    written, pool_nbytes = run("topk.pool", TopK(0.01))
    dense_written, dense_pool_nbytes = run("dense.pool", None)
    assert (written - state) / 6 < 0.03 * state < (dense_written - state) / 6
    assert pool_nbytes < 0.55 * dense_pool_nbytes


@pytest.mark.parametrize(("width", "n_relayouts"), [(WIDE, 0), (800, 1)], ids=["in the reserve", "in a new pool"])
def test_a_gradient_that_does_not_fit_is_stored_dense(pool, monkeypatch, caplog, width, n_relayouts):
    """As if something had added noise behind the selection."""
    caplog.set_level(logging.INFO)
    model, optimizer = make(0, width)
    compress = GradientCompression.gradients_final
    noisy = False
    monkeypatch.setattr(GradientCompression, "gradients_final", lambda *args: None if noisy else compress(*args))
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(TopK(RATIO))) as session:
        for number in range(16):
            noisy = number in (6, 10, 11)
            iterate(model, optimizer, number, 1)
            session.flush()
            assert session.committed == number + 1
            assert is_step(lightck.recover(pool), everything(model, optimizer))
            assert ("2.weight" in newest(pool, stored_gradients)) == noisy
    assert caplog.text.count("is written anew") == n_relayouts


def test_a_pool_made_with_dense_gradients_goes_on_with_compressed_ones_and_back(pool):
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3)):
        iterate(model, optimizer, 0, 5)
    for number, topk in ((5, TopK(RATIO)), (10, TopK(3 * RATIO)), (15, None)):
        other, other_optimizer = make(seed=1)
        with lightck.attach(
            other, pool, optimizer=other_optimizer, strategy=Gradients(3, compress=topk), resume=True
        ) as session:
            for step in range(number, number + 5):
                iterate(other, other_optimizer, step, 1)
                iterate(model, optimizer, step, 1, TopKByHand(model.parameters(), topk) if topk else lambda: None)
                session.flush()
                assert is_step(lightck.recover(pool), everything(other, other_optimizer))
        assert same(everything(other, other_optimizer), everything(model, optimizer))


# -- trainings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_each_step_is_recovered_in_narrow_dtypes(pool, dtype, way):
    def step(number: int, model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(batch(number).to(dtype)).float().sum().backward()
        optimizer.step()

    def make() -> Any:
        return (model := net().to(dtype)), torch.optim.AdamW(model.parameters(), lr=0.05, **{way: True})

    assert_each_step_is_recovered(pool, make, step, TopK(RATIO, error_feedback=True, residual="step"))


class Mixed(nn.Module):
    """A sparse table, a table with a dense gradient, tied weights, a convolution, and a part without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sparse, self.dense = nn.Embedding(500, 8, sparse=True), nn.Embedding(500, 8)
        self.conv = nn.Conv2d(8, 40, 3, padding=1).to(memory_format=torch.channels_last)
        self.head, self.sleeping = nn.Linear(8, 500), nn.Linear(40, 40)
        self.head.weight = self.dense.weight

    def forward(self, number: int) -> torch.Tensor:
        words = torch.randint(0, 500, (2, 9), generator=torch.Generator().manual_seed(number))
        x = self.sparse(words) + self.dense(words)
        image = x.transpose(1, 2).reshape(2, 8, 3, 3).contiguous(memory_format=torch.channels_last)
        found = self.head(x).square().mean() + self.conv(image).square().mean()
        return found + self.sleeping(self.conv(image).mean((2, 3))).square().mean() if number % 3 == 1 else found


@pytest.mark.parametrize("topk", [TopK(0.02), TopK(0.02, error_feedback=True, residual="step")], ids=str)
def test_each_step_is_recovered_with_sparse_tied_absent_and_accumulated_gradients(pool, topk):
    def made() -> Any:
        model = Mixed()
        others = [p for name, p in model.named_parameters() if not name.startswith("sparse")]
        adagrad = torch.optim.Adagrad(model.sparse.parameters(), lr=0.1)
        return model, torch.optim.SGD(others, lr=0.1, momentum=0.9, nesterov=True), adagrad

    def step(number: int, model: nn.Module, *optimizers: Any) -> None:
        for part in (2 * number, 2 * number + 1):
            model(part).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=number % 2 == 0)

    assert_each_step_is_recovered(pool, made, step, topk)


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled"])
def test_skipped_steps_of_a_scaler_leave_gradients_and_residuals_alone(pool, way, unscales):
    topk = TopK(RATIO, error_feedback=unscales, residual="step" if unscales else "base")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **{way: True})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with lightck.attach(model, pool, optimizer=optimizer, state={"scaler": scaler}, strategy=strategy(topk)) as session:
        for number in range(12):
            optimizer.zero_grad()
            loss = model(batch(number)).square().sum() * (float("inf") if number % 4 == 2 else 1)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            session.flush()
            assert is_step(lightck.recover(pool), everything(model, optimizer))
            for tensor in lightck.recover(pool).state.get("TopK", {"residuals": {}})["residuals"].values():
                assert bool(tensor.isfinite().all())
        assert (session.step, session.committed) == (9, 9)


def test_plain_sgd_is_taken_because_its_compressed_gradients_are_small(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(TopK(0.01))):
        iterate(model, optimizer, 0, 6)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", VARIANTS, ids=str)
def test_a_crashed_training_goes_on_bit_for_bit(pool, topk):
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)) as session:
        iterate(model, optimizer, 0, 5)
        session.flush()
        path = crashed(pool)
    for process in range(4):
        model, optimizer = make(seed=process + 1)
        with lightck.attach(model, path, optimizer=optimizer, resume=True, strategy=strategy(topk)) as session:
            assert session.recovered is not None
            assert (session.recovered.step, session.recovered.exact) == (5 + 2 * process, True)
            iterate(model, optimizer, session.step, 2)
            session.flush()
            path = crashed(path, f"crashed-{process}.pool")
    assert same(everything(model, optimizer), uninterrupted(topk, 13))


def run_to_the_end(pool: Path, topk: TopK, steps: int, kill: tuple[str, int] | None) -> None:
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=strategy(topk)) as session:
        if kill is not None:
            kill_at(*kill)
        while session.step < steps:
            iterate(model, optimizer, session.step, 1)


SITES = ("header", "block", "manifest", "sealed", "body", "word", "ack")


@pytest.mark.parametrize("topk", VARIANTS, ids=str)
def test_kills_in_the_middle_of_a_checkpoint_lose_nothing(pool, topk):
    assert_kills_lose_nothing(pool, topk, [(site, 2) for site in SITES])


@pytest.mark.long
@pytest.mark.parametrize("topk", VARIANTS, ids=str)
def test_many_kills_lose_nothing(pool, topk):
    draw = np.random.default_rng(0)
    kills = [(SITES[draw.integers(len(SITES))], int(draw.integers(1, 6))) for _ in range(40)]
    assert_kills_lose_nothing(pool, topk, kills)


def assert_kills_lose_nothing(pool: Path, topk: TopK, kills: list[tuple[str, int]]) -> None:
    steps = 6 * len(kills) + 3
    for kill in kills:
        killed_child(lambda kill=kill: run_to_the_end(pool, topk, steps, kill))
    run_to_the_end(pool, topk, steps, None)
    checkpoint = lightck.recover(pool)
    assert (checkpoint.step, checkpoint.exact, checkpoint.reason) == (steps, True, "")
    assert is_step(checkpoint, uninterrupted(topk, steps))


def test_a_residual_that_lies_with_the_bases_is_older_and_is_named(pool, caplog):
    topk = TopK(RATIO, error_feedback=True)
    model, optimizer = make()
    residuals = {}
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)) as session:
        for number in range(10):
            iterate(model, optimizer, number, 1)
            session.flush()
            state = session._steps.capture.objects["TopK"].state_dict()["residuals_of_bases"]
            residuals[number + 1] = {name: tensor.clone() for name, tensor in state.items()}
            checkpoint = lightck.recover(pool)
            assert is_step(checkpoint, everything(model, optimizer))
            base = newest(pool, lambda found: {one.entry.name: one.step for one in found.bases()})
            step = base["model/2.weight"]
            assert base["state/TopK/residuals_of_bases/2.weight"] == step
            found = checkpoint.state["TopK"]["residuals_of_bases"]
            assert same(found["2.weight"], residuals[step]["2.weight"])
            assert same(found["0.weight"], residuals[number + 1]["0.weight"])  # small: in the small state
            assert checkpoint.exact == (step == number + 1)
        assert (checkpoint.exact, step) == (False, 9)
    norm = float(residuals[9]["2.weight"].double().norm())
    assert (
        f"of 1 parameter are of step 9, and the checkpoint is of step 10; their norm is {norm:.6g}" in checkpoint.reason
    )
    model, optimizer = make(seed=1)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk), resume=True) as session:
        assert session.recovered == type(session.recovered)(10, exact=False, reason=checkpoint.reason)
        assert "does not go on bit for bit: the residuals" in caplog.text
        iterate(model, optimizer, 10, 3)
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_the_moment_at_which_residuals_are_saved_can_be_changed(pool):
    """The state that is restored stays the same, and the pool moves to a file that has room for it."""
    model, optimizer = make()
    topk = TopK(RATIO, error_feedback=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)):
        iterate(model, optimizer, 0, 7)
    for changed in (TopK(RATIO, error_feedback=True, residual="step"), topk):
        model, optimizer = make(seed=1)
        before = lightck.recover(pool).state["TopK"]
        with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(changed), resume=True) as session:
            now = session._steps.capture.objects["TopK"].state_dict()
            assert same(list(now.values()), list(before.values()))
            iterate(model, optimizer, session.step, 5)
            session.flush()
            checkpoint = lightck.recover(pool)
            assert is_step(checkpoint, everything(model, optimizer))
            if changed.residual == "step":
                assert checkpoint.exact
                assert same(checkpoint.state["TopK"], session._steps.capture.objects["TopK"].state_dict())


def test_error_feedback_that_is_left_out_at_a_resume_is_named(pool):
    model, optimizer = make()
    topk = TopK(RATIO, error_feedback=True, residual="step")
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)):
        iterate(model, optimizer, 0, 4)
    model, optimizer = make()
    with pytest.raises(DriftError, match="holds state 'TopK'"):
        lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(TopK(RATIO)), resume=True)
    with lightck.attach(
        model, pool, optimizer=optimizer, state={"TopK": None}, strategy=strategy(TopK(RATIO)), resume=True
    ) as session:
        iterate(model, optimizer, session.step, 3)
    checkpoint = lightck.recover(pool)
    assert (checkpoint.step, checkpoint.state) == (7, {})
    assert is_step(checkpoint, everything(model, optimizer))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topk", "error", "message"),
    [
        (TopK(0.0), ValueError, "ratio=0.0 is not between 0 and 1"),
        (TopK(1), ValueError, "ratio=1 is not between"),
        (TopK(float("nan")), ValueError, "ratio=nan"),
        (TopK("0.1"), TypeError, "ratio='0.1' is a str"),
        (TopK(0.1, error_feedback=1), TypeError, "error_feedback=1 is a int"),
        (TopK(0.1, residual="never"), ValueError, "residual='never'"),
        (TopK(0.1, residual="step"), ValueError, "without error_feedback=True"),
        (TopK, TypeError, "compress is 'TopK'"),
        (0.01, TypeError, "compress is 'float'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused(pool, topk, error, message):
    model, optimizer = make()
    with pytest.raises(error, match=message):
        lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3, compress=topk))


def test_error_feedback_that_is_added_at_a_resume_is_named(pool, folder):
    model, optimizer = make()
    topk = TopK(RATIO, error_feedback=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(TopK(RATIO))):
        iterate(model, optimizer, 0, 4)
    with pytest.raises(DriftError, match="holds no state for the object state\\['TopK'\\]"):
        lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk), resume=True)
    other, other_optimizer = make(seed=1)
    lightck.recover(pool, other, other_optimizer)
    assert same(everything(other, other_optimizer), everything(model, optimizer))
    with lightck.attach(other, folder / "other.pool", optimizer=other_optimizer, strategy=strategy(topk)):
        iterate(other, other_optimizer, 4, 4)
    assert is_step(lightck.recover(folder / "other.pool"), everything(other, other_optimizer))


def test_an_object_with_the_name_of_the_residuals_is_refused(pool):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(ValueError, match="state= has an object named 'TopK'"):
        lightck.attach(
            model,
            pool,
            optimizer=optimizer,
            state={"TopK": scheduler},
            strategy=strategy(TopK(0.1, error_feedback=True)),
        )


def test_error_feedback_under_a_scaler_of_a_fused_optimizer_is_refused_at_its_step(pool):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    topk = TopK(RATIO, error_feedback=True, residual="step")
    with lightck.attach(model, pool, optimizer=optimizer, state={"s": scaler}, strategy=strategy(topk)):
        scaler.scale(model(batch(0)).sum()).backward()
        with pytest.raises(UnsupportedError, match="unscale_"):
            scaler.step(optimizer)


def test_a_closed_session_compresses_nothing_and_keeps_no_residual(pool):
    model, optimizer = make()
    topk = TopK(RATIO, error_feedback=True, residual="step")
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)) as session:
        iterate(model, optimizer, 0, 2)
        residuals = session._steps.capture.objects["TopK"]
    iterate(model, optimizer, 2, 1)
    assert torch.count_nonzero(model[2].weight.grad) > 0.5 * WIDE * WIDE
    assert residuals.state_dict() == {"residuals": {}}


def test_a_parameter_outside_of_the_model_has_a_residual_with_its_base(pool):
    def made() -> Any:
        model, outside = net(), nn.Parameter(torch.ones(WIDE, WIDE))
        return model, outside, torch.optim.AdamW([*model.parameters(), outside], lr=0.05)

    topk = TopK(RATIO, error_feedback=True)
    model, outside, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)) as session:
        for number in range(8):
            optimizer.zero_grad()
            (model(batch(number)).square().sum() + (outside @ model[2].weight).square().mean()).backward()
            optimizer.step()
            session.flush()
            other, _, other_optimizer = made()
            checkpoint = lightck.recover(pool, other, other_optimizer)
            assert (checkpoint.step, checkpoint.rejected) == (number + 1, ())
            assert same(everything(other, other_optimizer), everything(model, optimizer))
    assert any("outside" in name for name in checkpoint.state["TopK"]["residuals_of_bases"])


@pytest.mark.parametrize("residual", ["base", "step"])
def test_a_parameter_that_is_unfrozen_late_gets_a_residual(pool, residual):
    model = net()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    topk = TopK(RATIO, error_feedback=True, residual=residual)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)) as session:
        for number in range(10):
            model[2].weight.requires_grad_(number >= 4)
            iterate(model, optimizer, number, 1)
            session.flush()
            checkpoint = lightck.recover(pool)
            assert (checkpoint.step, checkpoint.rejected) == (number + 1, ())
            assert is_step(checkpoint, everything(model, optimizer))
            (residuals,) = checkpoint.state["TopK"].values()
            assert ("2.weight" in residuals) == (number >= 4)


def test_a_group_of_parameters_that_is_added_is_compressed(pool):
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.05)
    topk = TopK(RATIO, error_feedback=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)) as session:
        for number in range(10):
            if number == 4:
                optimizer.add_param_group({"params": model[2].parameters()})
            iterate(model, optimizer, number, 1)
            session.flush()
            checkpoint = lightck.recover(pool)
            assert (checkpoint.step, checkpoint.rejected) == (number + 1, ())
            assert is_step(checkpoint, everything(model, optimizer))
        assert torch.count_nonzero(model[2].weight.grad) == topk.kept(WIDE * WIDE)


# -- residuals that lie with the bases -------------------------------------------------------------------------------


def test_kills_lose_no_update_if_residuals_lie_with_the_bases(pool):
    topk = TopK(RATIO, error_feedback=True)
    steps = 6 * len(SITES)
    for site in SITES:
        killed_child(lambda site=site: run_to_the_end(pool, topk, steps, (site, 2)))
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=strategy(topk)) as session:
        assert 1 < session.step < steps
        iterate(model, optimizer, session.step, 5)
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_damaged_residual_is_replaced_by_that_of_the_older_base(pool, caplog):
    topk = TopK(RATIO, error_feedback=True)
    model, optimizer = make()
    residuals = {}
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy(topk)) as session:
        for number in range(10):
            iterate(model, optimizer, number, 1)
            state = session._steps.capture.objects["TopK"].state_dict()["residuals_of_bases"]
            residuals[number + 1] = state["2.weight"].clone()
    name = "state/TopK/residuals_of_bases/2.weight"
    base, older = (
        newest(pool, lambda found, of=of: next(one for one in getattr(found, of)() if one.entry.name == name))
        for of in ("bases", "older_bases")
    )
    assert older.step < base.step < 10
    flip(pool, base.offset + 5)
    checkpoint = lightck.recover(pool)
    assert (checkpoint.step, checkpoint.rejected) == (10, ())
    assert is_step(checkpoint, everything(model, optimizer))
    assert same(checkpoint.state["TopK"]["residuals_of_bases"]["2.weight"], residuals[older.step])
    assert f"are of step {older.step}, and the checkpoint is of step 10" in checkpoint.reason
    assert f"An older one, of step {older.step}, is used" in caplog.text
