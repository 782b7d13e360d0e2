"""What of a version goes into a safetensors file: tensors by name, and the rest as metadata.

The model's tensors have the names of its ``state_dict()``, each stored once: of tied names the first in the order of
the modules is kept, which is the embedding's for a language model whose head is tied. With ``what="all"`` the others
follow under ``optimizer/``, ``state/``, ``outside/`` and ``rng/``, and what is no tensor as JSON.
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
AS_TORCH = 'Export with format="torch", which has every dtype and every name.'


@dataclass(slots=True)
class Chosen:
    """A file's content before it is written."""

    tensors: dict[str, PlannedTensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    cure: str = AS_TORCH
    """What its errors say that can be done."""

    def add(self, name: str, planned: PlannedTensor) -> str:
        """Raises ``StateValueError`` where the format cannot hold it, or has the name already."""
        check_dtype(name, planned.dtype, self.cure)
        if name in self.tensors or name == "__metadata__":
            raise StateValueError(
                f"Two things would be stored as {name!r}. A safetensors file has one name for each tensor. Nothing was "
                f"written. {self.cure}"
            )
        self.tensors[name] = planned
        return name


def check_what(what: str) -> None:
    if what not in WHATS:
        raise ValueError(f"what={what!r}: it is one of {', '.join(map(repr, WHATS))}.")


def choose(contents: Contents, what: str, read: Callable[[str], torch.Tensor], cure: str = AS_TORCH) -> Chosen:
    """``read`` gives the tensor of an entry by its name in the pool."""
    check_what(what)
    chosen = Chosen(cure=cure)
    _model(chosen, contents, read)
    if what == "all":
        for name, entry in contents.entries.items():
            if not name.startswith("model/") and entry.alias is None:
                chosen.add(name, PlannedTensor(entry.dtype, entry.shape, partial(read, name)))
    rest = JsonEncoder(chosen, contents, read)
    chosen.metadata |= {"format": "pt", "lightck_step": str(contents.step)}
    if chosen.tied:
        chosen.metadata["lightck_tied"] = json.dumps(chosen.tied)
    if contents.extra:
        extra = {name: rest.of(_unpack(packed), name) for name, packed in contents.extra.items()}
        chosen.metadata["lightck_extra_state"] = json.dumps(extra)
    if what == "all":
        chosen.metadata["lightck_all"] = json.dumps(_rest(contents, rest))
    return chosen


def _model(chosen: Chosen, contents: Contents, read: Callable[[str], torch.Tensor]) -> None:
    for name, entry in contents.model_entries.items():
        if entry.alias is not None:
            chosen.tied[name] = entry.alias.removeprefix("model/")
        else:
            chosen.add(name, PlannedTensor(entry.dtype, entry.shape, partial(read, entry.name)))


def _rest(contents: Contents, rest: JsonEncoder) -> dict[str, object]:
    return {
        "step": contents.step,
        "iteration": contents.iteration,
        "optimizers": [_optimizer(saved, rest) for saved in contents.optimizers],
        "state": {name: rest.of(_unpack(packed), f"state/{name}") for name, packed in contents.state.items()},
        "rng": rest.of(contents.rng.to_value(), "rng"),
    }


def _optimizer(saved: OptimizerContents, rest: JsonEncoder) -> dict[str, object]:
    return {
        "class": saved.class_name,
        "groups": [
            {"params": names, **rest.of_map(options, "optimizer/param_groups")}
            for names, options in zip(saved.names, saved.groups, strict=True)
        ],
        "values": rest.of(unpack_dict(saved.values, tensor=_large), "optimizer"),
        "rest": rest.of(unpack_dict(saved.rest, tensor=_large), "optimizer/rest"),
    }


def _unpack(packed: bytes) -> object:
    return values.unpack(packed, tensor=_large)


def _large(name: str) -> torch.Tensor:
    """What stands in the place of a tensor that lies in the payload."""
    return cast("torch.Tensor", PayloadRef(name))
