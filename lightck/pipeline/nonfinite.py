"""``pause_on_nonfinite=True``: a state that is visibly broken is not committed, so that the last good version stays.

At each version the loss scale, some values of every floating-point parameter, buffer and optimizer state, and one
larger block in turn are looked at; what is refused is only not saved: the training goes on. It finds most NaN at once,
since they spread to every parameter within an update or two, and it is no proof that a state is finite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lightck.pipeline.decision import CommitDecision
from lightck.pool.format.layout import is_dense
from lightck.pool.writer import PoolWriter
from lightck.state.inventory import Live
from lightck.state.optimizer_wrappers import enabled_scalers
from lightck.state.signatures import ClosedStep
from lightck.stats import Meter

log = logging.getLogger("lightck")

WINDOW = 64
"""Values of each tensor that are looked at in each version; tensors of no more are looked at whole."""
BLOCK = 1 << 18
"""Values of the one tensor whose turn it is."""


class NonfiniteCheck(CommitDecision):
    """What a session saves, looked at before it is saved."""

    def __init__(self, objects: Mapping[str, Any], meter: Meter) -> None:
        """``objects``: what is saved by name; GradScalers among them."""
        self._objects, self._meter = objects, meter
        self._exempt: set[str] | None = None
        self._turn = 0
        self._at: tuple[int, int] = (0, 0)
        self._refused: int | None = None
        self.reason: str | None = None
        """Why nothing is committed now, or None."""

    def held(self, writer: PoolWriter) -> frozenset[int]:
        return frozenset()

    def may_commit(self, closed_step: ClosedStep) -> bool:
        """Whether the values of this version are finite. Told in the log when they are not, and when they are again."""
        before, self.reason = self.reason, self._find(closed_step.lives)
        if self.reason is None:
            if before is not None:
                log.warning("lightck: step %d is finite again: versions are committed again", closed_step.step)
            return True
        if before is None:
            log.warning(
                "lightck: step %d is not committed: %s. The last good version stays in the pool, and nothing "
                "newer is committed until values are finite again. To go back to it: stop, and attach with "
                "resume=True.",
                closed_step.step,
                self.reason,
            )
        self._meter.skipped += closed_step.step != self._refused
        self._refused = closed_step.step
        return False

    def _find(self, lives: list[Live]) -> str | None:
        for name, obj in enabled_scalers(self._objects).items():
            scale = float(obj.get_scale())
            if not math.isfinite(scale) or scale <= 0:
                return f"the loss scale of {name!r} is {scale}"
        watched = [live for live in lives if _is_watched(live)]
        if self._exempt is None:
            self._exempt = {live.name for live in watched if live.role == "buffer" and _is_mask(live.tensor)}
            if self._exempt:
                log.info(
                    "lightck: %s held infinities from the beginning: not looked at", ", ".join(sorted(self._exempt))
                )
        watched = [live for live in watched if live.name not in self._exempt]
        self._turn += 1
        samples = [_window(live.tensor, self._turn) for live in watched]
        if not _all_finite(samples):
            found = next(live for live, s in zip(watched, samples, strict=True) if not _all_finite([s]))
            return f"{found.name!r} holds values that are not finite"
        return self._look_at_block(watched)

    def _look_at_block(self, watched: list[Live]) -> str | None:
        """The next block of the next tensor: so every value is looked at in its turn."""
        if not watched:
            return None
        number, start = self._at
        live = watched[number % len(watched)]
        total = live.tensor.numel()
        self._at = (number, start + BLOCK) if start + BLOCK < total else (number + 1, 0)
        size = min(BLOCK, total - start)
        if size <= WINDOW or _all_finite([_run(live.tensor, start, size)]):
            return None
        return f"{live.name!r} holds values that are not finite"


_ALL_FINITE = (torch.float4_e2m1fn_x2,)
"""Has neither NaN nor infinities, and torch converts it to nothing that could be asked."""


def _is_watched(live: Live) -> bool:
    tensor = live.tensor
    floating = (tensor.is_floating_point() and tensor.dtype not in _ALL_FINITE) or tensor.is_complex()
    return live.role in ("param", "buffer", "optimizer") and live.alias is None and floating and tensor.numel() > 0


def _is_mask(tensor: torch.Tensor) -> bool:
    """Infinities without NaN, as in attention masks."""
    tensor = tensor.detach()
    return not _all_finite([tensor]) and not bool(torch.isnan(_askable(tensor)).any())


def _window(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """``WINDOW`` values, the next ones at each turn; the last window ends where the tensor ends."""
    total = tensor.numel()
    if total <= WINDOW:
        return tensor.detach().reshape(-1)
    start = turn % -(-total // WINDOW) * WINDOW
    return _run(tensor, min(start, total - WINDOW), WINDOW)


def _run(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Values in the order in which they lie in memory."""
    tensor = tensor.detach()
    if tensor.is_conj() or not (tensor.is_contiguous() or is_dense(tuple(tensor.shape), tuple(tensor.stride()))):
        return tensor.reshape(-1)[start : start + size]
    return tensor.as_strided((size,), (1,), tensor.storage_offset() + start)


def _askable(tensor: torch.Tensor) -> torch.Tensor:
    """torch has no isfinite for float8."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _all_finite(samples: Iterable[torch.Tensor]) -> bool:
    """One call for each kind of tensor, and not for each tensor: a step has hundreds of them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for sample in samples:
        sample = _askable(sample)
        kinds.setdefault((sample.dtype, sample.device), []).append(sample.reshape(-1))
    return all(bool(torch.isfinite(torch.cat(same)).all()) for same in kinds.values())
