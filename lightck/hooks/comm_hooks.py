"""What lightck's communication hooks of DistributedDataParallel have in common.

torch takes one hook, cannot unregister it, and keeps a hook that is written in Python in a list. A copy of a
DistributedDataParallel (deepcopy, pickle) has this list, but torch registers none of the hooks in it. lightck's hook
refers to a process group, which cannot be copied. So a copy has a placeholder (``HookOfCopy``) in its place. The
placeholder shows that no hook is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightck.errors import UnsupportedError


class OwnCommHook:
    """Base of the objects whose method ``_hook`` is registered."""

    def __reduce__(self) -> tuple[type[HookOfCopy], tuple[()]]:
        return HookOfCopy, ()


class HookOfCopy:
    """What a copy has in place of an ``OwnCommHook``. It is never called."""

    def _hook(self, _: object, bucket: object) -> None: ...


def registered_hooks(ddp: Any) -> list[Callable[..., Any]]:
    """Return the hooks written in Python that are registered: one or none. If ``ddp`` is a copy, those that it only
    seems to have are removed from its list."""
    hooks = getattr(ddp, "_comm_hooks", [])
    hooks[:] = [one for one in hooks if not isinstance(owner_of(one[0]), HookOfCopy)]
    return [function for function, _ in hooks]


def owner_of(function: object) -> object:
    """Return the object whose method a hook is; None if it is a function."""
    return getattr(function, "__self__", None)


def register(ddp: Any, hook: Callable[..., Any], taken: Callable[[str], UnsupportedError]) -> None:
    """Register a hook. Call after ``registered_hooks`` has found none. ``taken``: returns the error to raise if another
    hook is registered, from that hook's name."""
    try:
        ddp.register_comm_hook(None, hook)
    except RuntimeError as err:  # torch's own hooks in C++ leave no trace in Python
        ddp._comm_hooks.pop()
        raise taken("of torch") from err


def name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def averaged(bucket: Any, group: Any) -> Any:
    """Begin to average a bucket as torch does without a hook, with the same bits, and return the future of it."""
    buffer = bucket.buffer()
    # Without a hook, torch multiplies by 1/n. (Its allreduce_hook divides by n, which rounds otherwise for n = 3.)
    # The factor is a tensor without dimensions, as in torch. For sparse gradients torch divides.
    if buffer.layout is torch.strided:
        buffer.mul_(torch.scalar_tensor(1.0 / group.size(), dtype=torch.float64))
    else:
        buffer.div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None, "this process is a rank of the group"
    return work.get_future().then(lambda future: future.value()[0])
