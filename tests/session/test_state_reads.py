"""The remembered way to read an optimizer's state gives the checksum that reading it anew gives."""

import pytest
import torch

from lightck.following.update_parts import _state_checksum, _StateReads
from lightck.state.inventory import optimizer_views


def followed() -> tuple:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    (view,) = optimizer_views([optimizer], {id(p): n for n, p in model.named_parameters()})
    return view, model.weight, optimizer.state[model.weight]


def wider(state: dict) -> None:
    state["exp_avg"].data = torch.full((8, 8), 3.0)


def shorter(state: dict) -> None:
    state["exp_avg"].resize_(4, 8)


def emptied(state: dict) -> None:
    state["exp_avg"].untyped_storage().resize_(0)


def replaced(state: dict) -> None:
    state["exp_avg"] = torch.full((8, 8), 2.0)


def no_tensor(state: dict) -> None:
    state["exp_avg"] = 1.5


def one_more(state: dict) -> None:
    state["max_exp_avg_sq"] = torch.ones(8, 8)


@pytest.mark.parametrize("change", [wider, shorter, emptied, replaced, no_tensor, one_more, dict.clear])
def test_a_changed_state_is_read_where_it_lies_now(change):
    view, p, state = followed()
    reads = _StateReads()
    before = [reads.checksum(view, p) for _ in range(2)]
    assert before == [_state_checksum(view, p)] * 2
    change(state)
    assert [reads.checksum(view, p) for _ in range(2)] == [_state_checksum(view, p)] * 2


def test_a_write_in_place_changes_the_checksum():
    view, p, state = followed()
    reads = _StateReads()
    before = reads.checksum(view, p)
    state["exp_avg"].add_(1)
    assert reads.checksum(view, p) == _state_checksum(view, p) != before
