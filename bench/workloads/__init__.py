"""The six models of LightCheck's Table I, each with its optimizer, its input and a small size for tests.

Batch sizes are constants of the bench: LightCheck's own were chosen for its GPUs and take far more than ten seconds a
step on two cores, so they are the largest of 8, 16 and 32 whose step takes at most ten seconds there, and 8 where none
does (``lightck bench calibrate`` measures that). Changing one is a change of the bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from bench.workloads import language, vision
from bench.workloads.inception import inception_v3
from bench.workloads.vision import alexnet, resnet18, vgg16

MB, MIB = 10**6, 2**20
BATCHES = (8, 16, 32)
SECONDS_MAX = 10.0
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with its optimizer, input and loss."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    input: Callable[[int, torch.Generator], Batch]
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    batch: int
    says: str
    """The shape of the input and the optimizer, as text for a table."""
    paper_nbytes: int = 0
    """Bytes of a checkpoint in LightCheck's table; 0 for a small size, which is not in it."""


def _vision(name: str, model: Callable[[], nn.Module], pixels: int, batch: int, paper_mib: int) -> Workload:
    return Workload(
        name,
        model,
        vision.momentum_sgd,
        partial(_images, pixels, 1000),
        vision.cross_entropy,
        batch,
        f"{pixels} x {pixels}, momentum SGD",
        paper_mib * MIB,
    )


def _images(pixels: int, classes: int, n: int, generator: torch.Generator) -> Batch:
    return vision.images(n, pixels, classes, generator)


def _tokens(length: int, vocabulary: int, n: int, generator: torch.Generator) -> Batch:
    return language.tokens(n, length, vocabulary, generator)


def _language(
    name: str, model: Callable[[], nn.Module], length: int, vocabulary: int, batch: int, paper_mb: int
) -> Workload:
    return Workload(
        name,
        model,
        language.adam,
        partial(_tokens, length, vocabulary),
        language.own_loss,
        batch,
        f"{length} tokens, Adam",
        paper_mb * MB,
    )


FULL = {
    w.name: w
    for w in (
        _vision("resnet18", resnet18, 224, 32, 90),
        _vision("vgg16", vgg16, 224, 16, 1056),
        _vision("inception_v3", inception_v3, 299, 32, 183),
        _vision("alexnet", alexnet, 224, 32, 467),
        _language("gpt2", language.gpt2, 128, 50257, 8, 1508),
        _language("bert_large", language.bert_large, 64, 30522, 8, 4004),
    )
}
NAMES = tuple(FULL)


def _small_vision(name: str, model: Callable[[], nn.Module], pixels: int) -> Workload:
    return Workload(
        name,
        model,
        vision.momentum_sgd,
        partial(_images, pixels, 10),
        vision.cross_entropy,
        2,
        f"{pixels} x {pixels}, momentum SGD, small",
    )


def _small_language(name: str, model: Callable[[], nn.Module]) -> Workload:
    return Workload(
        name, model, language.adam, partial(_tokens, 32, 512), language.own_loss, 4, "32 tokens, Adam, small"
    )


_TRANSFORMER = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
SMALL = {
    w.name: w
    for w in (
        _small_vision("resnet18", partial(resnet18, 10, 8), 48),
        _small_vision("vgg16", partial(vgg16, 10, 16, 64, 32), 32),
        _small_vision("inception_v3", partial(inception_v3, 10, 16), 75),
        _small_vision("alexnet", partial(alexnet, 10, 16), 64),
        _small_language(
            "gpt2",
            partial(
                language.gpt2,
                n_embd=128,
                n_layer=2,
                n_head=4,
                vocab_size=512,
                n_positions=32,
                bos_token_id=None,
                eos_token_id=None,
            ),
        ),
        _small_language(
            "bert_large", partial(language.bert_large, vocab_size=512, max_position_embeddings=32, **_TRANSFORMER)
        ),
    )
}


def workload(name: str, size: str = "full") -> Workload:
    return {"full": FULL, "small": SMALL}[size][name]


def gpt2_of(layers: int, size: str = "full") -> Workload:
    """GPT-2 with so many of its 12 layers, and AdamW, on short batches: for measures in which several trainings run."""
    if size == "small":
        return replace(SMALL["gpt2"], optimizer=language.adamw)
    return replace(
        FULL["gpt2"],
        name=f"gpt2-{layers}",
        model=partial(language.gpt2, n_layer=layers),
        optimizer=language.adamw,
        input=partial(_tokens, 64, 50257),
        batch=4,
        says=f"{layers} layers, 64 tokens, AdamW",
    )


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint as (name, tensor), each once, tied tensors included."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{names[id(p)]}.{key}", value.detach()


def state_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return sum(t.numel() * t.element_size() for _, t in state_tensors(model, optimizer))


def checkpoint_shapes(of: Workload) -> list[int]:
    """The bytes of each tensor of a checkpoint after the first step, computed on the meta device without allocation."""
    with torch.device("meta"):
        model = of.model()
    optimizer = of.optimizer(model.parameters())
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step()
    return [t.numel() * t.element_size() for _, t in state_tensors(model, optimizer)]


def checkpoint_nbytes(of: Workload) -> int:
    return sum(checkpoint_shapes(of))
