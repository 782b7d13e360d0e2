"""Parts of tensors from the pools of several ranks: who holds them, and reads of them without the rest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import run_ranks, values
from toys import damage

import lightck
from lightck.errors import CorruptPoolError

from .test_recover import train
from .trainings import TOPOLOGIES, build


@pytest.mark.parametrize("name", ["fsdp 3", "tp", "hsdp", "ddp"])
def test_boxes_of_a_directory(pools, name):
    model, optimizer = train(name, pools, 2)
    with lightck.recover(pools, lazy=True) as checkpoint:

        @given(st.data())
        @settings(max_examples=60)
        def check(data):
            key = data.draw(st.sampled_from(["first.weight", "last.weight", "first.bias", "scale"]))
            kind = data.draw(st.sampled_from(["", "exp_avg"]))
            whole = optimizer[f"{key}/{kind}"] if kind else model[key]
            start = [data.draw(st.integers(0, n)) for n in whole.shape]
            size = [data.draw(st.integers(0, n - at)) for n, at in zip(whole.shape, start, strict=True)]
            box = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
            stored = f"optimizer/{key}/{kind}" if kind else f"model/{key}"
            assert torch.equal(checkpoint.read(stored, start, size), whole[box])

        check()
        assert all(torch.equal(checkpoint.tensor(f"model/{key}"), value) for key, value in model.items())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp 3", [(0, (0, 0), (200, 3)), (1, (200, 0), (200, 3)), (2, (400, 0), (200, 3))]),
        ("ddp", [(0, (0, 0), (600, 3)), (1, (0, 0), (600, 3))]),
    ],
)
def test_who_holds_which_piece(pools, name, expected):
    train(name, pools, 1)
    for lazy in (False, True):
        with lightck.recover(pools, lazy=lazy) as checkpoint:
            pieces = checkpoint.pieces("model/first.weight")
        assert [(one.rank, one.start, one.size) for one in pieces] == expected
        assert len({one.path for one in pieces}) == len(expected)


def test_a_dtensor_is_refused_as_out(pools):
    train("fsdp", pools, 2)

    def rank_body(rank):
        model, _ = build(TOPOLOGIES["fsdp"])
        weight = model.first.weight
        with lightck.recover(pools, lazy=True) as checkpoint:
            with pytest.raises(TypeError, match=r"out= is a DTensor\. Pass its local tensor"):
                checkpoint.read("model/first.weight", out=weight.detach())
            return checkpoint.read("model/first.weight", (300 * rank, 0), (300, 3), weight.to_local().detach()).sum()

    assert len(values(run_ranks(2, rank_body))) == 2


def test_buffers_that_differ_are_never_mixed(pools, caplog):
    """Each rank has its own count of forwards here; a damaged one of rank 0 is an error, and not that of rank 1."""
    train("ddp", pools, 2)
    damage(pools / "rank-00000-of-00002.pool", "model/calls")
    with lightck.recover(pools, lazy=True) as checkpoint:
        with pytest.raises(CorruptPoolError, match="'model/calls' of step 2 cannot be read"):
            checkpoint.read("model/calls")
        checkpoint.read("model/first.weight")


def test_a_damaged_block_is_read_from_another_rank_that_holds_the_same(pools, caplog):
    model, _ = train("ddp", pools, 2)
    damage(pools / "rank-00000-of-00002.pool", "model/first.weight")
    with lightck.recover(pools, lazy=True) as checkpoint:
        assert torch.equal(checkpoint.read("model/first.weight", (3, 0), (2, 3)), model["first.weight"][3:5])
        assert "is damaged" in caplog.text
        damage(pools / "rank-00001-of-00002.pool", "model/first.weight")
        with pytest.raises(CorruptPoolError, match=r"'model/first\.weight' of step 2 cannot be read"):
            checkpoint.read("model/first.weight", (3, 0), (2, 3))
