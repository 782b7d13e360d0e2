"""The communication hook of TopK: two real processes get the same gradients: the sum of what each has sent."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranked import log_lines, run_ranks, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from toys import everything, is_step, same

import lightck
from lightck import Gradients, TopK
from lightck.errors import UnsupportedError
from lightck.hooks.topk_all_reduce import TopKAllReduce
from lightck.pool.gradient_reader import checkpoint_of, committed
from lightck.pool.reader import open_pool
from lightck.session.capture import Capture
from lightck.session.compression import Compression
from lightck.state.indexed_gradient import capacity, dense_gradient, indexed

WORLD, RATIO, STEPS = 2, 0.05, 6
Tensors = list[torch.Tensor]


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 30)).to(dtype)


def inputs(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def kept_by_hand(flat: torch.Tensor) -> torch.Tensor:
    k = int(np.ceil(round(RATIO * flat.numel(), 6)))
    order = np.argsort(-flat.detach().float().abs().numpy(), kind="stable")
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[torch.from_numpy(order[:k].copy())] = True
    return mask


def by_hand(step: int, residuals: list[Tensors], dtype: torch.dtype, model: nn.Module, parts: int) -> Tensors:
    """The gradients that both ranks must have. ``residuals``: of each rank, changed in place."""
    sent: list[Tensors] = []
    for rank in range(WORLD):
        model.zero_grad()
        for part in range(parts):
            (model(inputs(10 * step + part, rank, dtype)).square().sum() / 100).backward()
        own = []
        for p, residual in zip(model.parameters(), residuals[rank], strict=True):
            whole = p.grad.clone() + residual
            mask = kept_by_hand(whole.reshape(-1)).view(whole.shape)
            own.append(torch.where(mask, whole, torch.zeros((), dtype=dtype)))
            residual.copy_(torch.where(mask, torch.zeros((), dtype=dtype), whole))
        sent.append(own)
    model.zero_grad()
    return [(torch.zeros_like(one) + one + other) / WORLD for one, other in zip(*sent, strict=True)]


def trained(rank: int, dtype: torch.dtype, feedback: bool, parts: int, options: dict[str, Any]) -> list[Tensors]:
    """Return the gradients of each step, as an optimizer would get them before clipping. Residuals change at the update
    only, because a checkpoint of the step before may not have ended."""
    model = net(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    ddp = DistributedDataParallel(model, **options)
    compression = Compression(TopK(RATIO, feedback, "step" if feedback else "base"), WORLD)
    capture = Capture(model, [optimizer], {})
    compression.allocate(capture)
    compression.register_hook(model, capture)
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        before = copy.deepcopy(saved(compression))
        for part in range(parts - 1):
            with ddp.no_sync():
                (ddp(inputs(10 * step + part, rank, dtype)).square().sum() / 100).backward()
        (ddp(inputs(10 * step + parts - 1, rank, dtype)).square().sum() / 100).backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert same(saved(compression), before)
        for listener in compression.in_group(capture):
            listener.gradients_final(0, optimizer)
        assert same(saved(compression), before) != feedback
    return found


def saved(compression: Compression) -> dict[str, Any]:
    return {} if compression.residuals is None else compression.residuals.state_dict()


@pytest.mark.parametrize(
    ("dtype", "feedback", "parts", "options"),
    [
        (torch.float32, False, 1, {}),
        (torch.float32, True, 2, {"gradient_as_bucket_view": True}),
        (torch.bfloat16, True, 1, {"bucket_cap_mb": 0.001}),
    ],
    ids=["plain", "error feedback, accumulation, bucket views", "bfloat16, error feedback, many buckets"],
)
def test_all_ranks_get_the_sum_of_what_each_has_sent(dtype, feedback, parts, options):
    of_ranks = values(run_ranks(WORLD, lambda rank: trained(rank, dtype, feedback, parts, options)))
    assert same(of_ranks[0], of_ranks[1])
    model = net(dtype)
    residuals = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(WORLD)]
    for step in range(STEPS):
        if not feedback:
            residuals = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(WORLD)]
        expected = by_hand(step, residuals, dtype, model, parts)
        assert same(of_ranks[0][step], expected)
        assert any(torch.count_nonzero(one) > TopK(RATIO).kept(one.numel()) for one in expected)


def test_what_the_optimizer_consumes_fits_the_room_for_the_union_of_all_ranks():
    """With accumulation and clipping: the record is not what was sent."""

    def body(rank: int) -> None:
        model = net()
        ddp = DistributedDataParallel(model)
        compression = Compression(TopK(RATIO), WORLD)
        TopKAllReduce.register(ddp, TopK(RATIO).kept)
        for step in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(inputs(10 * step, rank)).square().sum().backward()
            ddp(inputs(10 * step + 1, rank)).square().sum().backward()
            before = model[2].weight.grad.clone()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            gradient = model[2].weight.grad
            assert not same(before, gradient)
            form = compression.index(gradient)
            assert form is not None
            assert TopK(RATIO).kept(gradient.numel()) < form.n_used <= 2 * TopK(RATIO).kept(gradient.numel())
            assert same(dense_gradient(form, gradient.shape, gradient.stride()), gradient)

    values(run_ranks(WORLD, body))


@pytest.mark.parametrize("n_ranks", [WORLD, 3])
def test_without_the_hook_ranks_reduce_as_before(n_ranks):
    """torch cannot unregister a hook, so it stays, and the next session takes it."""

    def body(rank: int) -> Tensors:
        model = net()
        ddp = DistributedDataParallel(model)
        hook = TopKAllReduce.register(ddp, TopK(RATIO).kept)
        hook.remove()
        ddp(inputs(0, rank)).square().sum().backward()
        found = [p.grad.clone() for p in model.parameters()]
        assert TopKAllReduce.register(ddp, TopK(RATIO).kept) is hook
        ddp.zero_grad()
        ddp(inputs(0, rank)).square().sum().backward()
        assert torch.count_nonzero(model[2].weight.grad) < 0.2 * model[2].weight.numel()
        with pytest.raises(UnsupportedError, match="TopKAllReduce"):
            TopKAllReduce.register(ddp, TopK(RATIO).kept)
        return found

    def plain(rank: int) -> Tensors:
        model = net()
        ddp = DistributedDataParallel(model)
        ddp(inputs(0, rank)).square().sum().backward()
        return [p.grad for p in model.parameters()]

    assert same(values(run_ranks(n_ranks, body))[0], values(run_ranks(n_ranks, plain))[0])


def test_a_copy_of_a_ddp_can_be_made_and_reduces_as_without_a_hook():
    def body(rank: int) -> bool:
        ddp = DistributedDataParallel(net())
        TopKAllReduce.register(ddp, lambda numel: 1)
        other, plain = copy.deepcopy(ddp), DistributedDataParallel(net())
        for one in (other, plain):
            one(inputs(0, rank)).square().sum().backward()
        is_same = same([p.grad for p in other.parameters()], [p.grad for p in plain.parameters()])
        TopKAllReduce.register(other, lambda numel: 1)
        return is_same

    assert values(run_ranks(WORLD, body)) == [True] * WORLD


def test_a_hook_that_is_taken_is_named():
    def body(rank: int) -> list[str]:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        of_python, of_torch, messages = net(), net(), []
        one = DistributedDataParallel(of_python)
        one.register_comm_hook(None, fp16_compress_hook)
        other = DistributedDataParallel(of_torch)
        other._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        for ddp in (one, other):
            with pytest.raises(UnsupportedError) as error:
                TopKAllReduce.register(ddp, TopK(RATIO).kept)
            messages.append(str(error.value))
        assert len(one._comm_hooks) == 1
        assert other._comm_hooks == []
        return messages

    named, builtin = values(run_ranks(WORLD, body))[0]
    assert "The communication hook fp16_compress_hook is registered" in named
    assert "The communication hook of torch is registered" in builtin


def test_one_rank_that_is_saved_alone_is_refused(folder):
    """Its gradients would be compressed, and those of the others not."""

    def body(rank: int) -> None:
        model = DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(UnsupportedError, match="would differ from now on"):
            lightck.attach(
                model,
                folder / f"{rank}.pool",
                optimizer=optimizer,
                group=False,
                strategy=Gradients(3, compress=TopK(RATIO)),
            )

    values(run_ranks(WORLD, body))


def test_fully_sharded_parameters_are_refused(folder):
    def body(rank: int) -> None:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(net(), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(UnsupportedError, match="cannot be used under FSDP"):
            lightck.attach(
                model,
                folder / "run.pool",
                optimizer=optimizer,
                group=False,
                strategy=Gradients(3, compress=TopK(RATIO)),
            )

    values(run_ranks(1, body))


def test_error_feedback_under_a_scaler_is_refused_in_a_group(folder):
    """Whether the scaler is passed or found; without error feedback it is taken."""

    def body(rank: int) -> None:
        model = DistributedDataParallel(net())
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        for state in ({"scaler": scaler}, {}):
            with pytest.raises(UnsupportedError, match="in a group of ranks cannot be used with a GradScaler"):
                lightck.attach(
                    model,
                    folder / "pools",
                    optimizer=optimizer,
                    state=state,
                    strategy=Gradients(3, compress=TopK(RATIO, error_feedback=True)),
                )
        strategy = Gradients(3, compress=TopK(RATIO))
        with lightck.attach(
            model, folder / "pools", optimizer=optimizer, state={"scaler": scaler}, strategy=strategy
        ) as session:
            scaler.scale(model(inputs(0, rank)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            session.flush()
            assert session.committed == 1

    values(run_ranks(WORLD, body))


def test_room_for_the_union_is_not_kept_where_the_dense_form_is_smaller():
    assert capacity(100_000, 4, 30 * 1000) == 30_000
    assert capacity(100_000, 4, 60 * 1000) is None
    assert indexed(torch.ones(10), 5) is None


# -- the pool of a rank ----------------------------------------------------------------------------------------------


def steps_of(rank: int, pools: Path, topk: TopK, first: int, steps: int) -> Any:
    """Train from a checkpoint of this step on, and return what the training is at the end. Each step is recovered."""
    torch.manual_seed(first)  # the model that is restored is another one
    model = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 30))
    if not first:
        model = net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    strategy, pool = Gradients(3, compress=topk), pools / f"rank-0000{rank}-of-00002.pool"
    with lightck.attach(ddp, pools, optimizer=optimizer, strategy=strategy, resume=bool(first), timeout=60) as session:
        assert session.step == first
        for number in range(first, first + steps):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(inputs(10 * number, rank)).square().sum().backward()
            ddp(inputs(10 * number + 1, rank)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            session.flush()
            dist.barrier()
            checkpoint = lightck.recover(pools)
            assert (checkpoint.step, checkpoint.rejected, checkpoint.exact) == (number + 1, (), True)
            assert is_step(checkpoint, everything(model, optimizer))
            dist.barrier()
        with closing(open_pool(str(pool), gradients=True)) as reader:
            names = checkpoint_of(reader, committed(reader)[0]).in_record.keys()
        assert {"gradient/2.weight/indices", "gradient/2.weight/values"} <= names
        assert "gradient/2.weight" not in names
        return everything(model, optimizer), copy.deepcopy(session._steps.capture.objects)


@pytest.mark.parametrize("topk", [TopK(RATIO), TopK(RATIO, True, "step")], ids=["", "error feedback"])
def test_the_pool_of_a_rank_recovers_each_step_and_goes_on_bit_for_bit(folder, topk):
    def body(rank: int) -> tuple[Any, Any]:
        steps_of(rank, folder / "pools", topk, 0, 5)
        resumed, residuals = steps_of(rank, folder / "pools", topk, 5, 4)
        whole, whole_residuals = steps_of(rank, folder / "whole", topk, 0, 9)
        assert same(resumed, whole)
        for name in residuals:
            assert same(residuals[name].state_dict(), whole_residuals[name].state_dict())
        return resumed, {name: one.state_dict() for name, one in residuals.items()}

    (one, residuals_of_one), (other, residuals_of_other) = values(run_ranks(WORLD, body))
    assert same(one, other)
    assert same(residuals_of_one, residuals_of_other) != topk.error_feedback


def test_residuals_that_are_older_after_a_resume_are_named_on_all_ranks(folder):
    def body(rank: int) -> Any:
        model = net()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
        strategy = Gradients(3, compress=TopK(RATIO, error_feedback=True))
        with (
            log_lines() as lines,
            lightck.attach(
                ddp, folder / "pools", optimizer=optimizer, strategy=strategy, resume=True, timeout=60
            ) as session,
        ):
            for number in range(session.step, session.step + 5):
                optimizer.zero_grad()
                ddp(inputs(number, rank)).square().sum().backward()
                optimizer.step()
            return session.recovered, [line for line in lines if "residuals" in line]

    assert values(run_ranks(WORLD, body)) == [(None, [])] * WORLD
    (first, said), (second, not_said) = values(run_ranks(WORLD, body))
    assert (first.step, first.exact) == (5, False)
    assert first == second, "the same on all ranks"
    for rank in range(WORLD):
        assert f"on rank {rank}, the residuals (error feedback of TopK) of 1 parameter are of step" in first.reason
    assert len(said) == 1
    assert "is not bit-identical" in said[0]
    assert not_said == []
