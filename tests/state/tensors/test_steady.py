"""After many equal steps the list of tensors is reused. The next boundary notices whatever changes then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, crashed, everything, is_step, net, train

import lightck


class Steady:
    """A training after so many steps that its tensor list is reused."""

    def __init__(self, width: int) -> None:
        self.model: Any = net(width)
        self.model[1].register_buffer("scale", torch.ones(3))
        self.model[1].register_buffer("spare", None)
        self.model[1].register_parameter("shift", None)
        self.optimizer = adam(self.model)

    @property
    def param(self) -> Any:
        return self.model[0].weight

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.param]


def another_parameter(t: Steady) -> None:
    t.optimizer.param_groups[0]["params"][0] = new = nn.Parameter(t.param.detach() + 1)
    t.optimizer.state[new] = t.optimizer.state.pop(t.param)
    t.model[0].weight = new


def other_data(t: Steady) -> None:
    t.param.data = t.param.data + 1


def other_dtype(t: Steady) -> None:
    t.model[1].scale.data = t.model[1].scale.data.double()


def other_strides(t: Steady) -> None:
    t.model[1].scale = torch.arange(6.0).reshape(2, 3)
    t.model[1].scale.t_()


def a_buffer_where_none_was(t: Steady) -> None:
    t.model[1].spare = torch.full((5,), 2.0)


def a_buffer_less(t: Steady) -> None:
    t.model[1].scale = None


def a_parameter_where_none_was(t: Steady) -> None:
    t.model[1].shift = nn.Parameter(torch.full((4,), 3.0))


def a_module_more(t: Steady) -> None:
    t.model[1].extra = nn.Linear(2, 2)


def a_tied_parameter(t: Steady) -> None:
    t.model[1].shift = t.model[0].bias


def frozen(t: Steady) -> None:
    t.param.requires_grad_(False)
    t.param.grad = None


def state_under_a_new_key(t: Steady) -> None:
    t.state["more"] = torch.full((7,), 4.0)


def a_state_tensor_replaced(t: Steady) -> None:
    t.state["exp_avg"] = t.state["exp_avg"] + 1


def a_state_tensor_that_is_a_number_now(t: Steady) -> None:
    t.state["note"] = 1.5


def a_number_in_the_state(t: Steady) -> None:
    t.state["calls"] = 41


def a_group_more(t: Steady) -> None:
    t.model[1].late = nn.Linear(3, 3)
    t.optimizer.add_param_group({"params": list(t.model[1].late.parameters())})


def state_taken_away(t: Steady) -> None:
    del t.optimizer.state[t.model[2].bias]


def state_under_a_string(t: Steady) -> None:
    t.optimizer.state["history"] = {"losses": [1.0, 2.0]}


CHANGES = [
    another_parameter,
    other_data,
    other_dtype,
    other_strides,
    a_buffer_where_none_was,
    a_buffer_less,
    a_parameter_where_none_was,
    a_module_more,
    a_tied_parameter,
    frozen,
    state_under_a_new_key,
    a_state_tensor_replaced,
    a_state_tensor_that_is_a_number_now,
    a_number_in_the_state,
    a_group_more,
    state_taken_away,
    state_under_a_string,
]


@pytest.mark.parametrize("width", [8, BIG], ids=["small", "large"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_many_equal_steps_is_in_the_next_checkpoint(
    change: Callable[[Steady], None], width: int, pool: Any
) -> None:
    t = Steady(width)
    with lightck.attach(t.model, pool, optimizer=t.optimizer) as session:
        train(t.model, t.optimizer, 5)
        t.state["note"] = torch.ones(2)
        session.flush()
        known = session._steps.capture._tensor_list
        train(t.model, t.optimizer, 1, 5)
        session.flush()
        assert known is not None, "the workload does not show what it is for: nothing is ever known"
        assert session._steps.capture._tensor_list is known, (
            "this change does not test the reused list: all tensors are named again"
        )
        change(t)
        session.end_step()
        train(t.model, t.optimizer, 1, 6)
        session.flush()
        assert is_step(lightck.recover(crashed(pool)), everything(t.model, t.optimizer))
        train(t.model, t.optimizer, 2, 7)
    assert is_step(lightck.recover(pool), everything(t.model, t.optimizer))


def test_numbers_in_the_state_are_read_at_every_boundary(pool):
    t = Steady(8)
    with lightck.attach(t.model, pool, optimizer=t.optimizer) as session:
        train(t.model, t.optimizer, 2)
        for number in range(3):
            t.state["calls"] = number
            train(t.model, t.optimizer, 1, 2 + number)
            session.flush()
            assert is_step(lightck.recover(crashed(pool)), everything(t.model, t.optimizer))
