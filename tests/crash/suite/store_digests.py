"""What small trainings store in a pool, checkpoint by checkpoint, as digests: a change of the code that is to change no
behaviour stores the same bytes at the same places.

For each committed checkpoint there are up to four digests: of what is stored in its slot before the sync that precedes
its commit record, of what is stored between that and the acknowledgement (the commit record), of what is stored in its
slot after it, and of the record of the batch that follows, which may come before or after the commit. What is stored
elsewhere (superblocks, layout tables, adoptions) has one digest per file. Which thread stores, in which order and in
what chunks does not count.

The trainings calculate with numbers that every processor rounds alike, and the fingerprint of the machine is a
constant, so the digests are the same everywhere. ``LIGHTCK_TEST_BACKGROUND=1 PYTHONPATH=tests python
tests/crash/suite/store_digests.py`` compares them with those that are kept; with ``--keep`` it keeps them. (With the
variable, small models are copied in the background, as in the suite.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import workloads
from crash import recorded
from crash.recording import Recorder, Tape
from crash.trace import Event, Store, Sync
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightck.pool.format.structures import NEXT_NBYTES, NEXT_OFFSET, RING_OFFSET, RING_STRIDE, TABLE_OFFSET
from lightck.session import capture

KEPT = Path(__file__).with_suffix(".json")
TRAININGS = (
    "two slots",
    "three slots",
    "frozen",
    "struck",
    "adoption",
    "going back",
    "relayout",
    "pinned",
    "growth",
    "background",
    "layered",
    "by a device, copied",
    "by a device, direct",
    "two epochs and a resume",
)
BACKENDS = ("file", "pmdk")
_SLOT_MAGIC = b"LCKSLOT1"
_GROUPS = ("before the sync", "commit", "after the commit", "batch that follows")

MACHINE = {
    "torch": "2",
    "python": "3",
    "machine": "any",
    "cpu": "any",
    "threads": 1,
    "deterministic": False,
    "cuda": None,
}
Written = dict[int, int]
"""Offset -> the byte that was stored there last."""


def digests_of(name: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    """Of one training: for each file in turn its checkpoints by generation, and what lies elsewhere."""
    with _exact(), recorded.alone(backend), recorded.small_heap():
        recording = recorded.record({**workloads.WORKLOADS, **OTHERS}[name], folder / f"{name}.{backend}.pool")
    return [_of_file(tape) for tape in recording]


def _of_file(tape: Tape) -> dict[str, Any]:
    commits = _commits(tape.events)
    of_record = {at: generation for generation, commit in commits.items() for at in commit.stores}
    groups: dict[int, dict[str, Written]] = defaultdict(lambda: {name: {} for name in _GROUPS})
    elsewhere: Written = {}
    in_slot: dict[int, int] = {}
    for at, event in enumerate(tape.events):
        if not isinstance(event, Store):
            continue
        slot = next((n for n, place in enumerate(tape.slots) if place.header <= event.offset < place.end), None)
        if slot is None:
            generation = of_record.get(at, -1)
            _write(groups[generation]["commit"] if generation >= 0 else elsewhere, event)
            continue
        header = tape.slots[slot].header
        if event.offset == header and event.data[8:16] == _SLOT_MAGIC:
            in_slot[slot] = int.from_bytes(event.data[:8], "little")
        follows = NEXT_OFFSET <= event.offset - header < NEXT_OFFSET + NEXT_NBYTES
        generation = in_slot.get(slot, -1)
        group = "batch that follows" if follows else _group(at, commits.get(generation))
        _write(groups[generation][group], event)
    return {
        "checkpoints": {
            str(generation): {name: _digest(written) for name, written in groups[generation].items() if written}
            for generation in sorted(groups)
            if generation in commits  # of one that was given up a part is written, which depends on when
        },
        "elsewhere": _digest(elsewhere),
    }


@dataclass(frozen=True, slots=True)
class _Commit:
    """Where in the trace: the sync that comes before a commit record, the record's stores, and the sync behind it."""

    sync: int
    stores: tuple[int, int]
    end: int


def _commits(events: Sequence[Event]) -> dict[int, _Commit]:
    """Of each checkpoint that was committed, by generation. (A record that adopts another's payload is none.)"""
    found: dict[int, _Commit] = {}
    bodies: dict[int, tuple[int, Store]] = {}
    for at, event in enumerate(events):
        if not isinstance(event, Store) or not RING_OFFSET <= event.offset < TABLE_OFFSET:
            continue
        if (event.offset - RING_OFFSET) % RING_STRIDE == 8:
            bodies[event.offset - 8] = at, event
        elif event.offset in bodies and len(event.data) == 8:
            body, stored = bodies.pop(event.offset)
            if event.data == stored.data[16:24]:  # the generation of its payload is its own
                found[int.from_bytes(event.data, "little")] = _Commit(
                    next((n for n in reversed(range(body)) if _is_sync(events[n], event.thread)), body),
                    (body, at),
                    next((n for n in range(at, len(events)) if _is_sync(events[n], event.thread)), len(events)),
                )
    return found


def _is_sync(event: Event, thread: int) -> bool:
    return isinstance(event, Sync) and event.thread == thread


def _group(at: int, commit: _Commit | None) -> str:
    if commit is None or at < commit.sync:
        return "before the sync"
    return "commit" if at < commit.end else "after the commit"


def _write(written: Written, store: Store) -> None:
    written.update(enumerate(store.data, store.offset))


def _digest(written: Written) -> str:
    """Of runs of bytes, each with its offset."""
    found = blake2b(digest_size=8)
    for _, run in groupby(enumerate(sorted(written)), lambda pair: pair[1] - pair[0]):
        offsets = [offset for _, offset in run]
        found.update(offsets[0].to_bytes(8, "little") + len(offsets).to_bytes(8, "little"))
        found.update(bytes(written[offset] for offset in offsets))
    return found.hexdigest()


# -- what the simulator's trainings do not have -----------------------------------------------------------------------


class _Counting(nn.Module):
    """With a buffer that each forward moves, and random numbers. (Not those of a dropout: torch draws them otherwise on
    processors of another vendor.)"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layers(x + torch.rand(len(x), 1))


def _two_epochs_and_a_resume(recorder: Recorder) -> None:
    """Session loaders, a scheduler and a dict in ``state``, two optimizers, a buffer, every second checkpoint; the run
    ends within the second epoch, and another one continues from there."""
    for ends_at in (5, 8):
        recorded.build()  # seeds
        model = _Counting()
        with torch.no_grad():
            for number, p in enumerate(model.parameters()):
                p.copy_((torch.arange(p.numel()) % 5 - 2 + number / 2).reshape(p.shape))
        first, second = model.layers[0], model.layers[2]
        optimizers = [torch.optim.SGD(first.parameters(), 0.5), torch.optim.SGD(second.parameters(), 0.5, momentum=0.5)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 2, gamma=0.5)
        data = TensorDataset(torch.arange(16.0).reshape(8, 2))
        with recorder.attach(model, optimizers, state={"scheduler": scheduler}, interval=2, resume=True) as session:
            loader = session.loader(DataLoader(data, 2, shuffle=True), name="train")
            test = session.loader(DataLoader(data, 4), name="test")
            for _ in range(loader.epoch, 2):
                for number, (x,) in enumerate(loader, loader.start):
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    loss = model(x).sum() * 0.0
                    for p in model.parameters():
                        loss = loss + (p * float(number % 4 + 1)).sum()
                    loss.backward()
                    for optimizer in optimizers:
                        optimizer.step()
                    if session._steps.updates >= ends_at:
                        break
                if session._steps.updates >= ends_at:
                    break
                scheduler.step()
                model.eval()
                with torch.no_grad():
                    assert sum(len(x) for (x,) in test) == len(data)
                model.train()


OTHERS = {"two epochs and a resume": workloads.Workload(_two_epochs_and_a_resume)}


# -- the same bytes on every machine ---------------------------------------------------------------------------------


def _build(width: int = 3, frozen: bool = False) -> recorded.Pair:
    """As ``recorded.build``, with halves and whole numbers only."""
    model, _ = recorded.build(width, frozen)
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_((torch.arange(p.numel()) % 7 - 3 + number / 2).reshape(p.shape))
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.5, momentum=0.5)


def _one_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """All gradients are whole numbers: products with a half are exact, with one rounding or with two."""
    optimizer.zero_grad()
    loss = model(torch.tensor([[1.0, number], [0.5, -1.0]])).sum() * 0.0
    for p in model.parameters():
        if p.requires_grad:
            loss = loss + (p * float(number % 4 + 1)).sum()
    loss.backward()
    optimizer.step()


@contextmanager
def _exact() -> Iterator[None]:
    with (
        patch.object(capture, "fingerprint", lambda: MACHINE),
        patch.object(recorded, "one_step", _one_step),
        patch.object(workloads, "one_step", _one_step),
        patch.object(workloads, "build", _build),
    ):
        yield


# -- the script ------------------------------------------------------------------------------------------------------


def everything() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        return {f"{name}, {b}": digests_of(name, b, Path(folder)) for name in TRAININGS for b in BACKENDS}


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Where they differ, by names."""
    return [f"{training}: {where}" for training in now for where in _differences(was.get(training), now[training])]


def _differences(was: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from _differences(was.get(key), now.get(key), f"{where} {key}")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for number, (left, right) in enumerate(zip(was, now, strict=True)):
            yield from _differences(left, right, f"{where} file {number}")
    elif was != now:
        yield where.strip() or "all of it"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--keep", action="store_true", help="keep the digests of this code")
    arguments = parser.parse_args()
    now = everything()
    if arguments.keep:
        KEPT.write_text(json.dumps(now, indent=1) + "\n")
        return 0
    found = differences(json.loads(KEPT.read_text()), now)
    print("\n".join(found) or "the trainings store what they stored")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
