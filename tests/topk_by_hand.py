"""TopK as a stable sort says it, without lightck: the oracle of trainings with compressed gradients."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from lightck.strategy.topk import TopK


class TopKByHand:
    """Compresses the gradients of these parameters each time that it is called, right before the update."""

    def __init__(self, parameters: Iterable[torch.Tensor], topk: TopK) -> None:
        self.parameters, self.topk = list(parameters), topk
        self.residuals = [torch.zeros_like(p) for p in self.parameters]

    def __call__(self, *_: object) -> None:
        for p, residual in zip(self.parameters, self.residuals, strict=True):
            if p.grad is None:
                continue
            whole = p.grad + residual if self.topk.error_feedback else p.grad.clone()
            k = int(np.ceil(round(self.topk.ratio * whole.numel(), 6)))
            order = np.argsort(-whole.detach().abs().reshape(-1).numpy(), kind="stable")
            kept = torch.zeros(whole.numel(), dtype=torch.bool)
            kept[torch.from_numpy(order[:k].copy())] = True
            zeros = torch.zeros((), dtype=whole.dtype)
            p.grad = torch.where(kept.view(whole.shape), whole, zeros).detach()
            residual.copy_(torch.where(kept.view(whole.shape), zeros, whole))
