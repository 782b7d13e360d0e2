"""Pools for the tests of the commands: good, damaged, foreign. They are made once and copied for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gradient_damage import flip_gradient, flip_oldest_base
from toys import damage, pool_with

from lightck.strategy.gradients import Gradients

KINDS = (
    "good",
    "newest damaged",
    "all damaged",
    "truncated",
    "foreign",
    "empty file",
    "folder",
    "link",
    "missing",
    "no checkpoint yet",
    "gradients",
    "gradients, base damaged",
    "gradients, newest damaged",
)


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pools")
    pool_with(folder / "good", slots=3, steps=4)
    pool_with(folder / "fresh", steps=0)
    pool_with(folder / "gradients", steps=7, strategy=Gradients(base_every=3))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def good(folder: Path, originals: Path) -> Path:
    """A closed pool that holds the steps 2, 3 and 4."""
    return copied(originals / "good", folder / "good.pool")


@pytest.fixture
def gradients(folder: Path, originals: Path) -> Path:
    """A closed pool with gradient records, from which the steps 4 to 7 can be recovered. The bases of step 7 are of the
    steps 5, 6 and 7."""
    return copied(originals / "gradients", folder / "gradients.pool")


@pytest.fixture
def made(folder: Path, good: Path, originals: Path) -> Callable[[str], Path]:
    """A function that makes a path of one of the ``KINDS``."""

    def make(kind: str) -> Path:
        path = folder / "it.pool"
        if kind in ("foreign", "empty file"):
            path.write_bytes(b"" if kind == "empty file" else bytes(range(256)) * 400)
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(good)
        elif kind == "no checkpoint yet":
            copied(originals / "fresh", path)
        elif kind.startswith("gradients"):
            copied(originals / "gradients", path)
        elif kind != "missing":
            copied(good, path)
        if kind == "gradients, base damaged":
            flip_oldest_base(path)
        elif kind == "gradients, newest damaged":
            flip_gradient(path, 7)
        elif kind.endswith("damaged"):
            damage(path, "model/0.weight", [4] if kind == "newest damaged" else None)
        if kind == "truncated":
            path.write_bytes(path.read_bytes()[: 3 << 20])
            path.chmod(0o600)
        return path

    return make


def copied(source: Path, target: Path) -> Path:
    shutil.copyfile(source, target)
    target.chmod(0o600)
    return target
