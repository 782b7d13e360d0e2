"""How gradients are compressed before an update consumes them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from numbers import Real

RESIDUALS = ("base", "step")


@dataclass(frozen=True, slots=True)
class TopK:
    """Each update consumes only the entries of largest magnitude of each gradient, so a gradient record holds little
    more than these. **This changes the training**: it is a compression that you ask for, as in training with
    communication of sparse gradients. docs/topk.md says what it costs.

    Args:
        ratio: of each gradient the ``ceil(ratio * numel)`` entries of largest magnitude are kept, and the others are
            set to zero; between 0 and 1. Of entries of equal magnitude, the first ones are kept.
        error_feedback: add what was set to zero (the *residual*) to the next gradient of the parameter.
        residual: when the residual is saved. ``"base"``: with each parameter, once in ``base_every`` steps, so a resume
            goes on with an older residual, and is not exact. ``"step"``: at each step, which writes one more dense
            gradient for each step.

    Source: sparsified gradients with memory, as in Stich et al. (2018) and Deep Gradient Compression (Lin et al.,
    2018).
    """

    ratio: float
    error_feedback: bool = False
    residual: str = "base"

    def check(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` for impossible arguments."""
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, Real):
            raise TypeError(
                f"TopK: ratio={self.ratio!r} is a {type(self.ratio).__name__}. Pass a number, such as 0.01."
            )
        if not 0 < self.ratio < 1:
            raise ValueError(
                f"TopK: ratio={self.ratio!r} is not between 0 and 1. Pass the share of entries to keep, such as 0.01."
            )
        if type(self.error_feedback) is not bool:
            kind = type(self.error_feedback).__name__
            raise TypeError(f"TopK: error_feedback={self.error_feedback!r} is a {kind}. Pass True or False.")
        if self.residual not in RESIDUALS:
            raise ValueError(f'TopK: residual={self.residual!r} is neither "base" nor "step".')
        if self.residual == "step" and not self.error_feedback:
            raise ValueError(
                'TopK: residual="step" says when the residual is saved, and without error_feedback=True there is none. '
                "Pass error_feedback=True too, or leave residual= out."
            )

    def kept(self, numel: int) -> int:
        """Return how many entries of a gradient of ``numel`` entries are kept."""
        return _kept(float(self.ratio), numel)


@cache
def _kept(ratio: float, numel: int) -> int:
    # ``ratio * numel`` in floating point would make 8 of 0.07 * 100.
    return math.ceil(Fraction(repr(ratio)) * numel)
