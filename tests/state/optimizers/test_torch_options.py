"""Options of torch's optimizers: tensor learning rates, groups, closures, dtypes, options for devices; and what torch
or lightck refuses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from survival import Training, assert_equal, loads_by_itself, pool_uuid, survives, was_predicted, with_closure
from test_torch_optim import classes
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toys import crashed, everything, net, same, train

import lightck


def accepting(option: str) -> list[str]:
    return sorted(n for n, c in classes().items() if option in inspect.signature(c.__init__).parameters)


# -- learning rates --------------------------------------------------------------------------------------------------


def decaying(model: nn.Module, optimizers: Sequence[Any], number: int) -> torch.Tensor:
    """A loop that changes a tensor learning rate in place."""
    (optimizer,) = optimizers
    loss = with_closure(model, optimizers, number)
    for group in optimizer.param_groups:
        group["lr"].mul_(0.9)
    return loss


@pytest.mark.parametrize("how", [{"foreach": False}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_learning_rate_that_is_a_tensor(pool, name, how):
    if name != "SGD" and how == {"foreach": True}:
        with pytest.raises(ValueError, match="lr as a Tensor"):  # torch's own message
            classes()[name](net().parameters(), lr=torch.tensor(0.01), **how)
        return

    def make(model: nn.Module) -> Sequence[Any]:
        return [classes()[name](model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), **how)]

    run = Training(make, decaying)
    checkpoint = survives(pool, run)
    assert checkpoint.optimizer["param_groups"][0]["lr"].dtype == torch.float64
    loads_by_itself(checkpoint, run)


def test_groups_that_share_a_tensor_learning_rate_do_not_overwrite_each_other(pool):
    """The groups share it when the optimizer is built; then the loop replaces it in one group."""

    def build(seed: int) -> tuple[nn.Module, Any]:
        model = net(seed=seed)
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        return model, torch.optim.AdamW(groups, lr=torch.tensor(0.5), foreach=False)

    model, optimizer = build(0)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
        optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    other, restored = build(1)
    assert restored.param_groups[0]["lr"] is restored.param_groups[1]["lr"]
    lightck.recover(pool, other, restored)
    assert [float(g["lr"]) for g in restored.param_groups] == [0.5, 0.25]
    train(model, optimizer, 2, start=1)
    train(other, restored, 2, start=1)
    assert same(everything(other, restored), everything(model, optimizer))


def test_tensor_learning_rate_of_another_dtype_is_replaced_not_cast(pool):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1 / 3, dtype=torch.float64), foreach=False)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    fresh = net(seed=2)
    restored = torch.optim.AdamW(fresh.parameters(), lr=torch.tensor(0.1), foreach=False)
    lightck.recover(pool, fresh, restored)
    assert same(restored.param_groups[0]["lr"], optimizer.param_groups[0]["lr"])


def test_two_restores_of_one_checkpoint_share_nothing(pool):
    def build(seed: int) -> tuple[nn.Module, Any]:
        model = net(seed=seed)
        return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)

    model, optimizer = build(0)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    checkpoint = lightck.recover(pool)
    models = [net(seed=seed) for seed in (1, 2)]
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False)) for m in models]
    for m, o in pairs:
        checkpoint.restore(m, o)
    pairs[0][1].param_groups[0]["lr"].fill_(9.0)
    assert float(pairs[1][1].param_groups[0]["lr"]) == 0.5
    assert float(checkpoint.optimizer["param_groups"][0]["lr"]) == 0.5


# -- groups ----------------------------------------------------------------------------------------------------------


def grouped(model: nn.Module) -> Sequence[Any]:
    """Return an optimizer whose groups differ in options, names and implementation."""
    weights = [(n, p) for n, p in model.named_parameters() if p.dim() == 2]
    biases = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
    return [
        torch.optim.AdamW(
            [
                {"params": weights, "lr": 0.02, "amsgrad": True, "weight_decay": 0.1},
                {"params": biases, "lr": 0.01, "betas": (0.8, 0.95), "foreach": True},
            ]
        )
    ]


def test_groups_with_different_options_and_names(pool):
    run = Training(grouped)
    checkpoint = survives(pool, run)
    assert checkpoint.optimizer["param_groups"][0]["param_names"] == ["0.weight", "2.weight"]
    loads_by_itself(checkpoint, run)
    assert set(checkpoint.optimizer["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert set(checkpoint.optimizer["state"][2]) == {"step", "exp_avg", "exp_avg_sq"}
    was_predicted(pool)


def test_resume_uses_the_implementation_that_was_saved(pool):
    """fused differs in bits from foreach: a resume with other options continues as the run that was saved."""
    never_killed = Training(lambda model: [torch.optim.AdamW(model.parameters(), fused=True)])
    never_killed.learn(0, 4)
    run = Training(lambda model: [torch.optim.AdamW(model.parameters(), fused=True)])
    with lightck.attach(run.model, pool, optimizer=run.optimizers):
        run.learn(0, 2)
    fresh = Training(lambda model: [torch.optim.AdamW(model.parameters(), foreach=True)], seed=2)
    lightck.recover(pool, fresh.model, fresh.optimizers)
    fresh.learn(2, 2)
    assert_equal(fresh.bytes(), never_killed.bytes(), "other options")


# -- dtypes ----------------------------------------------------------------------------------------------------------


def half_precision_net(seed: int) -> nn.Module:
    return net(400, seed).bfloat16()


def double_net(seed: int) -> nn.Module:
    return net(400, seed).double()


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("build", [half_precision_net, double_net])
def test_parameters_of_other_dtypes(pool, build, how):
    run = Training(lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, **how)], build=build)
    checkpoint = survives(pool, run)
    was_predicted(pool)
    state = checkpoint.optimizer["state"][0]
    assert state["exp_avg"].dtype == next(run.model.parameters()).dtype
    assert state["step"].dtype == torch.float32


# -- capturable, differentiable --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", accepting("capturable"))
def test_capturable_on_the_cpu_is_refused_by_torch_and_not_by_attach(pool, name):
    model = net()
    optimizer = classes()[name](model.parameters(), capturable=True)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        with pytest.raises(AssertionError, match="capturable=True"):
            train(model, optimizer, 1)
        assert session.step == 0


def through_an_update(model: nn.Module, optimizers: Sequence[Any], number: int) -> torch.Tensor:
    """Make one step with differentiable=True. It refuses leaves that need gradients, so copies of them get the
    gradients."""
    (optimizer,) = optimizers
    copies = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    loss = torch.func.functional_call(model, copies, torch.ones(2, 4)).square().mean() * (1 + number)
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(copies.values())), strict=True):
        p.grad = grad
    optimizer.step()
    model(torch.ones(1, 4))  # the root's forward closes the checkpoint
    return loss


@pytest.mark.parametrize("name", accepting("differentiable"))
def test_differentiable_survives(pool, name):
    def make(model: nn.Module) -> Sequence[Any]:
        return [classes()[name](model.parameters(), lr=0.01, differentiable=True)]

    survives(pool, Training(make, through_an_update, build=lambda seed: net(400, seed).requires_grad_(False)))


# -- LBFGS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_history_grows_and_wraps_around(pool, search):
    def make(model: nn.Module) -> Sequence[Any]:
        return [torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=2, history_size=4, line_search_fn=search)]

    run = Training(make, with_closure)
    checkpoint = survives(pool, run, steps=8, more=3)
    loads_by_itself(checkpoint, run)
    state = checkpoint.optimizer["state"][0]
    assert len(state["old_dirs"]) == len(state["old_stps"]) == 4
    assert state["func_evals"] >= checkpoint.step


def test_lbfgs_killed_while_its_history_grows(pool):
    """Each step adds tensors: every image of the pool in between is complete."""

    def make(model: nn.Module) -> Sequence[Any]:
        return [torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=1, history_size=50)]

    never_killed = Training(make, with_closure)
    never_killed.learn(0, 10)
    run = Training(make, with_closure)
    images, held = [], {}
    with lightck.attach(run.model, pool, optimizer=run.optimizers):
        for number in range(9):
            run.learn(number, 1)
            held[number + 1] = run.bytes()
            images.append(crashed(pool, f"{number}.pool") if number else pool)
    for number, image in list(enumerate(images))[1:]:
        step = lightck.recover(image).step
        assert step in (number, number + 1)
        fresh = run.again()
        with lightck.attach(fresh.model, image, optimizer=fresh.optimizers, resume=True):
            assert_equal(fresh.bytes(), held[step], f"restored from {image.name}")
            fresh.learn(step, 10 - step)
        assert_equal(fresh.bytes(), never_killed.bytes(), f"continued from {image.name}")


def test_closure_on_any_optimizer(pool):
    run = Training(lambda model: [torch.optim.AdamW(model.parameters())], with_closure)
    survives(pool, run)


# -- SparseAdam ------------------------------------------------------------------------------------------------------


def test_sparse_adam_is_refused_by_name_with_the_cure(pool):
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    for options in ({"optimizer": optimizer}, {}):
        with pytest.raises(lightck.errors.UnsupportedError, match=r"SparseAdam.*torch\.optim\.Adam"):
            lightck.attach(model, pool, **options)
    assert not pool.exists()


def test_sparse_adam_made_after_attach_is_refused_at_its_first_step(pool):
    model = nn.Embedding(10, 4, sparse=True)
    with lightck.attach(model, pool):
        optimizer = torch.optim.SparseAdam(model.parameters())
        model(torch.tensor([1, 2])).sum().backward()
        before = model.weight.detach().clone()
        with pytest.raises(NotImplementedError, match="SparseAdam"):
            optimizer.step()
        assert same(model.weight.detach(), before)


def test_other_optimizers_with_sparse_gradients_are_supported(pool):
    """SGD and Adagrad accept them too, and their state is dense."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(500, 4, sparse=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.table(words)

    def learn(model: nn.Module, optimizers: Sequence[Any], number: int) -> torch.Tensor:
        (optimizer,) = optimizers
        optimizer.zero_grad()
        loss = model(torch.arange(number, 40 + number)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Words()

    survives(pool, Training(lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)], learn, build))


# -- prediction ------------------------------------------------------------------------------------------------------


def test_prediction_calls_no_user_hooks_and_draws_nothing(pool):
    """A scratch instance makes a step at attach: no global hook is called, and the random state is unchanged."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda *args: seen.append(args[0]))
    try:
        before = torch.get_rng_state()
        with lightck.attach(model, pool, optimizer=optimizer) as session:
            assert seen == []
            assert same(torch.get_rng_state(), before)
            laid_out = pool_uuid(pool)
            train(model, optimizer, 2)
            assert {id(o) for o in seen} == {id(optimizer)}
            assert session.step == 2
    finally:
        handle.remove()
    assert pool_uuid(pool) == laid_out
    was_predicted(pool)


def test_only_torchs_own_code_is_run_for_the_prediction(pool, caplog):
    """Side effects of another class's constructor or step cannot be undone, so its pool is laid out at the first
    boundary."""
    caplog.set_level(logging.INFO, "lightck")
    calls: list[str] = []

    class Noisy(torch.optim.AdamW):
        def __init__(self, params: Any) -> None:
            calls.append("made")
            super().__init__(params)

        def step(self, closure: Any = None) -> Any:
            calls.append("stepped")
            return super().step(closure)

    model = net()
    optimizer = Noisy(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer):
        assert calls == ["made"]
        assert not pool.exists()
        assert "is not known before its first update" in caplog.text
        train(model, optimizer, 2)
        assert calls == ["made", "stepped", "stepped"]
    assert lightck.recover(pool).step == 2


def test_muon_and_adamw_share_a_model(pool):
    """Muon accepts matrices only: two optimizers make one update."""

    def make(model: nn.Module) -> Sequence[Any]:
        return [
            torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01),
            torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01),
        ]

    run = Training(make)
    checkpoint = survives(pool, run, attach=lambda training: {"optimizer": None})
    assert [o.class_name for o in checkpoint.contents.optimizers] == ["Muon", "AdamW"]
    assert len(checkpoint.optimizer) == 2
