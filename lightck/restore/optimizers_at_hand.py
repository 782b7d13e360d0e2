"""Which optimizer makes the steps of a replay: a live one of the user, or a class of ``torch.optim`` (by its name)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightck.state.consumed_update import ConsumedStep, ConsumedUpdate
from lightck.state.inventory import ModelView, optimizer_views
from lightck.state.optimizer_wrappers import optimizers_to_follow
from lightck.state.partial_optimizer import PartialOptimizer, recorded_name


class OptimizersAtHand:
    """The optimizers that can replay updates: the live ones into which a checkpoint is restored, if there are any, and
    the classes of ``torch.optim``."""

    def __init__(self, model: object = None, optimizers: Sequence[object] = ()) -> None:
        """``model``, ``optimizers``: as in ``recover``. They are not changed. If ``model`` is not a module, both are
        ignored here, and the restore raises ``TypeError`` later."""
        self._partial: list[tuple[str, frozenset[str], PartialOptimizer]] = []
        """Of each live optimizer: name of its class in records, names of its parameters, and the object that replays
        its steps."""
        self._live: dict[str, torch.Tensor] = {}
        if not isinstance(model, nn.Module):
            return
        for view in optimizer_views(optimizers_to_follow(list(optimizers)), ModelView(model).names_by_id()):
            self._live.update(view.params)
            names = frozenset(name for name, _ in view.params)
            self._partial.append((recorded_name(type(view.optimizer)), names, PartialOptimizer.of(view.optimizer)))

    def for_updates(self, updates: Sequence[ConsumedUpdate]) -> dict[int, PartialOptimizer]:
        """Return index of an optimizer in these updates -> the object that replays its steps: the live optimizer of the
        same class that has most of the parameters; if there is none, the class of ``torch.optim``.

        Raises ``UnsupportedError`` if an update was made by another class, and no live optimizer is of it."""
        found: dict[int, PartialOptimizer] = {}
        for update in updates:
            for step in update.optimizer_steps:
                if step.optimizer not in found:
                    found[step.optimizer] = self._fitting(step) or PartialOptimizer.of_class(step.class_name)
        return found

    def live_parameter(self, name: str) -> torch.Tensor | None:
        """Return the live parameter of this name, if a live optimizer has it."""
        return self._live.get(name)

    def _fitting(self, step: ConsumedStep) -> PartialOptimizer | None:
        common = [
            (len(names & step.gradients.keys()), one)
            for class_name, names, one in self._partial
            if class_name == step.class_name
        ]
        most = max(common, key=lambda pair: pair[0], default=None)
        return most[1] if most is not None and most[0] else None
