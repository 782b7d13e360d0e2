"""Choose the content of a safetensors file: tensors by name, and everything else as metadata.

The model's tensors have the names of its ``state_dict()``, and each is stored once. A tied tensor is stored under the
first of its names in module order: in a language model with a tied head, under the name of the embedding. With
``what="all"`` the other tensors follow under ``optimizer/``, ``state/``, ``outside/`` (parameters of an optimizer that
are not in the model) and ``rng/``, and values that are no tensors are stored as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch

from lightck.errors import StateValueError
from lightck.export.plain import JsonEncoder, PayloadRef
from lightck.export.tensors import PlannedTensor, check_dtype
from lightck.restore.contents import Contents, OptimizerContents, unpack_dict
from lightck.state import values

WHATS = ("model", "all")
_CURE = 'Export with format="torch", which has every dtype and every name.'
"""The advice at the end of error messages of ``export_checkpoint``. (``tiers/keep.py`` sets another one.)"""


@dataclass(slots=True)
class Chosen:
    """The content of a safetensors file that is not written yet."""

    tensors: dict[str, PlannedTensor] = field(default_factory=dict)
    """Name in the file -> tensor."""
    metadata: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    """As ``Exported.tied``."""
    cure: str = _CURE
    """The advice at the end of error messages about this file."""

    def add(self, name: str, planned: PlannedTensor) -> str:
        """Add a tensor, and return ``name``. Raises ``StateValueError`` if the format lacks the dtype of the tensor, or
        if the name is used already."""
        check_dtype(name, planned.dtype, self.cure)
        if name in self.tensors or name == "__metadata__":
            raise StateValueError(
                f"Two tensors would be stored as {name!r}. In a safetensors file each tensor needs its own name. "
                f"Nothing was written. {self.cure}"
            )
        self.tensors[name] = planned
        return name


def check_what(what: str) -> None:
    if what not in WHATS:
        raise ValueError(f"what={what!r} is unknown. Pass one of {', '.join(map(repr, WHATS))}.")


def choose(contents: Contents, what: str, read: Callable[[str], torch.Tensor], cure: str = _CURE) -> Chosen:
    """Return the content of an export of a checkpoint. ``what``: as in ``export_checkpoint``. ``read``: returns a
    tensor by its name in the pool; called when the file is written. ``cure``: see ``Chosen``. Raises as ``Chosen.add``
    does."""
    check_what(what)
    chosen = Chosen(cure=cure)
    _add_model(chosen, contents, read)
    if what == "all":
        for name, entry in contents.entries.items():
            if not name.startswith("model/") and entry.alias is None:
                chosen.add(name, PlannedTensor(entry.dtype, entry.shape, partial(read, name)))
    encoder = JsonEncoder(chosen, contents, read)
    chosen.metadata |= {"format": "pt", "lightck_step": str(contents.step)}
    if chosen.tied:
        chosen.metadata["lightck_tied"] = json.dumps(chosen.tied)
    if contents.extra:
        extra = {name: encoder.encode(_unpack(packed), name) for name, packed in contents.extra.items()}
        chosen.metadata["lightck_extra_state"] = json.dumps(extra)
    if what == "all":
        chosen.metadata["lightck_all"] = json.dumps(_rest(contents, encoder))
    return chosen


def _add_model(chosen: Chosen, contents: Contents, read: Callable[[str], torch.Tensor]) -> None:
    """Add the tensors of the model to ``chosen``, and the names of tied tensors."""
    for name, entry in contents.model_entries.items():
        if entry.alias is not None:
            chosen.tied[name] = entry.alias.removeprefix("model/")
        else:
            chosen.add(name, PlannedTensor(entry.dtype, entry.shape, partial(read, entry.name)))


def _rest(contents: Contents, encoder: JsonEncoder) -> dict[str, object]:
    """Return the JSON value with everything that is exported besides the model."""
    return {
        "step": contents.step,
        "iteration": contents.iteration,
        "optimizers": [_optimizer(saved, encoder) for saved in contents.optimizers],
        "state": {name: encoder.encode(_unpack(packed), f"state/{name}") for name, packed in contents.state.items()},
        "rng": encoder.encode(contents.rng.to_value(), "rng"),
    }


def _optimizer(saved: OptimizerContents, encoder: JsonEncoder) -> dict[str, object]:
    return {
        "class": saved.class_name,
        "groups": [
            {"params": names, **encoder.encode_map(options, "optimizer/param_groups")}
            for names, options in zip(saved.names, saved.groups, strict=True)
        ],
        "values": encoder.encode(unpack_dict(saved.packed_param_state, tensor=_payload_ref), "optimizer"),
        "rest": encoder.encode(unpack_dict(saved.packed_other_state, tensor=_payload_ref), "optimizer/rest"),
    }


def _unpack(packed: bytes) -> object:
    return values.unpack(packed, tensor=_payload_ref)


def _payload_ref(name: str) -> torch.Tensor:
    """Return a placeholder for the tensor with this name in the pool; typed as a tensor for ``values.unpack``."""
    return cast("torch.Tensor", PayloadRef(name))
