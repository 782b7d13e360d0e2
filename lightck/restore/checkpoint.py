"""The public ``Checkpoint``: a recovered checkpoint, loaded into memory or restored in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from lightck.errors import LightckError, SessionError
from lightck.layout import Layout
from lightck.pool.format.structures import CommitRecord
from lightck.pool.reader import RejectedCheckpoint
from lightck.restore import restore as _restore
from lightck.restore.by_parameter import merged_by_parameter
from lightck.restore.contents import Contents, MemorySource, OptimizerContents, refuse_unknown, unpack_dict
from lightck.restore.optimizer import joined, keys_by_param
from lightck.restore.ranges import Pieces, RangeReader, StoredPiece, can_read_into, checked_box, refuse_unfit_out
from lightck.restore.resume import RestoredFrom, mark_poisoned, remember
from lightck.restore.tensor_writes import ordinary_tensors
from lightck.sessions import has_open_session
from lightck.state import values
from lightck.state.optimizer_wrappers import optimizers_to_follow
from lightck.state.rng import RngState
from lightck.state.storable import dtype_from_name


class Checkpoint:
    """One checkpoint of a training, returned by :func:`lightck.recover`.

    Attributes:
        step: number of updates that the training had made when the checkpoint was closed.
        iteration: number of iterations of the loop up to this checkpoint; an iteration whose update a GradScaler
            skipped counts too.
        exact: whether the checkpoint has exactly the bits of the training at its step. False if it holds older
            residuals of ``TopK``, or if ``Replica`` saved a training on a device, or if updates were replayed for it by
            another torch or processor than in the training.
        reason: why ``exact`` is False; else empty.
        rejected: newer checkpoints that recovery rejected, each with its reason.
        drift: after a restore with ``strict=False``, the parts that did not fit.
        contents, record: the parsed checkpoint and its commit record, for lightck itself.
    """

    def __init__(
        self,
        contents: Contents,
        read_source: Callable[[], MemorySource],
        record: CommitRecord,
        path: str,
        uuid: bytes,
        rejected: Sequence[RejectedCheckpoint],
        pieces: Pieces,
        ranges: RangeReader | None = None,
    ) -> None:
        """``read_source``: reads the tensors. It is called once, when a tensor is first used. If the checkpoint was
        restored in place, it reads the tensors from the pool again, because the live tensors change as soon as the
        training continues. ``ranges``: reads from open pools; given if the checkpoint was recovered with
        ``lazy=True``."""
        self.step = contents.step
        self.iteration = contents.iteration
        self.rejected: tuple[RejectedCheckpoint, ...] = tuple(rejected)
        self.exact, self.reason = not contents.not_exact, contents.not_exact
        self.drift = _restore.Drift()
        self.contents = contents
        self._read_source = read_source
        self._loaded_source: MemorySource | None = None
        self.record = record
        self._path = path
        self._uuid = uuid
        self._pieces, self._ranges = pieces, ranges
        self._tensors_read: dict[str, torch.Tensor] = {}
        """Name -> tensor that ``tensor`` has read so far with ``_ranges``."""

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, tensors={len(self.contents.entries)}, pool={self._path!r})"

    @property
    def model(self) -> OrderedDict[str, Any]:
        """The model's state_dict: name -> tensor. The names of a tied weight map to the same tensor object. The names
        of extra state map to what ``get_extra_state`` returned."""
        found: OrderedDict[str, Any] = OrderedDict()
        for name, entry in self.contents.model_entries.items():
            found[name] = self.tensor(entry.alias or entry.name)
        for name, packed in self.contents.extra.items():
            found[name] = values.unpack(packed, tensor=self.tensor)
        return found

    @property
    def optimizer(self) -> dict[str, Any] | list[dict[str, Any]] | None:
        """The optimizer's state_dict, with torch's parameter numbers. If several optimizers were saved, a list of
        state_dicts, in which a wrapper stands before the optimizer that it wraps. If none was saved, None. The tensors
        are copies, because an optimizer that loads the state_dict may change its tensors.

        ``Optimizer.load_state_dict`` casts a state tensor to the dtype of its parameter; ``restore`` does not cast."""
        dicts = [self._optimizer_dict(o, lambda name: self.tensor(name).clone()) for o in self.contents.optimizers]
        if len(dicts) > 1:
            return dicts
        return dicts[0] if dicts else None

    def meta(self, name: str) -> torch.Tensor:
        """Return a tensor without data, on the device "meta", with the shape and dtype of the tensor ``name``. Reads
        nothing.

        Raises ``NoTensorError`` as ``tensor`` does."""
        refuse_unknown(name, self.contents.entries)
        entry = self.contents.entries[name]
        return torch.empty(entry.shape, dtype=dtype_from_name(entry.dtype), device="meta")

    def by_parameter(self, tensor: Callable[[str], Any] | None = None) -> dict[str, Any]:
        """Return model and optimizers with the names of parameters, as
        ``torch.distributed.checkpoint.state_dict.get_state_dict`` has them: ``{"model": {name: tensor}, "optimizer":
        {"state": {name: {key: tensor}}, "param_groups": [...]}}``. Extra state of modules is in ``model``, as in
        ``self.model``. If nothing of an optimizer was saved, ``state`` and ``param_groups`` are empty.

        Args:
            tensor: called with the name of each tensor in the pool; what it returns is put in its place. ``meta`` gives
                the structure without a read. By default ``self.tensor``.

        Raises:
            StateValueError: state of an optimizer that belongs to no parameter, or that has lists.
        """
        value = self.tensor if tensor is None else tensor
        model = {name: value(entry.alias or entry.name) for name, entry in self.contents.model_entries.items()}
        model |= {name: values.unpack(packed, tensor=value) for name, packed in self.contents.extra.items()}
        dicts = [self._optimizer_dict(one, value) for one in self.contents.optimizers]
        cure = "Read it with .optimizer."
        return {"model": model, "optimizer": merged_by_parameter(self.contents.optimizers, dicts, cure)}

    @property
    def state(self) -> dict[str, Any]:
        """Name in ``state`` -> what the ``state_dict()`` of the object under this name returned."""
        return {n: values.unpack(packed, tensor=self.tensor) for n, packed in self.contents.state.items()}

    @property
    def rng(self) -> RngState:
        """The random states from which the next step starts; ``rng.restore()`` sets them."""
        return self.contents.rng

    @ordinary_tensors()
    def restore(
        self,
        model: nn.Module,
        optimizer: object = None,
        state: Mapping[str, object] | None = None,
        *,
        strict: bool = True,
    ) -> None:
        """Restore this checkpoint into a model (and optimizers, and objects in ``state``) in place, bit for bit.

        Raises ``DriftError`` if checkpoint and live objects do not fit each other, and ``SessionError`` if the model
        has an open session; then nothing has changed. If an optimizer, or an object in ``state``, rejects or ignores
        its saved state, that is a ``DriftError`` too, and the model's parameters are NaN, as the message says. With
        ``strict=False`` the parts that fit are restored, and ``drift`` lists what does not fit.
        """
        plan = plan_restore(self.contents, model, optimizer, state, strict=strict)
        source = self.source
        try:
            _restore.apply(plan, source)
        except BaseException as err:
            if plan.restored:  # live tensors may be overwritten already
                poison(err, plan.restored.values(), model)
            raise
        self.record_restored(model, plan)

    def record_restored(self, model: nn.Module, plan: _restore.RestorePlan) -> None:
        """For lightck itself: record that ``plan`` has restored this checkpoint into ``model``."""
        self.drift = plan.drift
        remember(model, RestoredFrom(self._path, self._uuid, self.record, self.contents, unused_parts(plan)))

    @property
    def source(self) -> MemorySource:
        """The tensors, read into memory when they are first used; for lightck itself."""
        if self._loaded_source is None:
            with ordinary_tensors():
                self._loaded_source = self._read_source()
        return self._loaded_source

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all stored tensors, for ``tensor``, ``read`` and ``pieces``. A tied tensor has one name here."""
        return tuple(name for name, entry in self.contents.entries.items() if entry.alias is None)

    @property
    def is_lazy(self) -> bool:
        """Whether a tensor is read from the pool when it is asked for (``recover(..., lazy=True)``)."""
        return self._ranges is not None and self._loaded_source is None

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor by its name in the pool (``model/...``, ``optimizer/.../exp_avg``). If the checkpoint was
        recovered with ``lazy=True``, it is read at the first call, and kept.

        Raises ``NoTensorError`` for an unknown name, and for a tied name, whose tensor is stored under another name. If
        the checkpoint was recovered with ``lazy=True``, raises as ``read`` does."""
        refuse_unknown(name, self.contents.entries)
        if self._ranges is None or self._loaded_source is not None:
            return self.source.tensors[name]
        if name not in self._tensors_read:
            with ordinary_tensors():
                self._tensors_read[name] = self._ranges.whole(name)
        return self._tensors_read[name]

    def pieces(self, name: str) -> tuple[StoredPiece, ...]:
        """Return which pools hold which parts of a tensor. A part that several pools hold is returned for each of them.
        An empty tensor has none.

        Raises ``NoTensorError`` as ``tensor`` does."""
        refuse_unknown(name, self.contents.entries)
        return self._pieces(name)

    def read(
        self,
        name: str,
        start: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read a box of one tensor, and nothing else if the checkpoint was recovered with ``lazy=True``. Every block
        that is read is verified. A damaged block of a parameter or of optimizer state is read from another pool that
        holds the same.

        Args:
            name: the tensor's name in the pool.
            start: the first element, an int for each dimension; None: the beginning of the tensor.
            size: the number of elements in each dimension; None: up to the end of the tensor.
            out: a tensor of this size and of the tensor's dtype, on any device; None: a new contiguous tensor on the
                CPU. After an error it may be partly overwritten.

        Returns ``out``, or the new tensor.

        Raises:
            NoTensorError: as ``tensor``.
            TypeError, ValueError: the box is not inside the tensor, ``out`` does not fit, or the checkpoint is closed.
            CorruptPoolError: a block is damaged, and no other pool holds it (``lazy=True``).
            NoCheckpointError: the training has overwritten the checkpoint (``lazy=True``).
        """
        refuse_unknown(name, self.contents.entries)
        entry = self.contents.entries[name]
        box = checked_box(name, entry.shape, start, size)
        refuse_unfit_out(out, dtype_from_name(entry.dtype), box.size)
        is_direct = out is not None and self._ranges is not None and can_read_into(out)
        with ordinary_tensors():
            if self._ranges is not None:
                part = self._ranges.box(name, box, out if is_direct else None)
            else:
                part = self.source.tensors[name]
                for dim, (at, n) in enumerate(zip(*box, strict=True)):
                    part = part.narrow(dim, at, n)
                part = part if out is not None else part.clone(memory_format=torch.contiguous_format)
        if out is None:
            return part
        if is_direct:
            torch.autograd.graph.increment_version(out)  # as copy_ does, for autograd
            return out
        with torch.no_grad():
            return out.copy_(part)

    def close(self) -> None:
        """Close the pools of a checkpoint that was recovered with ``lazy=True``. What was read stays. For any other
        checkpoint this does nothing."""
        if self._ranges is not None:
            self._ranges.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @ordinary_tensors()
    def _optimizer_dict(self, saved: OptimizerContents, tensor_for: Callable[[str], Any]) -> dict[str, Any]:
        """Return the ``state_dict`` of one optimizer. ``tensor_for``: returns what is put in the place of a tensor in
        the pool, by its name; called once for each."""
        param_indexes = {name: i for i, name in enumerate(saved.all_names)}
        keys = keys_by_param(self.contents, saved)
        values_by_name: dict[str, Any] = {}

        def value_for(name: str) -> Any:
            if name not in values_by_name:
                values_by_name[name] = tensor_for(name)
            return values_by_name[name]

        non_tensors = unpack_dict(saved.packed_param_state, tensor=value_for)
        state: dict[object, object] = {}
        for name, index in param_indexes.items():
            found: dict[object, object] = {key: value_for(e.alias or e.name) for key, e in keys.get(name, {}).items()}
            if found or name in non_tensors:
                state[index] = joined(found, non_tensors, name)
        state |= unpack_dict(saved.packed_other_state, tensor=value_for)
        groups = [
            {**deepcopy(options), "params": [param_indexes[n] for n in names]}
            for options, names in zip(saved.groups, saved.names, strict=True)
        ]
        return {"state": state, "param_groups": groups}


def refuse_other_than_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, not a torch.nn.Module. Pass the module that you train.")


def refuse_other_than_bool(**flags: object) -> None:
    """Raise ``TypeError`` for a flag that is no bool. (Every nonempty string is true, so ``overwrite="no"`` would
    discard checkpoints.)"""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}. Pass True or False.")


def refuse_other_than_mapping(state: object) -> None:
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f'state= is a {type(state).__name__}. Pass a dict of names and objects: state={{"ema": ema}}.')


def as_list(optimizer: object) -> Sequence[object]:
    """Return the optimizers that a caller passed as ``optimizer=``: one, several, or None."""
    return optimizer if isinstance(optimizer, (list, tuple)) else [optimizer] if optimizer is not None else []


def plan_restore(
    contents: Contents,
    model: nn.Module,
    optimizer: object,
    state: Mapping[str, object] | None,
    *,
    strict: bool,
    unused_is_drift: bool = False,
    of_rank: bool = False,
    layout: Layout | None = None,
) -> _restore.RestorePlan:
    """Check a restore into these objects and return its plan; nothing is changed. ``state``: name -> object; None as
    the object means that the saved state of this name is not restored. ``strict``, ``unused_is_drift``, ``of_rank``,
    ``layout``: as in ``restore.check``.

    Raises ``DriftError`` if the checkpoint does not fit the objects, ``SessionError`` for a model with an open session,
    and ``TypeError``."""
    refuse_other_than_module(model)
    refuse_other_than_mapping(state)
    refuse_other_than_bool(strict=strict)
    if has_open_session(model, shared_parts=True):
        raise SessionError(
            "This model, or another model that shares modules with it, has an open session: restoring would change "
            "what is being saved. Close the session first (session.close()), then restore and attach again."
        )
    return _restore.check(
        contents,
        model,
        list(optimizers_to_follow(as_list(optimizer))),
        state or {},
        strict=strict,
        unused_is_drift=unused_is_drift,
        of_rank=of_rank,
        layout=layout,
    )


def poison(error: BaseException, touched: Iterable[torch.Tensor], model: nn.Module) -> None:
    """Make a model unusable after its restore failed halfway: write NaN into its parameters and into the tensors in
    ``touched``, and mark the model, so that ``attach`` refuses it. The message of ``error`` then says so."""
    _restore.write_nan(touched, model)
    mark_poisoned(model)
    if isinstance(error, LightckError) and error.args:
        fact = str(error.args[0]).rstrip(".")
        message = f"{fact}. The model's parameters are NaN now: build it again, or restore a checkpoint into it."
        error.args = (message, *error.args[1:])


def unused_parts(plan: _restore.RestorePlan) -> tuple[str, ...]:
    """Return a description of each part of the checkpoint that this restore did not use. ``attach`` refuses to continue
    from a restore that left such parts out."""
    taken = {id(saved) for saved, _ in plan.optimizers}
    descriptions = [f"the {saved.class_name}" for saved in plan.contents.optimizers if id(saved) not in taken]
    taken_state = plan.objects.keys() | plan.declined
    descriptions += [f"state {name!r}" for name in plan.contents.state if name not in taken_state]
    descriptions += [f"the tie of two parameters ({one})" for one in plan.untied]
    unfit = [*plan.drift.extra, *plan.drift.reshaped, *plan.drift.retyped]
    if unfit:
        descriptions.append(f"the tensor {unfit[0]}" if len(unfit) == 1 else f"{len(unfit)} tensors ({unfit[0]}; ...)")
    return tuple(descriptions)
