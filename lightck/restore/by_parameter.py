"""A checkpoint as ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives it: state and options of all
optimizers by the names of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightck.errors import StateValueError, listed
from lightck.restore.contents import OptimizerContents


def merged_by_parameter(
    saved: Sequence[OptimizerContents], dicts: Sequence[dict[str, Any]], cure: str
) -> dict[str, Any]:
    """Return one dict of the ``state_dict`` of all optimizers. saved: what a checkpoint holds of them. dicts: their
    ``state_dict``. cure: what to do instead, for the message of an error. Raises ``StateValueError`` for state that
    torch.distributed.checkpoint has no place for."""
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for contents, one in zip(saved, dicts, strict=True):
        if contents.wraps:
            continue  # the wrapped optimizer comes next in the list, and has these parameters
        names = list(contents.all_names)
        for number, state in one["state"].items():
            if not isinstance(number, int) or not isinstance(state, dict):
                raise StateValueError(
                    f"{contents.class_name} keeps state under {number!r}, which is no parameter, and "
                    f"torch.distributed.checkpoint has no place for it. {cure}"
                )
            nested = [key for key, part in state.items() if isinstance(part, (list, tuple, dict))]
            if nested:
                raise StateValueError(
                    f"The state of {contents.class_name} has lists ({listed(list(map(repr, nested)), 3)}), which "
                    f"torch.distributed.checkpoint does not load. {cure}"
                )
            merged["state"][names[number]] = state
        merged["param_groups"] += [
            {**group, "params": [names[number] for number in group["params"]]} for group in one["param_groups"]
        ]
    return merged
