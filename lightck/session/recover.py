"""``recover``: from a pool, from the directory of a group of ranks, or from a tier."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral

import torch
from torch import nn

from lightck.layout import Layout, check_layout_argument
from lightck.pool.reader import PoolReader, RejectedCheckpoint
from lightck.pool.storage.backends import readable_path
from lightck.restore.checkpoint import Checkpoint, refuse_other_than_mapping
from lightck.restore.contents import refuse_unusable_device
from lightck.restore.directory import recover_directory, recover_readers
from lightck.restore.recover import collector_paused, recover_from, recover_lazily, recover_pool
from lightck.restore.tensor_writes import ordinary_tensors
from lightck.tiers.candidates import Rejected
from lightck.tiers.claiming import refuse_other_runs
from lightck.tiers.open_store import Options, is_tier, is_url, open_store, refuse_unusable_root
from lightck.tiers.reading import newest_in_memory
from lightck.tiers.store import Store


@collector_paused()
@ordinary_tensors()
def recover(
    pool_path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: object = None,
    state: Mapping[str, object] | None = None,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    strict: bool = True,
    lazy: bool = False,
    layout: Layout | None = None,
    options: Mapping[str, str | int | bool] | None = None,
) -> Checkpoint:
    """Load or restore the newest checkpoint of a pool, or of a tier, that verifies.

    Args:
        pool_path: the pool, the directory of a group of ranks, or the folder or URL of a tier; it may be in use (it is
            only read). From a directory, the parts of all ranks are put together; random states, loader positions and
            objects are those of rank 0. What is recovered from a tier is fetched to memory first.
        model: restore into this module in place; without ``model`` the checkpoint is loaded into new tensors.
        optimizer: an optimizer, or a list of them, restored by parameter name.
        state: name -> object with ``load_state_dict``, restored from what was saved under the same name.
        step: recover this step instead of the newest.
        device: device of the new tensors; ignored if ``model`` is given.
        strict: if True, raise if checkpoint and model differ; if False, restore the parts that fit, and list in
            ``.drift`` what does not fit.
        lazy: read no tensor now, but each tensor, or a part of it, when it is used (``.tensor``, ``.read``). The pools
            stay open until ``.close()``; the checkpoint is a context manager. Blocks are verified as they are read, so
            no older checkpoint is taken if one is damaged. Not with ``model`` or ``device``.
        layout: with a directory: which parts of tensors ``model`` holds, if they are no DTensors.
        options: with a URL: what the object store needs beside it, as for ``lightck.Tier``.

    Raises:
        PoolError: there is no pool, or it cannot be read (see :mod:`lightck.errors`).
        NoCheckpointError: the pool holds no checkpoint yet, or no checkpoint of ``step``.
        CorruptPoolError: checkpoints exist and none of them verifies.
        DriftError: the checkpoint does not fit ``model``, ``optimizer`` or ``state``. If one of the latter two rejected
            or ignored its saved state, the model's parameters are NaN, and the message says so; else nothing changed.
        SessionError: the model's session is open.
        UnsupportedError: this is the pool of one rank (pass the directory). LayoutError: ``layout`` does not fit.
        TierError: the tier cannot be read, or holds two runs.
        RankError: the directory lacks the pool of a rank, or holds pools of several trainings.
        TypeError, ValueError: an invalid argument, or a ``device`` that this machine or torch does not support.
    """
    _check_arguments(model, optimizer, state, step)
    _check_lazy(lazy, model, device)
    if model is None:
        refuse_unusable_device(device)
    store = _tier_at(pool_path, options)
    path = "" if store is not None else readable_path(pool_path)
    is_of_ranks = os.path.isdir(path)
    check_layout_argument(layout, is_used=model is not None and is_of_ranks)
    if store is not None:
        return _recover_tier(store, model, optimizer, state, step, device, strict=strict, lazy=lazy)
    if is_of_ranks:
        return recover_directory(path, model, optimizer, state, step, device, layout, strict=strict, lazy=lazy)
    return recover_pool(path, model, optimizer, state, step, device, strict=strict, lazy=lazy)


def _tier_at(path: str | os.PathLike[str], options: Options | None) -> Store | None:
    """Return the store of a tier; None if the path is that of a pool, or of the directory of a group."""
    if is_url(path):
        return open_store(path, options)
    path = readable_path(path)
    refuse_unusable_root(path, options)
    return open_store(path) if is_tier(path) else None


def _recover_tier(
    store: Store,
    model: nn.Module | None,
    optimizer: object,
    state: Mapping[str, object] | None,
    step: int | None,
    device: torch.device | str,
    *,
    strict: bool,
    lazy: bool,
) -> Checkpoint:
    """``recover`` for a tier: fetch the newest whole checkpoint to memory, and recover it as from a pool."""
    readers, rejected = _fetched(store, step)
    if readers[0].group is not None:
        checkpoint = recover_readers(str(store), readers, model, optimizer, state, device, strict=strict, lazy=lazy)
    elif lazy:
        checkpoint = recover_lazily(lambda: readers[0], None)
    else:
        try:
            checkpoint = recover_from(readers[0], model, optimizer, state, None, device, strict=strict)
        finally:
            readers[0].close()
    newer = (RejectedCheckpoint(each.step, each.checkpoint.claim.number, each.reason) for each in rejected)
    checkpoint.rejected = (*newer, *checkpoint.rejected)
    return checkpoint


def _fetched(store: Store, step: int | None) -> tuple[list[PoolReader], list[Rejected]]:
    """Fetch the newest checkpoint of a tier that is whole, or that of ``step``: a pool for each rank."""
    listing = store.listing()
    refuse_other_runs(store, listing)
    rejected: list[Rejected] = []
    return newest_in_memory(store, listing, step, rejected), rejected


def _check_arguments(model: object, optimizer: object, state: object, step: object) -> None:
    refuse_other_than_mapping(state)
    if step is not None and (isinstance(step, bool) or not isinstance(step, Integral)):
        raise TypeError(f"step={step!r} is a {type(step).__name__}. Pass the number of a step, an int: step=1000.")
    if model is None and (optimizer is not None or state):
        arguments = (("optimizer=", optimizer), ("state=", state))
        given = " and ".join(name for name, value in arguments if value is not None)
        raise TypeError(
            f"{given} cannot be passed without model=: optimizer and state are restored together with the model, "
            "because state is saved by parameter name. Pass model= too; or leave them out, and read .optimizer "
            "and .state of the checkpoint."
        )


def _check_lazy(lazy: object, model: object, device: object) -> None:
    if not isinstance(lazy, bool):
        raise TypeError(f"lazy={lazy!r} is a {type(lazy).__name__}. Pass True or False.")
    if lazy and (model is not None or str(device) != "cpu"):
        given = "model=" if model is not None else "device="
        raise TypeError(
            f"lazy=True cannot be combined with {given}: it reads nothing before a tensor is asked for. Leave out one "
            "of them. .read(name, out=tensor) reads into a tensor on any device."
        )
