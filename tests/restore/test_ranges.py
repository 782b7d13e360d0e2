"""``recover(lazy=True)``, ``Checkpoint.read`` and ``Checkpoint.pieces``: parts of tensors, without the rest."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import adam, damage, net, pool_with, same, train, weights

import lightck
from lightck.errors import CorruptPoolError, NoCheckpointError, NoTensorError
from lightck.pool.reader import StoredCheckpoint

WEIGHT = "model/0.weight"


@pytest.fixture(params=[True, False], ids=["lazy", "loaded"])
def lazy(request):
    return request.param


def test_a_box_has_the_bytes_of_the_tensor(pool, lazy):
    model, optimizer = pool_with(pool)
    average = optimizer.state[model[0].weight]["exp_avg"]
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        part = checkpoint.read(WEIGHT, start=(2, 1), size=(3, 2))
        assert torch.equal(part, model[0].weight[2:5, 1:3])
        assert part.is_contiguous()
        assert torch.equal(checkpoint.read(WEIGHT, (5, 0)), model[0].weight[5:])
        assert torch.equal(checkpoint.read(WEIGHT), model[0].weight)
        assert torch.equal(checkpoint.read("optimizer/0.weight/exp_avg", size=(1, 4)), average[:1])
        assert checkpoint.read(WEIGHT, size=(0, 4)).shape == (0, 4)
        assert checkpoint.read("optimizer/0.weight/step") == 3


def test_out_is_filled_whatever_its_memory(pool, lazy):
    model, _ = pool_with(pool)
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        for out in (torch.zeros(2, 4), torch.zeros(4, 2).t(), torch.zeros(5, 4)[1:3], model[0].weight.detach()[:2] * 0):
            assert checkpoint.read(WEIGHT, (3, 0), (2, 4), out) is out
            assert torch.equal(out, model[0].weight[3:5])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_boxes_of_any_layout(pool, layout):
    torch.manual_seed(0)
    model = torch.nn.Conv2d(5, 7, 3).to(memory_format=layout)
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        model(torch.ones(1, 5, 3, 3)).sum().backward()
        optimizer.step()
    with lightck.recover(pool, lazy=True) as checkpoint:
        whole = checkpoint.tensor("model/weight")
        assert same(whole, model.weight.detach())

        @given(st.data())
        def check(data):
            start = [data.draw(st.integers(0, n)) for n in whole.shape]
            size = [data.draw(st.integers(0, n - at)) for n, at in zip(whole.shape, start, strict=True)]
            box = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
            assert torch.equal(checkpoint.read("model/weight", start, size), whole[box])

        check()


def test_nothing_but_the_blocks_of_a_part_is_read(pool, monkeypatch):
    """And nothing at all before a tensor is asked for."""
    model = net(200_000)
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        train(model, optimizer, 1)
    read = []
    read_blocks, read_many = StoredCheckpoint.read_blocks, StoredCheckpoint.read_many
    monkeypatch.setattr(
        StoredCheckpoint,
        "read_blocks",
        lambda self, runs: (read.extend(n for _, _, n, _ in runs), read_blocks(self, runs))[1],
    )
    monkeypatch.setattr(
        StoredCheckpoint,
        "read_many",
        lambda self, places: (read.extend(name for name, _ in places), read_many(self, places))[1],
    )
    with lightck.recover(pool, lazy=True) as checkpoint:
        assert checkpoint.pieces(WEIGHT)[0].size == (200_000, 4)
        assert not read
        part = checkpoint.read(WEIGHT, (100_000, 0), (10, 4))
        assert torch.equal(part, model[0].weight[100_000:100_010])
    block = 1 << 20
    assert sum(read) <= 2 * block < model[0].weight.nbytes


def test_a_lazy_checkpoint_is_the_same_as_a_loaded_one(pool):
    model, optimizer = pool_with(pool)
    with lightck.recover(pool, lazy=True) as lazy:
        loaded = lightck.recover(pool)
        assert (lazy.step, lazy.iteration, lazy.rejected) == (loaded.step, loaded.iteration, loaded.rejected)
        assert same(dict(lazy.model), dict(loaded.model))
        assert same(lazy.optimizer, loaded.optimizer)
        assert lazy.tensor(WEIGHT) is lazy.tensor(WEIGHT)
        other = net(seed=9)
        lazy.restore(other, optimizer_of_other := adam(other))
    assert same(other.state_dict(), model.state_dict())
    assert same(optimizer_of_other.state_dict(), optimizer.state_dict())


def test_a_damaged_block_is_found_when_it_is_read(pool):
    pool_with(pool)
    damage(pool, WEIGHT, steps=[3])
    with lightck.recover(pool, lazy=True) as checkpoint:
        assert checkpoint.step == 3
        checkpoint.read("model/2.weight")
        with pytest.raises(CorruptPoolError, match=r"'model/0\.weight' of step 3 cannot be read.*without lazy="):
            checkpoint.read(WEIGHT)
    assert lightck.recover(pool).step == 2


def test_after_a_damaged_block_all_others_can_be_read(pool):
    model, _ = pool_with(pool)
    damage(pool, WEIGHT, steps=[3])
    with lightck.recover(pool, lazy=True) as checkpoint:
        for ask in (checkpoint.read, checkpoint.tensor, checkpoint.read):
            with pytest.raises(CorruptPoolError):
                ask(WEIGHT)
            assert torch.equal(checkpoint.read("model/2.weight"), model[2].weight)
        other = net(seed=9)
        before = weights(other)
        with pytest.raises(CorruptPoolError, match="A tensor of step 3 cannot be read"):
            checkpoint.restore(other, adam(other))
        assert same(weights(other), before)
    with pytest.raises(ValueError, match="checkpoint is closed"):
        checkpoint.restore(other, adam(other))


@pytest.mark.parametrize("make", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_out_whose_memory_holds_other_numbers_than_it_shows(pool, lazy, make):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4, dtype=torch.complex64)
    with lightck.attach(model, pool, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))):
        model(torch.ones(2, 3, dtype=torch.complex64)).abs().sum().backward()
        optimizer.step()
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        out = make(torch.zeros(4, 3, dtype=torch.complex64))
        assert torch.equal(checkpoint.read("model/weight", out=out), model.weight)


def test_out_that_has_no_memory_is_refused(pool, lazy):
    pool_with(pool)
    out = torch.zeros(8, 4)
    out.untyped_storage().resize_(0)
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        for wrong in (out, torch.zeros(8, 4, device="meta")):
            with pytest.raises(ValueError, match="out has no memory"):
                checkpoint.read(WEIGHT, out=wrong)


def test_autograd_sees_that_out_was_written(pool, lazy):
    pool_with(pool)
    weight = torch.zeros(8, 4, requires_grad=True)
    x = torch.ones(8, 4, requires_grad=True)
    loss = (x * weight).sum()
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        checkpoint.read(WEIGHT, out=weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_in_inference_mode(pool, lazy):
    model, _ = pool_with(pool)
    with torch.inference_mode(), lightck.recover(pool, lazy=lazy) as checkpoint:
        for out in (torch.zeros(8, 4), torch.zeros(4, 8).t()):
            assert torch.equal(checkpoint.read(WEIGHT, out=out), model[0].weight)


def test_strides_are_those_of_the_training(pool, lazy):
    model = torch.nn.Conv2d(5, 7, 3).to(memory_format=torch.channels_last)
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        model(torch.ones(1, 5, 3, 3)).sum().backward()
        optimizer.step()
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        assert checkpoint.tensor("model/weight").stride() == model.weight.stride()
        assert checkpoint.read("model/weight").is_contiguous()


def test_a_checkpoint_that_is_dropped_closes_its_pool(pool):
    pool_with(pool)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        lightck.recover(pool, lazy=True).read(WEIGHT)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_names_are_those_that_can_be_read(pool, lazy):
    pool_with(pool)
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        assert len(checkpoint.names) == 16
        assert all(checkpoint.read(name).shape == checkpoint.tensor(name).shape for name in checkpoint.names)
        assert checkpoint.is_lazy == lazy


def test_a_lazy_export_keeps_no_tensor(pool, tmp_path):
    model, _ = pool_with(pool)
    with lightck.recover(pool, lazy=True) as checkpoint:
        lightck.export_checkpoint(checkpoint, tmp_path / "it.safetensors")
        assert not checkpoint._tensors_read
    assert same(safetensors.torch.load_file(tmp_path / "it.safetensors"), weights(model))


def test_a_step_that_was_overwritten_is_not_read(pool):
    model, optimizer = pool_with(pool)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True), lightck.recover(pool, lazy=True) as checkpoint:
        train(model, optimizer, 4, start=3)
        for ask in (checkpoint.read, checkpoint.tensor, checkpoint.read):
            with pytest.raises(NoCheckpointError, match=r"Step 3 was overwritten.*run\.pool.*session\.pin"):
                ask(WEIGHT)
        with pytest.raises(NoCheckpointError, match="Step 3 was overwritten"):
            checkpoint.restore(net())


def test_wrong_arguments_are_refused(pool, lazy):
    pool_with(pool)
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        for start, size in (((1,), None), ((0, 0), (9, 4)), ((0, -1), (1, 1)), ((9, 0), None)):
            with pytest.raises(ValueError, match=r"'model/0\.weight', whose shape is \(8, 4\)"):
                checkpoint.read(WEIGHT, start, size)
        for start, size in ((("a", 0), (1, 1)), (1, None), ((True, 0), (1, 1)), ((0, 0), (1.0, 1))):
            with pytest.raises(TypeError, match="pass a tuple with an int for each dimension"):
                checkpoint.read(WEIGHT, start, size)
        assert checkpoint.read(WEIGHT, np.array([1, 0]), torch.Size([2, 4])).shape == (2, 4)
        assert checkpoint.read(WEIGHT, torch.tensor([1, 0]), (np.int64(2), 4)).shape == (2, 4)
        for out in (torch.zeros(3, 4), torch.zeros(8, 4, dtype=torch.float64)):
            with pytest.raises(ValueError, match="out has the shape"):
                checkpoint.read(WEIGHT, out=out)
        with pytest.raises(TypeError, match="out=5 is a int"):
            checkpoint.read(WEIGHT, out=5)
        for ask in (checkpoint.read, checkpoint.pieces, checkpoint.tensor):
            with pytest.raises(NoTensorError, match="holds no tensor 'nothing'"):
                ask("nothing")
    if lazy:
        with pytest.raises(ValueError, match="checkpoint is closed"):
            checkpoint.read(WEIGHT)
    with pytest.raises(TypeError, match=r"lazy=True cannot be combined with model="):
        lightck.recover(pool, net(), lazy=True)
    with pytest.raises(TypeError, match=r"lazy=True cannot be combined with device="):
        lightck.recover(pool, device="meta", lazy=True)
    with pytest.raises(TypeError, match="lazy='no' is a str"):
        lightck.recover(pool, lazy="no")
    lightck.recover(pool, device=torch.device("cpu"), lazy=True).close()


def test_the_pool_of_a_single_process_holds_each_tensor_whole(pool, lazy):
    pool_with(pool)
    with lightck.recover(pool, lazy=lazy) as checkpoint:
        (piece,) = checkpoint.pieces(WEIGHT)
        assert piece == lightck.StoredPiece(None, str(pool), (0, 0), (8, 4))
        (step,) = checkpoint.pieces("optimizer/0.weight/step")
        assert (step.start, step.size) == ((), ())


def test_a_closed_checkpoint_keeps_what_was_read(pool):
    model, _ = pool_with(pool)
    with lightck.recover(pool, lazy=True) as checkpoint:
        weight = checkpoint.tensor(WEIGHT)
    assert torch.equal(weight, model[0].weight)
    assert checkpoint.tensor(WEIGHT) is weight
    checkpoint.close()
