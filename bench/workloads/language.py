"""GPT-2 124M and BERT-large from their configurations (transformers), random-initialised, on random tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightck.errors import BenchError


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BenchError(
            f"The language models need transformers, which is not installed ({error}). Install it: "
            "pip install 'lightck[bench]'."
        ) from error
    return transformers


def gpt2(**small: Any) -> nn.Module:
    transformers = _transformers()
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{"use_cache": False, **small}))
    return model


def bert_large(**small: Any) -> nn.Module:
    transformers = _transformers()
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model: nn.Module = transformers.BertForMaskedLM(transformers.BertConfig(**{**shape, **small}))
    return model


def tokens(n: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and labels for all of them, which costs as much as labels for a masked part."""
    ids = torch.randint(vocabulary, (n, length), generator=generator)
    return ids, ids.clone()


def own_loss(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)
