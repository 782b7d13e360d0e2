"""Optimizers that torch does not know are saved through their ``state`` and ``param_groups`` only, whatever these
hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lookalikes as wild
import pytest
import torch
from survival import Training, assert_same, goes_on, loads_by_itself, loss_of, plain, survives, survives_kill_9
from torch import nn
from toys import crashed, net, same

import lightck

KINDS = [
    wild.Lion,
    wild.Factored,
    wild.Soap,
    wild.Sophia,
    wild.EightBit,
    wild.Odd,
    wild.Global,
    wild.Late,
    wild.Wider,
    wild.NotADict,
    wild.Overriding,
]


def with_lr(kind: Callable[..., Any], lr: float = 0.02) -> Callable[[nn.Module], Sequence[Any]]:
    """Two groups, the first with a learning rate of its own."""

    def make(model: nn.Module) -> Sequence[Any]:
        first, *others = model.parameters()
        return [kind([{"params": [first], "lr": lr / 2}, {"params": others}], lr=lr)]

    return make


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_state_of_any_shape_survives(pool, kind):
    survives(pool, Training(with_lr(kind)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_state_of_any_shape_survives_a_real_kill(pool, kind):
    survives_kill_9(pool, Training(with_lr(kind)))


@pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if k not in (wild.Wider, wild.Odd, wild.EightBit, wild.NotADict)],
    ids=lambda kind: kind.__name__,
)
def test_their_own_load_state_dict_takes_the_checkpoint(pool, kind):
    run = Training(with_lr(kind))
    loads_by_itself(survives(pool, run), run)


def test_found_among_live_objects(pool):
    """Nothing is passed to attach: a third-party optimizer is found like torch's."""
    run = Training(with_lr(wild.Soap))
    with lightck.attach(run.model, pool) as session:
        assert session.found == {"optimizer": "Soap"}
        run.learn(0, 2)
    assert lightck.recover(pool).contents.optimizers[0].class_name == "Soap"


# -- what load_state_dict would not keep -----------------------------------------------------------------------------


def bfloat16_net(seed: int) -> nn.Module:
    return net(400, seed).bfloat16()


def test_state_keeps_its_dtype_beside_parameters_of_another(pool):
    run = Training(with_lr(wild.Wider), build=bfloat16_net)
    checkpoint = survives(pool, run)
    state = checkpoint.optimizer["state"][0]
    assert (state["master"].dtype, state["moment"].dtype) == (torch.float32, torch.float32)


def test_a_table_that_parameters_share_is_stored_once_and_stays_shared(pool):
    run = Training(with_lr(wild.EightBit))
    checkpoint = survives(pool, run)
    tables = {e.name: e for e in checkpoint.contents.entries.values() if e.name.endswith("/qmap1")}
    assert len(tables) == 4
    assert sum(e.nbytes for e in tables.values()) == 256 * 4
    assert len({id(s["qmap1"]) for s in checkpoint.optimizer["state"].values()}) == 1
    fresh = run.again()
    lightck.recover(pool, fresh.model, fresh.optimizers)
    assert len({id(s["qmap1"]) for s in fresh.optimizers[0].state.values()}) == 1


def test_live_tensors_that_are_shared_do_not_overwrite_each_other(pool):
    """The tensors are shared in the restored optimizer and were not when saved: each parameter gets its own value."""

    class Shared(wild.Lion):
        def __init__(self, params: Any, lr: float = 0.01, together: bool = True) -> None:
            super().__init__(params, lr)
            one = torch.zeros(())
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"count": one if together else torch.zeros(()), "exp_avg": torch.zeros_like(p)}

        def update(self, p: Any, group: Any, state: Any) -> None:
            super().update(p, group, state)
            state["count"] += p.numel()

    model = net()
    optimizer = Shared(model.parameters(), together=False)
    run = Training(lambda model: [Shared(model.parameters(), together=False)])
    with lightck.attach(run.model, pool, optimizer=run.optimizers):
        run.learn(0, 2)
    model = net(400, seed=3)
    optimizer = Shared(model.parameters())
    lightck.recover(pool, model, optimizer)
    counts = [float(optimizer.state[p]["count"]) for p in model.parameters()]
    assert counts == [2 * p.numel() for p in model.parameters()]


def test_training_on_does_not_change_a_checkpoint_that_it_loaded(pool):
    run = Training(with_lr(wild.Global))
    checkpoint = survives(pool, run)
    before = checkpoint.optimizer
    for load in (run.optimizers[0].load_state_dict, lambda state: checkpoint.restore(run.model, run.optimizers)):
        load(checkpoint.optimizer)
        run.learn(0, 2)
        assert same(checkpoint.optimizer, before)


# -- what cannot be saved --------------------------------------------------------------------------------------------


def test_state_under_a_tensor_that_is_no_parameter_is_refused(pool):
    run = Training(with_lr(wild.Lion))
    run.optimizers[0].state[torch.ones(3, 2)] = {"block": torch.ones(3)}
    with pytest.raises(lightck.errors.StateValueError, match=r"Lion keeps state under a tensor of shape \[3, 2\]"):
        lightck.attach(run.model, pool, optimizer=run.optimizers)
    assert not pool.exists()


def test_state_of_a_removed_parameter_does_no_harm(pool):
    run = Training(with_lr(wild.Lion))
    with lightck.attach(run.model, pool, optimizer=run.optimizers) as session:
        run.learn(0, 2)
        run.optimizers[0].param_groups[1]["params"].pop()
        run.learn(2, 2)
        assert session.flush() == 4
    fresh = Training(with_lr(wild.Lion), seed=4)
    fresh.optimizers[0].param_groups[1]["params"].pop()
    lightck.recover(pool, fresh.model, fresh.optimizers)
    fresh.learn(4, 2)
    run.learn(4, 2)
    assert same(fresh.losses[5], run.losses[5])
    lightck.recover(pool, run.model, run.optimizers)  # into the optimizer that still has that state
    run.learn(4, 2)
    assert same(fresh.losses[5], run.losses[5])


def test_tensors_in_attributes_are_named_in_a_warning(pool, caplog):
    class Hidden(wild.Lion):
        def __init__(self, params: Any, lr: float = 0.01) -> None:
            super().__init__(params, lr)
            self.slow_weights = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]
            self.flat_params = [p for g in self.param_groups for p in g["params"]]

    run = Training(with_lr(Hidden))
    with lightck.attach(run.model, pool, optimizer=run.optimizers):
        pass
    (warning,) = [r.getMessage() for r in caplog.records if "keeps tensors" in r.getMessage()]
    assert "Hidden.slow_weights" in warning
    assert "flat_params" not in warning


def test_a_planted_moment_in_an_attribute_is_found_by_these_tests(pool):
    """A planted fault: if a part of an optimizer were not restored, the comparison would fail."""

    class Forgetful(wild.Lion):
        def update(self, p: Any, group: Any, state: Any) -> None:
            moments = self.__dict__.setdefault("moments", {})
            super().update(p, group, moments.setdefault(p, {}))

    with pytest.raises(AssertionError, match="the resumed training differs"):
        survives(pool, Training(with_lr(Forgetful)))


def test_state_that_lies_in_one_buffer_is_named_in_a_warning(pool, caplog):
    class Flat(wild.Lion):
        """Moments as views of one buffer."""

        def step(self, closure: Any = None) -> Any:
            if not self.state:
                params = [p for g in self.param_groups for p in g["params"]]
                parts = torch.zeros(sum(p.numel() for p in params)).split([p.numel() for p in params])
                for p, part in zip(params, parts, strict=True):
                    self.state[p]["exp_avg"] = part.view_as(p)
            return super().step(closure)

    survives(pool, Training(with_lr(Flat)))  # here each view is written as a tensor of its own
    warned = {r.getMessage().split(". ")[0] for r in caplog.records if "lies in the memory" in r.getMessage()}
    assert warned == {"lightck: optimizer/0.bias/exp_avg lies in the memory of optimizer/0.weight/exp_avg"}


# -- weights that are swapped ----------------------------------------------------------------------------------------


def test_schedule_free_weights_are_swapped_for_an_evaluation_inside_paused(pool):
    def learn(model: nn.Module, optimizer: Any, start: int, end: int, session: Any = None) -> list[torch.Tensor]:
        losses = []
        optimizer.train()
        for number in range(start, end):
            losses.append(plain(model, [optimizer], number).detach())
            if session is not None:
                session.end_step()
                with session.paused():
                    evaluate(model, optimizer)
            else:
                evaluate(model, optimizer)
        return losses

    def evaluate(model: nn.Module, optimizer: Any) -> None:
        held = [p.detach().clone() for p in model.parameters()]
        optimizer.eval()
        model.eval()
        with torch.no_grad():
            loss_of(model, 99)
        model.train()
        optimizer.train()
        for p, was in zip(model.parameters(), held, strict=True):
            p.data.copy_(was)  # swapping forth and back rounds; undo that, so that the runs can be compared

    never_killed = Training(with_lr(wild.ScheduleFree))
    losses = learn(never_killed.model, never_killed.optimizers[0], 0, 6)
    run = Training(with_lr(wild.ScheduleFree))
    with lightck.attach(run.model, pool, optimizer=run.optimizers) as session:
        learn(run.model, run.optimizers[0], 0, 3, session)
        image = crashed(pool)
    fresh = run.again()
    with lightck.attach(fresh.model, image, optimizer=fresh.optimizers, resume=True) as session:
        start = session.step
        assert start in (2, 3)
        assert same(learn(fresh.model, fresh.optimizers[0], start, 6, session), losses[start:])
        assert session.stats().skipped == 0
    assert_same(fresh, never_killed, "schedule-free")


# -- added later -----------------------------------------------------------------------------------------------------


def test_goes_on_from_a_pool_that_was_laid_out_without_late_state(pool):
    """State appears at the third step; the pool is resumed before and after that."""
    never_killed = Training(with_lr(wild.Late))
    never_killed.learn(0, 6)
    run = Training(with_lr(wild.Late))
    lightck.attach(run.model, pool, optimizer=run.optimizers)
    images = {}
    for number in range(5):
        run.learn(number, 1)
        if number >= 1:  # before that there is no pool, because the first boundary lays it out
            images[number] = crashed(pool, f"after-{number}.pool")
    for number, image in images.items():
        step = lightck.recover(image).step
        assert step in (number, number + 1)
        goes_on(image, run.again(), never_killed, step, lambda training: {})
