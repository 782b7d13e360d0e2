"""What the tests of ``PoolWriter`` share: saves, loads without a state to load into, and errors inside torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from lightck.integrations.dcp import PoolReader, PoolWriter


def saved(state: dict[str, Any], path: Any, **options: Any) -> None:
    """Save with a new writer, as a script does that makes one for each save."""
    dcp.save(dict(state), storage_writer=PoolWriter(path, **options))


def loads_everything(reader: PoolReader) -> dict[str, Any]:
    """Load without a state dict, in this process alone, as ``torch.distributed.checkpoint.format_utils`` does."""
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def loaded(reader: PoolReader, model: Any, optimizer: Any) -> int:
    """Load as torch's tutorial does. Returns the step that was saved as a value."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    value = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(value, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=value["model"], optim_state_dict=value["optimizer"])
    return value["step"]


class BytesPlanner(DefaultSavePlanner):
    """Remembers the bytes that it gives the writer."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, bytes] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        if write_item.tensor_data is None:
            self.given[write_item.index.fqn] = value.getvalue()
        return value


@contextlib.contextmanager
def fails(kind: type[BaseException], text: str) -> Iterator[None]:
    """torch puts the error of a rank into a ``CheckpointException``."""
    with pytest.raises((kind, CheckpointException)) as raised:
        yield
    error = raised.value
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    assert isinstance(error, kind), repr(error)
    assert text in str(error)
