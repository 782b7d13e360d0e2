"""A replay computes the bits of the training: every optimizer of torch, every implementation, every dtype.

A training of five updates, with a learning rate that changes and gradients that are absent, is compared with a replay
from units of different steps: one after the other, in parallel, and in slices. The sizes are odd, so that each thread's
part ends within a vector.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from consumed_by_hand import SHAPES, Run, all_gradients, gradients, parameters
from toys import same

from lightck.errors import ReplayError
from lightck.restore.replay import Base, replay
from lightck.state.consumed_update import ConsumedUpdate, Implementation
from lightck.state.torch_classes import TORCH_CLASSES

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 2, "weight_decay": 0.01}],
    "Adadelta": [{"weight_decay": 0.01}],
    "Adafactor": [{"weight_decay": 0.01}],
    "Adagrad": [{"lr_decay": 0.01, "weight_decay": 0.01}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.01}],
    "AdamW": [{}],
    "Adamax": [{"weight_decay": 0.01, "maximize": True}],
    "Muon": [{}],
    "NAdam": [{"weight_decay": 0.01}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.01}],
    "RMSprop": [{"centered": True, "momentum": 0.5, "weight_decay": 0.01}],
    "Rprop": [{}],
    "SGD": [{"momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.9, "nesterov": True}],
}
ELSEWHERE = {"LBFGS", "SparseAdam"}
"""The first is refused, the second has sparse gradients only and a test of its own."""
FUSED = {"Adagrad", "Adam", "AdamW", "SGD"}
STEPS = 5
MATRICES = ((97, 61), (37, 3), (5, 7), (1, 3))
NARROW = (torch.bfloat16, torch.float16)


def implementations(name: str) -> list[dict[str, Any]]:
    if name == "Muon":
        return [{}]
    return [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else [])]


def table(*dtypes: torch.dtype) -> Iterator[Any]:
    for name, variants in OPTIONS.items():
        for options in variants:
            for how in implementations(name):
                for dtype in dtypes:
                    if name == "SGD" and how == {"fused": True} and dtype != torch.float32:
                        continue  # refused: test_a_fused_sgd_below_float32_is_refused
                    label = f"{name}-{'-'.join(f'{k}={v}' for k, v in (options | how).items())}-{dtype}"
                    yield pytest.param(name, options | how, dtype, id=label)


def run_of(name: str, options: dict[str, Any], dtype: torch.dtype, **how: Any) -> Run:
    if options.get("fused") and name == "SGD":
        how.setdefault("draw", all_gradients)  # torch's fused SGD fails if a momentum is absent
    shapes = MATRICES if name == "Muon" else SHAPES
    return Run(lambda ps: TORCH_CLASSES[name](ps, lr=0.02, **options), parameters(dtype, shapes), **how)


def differing(run: Run, bases: list[Base]) -> list[str]:
    """The names of the units that are not the bits of the training."""
    found = []
    for base in bases:
        parameter, state = run.states[-1][base.unit.name]
        if not same(base.unit.parameter, parameter) or not same(dict(base.unit.states[0]), state):
            found.append(base.unit.name)
    return found


def replayed(run: Run, updates: list[ConsumedUpdate] | None = None, **how: Any) -> list[str]:
    bases = run.bases()
    replay(bases, run.updates if updates is None else updates, run.partial, STEPS, **how)
    return differing(run, bases)


def test_every_class_of_torch_is_in_the_table():
    assert set(OPTIONS) | ELSEWHERE == set(TORCH_CLASSES)


def assert_has_the_bits(run: Run, *ways: dict[str, Any]) -> None:
    given = copy.deepcopy([update.optimizer_steps[0].gradients for update in run.updates])
    for how in ways:
        assert replayed(run, **how) == []
    assert same(given, [update.optimizer_steps[0].gradients for update in run.updates]), "a gradient was written"
    assert same(run._copy(), run.states[-1]), "the training's own tensors were written"


WHOLE_IN_TURN: dict[str, Any] = {"workers": 1, "slice_numel": None}
SLICED_IN_PARALLEL: dict[str, Any] = {"workers": 3, "slice_numel": 4_001}


@pytest.mark.parametrize(("name", "options", "dtype"), list(table(torch.float32)))
def test_a_replay_has_the_bits_of_the_training(name, options, dtype):
    assert_has_the_bits(run_of(name, options, dtype), WHOLE_IN_TURN, SLICED_IN_PARALLEL)


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [*table(torch.bfloat16), *(pytest.param(*p.values, id=p.id, marks=pytest.mark.long) for p in table(torch.float16))],
)
def test_a_replay_below_float32_has_the_bits_of_the_training(name, options, dtype):
    assert_has_the_bits(run_of(name, options, dtype), SLICED_IN_PARALLEL)


@pytest.mark.long
@pytest.mark.parametrize(("name", "options", "dtype"), list(table(torch.float32, torch.float64, *NARROW)))
def test_a_replay_has_the_bits_of_a_training_with_one_thread(name, options, dtype):
    if name == "SGD" and options.get("fused") and dtype in NARROW:
        return  # refused
    assert_has_the_bits(run_of(name, options, dtype, threads=1), SLICED_IN_PARALLEL)


@pytest.mark.parametrize(
    "name", sorted(set(OPTIONS) - {"Rprop"})
)  # Rprop uses its learning rate in the first step only
def test_options_after_the_scheduler_are_other_options(name):
    run = run_of(name, OPTIONS[name][0] | implementations(name)[0], torch.float32, threads=1)
    wrong = [
        replace(update, optimizer_steps=(replace(update.optimizer_steps[0], groups=later.optimizer_steps[0].groups),))
        for update, later in zip(run.updates, [*run.updates[1:], run.updates[-1]], strict=True)
    ]
    assert replayed(run, wrong) != []


def with_implementation(run: Run, how: Implementation) -> list[ConsumedUpdate]:
    def changed(update: ConsumedUpdate) -> ConsumedUpdate:
        step = update.optimizer_steps[0]
        groups = tuple(replace(group, implementation=how, other_implementations={}) for group in step.groups)
        return replace(update, optimizer_steps=(replace(step, groups=groups),))

    return [changed(update) for update in run.updates]


@pytest.mark.parametrize(
    ("name", "how", "wrong"),
    [
        *((name, "foreach", Implementation.FOR_LOOP) for name in ("NAdam", "RAdam", "ASGD", "Adafactor")),
        *((name, "fused", Implementation.FOR_LOOP) for name in ("Adam", "AdamW", "Adagrad")),
    ],
)
def test_another_implementation_computes_other_bits(name, how, wrong):
    run = run_of(name, {how: True}, torch.float32)
    assert replayed(run) == []
    assert replayed(run, with_implementation(run, wrong)) != []


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "SGD"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_below_float32_another_number_of_threads_computes_other_bits(name, dtype):
    run = run_of(name, OPTIONS[name][0] | {"foreach": False}, dtype, threads=2)
    assert replayed(run) == []
    assert replayed(run, [replace(update, threads=1) for update in run.updates]) == ["p0"]


def test_the_strides_of_a_gradient_decide_bits_below_float32():
    """A record that keeps the values and not the strides is not what the update consumed."""

    def strided(ps, step):
        return {
            n: None if g is None else g.t().contiguous().t() if g.dim() == 2 else g
            for n, g in gradients(ps, step).items()
        }

    run = run_of("Adam", {"weight_decay": 0.01, "foreach": False}, torch.bfloat16, draw=strided)
    assert replayed(run) == []
    dense = [
        replace(
            u,
            optimizer_steps=(
                replace(s, gradients={n: g if g is None else g.contiguous() for n, g in s.gradients.items()}),
            ),
        )
        for u in run.updates
        for s in u.optimizer_steps
    ]
    assert replayed(run, dense) == ["p0"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_first_momentum_beside_it_changes_the_bits_of_a_tensor(dtype):
    """SGD's foreach code updates each momentum for itself in a step in which one is new."""
    run = run_of("SGD", {"momentum": 0.9, "foreach": True}, dtype)
    assert any(group.other_implementations for u in run.updates for group in u.optimizer_steps[0].groups)
    assert replayed(run) == []
    assert replayed(run, with_implementation(run, Implementation.FOREACH)) != []


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "RMSprop", "SGD"])
def test_complex_parameters(name, options):
    run = run_of(name, OPTIONS[name][0] | options, torch.complex64)
    assert replayed(run, workers=3, slice_numel=4_001) == []


def sparse_rows(is_coalesced: bool) -> Any:
    def draw(ps, step):
        generator = torch.Generator().manual_seed(step)
        found = gradients(ps, step)
        for name, p in ps.items():
            if p.dim() == 2 and found[name] is not None:
                rows = torch.randint(0, p.shape[0], (1, 40), generator=generator)
                values = torch.randn(40, p.shape[1], generator=generator).to(p.dtype)
                one = torch.sparse_coo_tensor(rows, values, p.shape, check_invariants=False)
                found[name] = one.coalesce() if is_coalesced else one
        return found

    return draw


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad's own
@pytest.mark.parametrize("is_coalesced", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"foreach": False}),
        ("SGD", {"foreach": True}),
        ("Adagrad", {"foreach": False}),
        ("Adagrad", {"foreach": True}),
    ],
    ids=str,
)
def test_sparse_gradients_beside_dense_ones(name, options, dtype, is_coalesced):
    run = run_of(name, options, dtype, draw=sparse_rows(is_coalesced))
    assert replayed(run, slice_numel=4_001) == []


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_sparse_adam(is_coalesced):
    shapes = ((149, 33), (30, 7))
    make = TORCH_CLASSES["SparseAdam"]
    run = Run(lambda ps: make(ps, lr=0.02), parameters(shapes=shapes), draw=sparse_rows(is_coalesced))
    assert replayed(run) == []


def test_a_fused_sgd_below_float32_is_refused():
    run = run_of("SGD", {"momentum": 0.9, "fused": True}, torch.bfloat16)
    with pytest.raises(ReplayError, match="fused SGD with momentum computes other bits of bfloat16 at each run"):
        replay(run.bases(), run.updates, run.partial, STEPS)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_grad_scaler_and_a_step_that_it_skips(name):
    """A fused step unscales, writes the gradient, and does nothing if one was infinite."""

    def scaled(optimizer):
        optimizer.grad_scale = torch.tensor(8.0)
        optimizer.found_inf = torch.tensor(float(scaled.step == 3))
        scaled.step += 1

    scaled.step = 1
    options = {"momentum": 0.9} if name == "SGD" else {}
    run = run_of(name, options | {"fused": True}, torch.float32, before_step=scaled)
    assert replayed(run) == []
    assert replayed(run) == [], "the record was changed by the first replay"
