"""The pool of one rank is not taken for the whole training: nothing of it is recovered, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pools_by_hand as by_hand
import pytest
import torch
from torch import nn
from toys import adam, content

import lightck
from lightck.errors import CheckpointExistsError, UnsupportedError
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.pieces import Piece

GROUP = GroupIdentity(run_id=bytes(16), world_id=bytes(16), rank=1, world_size=2)
REFUSED = r"rank 1 of 2, .* Pass the directory that holds the pools of all ranks"


@pytest.fixture
def half(pool: Path) -> Path:
    """The pool of rank 1 of 2: the second half of a weight of 4 x 3."""
    pieces = (Piece((2, 0), (2, 3), (0, 0)),)
    by_hand.make(pool, [by_hand.entry("model/weight", (2, 3), logical_shape=(4, 3), pieces=pieces)], group=GROUP)
    with by_hand.writer_of(pool) as writer:
        by_hand.commit(writer, 5, state=by_hand.small_state())
    return pool


def small() -> nn.Module:
    """A model that the local tensor fits by name and by shape."""
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_the_same_pool_without_a_group_is_restored(pool: Path) -> None:
    """So it is the group alone that the next tests are refused for."""
    by_hand.make(pool, [by_hand.entry("model/weight", (2, 3))])
    with by_hand.writer_of(pool) as writer:
        by_hand.commit(writer, 5, state=by_hand.small_state())
    model = small()
    assert lightck.recover(pool, model).step == 5
    assert not torch.equal(model.weight, torch.ones(2, 3))


@pytest.mark.parametrize("options", [{}, {"step": 5}, {"strict": False}, {"step": 99}], ids=str)
def test_a_part_is_not_restored_into_a_live_model(half: Path, options: dict[str, object]) -> None:
    model, before = small(), content(half)
    with pytest.raises(UnsupportedError, match=REFUSED):
        lightck.recover(half, model, **options)  # type: ignore[arg-type]
    assert torch.equal(model.weight, torch.ones(2, 3))
    assert content(half) == before


def test_a_part_is_not_loaded_either(half: Path) -> None:
    """Its tensors would look like whole ones."""
    with pytest.raises(UnsupportedError, match=REFUSED):
        lightck.recover(half)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_no_training_goes_on_from_a_part(half: Path, with_optimizer: bool) -> None:
    model, before = small(), content(half)
    optimizer = adam(model) if with_optimizer else []
    with pytest.raises(UnsupportedError, match=REFUSED):
        lightck.attach(model, half, optimizer=optimizer, resume=True)
    assert torch.equal(model.weight, torch.ones(2, 3))
    assert content(half) == before
    lightck.attach(model, half.with_name("other.pool"), optimizer=optimizer).close()


def test_the_pool_of_a_rank_is_not_overwritten_unasked(half: Path) -> None:
    model, before = small(), content(half)
    with pytest.raises(CheckpointExistsError, match="holds step 5"):
        lightck.attach(model, half, optimizer=adam(model))
    assert content(half) == before
    lightck.attach(model, half, optimizer=adam(model), overwrite=True).close()
    with lightck.attach(model, half, optimizer=adam(model), resume=True) as session:
        assert session.step == 0
