"""Small made-up data of the shapes that the programs read. Everything is drawn from seeds: the same in every folder."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

Maker = Callable[[Path], None]
"""Called with the folder of the program, that is the repository's root."""


def _random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def nothing(root: Path) -> None:
    pass


def mnist(where: str, train: int = 160, test: int = 48) -> Maker:
    """The four files of MNIST, as torchvision looks for them under ``where``. Digits are blobs."""

    def make(root: Path) -> None:
        folder = root / where / "MNIST" / "raw"
        folder.mkdir(parents=True)
        draw = _random()
        for name, count in (("train", train), ("t10k", test)):
            labels = (np.arange(count) % 10).astype(np.uint8)
            draw.shuffle(labels)
            images = draw.integers(0, 90, (count, 28, 28))
            for image, label in zip(images, labels, strict=True):
                image[2 * label : 2 * label + 8, 4:24] += 120
            (folder / f"{name}-images-idx3-ubyte").write_bytes(
                struct.pack(">iiii", 2051, count, 28, 28) + images.astype(np.uint8).tobytes()
            )
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels.tobytes())

    return make


def pictures(where: str, counts: dict[str, int], size: int = 40, kind: str = "png", name: str = "{n:03d}") -> Maker:
    """A folder of pictures for each key of ``counts``. ``name`` may use ``n`` and the remainder ``r`` of n by 3."""

    def make(root: Path) -> None:
        from PIL import Image

        draw = _random()
        for sub, count in counts.items():
            folder = root / where / sub
            folder.mkdir(parents=True)
            for n in range(count):
                image = Image.fromarray(draw.integers(0, 255, (size, size, 3), dtype=np.uint8))
                image.save(folder / f"{name.format(n=n, r=n % 3)}.{kind}")

    return make


def tokens(where: str, names: dict[str, int], vocabulary: int, meta: bool = False) -> Maker:
    """Files of 16-bit tokens. ``meta``: the vocabulary's size beside them, as nanoGPT keeps it."""

    def make(root: Path) -> None:
        folder = root / where
        folder.mkdir(parents=True, exist_ok=True)
        draw = _random()
        for name, count in names.items():
            data = draw.integers(0, vocabulary, count).astype(np.uint16)
            np.save(folder / name, data) if name.endswith(".npy") else data.tofile(folder / name)
        if meta:
            (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))

    return make


def words(where: str, names: dict[str, int], vocabulary: int = 30, per_line: int = 9) -> Maker:
    """Text files of made-up words."""

    def make(root: Path) -> None:
        folder = root / where
        folder.mkdir(parents=True, exist_ok=True)
        draw = _random()
        for name, count in names.items():
            numbers = [*range(vocabulary), *draw.integers(0, vocabulary, count - vocabulary)]
            text = ["".join("abcdefghij"[int(c)] for c in str(n)) for n in numbers]
            lines = [" ".join(text[i : i + per_line]) for i in range(0, count, per_line)]
            (folder / name).write_text("\n".join(lines) + "\n")

    return make


def waves(where: str, rows: int = 6, length: int = 12) -> Maker:
    """Sines, as torch.save writes an array of them."""

    def make(root: Path) -> None:
        import torch

        steps = np.arange(length) + 3 * np.arange(rows)[:, None]
        torch.save(np.sin(steps / 4.0).astype(np.float64), root / where)

    return make


def cora(where: str, papers: int = 60, features: int = 20, classes: int = 3) -> Maker:
    """A small graph in the form of the Cora data set."""

    def make(root: Path) -> None:
        folder = root / where
        folder.mkdir(parents=True)
        draw = _random()
        bits = draw.integers(0, 2, (papers, features))
        bits[:, 0] = 1
        lines = [f"{n} {' '.join(map(str, bits[n]))} class{n % classes}" for n in range(papers)]
        (folder / "cora.content").write_text("\n".join(lines) + "\n")
        edges = sorted({(int(a), int(b)) for a, b in draw.integers(0, papers, (150, 2)) if a != b})
        (folder / "cora.cites").write_text("\n".join(f"{a} {b}" for a, b in edges) + "\n")

    return make


def several(*makers: Maker) -> Maker:
    def make(root: Path) -> None:
        for maker in makers:
            maker(root)

    return make


def file(where: str, text: str) -> Maker:
    """A file of ours, for instance a module that stands in for one that would need the network."""

    def make(root: Path) -> None:
        path = root / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return make
