"""Layers that are updated as soon as ranks have reduced their gradients: the bits of ``step()``, also when killed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ranked
import torch
import torch.distributed as dist
from ranked import run_ranks, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint

import lightck
from lightck.errors import UnsupportedError
from lightck.hooks import layerwise as layerwise_module
from lightck.hooks.reduced_buckets import ReducedBuckets
from lightck.pipeline import eager_copies
from lightck.pool.writer import PoolWriter
from lightck.profiler import events

UPDATES = 6
SMALL_MIB = 0.002
"""Of a bucket, so that there are several."""
Loop = Callable[["Trained", int], None]


class Deep(nn.Module):
    """Layers of several sizes, of which two are tied, one is read by another one without a gradient, and two are used
    on some ranks in some steps only."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.inner = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.middle.weight
        self.sometimes = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        self.calls += 1
        x = x.to(self.scale.dtype) * self.scale
        x = self.tied(torch.tanh(self.middle(self.norm(self.inner(x)))))
        for i in used:
            x = self.sometimes[i](x)
        # The backward of this reads a weight of a layer whose gradients come later.
        return self.out(x + nn.functional.linear(x, self.middle.weight.detach()))


class WithComplex(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x.to(torch.complex64) @ self.rotation).abs()


@dataclass
class Trained:
    rank: int
    model: Any
    called: Any
    optimizer: Optimizer
    layers: Any = None


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 * step + rank))


def plainly(one: Trained, step: int) -> None:
    one.called(batch(one.rank, step)).square().mean().backward()


def partly(one: Trained, step: int) -> None:
    """Rank 0 uses both of the layers that are used sometimes, the others one; nobody does in every third step."""
    used = () if step % 3 == 2 else (0, 1) if one.rank == 0 else (step % 2,)
    one.called(batch(one.rank, step), used).square().mean().backward()


def in_two_parts(one: Trained, step: int, *, marks: bool = True) -> None:
    with one.called.no_sync(), one.layers.accumulate() if one.layers is not None and marks else nullcontext():
        plainly(one, 100 + step)
    plainly(one, step)


def in_two_backwards(one: Trained, step: int) -> None:
    """Both are reduced."""
    with one.layers.accumulate() if one.layers is not None else nullcontext():
        plainly(one, 100 + step)
    plainly(one, step)


def in_two_shards(one: Trained, step: int) -> None:
    one.called.set_requires_gradient_sync(False)
    plainly(one, 100 + step)
    one.called.set_requires_gradient_sync(True)
    plainly(one, step)


def powersgd_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)


def sharded(model: Any, mesh: Any = None, **options: Any) -> Any:
    for module in (model.inner, model.out):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def over_two_dimensions(model: Any) -> Any:
    return sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def adamw(params: Any, **options: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01, **options)


def momentum(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    n_ranks: int = 2
    ddp: dict[str, Any] | None = None
    """Options of DistributedDataParallel; None: ``shard`` the model."""
    shard: Callable[[Any], Any] = sharded
    optimizer: Callable[[Any], Optimizer] = adamw
    loop: Loop = plainly
    hook: tuple[Any, Callable[[], Any]] | None = None
    """A communication hook, and what makes its state."""
    shape: Callable[[], nn.Module] = Deep
    dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of attach."""

    def build(self, rank: int, has_layers: bool) -> Trained:
        torch.manual_seed(0)
        model = self.shape().to(self.dtype)
        if self.ddp is None:
            called = self.shard(model)
        else:
            called = DistributedDataParallel(model, **{"bucket_cap_mb": SMALL_MIB} | self.ddp)
        optimizer = self.optimizer(model.parameters())
        hook, state = (None, None) if self.hook is None else (self.hook[0], self.hook[1]())
        layers = None
        if has_layers:
            layers = lightck.layerwise(called, optimizer, comm_hook=hook, comm_state=state)
        elif hook is not None:
            called.register_comm_hook(state, hook)
        return Trained(rank, model, called, optimizer, layers)


CASES = {
    "ddp": Case(3, {}, optimizer=momentum),
    "ddp, bfloat16": Case(3, {}, optimizer=momentum, dtype=torch.bfloat16),
    "ddp, fused": Case(2, {"gradient_as_bucket_view": True}, optimizer=lambda p: adamw(p, fused=True)),
    "ddp, foreach": Case(2, {}, optimizer=lambda p: adamw(p, foreach=True)),
    "ddp, static graph": Case(2, {"static_graph": True}),
    "ddp, static graph and bucket views": Case(2, {"static_graph": True, "gradient_as_bucket_view": True}),
    "ddp, unused": Case(3, {"find_unused_parameters": True}, loop=partly),
    "ddp, unused, bucket views": Case(
        3, {"find_unused_parameters": True, "gradient_as_bucket_view": True}, loop=partly, optimizer=momentum
    ),
    "ddp, no_sync": Case(2, {}, loop=in_two_parts),
    "ddp, no_sync without accumulate()": Case(2, {}, loop=lambda one, step: in_two_parts(one, step, marks=False)),
    "ddp, fp16 hook": Case(3, {}, hook=(default_hooks.fp16_compress_hook, lambda: None)),
    "ddp, PowerSGD": Case(2, {"bucket_cap_mb": 25}, hook=(powerSGD_hook.powerSGD_hook, powersgd_state)),
    "fsdp": Case(2),
    "fsdp, 3 ranks": Case(3, optimizer=momentum),
    "fsdp, fused": Case(2, optimizer=lambda p: adamw(p, fused=True)),
    "fsdp, foreach": Case(2, optimizer=lambda p: adamw(p, foreach=True)),
    "fsdp, not resharded": Case(2, shard=lambda model: sharded(model, reshard_after_forward=False)),
    "fsdp, bfloat16": Case(
        2,
        shard=lambda model: sharded(
            model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ),
    ),
    "fsdp, accumulation": Case(2, loop=in_two_shards),
    "fsdp, accumulation in one unit": Case(2, shard=fully_shard, loop=in_two_backwards),
    "ddp, accumulation": Case(2, {}, loop=in_two_backwards),
    "ddp, complex": Case(2, {}, shape=WithComplex),
    "hsdp": Case(4, shard=over_two_dimensions),
}


@dataclass
class Run:
    began: int
    state: list[torch.Tensor]
    layers_updated: int
    """In all updates, before ``step()``."""
    n_early: int
    """Checkpoints that copied tensors before their boundary."""
    stats: Any = None


def body(
    case: Case,
    *,
    has_layers: bool = True,
    pools: Path | None = None,
    dies: tuple[int, int, int] | None = None,
    **options: Any,
) -> Callable[[int], Run]:
    """``pools``: None trains without a session. ``dies``: (rank, update, n): it dies when n layers of that update are
    updated."""

    def run(rank: int) -> Run:
        eager_copies.EAGER_JOB_NBYTES_MIN = 1  # small layers are not gathered
        one = case.build(rank, has_layers)
        session = None
        if pools is not None:
            given = {"resume": True, "timeout": 60} | case.options | options
            session = lightck.attach(one.model, pools, optimizer=one.optimizer, **given)
        began = 0 if session is None else session.step
        n_updated = of_update = step = 0
        step_layer = layerwise_module.step_layer

        def counting(*args: Any) -> None:
            nonlocal n_updated, of_update
            if dies == (rank, step, of_update):
                ranked.die()
            n_updated += 1
            of_update += 1
            step_layer(*args)

        layerwise_module.step_layer = counting
        early, begin = [], PoolWriter.submit_part

        def submitted(writer: Any, *args: Any) -> Any:
            early.append(step)
            return begin(writer, *args)

        PoolWriter.submit_part = submitted
        for step in range(began, UPDATES):
            of_update = 0
            case.loop(one, step)
            one.optimizer.step()
            one.optimizer.zero_grad()
        if session is not None:
            session.close()
        state = ranked.everything(one.model, one.optimizer)
        return Run(began, state, n_updated, len(set(early)), None if session is None else session.stats())

    return run


def trained(case: Case, **options: Any) -> list[Run]:
    return values(run_ranks(case.n_ranks, body(case, **options)))


def same_tensors(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def same(some: list[Run], others: list[Run]) -> bool:
    return all(same_tensors(a.state, b.state) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_layers_of_ranks_get_the_bits_that_step_gives(name):
    case = CASES[name]
    found = trained(case)
    assert same(found, trained(case, has_layers=False))
    assert all(run.layers_updated >= 3 * UPDATES for run in found)


KILLED = ["ddp, fused", "ddp, unused", "fsdp", "hsdp"]
"""Not ``ddp`` with 3 ranks: a resumed DistributedDataParallel sums in another order at first, without layers too."""


@pytest.mark.parametrize("name", KILLED)
def test_ranks_that_are_killed_between_two_layers_go_on_bit_identically(pools, name):
    case = CASES[name]
    for dies in ((0, 2, 2), (case.n_ranks - 1, 4, 3)):
        ended = run_ranks(case.n_ranks, body(case, pools=pools, dies=dies))
        assert ended[dies[0]].is_killed
    found = trained(case, pools=pools)
    assert len({run.began for run in found}) == 1
    assert 2 <= found[0].began <= 4
    assert same(found, trained(case, has_layers=False))


@pytest.mark.parametrize("name", ["ddp, fused", "fsdp"])
def test_copies_begin_before_the_update_is_complete(pools, name):
    """All that the checkpoints copy in the background is copied at the layers' updates, apart from the first one."""
    found = trained(CASES[name], pools=pools)
    for run in found:
        assert run.n_early >= UPDATES - 2
        assert run.stats.recopied == 0
        assert run.stats.skipped == 0


@pytest.mark.parametrize("name", ["ddp, fused", "fsdp"])
def test_a_checkpoint_is_committed_at_its_boundary_if_little_is_left_to_copy(pools, name):
    """Else its copies would wait beside the next forward and backward, and the commit with them."""

    def run(rank: int) -> list[int | None]:
        eager_copies.EAGER_JOB_NBYTES_MIN = 1
        one, committed = CASES[name].build(rank, has_layers=True), []
        with lightck.attach(one.model, pools, optimizer=one.optimizer, timeout=60) as session:
            one.model.register_forward_hook(lambda *_: committed.append(session.committed))
            for step in range(UPDATES):
                plainly(one, step)
                time.sleep(0.2)  # the copies of the layers end
                one.optimizer.step()
        return committed

    for committed in values(run_ranks(2, run)):
        assert committed[3:] == list(range(3, UPDATES)), "the first checkpoints have new optimizer state"


def test_each_of_two_optimizers_gets_its_layers():
    def trains(has_layers: bool) -> Callable[[int], tuple[list[torch.Tensor], int]]:
        def run(rank: int) -> tuple[list[torch.Tensor], int]:
            torch.manual_seed(0)
            model = Deep()
            called = DistributedDataParallel(model, bucket_cap_mb=SMALL_MIB)
            params = list(model.parameters())
            optimizers = [momentum(params[::2]), adamw(params[1::2])]
            layers = [lightck.layerwise(called, one) for one in optimizers] if has_layers else []
            n_updated = 0
            for step in range(UPDATES):
                called(batch(rank, step)).square().mean().backward()
                n_updated += all(one._used for one in layers)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            return [p.detach() for p in params], n_updated

        return run

    found, expected = values(run_ranks(2, trains(True))), values(run_ranks(2, trains(False)))
    assert all(same_tensors(a[0], b[0]) for a, b in zip(found, expected, strict=True))
    assert [n for _, n in found] == [UPDATES] * 2


class Recomputed(nn.Module):
    """Segments that are computed again in backward passes inside the backward pass. Each reads a weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 32), nn.Linear(32, 2)
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def segment(self, first: int, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts[first : first + 2]:
            x = torch.tanh(part(x))
        return x + nn.functional.linear(x, self.parts[(first + 2) % 4].weight.detach())

    def forward(self, x: torch.Tensor, ends_outside: bool) -> torch.Tensor:
        x = self.inner(x)
        for first in (0, 2):
            x = checkpoint(self.segment, first, x, use_reentrant=True)
        return self.out(x) if ends_outside else x


# torch compares the annotations of a hook with its own types, so these must be no strings.
def slow_to_end(state, bucket):
    """Reduces, and lets the last bucket of a pass arrive late."""
    future = torch.futures.Future()
    buffer, is_last = bucket.buffer(), bucket.is_last()

    def reduce() -> None:
        dist.all_reduce(buffer)
        buffer.div_(dist.get_world_size())
        if is_last:
            time.sleep(0.3)
        future.set_result(buffer)

    worker.submit(reduce)
    return future


worker = ThreadPoolExecutor(1)  # one thread: the ranks reduce the buckets in one order


def test_stats_say_how_much_is_copied_while_gradients_are_on_the_way(pools):
    def run(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        called = DistributedDataParallel(model, bucket_cap_mb=4)
        optimizer = momentum(model.parameters())
        lightck.layerwise(called, optimizer, comm_hook=slow_to_end)
        with lightck.attach(model, pools, optimizer=optimizer, timeout=60) as session:
            for _ in range(4):
                called(torch.randn(2, 1024)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return session.stats()

    for stats in values(run_ranks(2, run)):
        assert 8 << 20 <= stats.collective_bytes_copied <= stats.bytes_written


@pytest.mark.parametrize("ends_outside", [True, False])
def test_nothing_is_updated_at_the_end_of_a_backward_pass_inside_another_one(ends_outside):
    def trains(has_layers: bool) -> Callable[[int], list[torch.Tensor]]:
        def run(rank: int) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Recomputed()
            model.out.requires_grad_(ends_outside)
            called = DistributedDataParallel(model, static_graph=True, bucket_cap_mb=SMALL_MIB)
            optimizer = momentum([p for p in model.parameters() if p.requires_grad])
            if has_layers:
                lightck.layerwise(called, optimizer)
            for step in range(UPDATES):
                called(batch(rank, step), ends_outside).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return ranked.everything(model, optimizer)

        return run

    found, expected = values(run_ranks(2, trains(True))), values(run_ranks(2, trains(False)))
    assert all(same_tensors(a, b) for a, b in zip(found, expected, strict=True))


def test_stats_and_a_trace_say_when_gradients_are_on_the_way(pools):
    def run(rank: int) -> tuple[Any, list[Any], int]:
        one = CASES["ddp, fused"].build(rank, has_layers=True)
        with lightck.attach(one.model, pools, optimizer=one.optimizer, timeout=60) as session:
            plainly(one, 0)
            one.optimizer.step()
            with session.trace(pools.parent / f"trace-{rank}.json"):
                for step in (1, 2):
                    plainly(one, step)
                    one.optimizer.step()
            stats = session.stats()
        trace = events.read(pools.parent / f"trace-{rank}.json")
        return stats, trace.of(events.COMMUNICATION), len(trace.of(events.UPDATE))

    for stats, bars, n_updates in values(run_ranks(2, run)):
        assert stats.collective_seconds > 0
        assert 0 <= stats.collective_bytes_copied <= stats.bytes_written
        n_buckets = len(bars) // 2
        assert n_buckets > 2
        assert [bar.name for bar in bars] == [f"bucket {i}" for i in range(n_buckets)] * 2
        assert all(bar.end > bar.begin for bar in bars)
        n_params = sum(p.numel() for p in Deep().parameters())
        assert sum(bar.args["bytes"] for bar in bars) == 2 * 4 * n_params
        assert n_updates > 2 * n_buckets / 2


# -- what these tests find ---------------------------------------------------------------------------------------------


def update_in_the_hook(patch: pytest.MonkeyPatch) -> None:
    """Update when a bucket is reduced, while the backward pass still computes."""
    real = ReducedBuckets._hook

    def hook(self: Any, _: Any, bucket: Any) -> Any:
        future = real(self, None, bucket)
        if self._buckets:
            future.wait()
            (one,), self._buckets = self._buckets, []
            for param, gradient in one.gradients():
                own, param.grad = param.grad, gradient
                self._live_receivers()[0].gradient_arrived(param)
                param.grad = own
        return future

    patch.setattr(ReducedBuckets, "_hook", hook)


def no_move(patch: pytest.MonkeyPatch) -> None:
    """Compare with the gradients in the buckets in ``step()``."""
    patch.setattr(layerwise_module.Layerwise, "rebind_gradients", lambda self: None)


def all_computed(patch: pytest.MonkeyPatch) -> None:
    """Update what no rank has used, too."""
    patch.setattr(layerwise_module.Layerwise, "has_computed", lambda self, param: True)


def divided(patch: pytest.MonkeyPatch) -> None:
    """Reduce as torch's hook does, which divides."""
    patch.setattr(ReducedBuckets, "_reduce", lambda self, bucket: default_hooks.allreduce_hook(self._group, bucket))


def before_reduction(patch: pytest.MonkeyPatch) -> None:
    """Update with what this rank alone has computed."""
    patch.setattr(layerwise_module.Layerwise, "_gradient_computed", layerwise_module.Layerwise.gradient_arrived)


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("ddp, fused", update_in_the_hook),
        ("ddp, fused", no_move),
        ("ddp, unused", all_computed),
        ("ddp", divided),
        ("ddp", before_reduction),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_is_found(monkeypatch, name, mutation):
    case = CASES[name]
    expected = trained(case, has_layers=False)
    mutation(monkeypatch)
    ended = run_ranks(case.n_ranks, body(case))
    assert any(one.error is not None or one.is_killed for one in ended) or not same(
        [one.value for one in ended], expected
    )


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(build: Callable[[], Any], match: str, n_ranks: int = 1) -> None:
    def run(rank: int) -> None:
        with pytest.raises(UnsupportedError, match=match):
            build()

    values(run_ranks(n_ranks, run))


def test_a_hook_that_is_registered_before_is_refused():
    def build() -> None:
        ddp = DistributedDataParallel(Deep())
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        lightck.layerwise(ddp, adamw(ddp.parameters()))

    refused(build, r"fp16_compress_hook is registered.*comm_hook=hook")


def test_a_hook_of_torch_in_c_is_refused():
    def build() -> None:
        ddp = DistributedDataParallel(Deep())
        ddp._register_builtin_comm_hook(torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS)
        lightck.layerwise(ddp, adamw(ddp.parameters()))

    refused(build, r"of torch is registered")


def test_another_hook_in_a_second_call_is_refused():
    def build() -> None:
        ddp = DistributedDataParallel(Deep())
        optimizer = adamw(ddp.parameters())
        lightck.layerwise(ddp, optimizer).remove()
        lightck.layerwise(ddp, optimizer).remove()
        lightck.layerwise(ddp, optimizer, comm_hook=default_hooks.fp16_compress_hook)

    refused(build, r"another comm_hook=")


def test_a_part_in_ddp_is_refused():
    def build() -> None:
        model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
        lightck.layerwise(model, adamw(model.parameters()))

    refused(build, r"A part of the model is wrapped")


def test_parameters_that_ddp_does_not_reduce_are_refused():
    def build() -> None:
        model = Deep()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["out.weight"])
        lightck.layerwise(DistributedDataParallel(model), adamw(model.parameters()))

    refused(build, r"does not reduce")


def test_plain_ranks_are_refused():
    def build() -> None:
        model = Deep()
        lightck.layerwise(model, adamw(model.parameters()))

    refused(build, r"one of several ranks", n_ranks=2)


def test_parameters_that_fully_shard_ignores_are_refused():
    def build() -> None:
        model = Deep()
        fully_shard(model, ignored_params={model.out.weight})
        lightck.layerwise(model, adamw(model.parameters()))

    refused(build, r"does not reduce the gradients of all")


def test_a_hook_without_ddp_is_an_error():
    model = Deep()
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        lightck.layerwise(model, adamw(model.parameters()), comm_hook=default_hooks.fp16_compress_hook)


@pytest.mark.parametrize("change", ["clipping", "join", "second backward"])
def test_what_comes_too_late_is_refused_on_all_ranks(change):
    def run(rank: int) -> str:
        one = Case(ddp={}).build(rank, has_layers=True)
        with pytest.raises(UnsupportedError) as found, one.called.join() if change == "join" else nullcontext():
            plainly(one, 0)
            if change == "second backward":
                plainly(one, 1)
            nn.utils.clip_grad_norm_(one.model.parameters(), 1e-3)
            one.optimizer.step()
        return str(found.value)

    expected = {
        "clipping": "gradients were changed",
        "join": "join()",
        "second backward": "A forward of the model began",
    }
    for text in values(run_ranks(2, run)):
        assert expected[change] in text


@pytest.mark.parametrize("first", ["plain", "another ddp"])
def test_a_model_that_gets_another_wrapper_gets_layers_there(first):
    def run(rank: int) -> bool:
        torch.manual_seed(0)
        model = Deep()
        optimizer = momentum(model.parameters())
        before: Any = model if first == "plain" else DistributedDataParallel(model)
        layers = lightck.layerwise(before, optimizer)
        called = DistributedDataParallel(model, bucket_cap_mb=SMALL_MIB)
        new = lightck.layerwise(called, optimizer)
        assert new is not layers
        assert lightck.layerwise(called, optimizer) is new
        called(batch(rank, 0)).square().mean().backward()
        is_updated = bool(new._used)
        optimizer.step()
        return is_updated

    assert values(run_ranks(1, run)) == [True]


def test_a_copy_of_a_ddp_can_be_made_and_gets_layers_of_its_own(tmp_path):
    def run(rank: int) -> bool:
        one = Case(ddp={}).build(rank, has_layers=True)
        plainly(one, 0)
        one.optimizer.step()
        torch.save(one.called, tmp_path / f"{rank}.pt")
        loaded = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        found = []
        for called, has_layers in ((copy.deepcopy(one.called), True), (loaded, False)):
            other = Trained(rank, called.module, called, momentum(called.parameters()))
            if has_layers:
                other.layers = lightck.layerwise(called, other.optimizer)
            plainly(other, 1)
            assert not has_layers or other.layers._used
            other.optimizer.step()
            found.append(ranked.everything(other.model, other.optimizer))
        return same_tensors(*found)

    assert values(run_ranks(2, run)) == [True, True]


def test_a_ddp_without_layers_again_reduces_as_before():
    """After ``remove()`` the hook stays, since torch cannot unregister it."""

    def run(removes: bool) -> Callable[[int], list[torch.Tensor]]:
        def body(rank: int) -> list[torch.Tensor]:
            one = Case(ddp={}).build(rank, has_layers=removes)
            for step in range(UPDATES):
                if removes and step == 2:
                    one.layers.remove()
                if removes and step == 4:
                    one.layers = lightck.layerwise(one.called, one.optimizer)
                plainly(one, step)
                one.optimizer.step()
                one.optimizer.zero_grad()
            return ranked.everything(one.model, one.optimizer)

        return body

    for found, expected in zip(values(run_ranks(3, run(True))), values(run_ranks(3, run(False))), strict=True):
        assert all(map(torch.equal, found, expected))
