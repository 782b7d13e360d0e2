"""torch.distributed.checkpoint (DCP): a pool, or the directory of a group's pools, behind torch's ``StorageReader``.

    state = {"model": model_state_dict, "optimizer": optimizer_state_dict}    # of get_state_dict, in any placement
    dcp.load(state, storage_reader=lightck.integrations.dcp.PoolReader("run.pool"))

How a load goes:

    read_metadata       every rank opens the newest checkpoint; nothing is read of its tensors. Each tensor is one chunk
    prepare_local_plan  torch has decided which boxes of which tensors this rank needs. The step is put into the plan
    prepare_global_plan the coordinator compares the steps: a training that goes on may have committed between two ranks
    read_data           only these boxes are read, and every block that is read is verified. Values that are no tensors
                        are given to the planner as ``torch.save`` writes them

Invariant: nothing that was stored as bytes is unpickled here. Options of optimizers are plain values in the pool.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

import lightck
from lightck.errors import PoolNotFoundError, RankError
from lightck.integrations.newest import newest


class PoolReader(StorageReader):
    """Reads a pool, or a directory of pools, for ``torch.distributed.checkpoint.load`` and what is built on it.

    The keys are ``step`` and those of ``get_state_dict``: ``model.<name>``, ``optimizer.state.<name>.<key>`` and
    ``optimizer.param_groups``.

    Args:
        pool_path: the pool, or the directory of a group of ranks. It may be in use.
        step: read this step instead of the newest. Pass it if a training goes on with the pool.
        model_key, optimizer_key: names that the state dict has for model and optimizer; "" for none: the names of
            parameters are the keys then.
        flatten_optimizer_state_dict: as in ``StateDictOptions``: the keys of options are
            ``optimizer.param_groups.<name>.<option>``.

    ``load`` puts what ``lightck.recover`` raises into the message of an error of its own. It fails with
    ``RankError`` if the ranks have found different steps.
    """

    def __init__(
        self,
        pool_path: str | os.PathLike[str],
        *,
        step: int | None = None,
        model_key: str = "model",
        optimizer_key: str = "optimizer",
        flatten_optimizer_state_dict: bool = False,
    ) -> None:
        self._path, self._step = os.fspath(pool_path), step
        self._keys, self._flattens = (model_key, optimizer_key), flatten_optimizer_state_dict
        self._checkpoint: lightck.Checkpoint | None = None
        self._names: dict[str, str] = {}
        """Key of a tensor in the state dict -> its name in the pool."""
        self._values: dict[str, Any] = {}
        """Key -> value that is no tensor, or a tensor that the pool holds among its small values."""

    # -- StorageReader -------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load. ``checkpoint_id``: another pool."""
        self.close()
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self.close()
        self._checkpoint = checkpoint = newest(self._path, self._step)
        self._names, self._values = {}, {}
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for path, value in self._items(checkpoint):
            key = ".".join(map(str, path))
            paths[key] = path
            if isinstance(value, _Named):
                self._names[key] = value.name
                found[key] = _metadata_of(checkpoint.meta(value.name))
            elif isinstance(value, torch.Tensor):
                self._values[key] = value
                found[key] = _metadata_of(value)
            else:
                self._values[key] = value
                found[key] = BytesStorageMetadata()
        return Metadata(state_dict_metadata=found, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing is left to do: ``read_metadata`` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._opened_checkpoint.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        steps = sorted({plan.storage_data for plan in plans})
        if len(steps) > 1:
            raise RankError(
                f"The ranks have opened different checkpoints of {self._path!r}: steps {', '.join(map(str, steps))}. A "
                "training goes on with the pool. Pass PoolReader(path, step=...), or load after the training."
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                stored = io.BytesIO()
                torch.save(self._values[key], stored)
                stored.seek(0)
                planner.load_bytes(item, stored)
            else:
                self._read_tensor(key, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is something at this path that ``lightck.recover`` can read."""
        try:
            newest(os.fspath(checkpoint_id)).close()
        except (lightck.errors.LightckError, OSError):
            return False
        return True

    # -- its own -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step of the checkpoint that the last load has read."""
        return self._opened_checkpoint.step

    def close(self) -> None:
        """Close the pools. The next load opens them again."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    def __enter__(self) -> PoolReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _opened_checkpoint(self) -> lightck.Checkpoint:
        if self._checkpoint is None:
            raise PoolNotFoundError(f"No checkpoint of {self._path!r} is open. Call read_metadata first, as load does.")
        return self._checkpoint

    def _read_tensor(self, key: str, item: ReadItem, planner: LoadPlanner) -> None:
        checkpoint, name = self._opened_checkpoint, self._names.get(key)
        start, size = tuple(item.storage_offsets), tuple(item.lengths)
        target = planner.resolve_tensor(item).detach()
        if name is None:
            target.copy_(_box_of(self._values[key], start, size))
        elif target.dtype == checkpoint.meta(name).dtype and tuple(target.shape) == size:
            checkpoint.read(name, start, size, out=target)
        else:
            target.copy_(checkpoint.read(name, start, size))
        planner.commit_tensor(item, target)

    def _items(self, checkpoint: lightck.Checkpoint) -> Iterator[tuple[tuple[str | int, ...], Any]]:
        """Yield path and value of everything that can be loaded. The value of a tensor is a ``_Named``."""
        found = checkpoint.by_parameter(_Named)
        model, optimizer = ((key,) if key else () for key in self._keys)
        yield ("step",), checkpoint.step
        for name, value in found["model"].items():
            yield (*model, name), value
        for name, state in found["optimizer"]["state"].items():
            for key, value in state.items():
                yield (*optimizer, "state", name, str(key)), value
        groups = found["optimizer"]["param_groups"]
        if self._flattens:
            for group in groups:
                for name in group["params"]:
                    for key, value in group.items():
                        if key != "params":
                            yield (*optimizer, "param_groups", name, key), value
        elif any(isinstance(value, _Named) for group in groups for value in group.values()):
            for number, group in enumerate(groups):  # torch traverses lists that hold tensors
                for key, value in group.items():
                    yield (*optimizer, "param_groups", number, key), value
        else:
            yield (*optimizer, "param_groups"), groups


def _box_of(tensor: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for dim, (at, n) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, at, n)
    return tensor


class _Named:
    """A tensor of the pool, in the place of the tensor itself."""

    def __init__(self, name: str) -> None:
        self.name = name


def _metadata_of(tensor: torch.Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.shape)
    return TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.shape, [whole])
