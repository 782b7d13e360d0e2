"""Pools that the byte level makes alone, with entries and bytes that a test chooses: no model, no ``attach``.

So are pools of ranks made that no training would write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightck.pool.create import create
from lightck.pool.engine import ENDED, Engine
from lightck.pool.format.layout import ITEM_NBYTES, Entry
from lightck.pool.planned_records import CopyPlan
from lightck.pool.reader import open_pool
from lightck.pool.storage.backends import backend_for
from lightck.pool.writer import PoolWriter
from lightck.state import rng, values

NO_STATE = values.pack({}, path="")


def entry(name: str, shape: Sequence[int], **fields: Any) -> Entry:
    """An entry of a contiguous tensor."""
    dtype, sizes = fields.get("dtype", "float32"), tuple(shape)
    stride = tuple(int(np.prod(sizes[dim + 1 :], dtype=np.int64)) for dim in range(len(sizes)))
    plain = {"role": "param", "dtype": dtype, "nbytes": int(np.prod(sizes, dtype=np.int64)) * ITEM_NBYTES[dtype]}
    return Entry(name=name, shape=sizes, stride=stride, **{**plain, **fields})


def small_state() -> bytes:
    """The small state of a training without optimizers, which a recovery can parse."""
    tree = {
        "version": values.STATE_VERSION,
        "event": "flush",
        "explicit": False,
        "rng": rng.capture().to_value(),
        "rng_forward": None,
        "optimizers": [],
        "state": {},
        "extra": {},
        "loaders": {},
        "at_once": [],
        "fingerprint": {"torch": "by hand"},
    }
    return values.pack(tree, path="")


def content(one: Entry, step: int) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor after a step."""
    return (np.arange(one.nbytes) % 251 + step).astype(np.uint8)


def make(path: Path, entries: Sequence[Entry], **options: Any) -> None:
    """Create a pool without checkpoints. ``options``: arguments of ``create``."""
    kind = backend_for(str(path))
    container, _ = create(kind, str(path), entries, **{"slots": 2, "state_nbytes": 100, **options})
    container.publish()
    container.close()


@contextmanager
def writer_of(path: Path) -> Iterator[PoolWriter]:
    """The pool, open for writing during the block."""
    kind, engine = backend_for(str(path)), Engine(1)
    try:
        writer = PoolWriter(open_pool(str(path), write=True), engine, kind.probe(str(path)))
        try:
            yield writer
        finally:
            writer.close()
    finally:
        engine.close()


def commit(
    writer: PoolWriter,
    step: int,
    extras: Sequence[Entry] = (),
    *,
    state: bytes = NO_STATE,
    left_out: Sequence[str] = (),
) -> None:
    """Commit a checkpoint with all tensors of the pool, apart from ``left_out``, and these extra ones."""
    if extras:
        writer.add(extras, {*writer.numbers} | {one.name for one in extras})
    tensors = {
        name: content(writer.entries[number], step) for name, number in writer.numbers.items() if name not in left_out
    }
    pending = writer.begin(plan_of(writer, step, tensors, state), _free(writer), tensors)
    pending.job.release()
    pending.job.wait(ENDED)
    assert not pending.job.has_failed
    writer.committed(pending)
    pending.job.forget()


def _free(writer: PoolWriter) -> Any:
    slot = writer.slots.choose()
    assert slot is not None
    return slot


def plan_of(writer: PoolWriter, step: int, tensors: Mapping[str, npt.NDArray[np.uint8]], state: bytes) -> CopyPlan:
    copied = [name for name, data in tensors.items() if len(data)]
    numbers = {name: writer.numbers[name] for name in tensors}
    return CopyPlan(
        step=step,
        iteration=step,
        records=np.array([numbers[name] for name in copied], np.int64),
        sources=np.array([tensors[name].ctypes.data for name in copied], np.uint64),
        at_boundary=np.ones(len(copied), np.bool_),
        unchanged=np.array([], np.int64),
        recorded_only=np.array([number for name, number in numbers.items() if name not in copied], np.int64),
        n_tensors=len(numbers),
        state=state,
    )
