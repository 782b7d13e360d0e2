"""A training with tensor parallelism by hand, in the way of Megatron: plain tensors, all-reduces, no DTensor.

The vocabulary is padded, query, key and value are fused, and the embedding is tied to the last layer. What the ranks
hold is split and put together here by hand, so that lightck is compared with something that it has not computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranked
import torch
import torch.distributed as dist
from torch import nn

import lightck
from lightck.layout import Fused, Layout, Padded, Replicated, Rule, Shard

VOCABULARY, WIDTH, QKV = 10, 6, (8, 4, 4)
"""Two queries belong to each key and value."""
RULES: dict[str, Rule] = {
    r"embed\.weight": Padded(0, VOCABULARY),
    r"qkv\.(weight|bias)": Fused(0, QKV),
    r"proj\.weight": Shard(1),
    r"seen": Shard(0),
    r"norm\..*": Replicated(),
}


@dataclass(frozen=True)
class World:
    """``tp`` ranks share the tensors, and ``dp`` such groups have other batches."""

    tp: int
    dp: int

    @property
    def n_ranks(self) -> int:
        return self.tp * self.dp

    def layout(self, rank: int, rules: dict[str, Rule] | None = None) -> Layout:
        return Layout(RULES if rules is None else rules, rank % self.tp, self.tp)

    def groups(self, rank: int) -> tuple[Any, Any]:
        """The process groups of this rank: tensor parallel, and data parallel."""
        own: list[Any] = [None, None]
        of_tp = [range(first, first + self.tp) for first in range(0, self.n_ranks, self.tp)]
        of_dp = [range(first, self.n_ranks, self.tp) for first in range(self.tp)]
        for kind, many in enumerate((of_tp, of_dp)):
            for ranks in many:
                made = dist.new_group(list(ranks))
                own[kind] = made if rank in ranks else own[kind]
        return own[0], own[1]


def n_rows(tp: int) -> int:
    """Rows of the padded vocabulary: each rank has a multiple of 4, so the last of 4 ranks holds nothing but
    padding."""
    return -(-VOCABULARY // (4 * tp)) * 4 * tp


class Copied(torch.autograd.Function):
    """The same on all ranks; their gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Added(torch.autograd.Function):
    """The sum over all ranks; each gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class Net(nn.Module):
    """The part of one rank."""

    def __init__(self, tp: int, rank: int, group: Any) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        object.__setattr__(self, "group", group)
        self.embed = nn.Embedding(n_rows(tp) // tp, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, sum(QKV) // tp)
        self.proj = nn.Linear(QKV[0] // tp, WIDTH)
        self.head = nn.Linear(WIDTH, n_rows(tp) // tp, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(QKV[0] // tp))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = self.embed.num_embeddings
        own = (tokens >= self.rank * n) & (tokens < (self.rank + 1) * n)
        found = self.embed((tokens - self.rank * n).clamp(0, n - 1)) * own[..., None]
        hidden = Added.apply(found, self.group)
        q, k, v = self.qkv(Copied.apply(self.norm(hidden), self.group)).split([one // self.tp for one in QKV], -1)
        mixed = (torch.tanh(q.unflatten(-1, (-1, 2)) * k[..., None]) + v[..., None]).flatten(-2)
        with torch.no_grad():
            self.seen += mixed.sum((0, 1))
        hidden = hidden + Added.apply(nn.functional.linear(mixed, self.proj.weight), self.group) + self.proj.bias
        logits = self.head(Copied.apply(hidden, self.group))
        real = torch.arange(n) + self.rank * n < VOCABULARY
        return Added.apply((logits * real).pow(2).sum(), self.group)


def build(world: World, rank: int, seed: int = 0, group: Any = None) -> tuple[Net, torch.optim.Optimizer]:
    """``group``: the tensor parallel group; None: nothing is computed."""
    model = Net(world.tp, rank % world.tp, group)
    torch.manual_seed(seed)
    wholes = {
        "embed.weight": torch.randn(n_rows(world.tp), WIDTH),  # padding is not zero
        "qkv.weight": torch.randn(sum(QKV), WIDTH),
        "qkv.bias": torch.randn(sum(QKV)),
        "proj.weight": torch.randn(WIDTH, QKV[0]),
        "proj.bias": torch.randn(WIDTH),
    }
    with torch.no_grad():
        for name, whole in wholes.items():
            model.get_parameter(name).copy_(part_by_hand(name, whole, rank % world.tp, world.tp))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def part_by_hand(name: str, whole: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    if name.startswith("qkv"):
        return torch.cat([one.chunk(tp)[rank] for one in whole.split(QKV)])
    if name == "proj.weight":
        return whole.chunk(tp, 1)[rank]
    return whole.chunk(tp)[rank] if name in ("embed.weight", "seen") else whole


def whole_by_hand(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``name``: of a parameter or buffer; ``parts``: what each tensor parallel rank holds, of it or of its state."""
    if parts[0].ndim and name.startswith("qkv"):
        split = [part.split([one // len(parts) for one in QKV]) for part in parts]
        return torch.cat([part[kind] for kind in range(3) for part in split])
    if parts[0].ndim and name == "proj.weight":
        return torch.cat(list(parts), 1)
    if parts[0].ndim and name == "embed.weight":
        return torch.cat(list(parts))[:VOCABULARY]
    if name == "seen":
        return torch.cat(list(parts))
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]


def local_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], torch.Tensor]:
    """(name of a parameter or buffer, key of its state or "") -> a copy of what this rank holds."""
    found = {(name, ""): value.detach().clone() for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        found |= {(name, str(key)): value.clone() for key, value in optimizer.state.get(p, {}).items()}
    return found


def wholes_by_hand(world: World, locals_: Sequence[dict[tuple[str, str], torch.Tensor]]) -> dict[Any, torch.Tensor]:
    """The logical tensors. All data parallel ranks must hold the same."""
    for rank, one in enumerate(locals_):
        same = locals_[rank % world.tp]
        assert all(torch.equal(value, same[key]) for key, value in one.items() if key[0] != "seen")
    of_tp = locals_[: world.tp]
    return {key: whole_by_hand(key[0].replace("head.", "embed."), [one[key] for one in of_tp]) for key in locals_[0]}


def tokens(world: World, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank // world.tp)
    return torch.randint(0, VOCABULARY, (3, 4), generator=generator)


def update(
    world: World, rank: int, step: int, model: Net, optimizer: torch.optim.Optimizer, of_dp: Any, has_hooks: bool = True
) -> None:
    """``has_hooks``: whether lightck sees the forward, so that it closes a step before the next one changes buffers."""
    optimizer.zero_grad()
    (model if has_hooks else model.forward)(tokens(world, rank, step)).backward()
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, group=of_dp)
    optimizer.step()


@dataclass
class Run:
    """What one rank returns: where it began, what it held then, and what it holds at the end."""

    began: int
    first: dict[tuple[str, str], torch.Tensor]
    last: dict[tuple[str, str], torch.Tensor]
    exact: bool | None = None


def body(
    world: World,
    pools: Path | None,
    updates: int,
    *,
    kill: tuple[int, int] | None = None,
    rules: Callable[[int], dict[str, Rule]] = lambda rank: RULES,
    seed: int = 0,
    has_hooks: bool = True,
    **options: Any,
) -> Callable[[int], Run]:
    """The body of a rank for ``run_ranks``. ``pools``: None trains without lightck. ``kill``: (rank, step): that rank
    dies in the iteration after that step. ``updates``: number of the last step."""

    def run(rank: int) -> Run:
        of_tp, of_dp = world.groups(rank)
        model, optimizer = build(world, rank, seed, of_tp)
        session = None
        if pools is not None:
            layout = world.layout(rank, rules(rank))
            given = {"optimizer": optimizer, "resume": True, "timeout": 60, "layout": layout} | options
            session = lightck.attach(model, pools, **given)
        began, first = 0 if session is None else session.step, local_tensors(model, optimizer)
        for step in range(began, updates):
            if kill == (rank, step):
                ranked.die()
            update(world, rank, step, model, optimizer, of_dp, has_hooks)
        recovered = None if session is None else session.recovered
        if session is not None:
            session.close()
        return Run(began, first, local_tensors(model, optimizer), None if recovered is None else recovered.exact)

    return run


def train(world: World, pools: Path | None, updates: int, **options: Any) -> list[Run]:
    return ranked.values(ranked.run_ranks(world.n_ranks, body(world, pools, updates, **options)))


@functools.cache
def plain(world: World, updates: int) -> list[Run]:
    """The training without lightck."""
    return train(world, None, updates)
