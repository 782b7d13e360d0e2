"""Stand-ins: memory that a checkpoint copies in place of a tensor, and that is complete only some time after the
boundary.

``StandIns`` makes the stand-ins, and says when each group of them is complete. A stand-in then has the bytes that its
tensor has at the boundary; if that is not certain, ``inexact_reason`` says why. Until the copies have ended, nothing
else writes to a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from lightck.state.inventory import Live


class LateMemory(Protocol):
    """A group of stand-ins that become complete together."""

    def start_when_complete(self, start: Callable[[], object]) -> None:
        """Call ``start`` as soon as all stand-ins of the group have the bytes of the closed step: now, or later on
        another thread."""
        ...

    def wait_complete(self) -> None:
        """Wait until they have these bytes, and every ``start`` has returned."""
        ...


@dataclass(frozen=True, slots=True)
class StandIn:
    """The stand-in of one tensor: plain host memory with the shape, strides and dtype of the tensor."""

    tensor: torch.Tensor
    group: LateMemory


class StandIns(Protocol):
    """Makes the stand-ins of one session."""

    def prepare(self, step: int) -> None:
        """A checkpoint of this step closes now. After this call each tensor either has no stand-in, or one that will be
        complete."""
        ...

    def assign(self, lives: Sequence[Live]) -> None:
        """Set ``Live.stand_in`` of each of these tensors that has one."""
        ...

    @property
    def are_assigned(self) -> bool:
        """Whether ``assign`` was called after the last time that a tensor got, lost or changed its stand-in."""
        ...

    @property
    def inexact_reason(self) -> str:
        """Why the bytes of the stand-ins may differ from those of their tensors; empty if they do not."""
        ...


class _NoStandIns:
    """Each tensor is copied itself."""

    are_assigned, inexact_reason = True, ""

    def prepare(self, step: int) -> None:
        pass

    def assign(self, lives: Sequence[Live]) -> None:
        pass


NO_STAND_INS: StandIns = _NoStandIns()
