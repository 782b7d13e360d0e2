"""``pause_on_nonfinite=True``: a state with NaN or infinite values is not committed, so the last finite checkpoint
stays.

For each checkpoint, the check reads the loss scale, some values of every floating-point parameter, buffer and optimizer
state, and a larger block of one of these tensors. The blocks of all tensors take turns. If a checkpoint is refused, the
training goes on without it. The check finds most NaN at once, because they spread to every parameter within an update
or two. It does not prove that a state is finite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
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
"""How many values of each tensor are checked for one checkpoint. A tensor with fewer values is checked whole."""
_LAST_GOOD = (
    "The last good checkpoint stays in the pool, and no newer one is committed until all values are finite again. To "
    "go back to the good one, stop the training and start it again with resume=True."
)
_NOTHING_GOOD = "No step is committed until all values are finite."
BLOCK = 1 << 18
"""The largest number of further values, all of one tensor, that are checked for one checkpoint."""


class NonfiniteCheck(CommitDecision):
    """A commit decision that refuses checkpoints with values that are not finite."""

    def __init__(self, objects: Mapping[str, Any], meter: Meter) -> None:
        """``objects``: the user's objects that are saved, by name; GradScalers among them are checked."""
        self._objects, self._meter = objects, meter
        self._exempt: set[str] | None = None
        """Names of the buffers that are not checked, because they held infinities, but no NaN, at the first check. None
        before the first check."""
        self._turn = 0
        """Number of checks; it chooses the window of each tensor."""
        self._next_block: tuple[int, int] = (0, 0)
        """Where the next block begins: the number of a tensor (modulo the number of checked tensors), and the number of
        a value in it."""
        self._refused_step: int | None = None
        """The step that was refused last; None if no step was refused."""
        self.reason: str | None = None
        """Why the last closed step was refused, as a clause; None if it was not refused."""
        self.on_refused: Callable[[str], object] = lambda reason: None
        """Called with the reason of each refusal."""
        self.reason_of_others: Callable[[], str | None] = lambda: None
        """Returns why another rank pauses, if this rank has therefore given up its last checkpoint; else None."""

    @property
    def paused_reason(self) -> str | None:
        """Why nothing is committed at present; None if checkpoints are committed."""
        return self.reason if self.reason is not None else self.reason_of_others()

    def held(self, writer: PoolWriter) -> frozenset[int]:
        return frozenset()

    def may_commit(self, closed_step: ClosedStep) -> bool:
        """Whether the checked values are finite. Log a warning when the result changes from True to False, and when it
        changes back."""
        before, self.reason = self.reason, self._find(closed_step.lives)
        if self.reason is None:
            if before is not None:
                log.warning(
                    "lightck: the values of step %d are finite again: checkpoints are committed again", closed_step.step
                )
            return True
        if before is None:
            log.warning(
                "lightck: step %d is not committed: %s. %s",
                closed_step.step,
                self.reason,
                _LAST_GOOD if closed_step.step else _NOTHING_GOOD,
            )
        self.on_refused(self.reason)
        if closed_step.step != self._refused_step:  # this method may be called more than once for a step
            self._meter.skipped += 1
        self._refused_step = closed_step.step
        return False

    def _find(self, lives: list[Live]) -> str | None:
        """Return a clause that names what is not finite; None if all checked values are finite."""
        for name, obj in enabled_scalers(self._objects).items():
            scale = float(obj.get_scale())
            if not math.isfinite(scale) or scale <= 0:
                return f"the loss scale of {name!r} is {scale}"
        watched = [live for live in lives if _is_watched(live)]
        if self._exempt is None:
            self._exempt = {live.name for live in watched if live.role == "buffer" and _is_mask(live.tensor)}
            if self._exempt:
                log.info(
                    "lightck: %s held infinities at the first check (an attention mask?), so its values are not "
                    "checked",
                    ", ".join(sorted(self._exempt)),
                )
        watched = [live for live in watched if live.name not in self._exempt]
        self._turn += 1
        samples = [_window(live.tensor, self._turn) for live in watched]
        if not _all_finite(samples):
            found = next(live for live, s in zip(watched, samples, strict=True) if not _all_finite([s]))
            return f"{found.name!r} holds values that are not finite"
        return self._check_next_block(watched)

    def _check_next_block(self, watched: list[Live]) -> str | None:
        """Check the next block, so that every value is checked in its turn. Return a clause that names the tensor if a
        value is not finite, else None."""
        if not watched:
            return None
        number, start = self._next_block
        live = watched[number % len(watched)]
        total = live.tensor.numel()
        self._next_block = (number, start + BLOCK) if start + BLOCK < total else (number + 1, 0)
        size = min(BLOCK, total - start)
        if size <= WINDOW or _all_finite([_consecutive_values(live.tensor, start, size)]):
            return None
        return f"{live.name!r} holds values that are not finite"


_ALWAYS_FINITE_DTYPES = (torch.float4_e2m1fn_x2,)
"""Dtypes without NaN and infinities, which torch cannot convert to a dtype that has an ``isfinite``."""


def _is_watched(live: Live) -> bool:
    """Whether the tensor is checked: a parameter, buffer or optimizer state with floating-point or complex values."""
    tensor = live.tensor
    floating = (tensor.is_floating_point() and tensor.dtype not in _ALWAYS_FINITE_DTYPES) or tensor.is_complex()
    return live.role in ("param", "buffer", "optimizer") and live.alias is None and floating and tensor.numel() > 0


def _is_mask(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds infinities but no NaN, as attention masks do."""
    tensor = tensor.detach()
    return not _all_finite([tensor]) and not bool(torch.isnan(_in_checkable_dtype(tensor)).any())


def _window(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return the ``WINDOW`` values of a tensor that are checked in this turn. The last window of a tensor ends at the
    tensor's last value."""
    total = tensor.numel()
    if total <= WINDOW:
        return tensor.detach().reshape(-1)
    start = turn % -(-total // WINDOW) * WINDOW
    return _consecutive_values(tensor, min(start, total - WINDOW), WINDOW)


def _consecutive_values(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Return ``size`` values, beginning at value number ``start``, in the order in which they lie in memory (in index
    order if the tensor is not dense)."""
    tensor = tensor.detach()
    if tensor.is_conj() or not (tensor.is_contiguous() or is_dense(tuple(tensor.shape), tuple(tensor.stride()))):
        return tensor.reshape(-1)[start : start + size]
    return tensor.as_strided((size,), (1,), tensor.storage_offset() + start)


def _in_checkable_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float8 tensor as float32, because torch has no ``isfinite`` for float8. Return any other tensor as it
    is."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _all_finite(samples: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite. All samples of one dtype and device are checked in one call, because a step has
    hundreds of tensors."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for sample in samples:
        sample = _in_checkable_dtype(sample)
        kinds.setdefault((sample.dtype, sample.device), []).append(sample.reshape(-1))
    return all(bool(torch.isfinite(torch.cat(same)).all()) for same in kinds.values())
