"""The rules of a layout for live tensors: which part of a logical tensor a plain tensor is (``Live.part``).

A rule names a parameter or a buffer. If the tensor is tied, any of its names may be used. Optimizer state of the
parameter's shape is the same part of its logical tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lightck.errors import LayoutError
from lightck.layout import Average, Layout, Rule
from lightck.pool.format.layout import Entry
from lightck.state.inventory import Live, ModelView, param_of
from lightck.state.parts import Part, parts_of


class ModelTensors(NamedTuple):
    """The tensors that a model has on this rank, without those of optimizers."""

    lives: list[Live]
    parts: dict[str, Part]
    """Name -> part, of those that are parts."""
    names: frozenset[str]
    """The names of all tensors."""
    params: frozenset[str]
    """Names of the parameters."""
    ties: dict[str, str]
    """Name of a tied tensor -> the name under which its bytes are saved."""
    extra: frozenset[str]
    """Names of the modules' extra states, without prefix."""
    is_stage: bool
    """Whether the ranks of other pipeline stages have other tensors."""


def tensors_of(model: nn.Module, layout: Layout | None) -> ModelTensors:
    """Return the tensors of a model, with their parts. Raises ``LayoutError`` unless each rule fits them."""
    view = ModelView(model, layout)
    lives = view.tensors(None)
    if layout is not None:
        layout.refuse_unused_renames(view.local_names.values())
        layout.refuse_unused([live.name.removeprefix("model/") for live in lives])
        assign_parts(layout, lives)
    return ModelTensors(
        lives,
        parts_of(lives),
        frozenset(live.name for live in lives),
        frozenset(live.name for live in lives if live.role == "param"),
        {live.name: live.alias for live in lives if live.alias is not None},
        frozenset(name for name, _ in view.extra),
        layout is not None and layout.stages > 1,
    )


def assign_parts(layout: Layout | None, lives: Sequence[Live]) -> None:
    """Set ``Live.part`` of each of these tensors that has a rule. In ``lives`` a parameter must come before its
    optimizer state. Raises ``LayoutError``."""
    if layout is None:
        return
    rules = _rules_by_saved_name(layout, lives)
    parts: dict[str, Part] = {}
    for live in lives:
        saved_name = live.alias or live.name
        if live.role in ("param", "buffer"):
            part = _part(layout, rules.get(saved_name), live)
            if part is not None:
                live.part = parts[saved_name] = parts[live.name] = part
        elif live.role == "optimizer":
            part = parts.get(f"model/{param_of(saved_name)}")
            live.part = part if part is not None and part.shape == tuple(live.tensor.shape) else None


def _rules_by_saved_name(layout: Layout, lives: Iterable[Live]) -> dict[str, Rule]:
    """Return the rule of each tensor, under the name under which its bytes are saved. Raises ``LayoutError`` if two
    names of one tensor have different rules."""
    found: dict[str, Rule] = {}
    for live in lives:
        if not live.name.startswith("model/"):
            continue
        rule, saved_name = layout.rule_of(live.name.removeprefix("model/")), live.alias or live.name
        if rule is not None and found.setdefault(saved_name, rule) != rule:
            raise LayoutError(
                f"The tensors {saved_name!r} and {live.name!r} are tied, and layout= has different rules for them: "
                f"{found[saved_name]!r} and {rule!r}. Give both the same rule, or only one of them a rule."
            )
    return found


def _part(layout: Layout, rule: Rule | None, live: Live) -> Part | None:
    if rule is None:
        return None
    if live.dtensor is not None or live.registered is not live.tensor:
        raise LayoutError(
            f"layout= has the rule {rule!r} for the tensor {live.name!r}, which is a DTensor and says by itself which "
            "part of it a rank holds. Remove the rule."
        )
    if isinstance(rule, Average) and not live.tensor.is_floating_point():
        raise LayoutError(
            f"layout= has the rule Average() for the tensor {live.name!r}, which is of the dtype {live.tensor.dtype}. "
            "Nobody can take a mean of such values. Use Replicated(), or no rule."
        )
    shape = tuple(live.tensor.shape)
    found = layout.part(live.name.removeprefix("model/"), rule, shape)
    return None if found is None else Part(shape, *found)


def with_part_of_param(entry: Entry, entries: Mapping[str, Entry]) -> Entry:
    """Return the entry of predicted optimizer state. If its parameter is a part, and the state has the same shape, the
    entry is that of the same part. ``entries``: name -> entry of the parameters."""
    param = entries.get(f"model/{param_of(entry.name)}")
    if param is None or param.pieces is None or param.shape != entry.shape:
        return entry
    return entry._replace(logical_shape=param.logical_shape, pieces=param.pieces)
