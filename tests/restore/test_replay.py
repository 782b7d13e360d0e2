"""What a replay needs, what it refuses, and what it does not touch. (Its bits: ``test_replay_bits.py``.)"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from consumed_by_hand import Run, consumed, copied, gradients, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import same

from lightck.errors import ReplayError
from lightck.restore.replay import replay
from lightck.restore.unit_replay import Base
from lightck.state.consumed_update import ConsumedUpdate, SparseGradient
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.unit_update import Unit

SMALL = ((7, 5), (9,), (3, 2, 2), (1,), ())


def adamw(ps: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ps, lr=0.05)


def small_run(**how: Any) -> Run:
    return Run(how.pop("make", adamw), parameters(shapes=SMALL), **how)


def assert_reached(run: Run, bases: list[Base], step: int) -> None:
    for base in bases:
        parameter, state = run.states[step][base.unit.name]
        assert same(base.unit.parameter, parameter), base.unit.name
        assert same(dict(base.unit.states[0]), state), base.unit.name


@given(
    starts=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    absent=st.sets(st.tuples(st.integers(0, 4), st.integers(1, 5))),
    to_step=st.integers(0, 5),
    workers=st.integers(1, 3),
    slice_numel=st.sampled_from([None, 1, 4, 64]),
    is_foreach=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_bases_reach_any_later_step(starts, absent, to_step, workers, slice_numel, is_foreach):
    def draw(ps, step):
        return {n: None if (i, step) in absent else g for i, (n, g) in enumerate(gradients(ps, step).items())}

    run = small_run(draw=draw, make=lambda ps: torch.optim.NAdam(ps, lr=0.05, foreach=is_foreach))
    bases = [run.base(name, min(start, to_step)) for name, start in zip(run.parameters, starts, strict=True)]
    replay(bases, run.updates, run.partial, to_step, workers=workers, slice_numel=slice_numel)
    assert_reached(run, bases, to_step)


def test_only_the_updates_after_the_oldest_base_are_needed():
    run = small_run()
    bases = run.bases(oldest=2)
    replay(bases, run.updates[2:], run.partial, 5)
    assert_reached(run, bases, 5)
    replay(bases := [run.base(name, 5) for name in run.parameters], [], run.partial, 5)
    assert_reached(run, bases, 5)


@pytest.mark.parametrize("foreach", [None, False])
def test_a_learning_rate_that_is_a_tensor(foreach):
    run = small_run(make=lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.05), foreach=foreach))
    replay(bases := run.bases(), run.updates, run.partial, 5, slice_numel=4)
    assert_reached(run, bases, 5)


def test_tensors_whose_memory_is_in_another_order():
    """Convolutions in channels_last, and a transposed matrix: the state that an update creates is in the same order."""
    conv, matrix = (p.detach() for p in parameters(shapes=((8, 3, 5, 5), (11, 7))).values())
    ps = {
        "conv": torch.nn.Parameter(conv.to(memory_format=torch.channels_last)),
        "matrix": torch.nn.Parameter(matrix.t()),
    }
    run = Run(adamw, ps)
    bases = run.bases()
    replay(bases, run.updates, run.partial, 5, slice_numel=64)
    assert_reached(run, bases, 5)
    assert bases[0].unit.states[0]["exp_avg"].stride() == ps["conv"].stride()


def test_a_missing_update_is_named():
    run = small_run()
    with pytest.raises(ReplayError, match=r"step 3, 4 consumed is missing.*state of step 5 .*from step 1"):
        replay(run.bases(oldest=1), [run.updates[1], run.updates[4]], run.partial, 5)


def test_a_base_that_is_younger_than_the_step_is_named():
    run = small_run()
    with pytest.raises(ReplayError, match="the bases of p1, p2, p4 are younger than step 0"):
        replay(run.bases(), run.updates, run.partial, 0)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_gradient_that_is_not_recorded_is_no_absent_gradient(workers):
    run = small_run()
    step = run.updates[3].optimizer_steps[0]
    found = {name: g for name, g in step.gradients.items() if name != "p1"}
    run.updates[3] = replace(run.updates[3], optimizer_steps=(replace(step, gradients=found),))
    with pytest.raises(ReplayError, match=r"step 4 of the parameter 'p1' .*not recorded") as caught:
        replay(run.bases(), run.updates, run.partial, 5, workers=workers)
    assert (caught.value.parameter, caught.value.step) == ("p1", 4)


def with_gradient(run: Run, name: str, gradient: Any) -> list[ConsumedUpdate]:
    step = run.updates[4].optimizer_steps[0]
    changed = replace(step, gradients={**step.gradients, name: gradient})
    return [*run.updates[:4], replace(run.updates[4], optimizer_steps=(changed,))]


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        (torch.ones(5, 7), r"shape \[5, 7\], and the parameter \[7, 5\]"),
        (torch.ones(35), r"shape \[35\]"),
        (torch.ones(7, 5, dtype=torch.int64), "AdamW raised"),
        (SparseGradient(torch.tensor([[0]]), torch.ones(1, 5), (9, 5), True), r"shape \[9, 5\]"),
        (SparseGradient(torch.tensor([[99]]), torch.ones(1, 5), (7, 5), True), "AdamW raised"),
    ],
    ids=["transposed", "flat", "integers", "sparse", "sparse beyond the end"],
)
def test_a_gradient_that_does_not_fit_is_named(gradient, reason):
    run = small_run()
    with pytest.raises(ReplayError, match=f"step 5 of the parameter 'p0'.*{reason}"):
        replay(run.bases(), with_gradient(run, "p0", gradient), run.partial, 5)


def test_state_that_fused_code_would_read_beyond_its_end_is_refused():
    run = small_run(make=lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True))
    bases = run.bases(oldest=2)
    bases[0].unit.states[0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(ReplayError, match=r"'exp_avg' has shape \[2\], which a fused step cannot use"):
        replay(bases, run.updates, run.partial, 5)


@pytest.mark.parametrize("optimizers", [{}, {0: PartialOptimizer.of_class("Adam")}])
def test_another_optimizer_is_refused(optimizers):
    run = small_run()
    with pytest.raises(ReplayError, match=r"was made by optimizer 0, a AdamW, and .* in its place"):
        replay(run.bases(), run.updates, optimizers, 5)


def test_a_class_of_torch_is_replayed_without_an_optimizer():
    run = small_run()
    replay(bases := run.bases(), run.updates, {0: PartialOptimizer.of_class("AdamW")}, 5)
    assert_reached(run, bases, 5)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_check_ends_the_replay_where_it_finds_a_difference(workers):
    run = small_run()
    seen: dict[str, list[int]] = {name: [] for name in run.parameters}

    def check(unit: Unit, step: int, part: slice | None) -> str | None:
        seen[unit.name].append(step)
        same_bits = same(unit.parameter, run.states[step][unit.name][0])
        return None if same_bits else "page 0 has another checksum"

    bases = run.bases()
    replay(bases, run.updates, run.partial, 5, check=check, workers=workers)
    assert seen == {base.unit.name: list(range(i % 3 + 1, 6)) for i, base in enumerate(run.bases())}

    run.states[3]["p1"][0].add_(1.0)  # as if something had changed the parameter beside its update
    with pytest.raises(ReplayError, match=r"'p1' differs .*after the update of step 3: page 0 has another") as caught:
        replay(run.bases(), run.updates, run.partial, 5, check=check, workers=workers)
    assert (caught.value.parameter, caught.value.step) == ("p1", 3)
    assert seen["p1"][-1] == 3, "nothing is replayed after the difference"


@pytest.mark.parametrize("workers", [1, 3])
def test_each_slice_is_checked_after_each_update(workers):
    run = small_run()
    bases, seen = run.bases(), list[tuple[str, int, int]]()

    def check(unit: Unit, step: int, part: slice | None) -> str | None:
        elements = range(unit.parameter.numel())[slice(None) if part is None else part]
        now, then = (p.detach().flatten() for p in (unit.parameter, run.states[step][unit.name][0]))
        seen.extend((unit.name, step, each) for each in elements)
        assert same({**unit.states[0]}["step"], run.states[step][unit.name][1]["step"])
        return None if all(same(now[each], then[each]) for each in elements) else "it differs"

    replay(bases, run.updates, run.partial, 5, check=check, workers=workers, slice_numel=4)
    assert sorted(seen) == sorted(
        (base.unit.name, step, each)
        for base in bases
        for step in range(base.step + 1, 6)
        for each in range(base.unit.parameter.numel())
    )
    assert_reached(run, bases, 5)

    run.states[3]["p0"][0].view(-1)[-1] += 1.0
    with pytest.raises(ReplayError, match=r"'p0' differs .*after the update of step 3: it differs") as caught:
        replay(run.bases(), run.updates, run.partial, 5, check=check, workers=workers, slice_numel=4)
    assert (caught.value.parameter, caught.value.step) == ("p0", 3)


class Once(Mapping[str, Any]):
    """Gradients that are read when they are asked for, as a pool does."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found, self.read = found, []

    def __getitem__(self, name: str) -> Any:
        self.read.append(name)
        return self.found[name]

    def __contains__(self, name: object) -> bool:
        return name in self.found

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def test_each_gradient_is_read_once_and_only_if_it_is_needed():
    run = small_run()
    lazy = [Once(update.optimizer_steps[0].gradients) for update in run.updates]
    updates = [
        replace(update, optimizer_steps=(replace(update.optimizer_steps[0], gradients=one),))
        for update, one in zip(run.updates, lazy, strict=True)
    ]
    replay(run.bases(), updates, run.partial, 5)
    assert [sorted(one.read) for one in lazy] == [
        ["p0", "p3"],
        ["p0", "p1", "p3", "p4"],
        *[sorted(run.parameters)] * 3,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_is_the_users_again(dtype):
    run = Run(adamw, parameters(dtype, SMALL), threads=2)
    for threads in (2, 1):  # one last, as in all tests
        torch.set_num_threads(threads)
        replay(run.bases(), run.updates, run.partial, 5, workers=2)
        with pytest.raises(ReplayError):
            replay(run.bases(), run.updates, run.partial, 5, check=lambda unit, step, part: "something")
        left = torch.get_num_threads()
        begun_later: list[int] = []
        thread = threading.Thread(target=lambda found=begun_later: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        torch.set_num_threads(1)
        assert [left, *begun_later] == [threads, threads]


class DecaysAll(torch.optim.AdamW):
    """Changes parameters without a gradient too."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * 0.01)
        return super().step(closure)


def test_a_class_that_is_not_of_torch():
    run = small_run(make=lambda ps: DecaysAll([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.01}], lr=0.05))
    bases = run.bases()
    replay(bases, run.updates, run.partial, 5)
    assert_reached(run, bases, 5)


class ByAttribute(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.requires_grad and p.grad is not None:
                p.grad.mul_(p.scale)
        return super().step(closure)


def test_such_a_class_sees_the_attributes_of_the_parameters():
    run_parameters = parameters(shapes=SMALL)
    for i, p in enumerate(run_parameters.values()):
        p.scale = 1.0 + i
    run = Run(lambda ps: ByAttribute(ps, lr=0.1, momentum=0.9), run_parameters)
    bases = run.bases()
    for base in bases:
        base.unit.parameter.scale = run_parameters[base.unit.name].scale
        base.unit.parameter.requires_grad_()
    replay(bases, run.updates, run.partial, 5)
    for base in bases:
        assert same(base.unit.parameter.detach(), run.states[5][base.unit.name][0])


# -- several optimizers -----------------------------------------------------------------------------------------------


class Pair:
    """Two optimizers of one parameter: in each update the first steps, then the second twice; in the third, only the
    second does."""

    def __init__(self) -> None:
        self.p = torch.nn.Parameter(torch.linspace(-1, 1, 9))
        self.optimizers = [torch.optim.AdamW([self.p], lr=0.1), torch.optim.SGD([self.p], lr=0.3, momentum=0.9)]
        self.unit = Unit("p", self.p.detach().clone(), {0: {}, 1: {}})
        self.updates = [self._update(step) for step in (1, 2, 3)]

    def _update(self, step: int) -> ConsumedUpdate:
        steps = []
        for count, index in enumerate((1, 1) if step == 3 else (0, 1, 1)):
            self.p.grad = torch.linspace(1, 2, 9) * (step + count)
            steps.append(copied(consumed(self.optimizers[index], {id(self.p): "p"}, index)))
            self.optimizers[index].step()
        return ConsumedUpdate(step, tuple(steps), 1)

    def replayed(self, updates: list[ConsumedUpdate]) -> bool:
        unit = Unit("p", self.unit.parameter.clone(), {0: {}, 1: {}})
        replay([Base(unit, 0)], updates, {i: PartialOptimizer.of(o) for i, o in enumerate(self.optimizers)}, 3)
        states = [dict(optimizer.state[self.p]) for optimizer in self.optimizers]
        return same(unit.parameter, self.p.detach()) and same([dict(unit.states[i]) for i in (0, 1)], states)


def test_optimizers_of_one_parameter_step_in_their_order():
    pair = Pair()
    assert pair.replayed(pair.updates)
    assert not pair.replayed([replace(u, optimizer_steps=u.optimizer_steps[::-1]) for u in pair.updates])
    assert not pair.replayed([replace(u, optimizer_steps=u.optimizer_steps[-2:]) for u in pair.updates])


def test_a_parameter_that_joined_later_has_no_updates_before():
    run = small_run(steps=2)
    late = torch.nn.Parameter(torch.ones(4))
    run.optimizer.add_param_group({"params": [late]})
    run.parameters["late"], run.names[id(late)] = late, "late"
    for states in run.states:
        states["late"] = (late.detach().clone(), {})
    for step in (3, 4):
        run._step(step, 0.05, 2, gradients, lambda optimizer: None)
    bases = [*run.bases()[:-1], run.base("late", 0)]
    replay(bases, run.updates, run.partial, 4)
    assert_reached(run, bases, 4)


def test_a_unit_whose_state_in_an_optimizer_is_not_given_is_named():
    run = small_run()
    bases = [Base(replace(base.unit, states={}), base.step) for base in run.bases()]
    with pytest.raises(ReplayError, match="the state of 'p0' in AdamW is not known"):
        replay(bases[:1], run.updates, run.partial, 5)
