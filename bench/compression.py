"""What compression gains on the state of trained models: python bench/compression.py [--out DIR] [--only NAME].

The six models take a few steps in fp32, with their own optimizers. Their state is cut into pieces of 32 MiB, as a drain
does, and every third piece is compressed and put back by the codec of tiers; then the same state, rounded to bf16.

- *Ratio*: bytes of these pieces over bytes of their objects. Pieces that do not get smaller count as they are.
- *MB/s*: bytes of the pieces over the processor time of one thread. Beside other work it varies much.

A frozen GPT with low-rank adapters: bytes that each checkpoint writes into a tier.

What is cut: gpt2 has 4 of its 12 layers and bert_large 4 of its 24, so that no training needs more than 2 GB; batches
are small.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import lightck
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.tiers.codecs import CODECS, coding_of, decoded, encoded
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, Writer
from lightck.tiers.sending import KnownObjects, send
from lightck.tiers.tier_manifest import OBJECT_NBYTES_MAX

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.workloads import FULL, NAMES, SMALL, Workload, language, state_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS, BATCH, EVERY_PIECE = 3, 2, 3
FORMS = (None, *CODECS)


def workloads(*, small: bool) -> dict[str, Workload]:
    if small:
        return dict(SMALL)
    cut = {
        "gpt2": partial(language.gpt2, n_layer=4),
        "bert_large": partial(language.bert_large, num_hidden_layers=4),
    }
    return {name: replace(FULL[name], batch=BATCH, model=cut.get(name, FULL[name].model)) for name in NAMES}


def trained_state(of: Workload) -> list[torch.Tensor]:
    """Train for some steps, and return the tensors of a checkpoint."""
    torch.manual_seed(0)
    model = of.model()
    optimizer = of.optimizer(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x, y = of.input(of.batch, generator)
        torch.autograd.backward(of.loss(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    return [tensor for _, tensor in state_tensors(model, optimizer)]


def pieces(tensors: list[torch.Tensor]) -> Iterator[list[tuple[int, memoryview]]]:
    """Yield (bytes of an element, bytes) of the parts of each piece."""
    piece: list[tuple[int, memoryview]] = []
    space = OBJECT_NBYTES_MAX
    for tensor in tensors:
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        while data:
            part, data = data[:space], data[space:]
            piece.append((tensor.element_size(), part))
            space -= len(part)
            if not space:
                yield piece
                piece, space = [], OBJECT_NBYTES_MAX
    if piece:
        yield piece


def measured(tensors: list[torch.Tensor], codec: str) -> dict[str, float]:
    """Compress a state and put it back."""
    nbytes = stored = 0
    made_seconds = back_seconds = 0.0
    decompressed = 0
    for parts in islice(pieces(tensors), 0, None, EVERY_PIECE):
        data = b"".join(part for _, part in parts)
        began = time.thread_time()
        coding = coding_of(codec, [(width, len(part)) for width, part in parts])
        made = encoded(data, coding)
        made_seconds += time.thread_time() - began
        nbytes += len(data)
        stored += len(data) if made is None else len(made)
        if made is not None:
            began = time.thread_time()
            back = decoded(made, coding)
            back_seconds += time.thread_time() - began
            decompressed += len(data)
            if bytes(back) != data:
                raise AssertionError("what comes back is not what was compressed")
    return {
        "nbytes": nbytes,
        "stored_nbytes": stored,
        "ratio": nbytes / stored,
        "compress_mb_per_second": nbytes / 1e6 / max(made_seconds, 1e-9),
        "decompress_mb_per_second": decompressed / 1e6 / max(back_seconds, 1e-9),
    }


def adapters(folder: Path, *, small: bool) -> dict[str, Any]:
    """Return how many bytes the checkpoints of a frozen model with adapters write into a tier, in each form."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from finetune_lora import with_adapters  # type: ignore[import-not-found]
    from train_gpt import GPT  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = with_adapters(GPT(2, 64, 2, 32, dropout=0.0) if small else GPT(8, 512, 8, 128, dropout=0.0), 8, 16)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    stores = {form: (FolderStore(str(folder / str(form))), KnownObjects()) for form in FORMS}
    found: dict[str, list[int]] = {str(form): [] for form in FORMS}
    nbytes = 0
    with lightck.attach(model, folder / "lora.pool", optimizer=optimizer) as session:
        for step in range(4):
            torch.autograd.backward(model(torch.randint(0, 256, (4, 32)), torch.randint(0, 256, (4, 32))))
            optimizer.step()
            optimizer.zero_grad()
            session.flush()
            for form, (store, earlier) in stores.items():
                with closing(open_pool(str(folder / "lora.pool"))) as reader:
                    stored = next(iter(reader.checkpoints()))
                    assert isinstance(stored, StoredCheckpoint), "just written"
                    writer = Writer(Claim(1, "0" * 8), 0, 1)
                    sent = send(stored, store, writer, f"{step:08x}", earlier, written_by="bench", codec=form)
                    earlier.add(sent.manifest)
                    nbytes = sent.manifest.nbytes
                found[str(form)].append(sent.nbytes)
    return {"nbytes": nbytes, "written": found}


def keep(results: dict[str, Any], folder: Path | None) -> None:
    if folder is not None:
        (folder / "compression.json").write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write compression.json into this folder")
    parser.add_argument("--only", help="only the model with this name, or lora")
    parser.add_argument("--small", action="store_true", help="small models: only that it runs")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, of in workloads(small=args.small).items():
        if args.only not in (None, name):
            continue
        state = trained_state(of)
        for kind, dtype in DTYPES.items():
            tensors = [each.to(dtype) if each.is_floating_point() else each for each in state]
            row = results.setdefault(name, {})[kind] = {codec: measured(tensors, codec) for codec in CODECS}
            for codec, each in row.items():
                print(
                    f"{name} {kind}, {each['nbytes'] / 1e6:,.0f} MB: {codec} {each['ratio']:.3f}, "
                    f"{each['compress_mb_per_second']:,.0f} and {each['decompress_mb_per_second']:,.0f} MB/s",
                    flush=True,
                )
            keep(results, args.out)
    if args.only in (None, "lora"):
        with tempfile.TemporaryDirectory() as folder:
            results["lora"] = adapters(Path(folder), small=args.small)
        print(f"lora: {results['lora']}")
        keep(results, args.out)


if __name__ == "__main__":
    main()
