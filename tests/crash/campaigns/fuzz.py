"""Hostile pools: structures changed by rule and sealed again, so that no checksum stands before a reader's own checks.

Every input goes through the whole of ``lightck.recover`` (loaded, and every value of it looked at); some also through
``inspect``, ``verify --deep``, ``export`` and a restore into a live model; every fourth trial brings an input to one of
the parsers alone besides. What must hold of each: an answer or an error of ours, in a second, in memory bounded by the
file's size, and not a byte of the file written.
"""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import lightck
from crash import confined, container, mutations, parsers
from crash.campaign import Campaign, Order, Tally
from crash.document import Base, Document
from crash.images import ImageFile, pages_of
from lightck.cli import main, verify
from lightck.errors import LightckError
from lightck.pool.format.structures import MIB
from lightck.pool.reader import open_pool
from lightck.pool.storage import backends, pmdk
from lightck.pool.storage.extents import runs

STEPS = 5
SOMETIMES = 1 / 24
"""How often an input goes through each of the other readers."""
FENCE, FENCE_NBYTES = 0xA5, 256
UNTOUCHED_EVERY = 1000
"""After so many inputs the whole file is compared."""


def grow_nbytes(file_nbytes: int) -> int:
    """What reading a file may add to the address space: its payload once, and objects made of its metadata."""
    return 2 * file_nbytes + 16 * MIB


def make_pool(path: str, backend: str) -> None:
    """A small pool of two slots, with tied weights, a state with a large tensor, and a restart in it."""
    backends.BACKENDS["pmdk"] = pmdk.PmdkBackend(arena_nbytes=4 * MIB)
    for first, last in ((1, 3), (4, STEPS)):
        model, optimizer, kept = parts()
        with lightck.attach(
            model, path, optimizer=optimizer, state={"kept": kept}, slots=2, backend=backend, resume=first > 1
        ) as session:
            for step in range(first, last + 1):
                kept.value = {"at": step, "large": torch.full((40, 40), float(step)), "list": [(1, 2.5), {"a"}, b"x"]}
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            session.flush()


class Kept:
    """An object for ``state``."""

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Kept]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3, affine=False))
    model[1].weight = model[0].weight
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Kept()


class Bench:
    """The pool in a file that is changed in place, and put back after each input."""

    def __init__(self, folder: str, backend: str) -> None:
        made = os.path.join(folder, "good.pool")
        make_pool(made, backend)
        reader = open_pool(made)
        self.base = Base(reader)
        self.places = reader.container.extents
        self.nbytes = os.fstat(reader.container.fd).st_size
        pages = pages_of(reader.container.fd)
        reader.close()
        os.unlink(made)
        os.unlink(made + ".lock")
        self.path = os.path.join(folder, "it.pool")
        self.image = ImageFile(self.path, self.nbytes, pages, ((0, self.nbytes),))
        self.good = bytes(self.image.whole())
        self.container = container.Base.of(self.good) if backend == "pmdk" else None
        self.exports = os.path.join(folder, "exports")

    def put(self, rng: random.Random) -> list[tuple[int, int]]:
        """Change the file. Returns the places."""
        if self.container is not None and rng.random() < 0.1:
            patches = container.change(rng, self.container)
        else:
            document = Document(self.base)
            mutations.change(rng, document)
            patches = []
            for offset, data in document.patches():
                for at, n in runs(self.places, offset, len(data)):
                    patches.append((at, data[:n]))
                    data = data[n:]
        for at, data in patches:
            self.image.write(at, data[: self.nbytes - at])
        return [(at, len(data)) for at, data in patches]

    def restore(self, places: list[tuple[int, int]]) -> None:
        for at, n in places:
            self.image.write(at, self.good[at : at + n])

    def is_whole(self) -> bool:
        return self.image.whole() == self.good

    def mend(self) -> None:
        self.image.write(0, self.good)

    def close(self) -> None:
        self.image.close()


# -- the readers -----------------------------------------------------------------------------------------------------


def load(path: str, rng: random.Random) -> str:
    checkpoint = lightck.recover(path, step=None if rng.random() < 0.9 else rng.choice((STEPS, STEPS - 1, 0)))
    _ = checkpoint.model, checkpoint.optimizer, checkpoint.state, checkpoint.rng, repr(checkpoint)
    return "older" if checkpoint.rejected else "loaded"


def restore(path: str, rng: random.Random) -> str:
    model, optimizer, kept = parts()
    fences = fenced(model)
    try:
        lightck.recover(path, model, optimizer, {"kept": kept}, strict=rng.random() < 0.5)
    finally:
        assert all((fence == FENCE).all() for fence in fences), "a restore wrote beside a tensor"
    return "restored"


def fenced(model: nn.Module) -> list[torch.Tensor]:
    """Known bytes on both sides of every tensor of a model."""
    fences = []
    for tensor in (*model.parameters(), *model.buffers()):
        room = torch.full((FENCE_NBYTES + tensor.nbytes + FENCE_NBYTES,), FENCE, dtype=torch.uint8)
        inside = room[FENCE_NBYTES : FENCE_NBYTES + tensor.nbytes]
        fences += [room[:FENCE_NBYTES], room[FENCE_NBYTES + tensor.nbytes :]]
        tensor.data = inside.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return fences


def export(path: str, rng: random.Random, folder: str) -> str:
    os.mkdir(folder)
    try:
        target = os.path.join(folder, "it")
        kind, what = rng.choice(("safetensors", "torch")), rng.choice(("model", "all"))
        lightck.export_checkpoint(lightck.recover(path), target, format=kind, what=what)
        assert os.listdir(folder) == ["it"], "an export wrote beside its target"
    finally:
        shutil.rmtree(folder)
    return "exported"


def command(*words: str) -> str:
    """One of our commands; what it prints must not act on a terminal."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        status = main.main(list(words), prog_name="lightck", standalone_mode=False)
    text = out.getvalue()
    assert text.replace("\n", "").isprintable(), f"it printed {text!a}"
    assert status in (0, 1, 2), f"exit status {status}"
    return f"{words[0]} {status}"


def readers(bench: Bench, rng: random.Random) -> list[tuple[str, Callable[[], str]]]:
    """Which readers this input goes through, each drawn whether or not one before it fails."""
    path = bench.path
    found: list[tuple[str, Callable[[], str]]] = [("recover", lambda: load(path, rng))]
    others: list[tuple[str, Callable[[], str]]] = [
        ("restore", lambda: restore(path, rng)),
        ("export", lambda: export(path, rng, bench.exports)),
        ("inspect", lambda: command("inspect", path, *rng.choice(([], ["--tensors"], ["--json", "--tensors"])))),
        ("verify", lambda: command("verify", path, *rng.choice((["--deep"], ["--deep", "--json"])))),
    ]
    return found + [each for each in others if rng.random() < SOMETIMES]


def judge(trial: int, name: str, read: Callable[[], str], tally: Tally) -> None:
    try:
        tally.counts[read()] += 1
    except LightckError as err:
        tally.counts[f"{type(err).__name__} from {name}"] += 1
    except (Exception, SystemExit) as err:
        at = err.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{os.path.basename(at.tb_frame.f_code.co_filename)}:{at.tb_lineno}" if at is not None else "?"
        tally.found(trial, f"{name}: {type(err).__name__} at {where}: {str(err)[:200]}")


def play(order: Order) -> Tally:
    bench = Bench(order.folder, order.backend)
    alone = parsers.Inputs(bench.base, bench.good)

    def trial(number: int, tally: Tally) -> None:
        rng = order.rng(number)
        places = bench.put(rng)
        before = bench.image.changed_at()
        try:
            for name, read in readers(bench, rng):
                judge(number, name, read, tally)
        finally:
            if bench.image.changed_at() != before:
                tally.found(number, "the file was written to")
            bench.restore(places)
        tally.counts["inputs to the whole reader"] += 1
        if number % UNTOUCHED_EVERY == 0 and not bench.is_whole():
            tally.found(number, f"the file was changed at this or one of the {UNTOUCHED_EVERY} inputs before")
            bench.mend()
        if number % 4 == 0:
            name, parse = alone.draw(rng)
            judge(number, name, parse, tally)
            tally.counts["inputs to single parsers"] += 1

    try:
        for _ in range(3):  # what is imported and allocated once is no input's
            for name, read in readers(bench, random.Random(0)):
                judge(0, name, read, Tally())
            command("inspect", bench.path), command("verify", bench.path)
        with patch.object(verify, "_READS", 1):  # nobody else writes here
            return confined.run(order.trials, trial, grow_nbytes(bench.nbytes), order.say)
    finally:
        bench.close()


CAMPAIGN = Campaign(
    name="fuzz",
    summary="hostile pools, sealed again, through every reader: an answer or an error of ours, bounded, no write",
    small=800,
    long=1_000_000,
    run=play,
)
