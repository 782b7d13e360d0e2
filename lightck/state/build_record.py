"""What a script had built when it attached: options of its optimizers and schedulers, and which parameters are frozen.

A version keeps it beside the state itself. So a resume can tell what somebody changed in the script from what moved
during the training: the first is what the script built then and builds now, the second is in the state.
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
    """groups: for each optimizer the options of its groups. states: for each, how many parameters had state already.
    schedulers: name -> state. frozen: names of the model's parameters that needed no gradient."""

    groups: list[list[dict[str, object]]] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    schedulers: dict[str, dict[Any, object]] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)

    def pack(self) -> bytes:
        value = {"groups": self.groups, "states": self.states, "schedulers": self.schedulers, "frozen": self.frozen}
        return values.pack(value, path="options at attach")

    @classmethod
    def parse(cls, packed: object) -> BuildRecord:
        """Raises ``CorruptPoolError``."""
        raw = typed(values.unpack(typed(packed, bytes)), dict)
        if raw.keys() != {"groups", "states", "schedulers", "frozen"}:
            raise CorruptPoolError("its small state is malformed (options at attach)")
        groups = [[typed(group, dict) for group in typed(one, list)] for one in typed(raw["groups"], list)]
        states = [typed(one, int) for one in typed(raw["states"], list)]
        schedulers = {typed(k, str): typed(v, dict) for k, v in typed(raw["schedulers"], dict).items()}
        if len(states) != len(groups):
            raise CorruptPoolError("its small state is malformed (options at attach)")
        return cls(groups, states, schedulers, [typed(name, str) for name in typed(raw["frozen"], list)])


class CurrentBuild:
    """Of the script that attaches now; as bytes for the small state, and which parameters are frozen since."""

    def __init__(self, model: ModelView, views: Sequence[OptimizerView], objects: Mapping[str, object]) -> None:
        schedulers = {name: dict(obj.state_dict()) for name, obj in objects.items() if isinstance(obj, LRScheduler)}
        self._set(BuildRecord(schedulers=schedulers, frozen=frozen_names(model.tensors(None))))
        self.add(views)

    def _set(self, built: BuildRecord) -> None:
        self._at_attach = built.frozen
        self._token: object = None
        """Of the roster that was asked: itself it would keep the tensors alive."""
        self._frozen: list[str] | None = None
        try:
            self.packed: bytes | None = built.pack()
        except StateValueError:  # said by its path when it is to be saved
            self.packed = None

    def add(self, views: Sequence[OptimizerView]) -> None:
        """Optimizers, as they are built."""
        if self.packed is not None:
            built = BuildRecord.parse(self.packed)
            built.groups += [view.groups() for view in views]
            built.states += [len(view.optimizer.state) for view in views]
            self._set(built)

    def use_record(self, built: BuildRecord | None) -> None:
        """The script restored a checkpoint before it attached: what it had built is what that one knows."""
        if built is not None:
            self._set(built)

    def frozen_since(self, tensor_list: TensorList | None, model: ModelView) -> list[str] | None:
        """Names of the parameters that are frozen now; None where they are the same as at attach. Where
        ``tensor_list`` is that of an earlier checkpoint, nothing changed."""
        if tensor_list is None or tensor_list.token is not self._token:
            frozen = frozen_names(model.tensors(None) if tensor_list is None else tensor_list.lives)
            self._frozen = None if frozen == self._at_attach else frozen
            self._token = None if tensor_list is None else tensor_list.token
        return self._frozen


def frozen_names(lives: Sequence[Live]) -> list[str]:
    """Names in the model of the parameters that need no gradient."""
    params = [live for live in lives if live.role == "param" and live.name.startswith("model/")]
    return sorted(live.name.removeprefix("model/") for live in params if not live.tensor.requires_grad)
