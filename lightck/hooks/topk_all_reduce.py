"""The communication hook of DistributedDataParallel that exchanges only the entries of largest magnitude.

Each rank chooses the entries of each of its gradients, and all ranks gather the positions and values. Each then sums
them, in the order of the ranks, into a gradient of zeros, and divides it by the number of ranks. So all ranks get the
same bits as each other, as they do with the default hook. Clipping may follow, so lightck captures the gradient later,
at the update.

The residuals (error feedback) are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightck.errors import UnsupportedError
from lightck.hooks.comm_hooks import OwnCommHook, averaged, name_of, owner_of, register, registered_hooks
from lightck.hooks.compression import Kept
from lightck.state.indexed_gradient import INDEX_DTYPE, INDEX_NBYTES, NUMEL_MAX
from lightck.state.selection import BITS, kept_entries

ResidualOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a parameter and its gradient to the residual of the parameter."""


class TopKAllReduce(OwnCommHook):
    """The hook of one DistributedDataParallel. After ``remove`` it does what torch does without a hook, because torch
    cannot unregister a hook."""

    def __init__(self, group: Any) -> None:
        """Use ``register``. ``group``: the process group of the DistributedDataParallel."""
        self._group = group
        self._kept: Kept | None = None
        """None after ``remove``."""
        self._residual_of: ResidualOf | None = None

    @classmethod
    def register(cls, ddp: Any, kept: Kept, residual_of: ResidualOf | None = None) -> TopKAllReduce:
        """Register the hook, and return it. ``residual_of``: None: no error feedback. Raises ``UnsupportedError`` if
        another hook is registered."""
        refuse_other_hook(ddp)
        hook = next((one for function in registered_hooks(ddp) if isinstance(one := owner_of(function), cls)), None)
        if hook is None:
            hook = cls(ddp.process_group)
            register(ddp, hook._hook, _taken)
        hook._kept, hook._residual_of = kept, residual_of
        return hook

    def remove(self) -> None:
        """Let each bucket be reduced as without a hook from now on. All ranks must do so at the same step."""
        self._kept = self._residual_of = None

    # torch compares the annotations of a hook with its own types, so these must be no strings.
    def _hook(self, _, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        if self._kept is None or buffer.layout is not torch.strided or buffer.dtype not in BITS:
            return averaged(bucket, self._group)
        return self._all_reduce(bucket, buffer, self._kept)

    def _all_reduce(self, bucket: Any, buffer: torch.Tensor, kept: Kept) -> Any:
        gradients = bucket.gradients()
        counts = [kept(gradient.numel()) for gradient in gradients]
        own = [
            self._chosen(p, gradient, k) for p, gradient, k in zip(bucket.parameters(), gradients, counts, strict=True)
        ]
        sent = torch.cat([part.view(torch.uint8) for pair in own for part in pair])
        world = dist.get_world_size(self._group)
        received = [torch.empty_like(sent) for _ in range(world)]
        work = dist.all_gather(received, sent, group=self._group, async_op=True)
        assert work is not None

        def summed(_: Any) -> torch.Tensor:
            at = 0
            for gradient, k in zip(gradients, counts, strict=True):
                flat = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
                end = at + k * (INDEX_NBYTES + gradient.element_size())
                for of_rank in received:
                    indices, values = _parts(of_rank[at:end], k, gradient.dtype)
                    flat.index_add_(0, indices, values)
                gradient.copy_(flat.div_(world).view(gradient.shape))
                at = end
            return buffer

        return work.get_future().then(summed)

    def _chosen(self, p: torch.Tensor, gradient: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions and values that this rank sends of one gradient, and keep the residual."""
        if gradient.numel() > NUMEL_MAX:
            raise UnsupportedError(
                f"A gradient has {gradient.numel()} entries, and TopK can exchange gradients of at most {NUMEL_MAX}. "
                "Split the parameter into several smaller ones, or leave out compress=."
            )
        flat = gradient.reshape(-1)
        residual = None if self._residual_of is None else self._residual_of(p, gradient)
        if residual is not None:
            flat = flat + residual.view(-1)
        kept = kept_entries(flat, k)
        positions = torch.nonzero(kept).view(-1)
        if residual is not None:
            residual.view(-1).copy_(flat).masked_fill_(kept, 0)
        return positions.to(INDEX_DTYPE), flat[positions]


def _parts(sent: torch.Tensor, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values in the bytes that one rank has sent of a gradient."""
    split = k * INDEX_NBYTES
    # A copy, because the bytes of the values need not be aligned.
    return sent[:split].clone().view(INDEX_DTYPE), sent[split:].clone().view(dtype)


def refuse_other_hook(ddp: Any) -> None:
    """Raise ``UnsupportedError`` if a DistributedDataParallel has a communication hook already, apart from one of an
    earlier session, which was removed."""
    for function in registered_hooks(ddp):
        own = owner_of(function)
        if not isinstance(own, TopKAllReduce) or own._kept is not None:
            raise _taken(name_of(function))


def _taken(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"The communication hook {name} is registered on DistributedDataParallel, and TopK needs this place: torch "
        "allows one hook. Leave out register_comm_hook(), or compress=."
    )
