"""The devices that a session's tensors are on, and in what order they do what a boundary needs.

A device does later what it is told now, on several streams. A version is what the *updates* made: so their streams are
noted at each update, and joined by whatever stream is current at the boundary, before anything is read there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from lightck.errors import SessionError
from lightck.state.lanes import Lane, lane_of


class Devices:
    """Of one session: what another one does on a device is not its matter."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []

    def look(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are the session's tensors now. Before the first update, so that it is noted."""
        lanes = (lane_of(tensor) for tensor in tensors)
        self._lanes = list(dict.fromkeys(lane for lane in lanes if lane is not None))

    def note_updates(self) -> None:
        """After an optimizer's step, on the thread that made it."""
        for lane in self._lanes:
            lane.note_update()

    def join_updates(self) -> None:
        """At a boundary, before anything is read: another stream may be current than that of the update."""
        for lane in self._lanes:
            lane.join_updates()

    def refuse_capture(self, what: str) -> None:
        """Raises ``SessionError`` where what is called now is recorded for a CUDA graph, and not done."""
        if any(lane.is_capturing() for lane in self._lanes):
            raise SessionError(
                f"{what} is being captured in a CUDA graph. Its replays run no Python, so lightck would see none of "
                "them and save nothing. Capture forward and backward only, after session.flush(), and leave "
                "optimizer.step() outside (torch.cuda.make_graphed_callables does so)."
            )

    def is_captured(self, is_idle: Callable[[], bool]) -> bool:
        """Whether this forward is recorded for a CUDA graph: no boundary, then. Raises ``SessionError`` where a version
        is due or under way: to wait for it would end the capture."""
        if not any(lane.is_capturing() for lane in self._lanes):
            return False
        if not is_idle():
            raise SessionError(
                "A forward pass is being captured in a CUDA graph while a version is being saved: what that waits for "
                "would end the capture. Call session.flush() right before the capture."
            )
        return True
