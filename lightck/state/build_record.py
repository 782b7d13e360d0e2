"""What a script built before it attached: options of its optimizers and schedulers, and which parameters need no
gradient.

A checkpoint keeps this record beside the state. A resume compares the record with what the script builds now, and so
distinguishes options that somebody edited in the script from options that changed during the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lightck.errors import CorruptPoolError, StateValueError
from lightck.state import values
from lightck.state.inventory import Live, ModelView, OptimizerView
from lightck.state.signatures import TensorList
from lightck.state.values import typed


@dataclass(slots=True)
class BuildRecord:
    """What one script had built when it attached.

    groups: for each optimizer, the options of its groups. state_counts: for each optimizer, the number of keys that its
    ``state`` already had. schedulers: name -> ``state_dict()``. without_grad: names of the model's parameters with
    requires_grad=False, whether or not an optimizer has them.
    """

    groups: list[list[dict[str, object]]] = field(default_factory=list)
    state_counts: list[int] = field(default_factory=list)
    schedulers: dict[str, dict[Any, object]] = field(default_factory=dict)
    without_grad: list[str] = field(default_factory=list)

    def pack(self) -> bytes:
        """Return the record as bytes. Raises ``StateValueError`` for a value that cannot be stored."""
        # The format's key "frozen" stands for requires_grad=False, and not for what ``Live.is_frozen`` means.
        value = {"groups": self.groups, "states": self.state_counts, "schedulers": self.schedulers}
        return values.pack(value | {"frozen": self.without_grad}, path="options at attach")

    @classmethod
    def parse(cls, packed: object) -> BuildRecord:
        """Return the record that `pack` wrote. Raises ``CorruptPoolError`` if ``packed`` is anything else."""
        raw = typed(values.unpack(typed(packed, bytes)), dict)
        if raw.keys() != {"groups", "states", "schedulers", "frozen"}:
            raise CorruptPoolError("its saved options, counters or random states are malformed (options at attach)")
        groups = [[typed(group, dict) for group in typed(one, list)] for one in typed(raw["groups"], list)]
        states = [typed(one, int) for one in typed(raw["states"], list)]
        schedulers = {typed(k, str): typed(v, dict) for k, v in typed(raw["schedulers"], dict).items()}
        if len(states) != len(groups):
            raise CorruptPoolError("its saved options, counters or random states are malformed (options at attach)")
        return cls(groups, states, schedulers, [typed(name, str) for name in typed(raw["frozen"], list)])


class CurrentBuild:
    """What the script had built at attach, and whether the parameters that need no gradient have changed since then.
    ``packed``: the build record as bytes for the small state; None if a value in it cannot be stored."""

    def __init__(self, model: ModelView, views: Sequence[OptimizerView], objects: Mapping[str, object]) -> None:
        schedulers = {name: dict(obj.state_dict()) for name, obj in objects.items() if isinstance(obj, LRScheduler)}
        self._set(BuildRecord(schedulers=schedulers, without_grad=names_without_grad(model.tensors(None))))
        self.add(views)

    def _set(self, built: BuildRecord) -> None:
        self._without_grad_at_attach = built.without_grad
        self._token: object = None
        """Token of the tensor list that was examined last. A reference to the list itself would keep its tensors
        alive."""
        self._without_grad: list[str] | None = None
        """What `without_grad_if_changed` returned for the list that was examined last."""
        try:
            self.packed: bytes | None = built.pack()
        except StateValueError:  # the first checkpoint will raise the same error, with the path of the value
            self.packed = None

    def add(self, views: Sequence[OptimizerView]) -> None:
        """Add optimizers, with the options that they have now."""
        if self.packed is not None:
            built = BuildRecord.parse(self.packed)
            built.groups += [view.groups() for view in views]
            built.state_counts += [len(view.optimizer.state) for view in views]
            self._set(built)

    def use_record(self, built: BuildRecord | None) -> None:
        """Use the record of the checkpoint that the script restored before it attached. (The live objects hold the
        options of that checkpoint now, and no longer those that the script built.) ``built``: the record; None if the
        checkpoint has none: then nothing changes."""
        if built is not None:
            self._set(built)

    def without_grad_if_changed(self, tensor_list: TensorList | None, model: ModelView) -> list[str] | None:
        """Return the names of the parameters that need no gradient now, or None if they are the same as at attach.
        ``tensor_list``: the current list, or None. For the same list as at the last call, the last result is returned
        again."""
        if tensor_list is None or tensor_list.token is not self._token:
            names = names_without_grad(model.tensors(None) if tensor_list is None else tensor_list.lives)
            self._without_grad = None if names == self._without_grad_at_attach else names
            self._token = None if tensor_list is None else tensor_list.token
        return self._without_grad


def names_without_grad(lives: Sequence[Live]) -> list[str]:
    """Return the sorted names, in the model, of the parameters that need no gradient."""
    params = [live for live in lives if live.role == "param" and live.name.startswith("model/")]
    return sorted(live.name.removeprefix("model/") for live in params if not live.registered.requires_grad)
