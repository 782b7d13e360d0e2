"""torch.distributed.checkpoint (DCP): a pool, or the directory of a group's pools, behind torch's ``StorageReader`` and
``StorageWriter``.

    state = {"model": model_state_dict, "optimizer": optimizer_state_dict}  # from get_state_dict, however it is sharded
    dcp.save(state, storage_writer=lightck.integrations.dcp.PoolWriter("run.pool", step=step))
    dcp.load(state, storage_reader=lightck.integrations.dcp.PoolReader("run.pool"))

How a load goes:

    read_metadata       every rank opens the newest checkpoint. Each tensor is one chunk. No tensor is read, unless the
                        pool has gradient records: then all of them are
    prepare_local_plan  torch has decided which boxes of which tensors this rank needs. The step is put into
                        ``plan.storage_data``
    prepare_global_plan the coordinator compares the steps: a training that goes on may have committed between two ranks
    read_data           only these boxes are read, and every block that is read is verified. Values that are no tensors
                        are given to the planner as ``torch.save`` writes them, or as ``PoolWriter`` was given them

How a save goes (``lightck.saving`` does the work):

    prepare_local_plan  every rank puts into its plan what it finds at the path: pools, and their checkpoints
    prepare_global_plan the coordinator decides: step, incarnation, and the newest checkpoint that all ranks have
    write_data          each rank writes its tensors into a free slot, never into that of the common checkpoint, and
                        commits
    finish              all ranks have committed. Pools of another number of ranks are removed

Invariant: nothing that was stored as bytes is unpickled here. Options of optimizers are plain values in the pool of a
session; in one that ``PoolWriter`` made they are bytes, as everything that is no tensor.

Failure cases: plans that torch takes from its cache (``enable_plan_caching``) do not carry what the ranks found, so a
group of ranks gets an error that names this option.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import lightck
from lightck.errors import LightckError, PoolNotFoundError, RankError, UnsupportedError
from lightck.integrations.newest import newest
from lightck.saving.commit import remove_other_worlds, save
from lightck.saving.given import Box, GivenTensor, bytes_as_tensor
from lightck.saving.places import Order, Report, decide, is_saved_without_session, refuse_incomplete, survey

TENSORS, BYTES = "model/", "bytes/"
"""What the names of tensors, and of bytes, begin with in a pool that ``PoolWriter`` made. The key follows."""
STATE_NAME = "dcp"
"""Name in ``Checkpoint.state`` under which the path of each key is saved: its place in the nested state dict, which
torch builds again from these paths. Only a checkpoint that ``PoolWriter`` made has it."""


_Path = tuple[str | int, ...]
_Item = tuple[str, _Path, Any]
"""Key, path in the nested state dict, and value: a ``_Named`` in the place of each tensor, or bytes, of the pool."""


class PoolReader(StorageReader):
    """Reads a pool, or a directory of pools, for ``torch.distributed.checkpoint.load`` and what is built on it.

    If ``PoolWriter`` made it, the keys are those that were saved. If ``lightck.attach`` made it, the keys are ``step``
    and those of ``get_state_dict``: ``model.<name>``, ``optimizer.state.<name>.<key>`` and
    ``optimizer.param_groups.<number>.<option>``.

    Args:
        pool_path: the pool, or the directory of a group of ranks. It may be in use.
        step: read this step instead of the newest. Pass it if a training goes on with the pool.
        model_key, optimizer_key: only for a pool of ``lightck.attach``: the names that the state dict has for model and
            optimizer. "" means that there is no such level. Then the keys of the model are the names of its parameters
            and buffers, and those of the optimizer begin with ``state`` and ``param_groups``.
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
        items = _saved_items if is_saved_without_session(checkpoint.contents) else self._items
        for key, path, value in items(checkpoint):
            paths[key] = path
            if isinstance(value, _Named):
                self._names[key] = value.name
                is_bytes = value.name.startswith(BYTES)
                found[key] = BytesStorageMetadata() if is_bytes else _metadata_of(checkpoint.meta(value.name))
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
                "training is writing to the pool meanwhile. Pass PoolReader(path, step=...), or load after the "
                "training."
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes_of(key))
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
            raise PoolNotFoundError(
                f"No checkpoint of {self._path!r} is open: nothing was loaded yet, or the reader is closed. Load "
                "first, and use the reader inside its `with` block."
            )
        return self._checkpoint

    def _bytes_of(self, key: str) -> io.BytesIO:
        name = self._names.get(key)
        if name is not None:
            return io.BytesIO(self._opened_checkpoint.read(name).numpy().tobytes())
        stored = io.BytesIO()
        torch.save(deepcopy(self._values[key]), stored)  # the copy has a tensor in place of each ``_Named``
        stored.seek(0)
        return stored

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

    def _items(self, checkpoint: lightck.Checkpoint) -> Iterator[_Item]:
        """Yield everything that can be loaded from a pool of ``lightck.attach``."""
        for whole_path, whole in self._paths(checkpoint):
            for path, value in _traversed(whole_path, whole):
                yield ".".join(map(str, path)), path, value

    def _paths(self, checkpoint: lightck.Checkpoint) -> Iterator[tuple[_Path, Any]]:
        found = checkpoint.by_parameter(partial(_Named, checkpoint))
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
        else:
            yield (*optimizer, "param_groups"), groups


def _saved_items(checkpoint: lightck.Checkpoint) -> Iterator[_Item]:
    """Yield everything that ``PoolWriter`` has saved."""
    paths = checkpoint.state[STATE_NAME]["paths"]
    for name in checkpoint.names:
        prefix = next((one for one in (TENSORS, BYTES) if name.startswith(one)), None)
        if prefix is not None:
            key = name.removeprefix(prefix)
            yield key, tuple(paths.get(key, (key,))), _Named(checkpoint, name)


def _traversed(path: _Path, value: Any) -> Iterator[tuple[_Path, Any]]:
    """Yield the parts of a value that torch loads one by one, as it traverses a state dict since release 2.4: what lies
    in dicts, and in lists that hold tensors or dicts. Any other value is one part, a tuple too."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _traversed((*path, str(key)), part)
    elif isinstance(value, list) and _is_traversed(value):
        for number, part in enumerate(value):
            yield from _traversed((*path, number), part)
    else:
        yield path, value


def _is_traversed(value: list[Any]) -> bool:
    """Whether torch traverses this list."""
    return any(
        isinstance(part, (torch.Tensor, _Named, Mapping)) or (isinstance(part, list) and _is_traversed(part))
        for part in value
    )


def _box_of(tensor: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    for dim, (at, n) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, at, n)
    return tensor


class _Named:
    """A tensor of the pool, or bytes, in the place of the value itself. A deep copy of what holds it has the tensor."""

    def __init__(self, checkpoint: lightck.Checkpoint, name: str) -> None:
        self.name = name
        self._checkpoint = checkpoint

    def __deepcopy__(self, _memo: object) -> torch.Tensor:
        return self._checkpoint.read(self.name)


def _metadata_of(tensor: torch.Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.shape)
    return TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.shape, [whole])


class PoolWriter(StorageWriter):
    """Saves into a pool (one process) or a directory of pools (several ranks), for
    ``torch.distributed.checkpoint.save``, ``async_save`` and what is built on them. Each save becomes the newest
    checkpoint; a kill at any moment leaves the one before.

    Args:
        pool_path: the pool's file, which is created; for several ranks a directory, which is created.
        step: the number of the checkpoint, for ``lightck.recover(path, step=...)`` and the commands. By default it is
            one more than that of the newest checkpoint, and 1 in a new pool. A ``step`` in the state dict is a value
            like any other, and not read. ``step`` can be assigned before each save.
        overwrite: discard everything that the path holds, once, at the first save. Pools of ``lightck.attach`` and
            damaged ones need it. Pools that ``PoolWriter`` made do not: without it, their checkpoints stay, and saves
            go on.

    The pool is open, and locked, only during a save. ``save`` puts the errors of lightck into the message of an error
    of its own. It fails with ``CheckpointExistsError`` if the path holds a training's checkpoints, with
    ``PoolLockedError`` if something else writes to the pool, with ``RankError`` if the ranks pass different steps, and
    with ``StateValueError`` for a tensor that no pool can hold (sparse, quantized, a subclass).
    """

    def __init__(self, pool_path: str | os.PathLike[str], *, step: int | None = None, overwrite: bool = False) -> None:
        if type(overwrite) is not bool:
            raise TypeError(f"overwrite={overwrite!r} is a {type(overwrite).__name__}. Pass True or False.")
        self._path, self._overwrites = os.fspath(pool_path), overwrite
        self.step = step
        """The number of the next checkpoint; None: one more than that of the newest one."""
        self._rank = 0
        self._report: Report | None = None
        self._order: Order | None = None
        """What the coordinator itself has to do in this save. It is kept here, because a cached plan does not carry it.
        None on other ranks."""

    # -- StorageWriter -------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save. ``checkpoint_id``: another pool."""
        self._order = None
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank") or 0
        dist = torch.distributed
        is_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_group and not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "use_collectives=False: ranks that do not speak to each other cannot agree on a checkpoint. Nothing "
                "was written. Leave it out; or pass no_dist=True, and each process a path of its own."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._report = survey(self._path, self._rank, self.step, overwrite=self._overwrites)
        return replace(plan, storage_data=self._report)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        found = [self._report] if len(plans) == 1 else [plan.storage_data for plan in plans]
        reports = [one for one in found if isinstance(one, Report)]
        if len(reports) != len(plans):
            raise _cached_plan_error()
        refuse_incomplete(_boxes_of(plans))
        orders = decide(reports)
        self._order = orders[self._rank]
        paths: dict[str, Any] = {}
        for plan in plans:
            paths |= plan.planner_data if isinstance(plan.planner_data, dict) else {}
        of_ranks = [paths, *({} for _ in plans[1:])]  # a reader takes the small state of the first rank
        return [replace(plan, storage_data=one) for plan, *one in zip(plans, orders, of_ranks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        (order, paths), own_order = plan.storage_data, self._order
        order = own_order or order
        if order.group is not None and order.group.world_size > 1 and getattr(planner, "_enable_plan_caching", False):
            raise _cached_plan_error()
        save(self._path, order, list(_given(plan, planner)), {STATE_NAME: {"paths": paths}})
        if own_order is None:
            self._overwrites = False
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._order is not None, "the coordinator has made the global plan"
        if self._order.is_first_of_world:
            remove_other_worlds(self._path, self._order)
        self._overwrites = False

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a pool can be made at this path, or ``PoolWriter`` has made what is there."""
        try:
            decide([survey(checkpoint_id, 0, None, overwrite=False)])
        except (LightckError, OSError, TypeError):
            return False
        return os.path.isdir(os.path.dirname(os.path.abspath(checkpoint_id)))


def _given(plan: SavePlan, planner: SavePlanner) -> Iterator[GivenTensor]:
    """Yield each tensor, and each value as bytes, that the plan asks to save, under its name in the pool. Tensors are
    asked for when they are written."""
    of_keys: dict[str, list[WriteItem]] = {}
    for item in plan.items:
        of_keys.setdefault(item.index.fqn, []).append(item)
    for key, items in of_keys.items():
        data = items[0].tensor_data
        if data is None:
            value = planner.resolve_data(items[0])
            assert isinstance(value, io.BytesIO), "bytes are given as a BytesIO"
            yield GivenTensor.of(BYTES + key, bytes_as_tensor(value.getbuffer()))
            continue
        by_box = {_box_of_item(item): item for item in items}
        boxes = tuple(box for box in by_box if 0 not in box.size)

        def read(box: Box, by_box: dict[Box, WriteItem] = by_box) -> torch.Tensor:
            tensor = planner.resolve_data(by_box[box])
            assert isinstance(tensor, torch.Tensor), "a box is asked for of a tensor only, not of bytes"
            return tensor

        yield GivenTensor(TENSORS + key, data.properties.dtype, tuple(data.size), boxes, read)


def _box_of_item(item: WriteItem) -> Box:
    assert item.tensor_data is not None, "the item is a tensor, not bytes"
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _boxes_of(plans: Sequence[SavePlan]) -> dict[str, tuple[tuple[int, ...], list[Box]]]:
    """Return key -> shape and boxes of each tensor, from the plans of all ranks."""
    found: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    for plan in plans:
        for item in plan.items:
            if item.tensor_data is not None:
                box = _box_of_item(item)
                _, boxes = found.setdefault(item.index.fqn, (tuple(item.tensor_data.size), []))
                boxes += [box] * (0 not in box.size)
    return found


def _cached_plan_error() -> UnsupportedError:
    return UnsupportedError(
        "The planner takes its plans from a cache (enable_plan_caching=True). PoolWriter needs fresh plans, because "
        "each one carries the list of the checkpoints that its rank has. Nothing was written. Leave "
        "enable_plan_caching out."
    )
