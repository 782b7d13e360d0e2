"""An optimizer whose parameter groups are others than at the saved step."""

from __future__ import annotations

import pytest
import torch
from toys import net

import lightck
from lightck.errors import DriftError


def groups_of(model: torch.nn.Module, n: int) -> list[dict[str, object]]:
    parameters = list(model.parameters())
    return [{"params": parameters[i::n]} for i in range(n)]


def saved_with_two_groups(pool) -> None:
    model = net()
    with lightck.attach(model, pool, optimizer=torch.optim.AdamW(groups_of(model, 2))) as session:
        session.flush()


def test_merged_groups_are_named_as_that(pool):
    saved_with_two_groups(pool)
    model = net()
    merged = torch.optim.AdamW(groups_of(model, 1))
    with pytest.raises(DriftError, match=r"are in other groups now\. Give the optimizer the groups that it had"):
        lightck.attach(model, pool, optimizer=merged, resume=True)


def test_a_group_that_is_missing_names_add_param_group(pool):
    saved_with_two_groups(pool)
    model = net()
    first = torch.optim.AdamW(groups_of(model, 2)[:1])
    with pytest.raises(DriftError, match=r"lacks the groups of .*call add_param_group before attach"):
        lightck.attach(model, pool, optimizer=first, resume=True)
