"""A training with pipeline stages by hand, in the way of Megatron: each rank has some layers, counted from 0.

The embedding is tied to the last layer: the first and the last stage have a copy each, and add its gradients. What the
stages hold is put together here by hand, by the index of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ranked
import torch
import torch.distributed as dist
from torch import nn

import lightck
from lightck.layout import Layout, Rename, Rule, Shard, rename

from .tensor_parallel import Added, Copied

TOKENS, WIDTH, LAYERS = 11, 6, 5


class Layer(nn.Module):
    """``tp``: how many ranks share the weight, along its columns."""

    def __init__(self, tp: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH // tp, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.n_calls = 0
        self.at = 0
        self._group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        n = self.linear.in_features
        own = x if self._group is None else Copied.apply(x, self._group)
        out = nn.functional.linear(own[..., self.at * n : (self.at + 1) * n], self.linear.weight)
        out = out if self._group is None else Added.apply(out, self._group)
        x = x + torch.tanh(out + self.linear.bias)
        with torch.no_grad():
            self.seen += x.sum((0, 1))
        return x

    def get_extra_state(self) -> int:
        return self.n_calls

    def set_extra_state(self, state: int) -> None:
        self.n_calls = state


class Stage(nn.Module):
    """The layers ``first`` to ``last`` (excluded) of the whole model."""

    def __init__(self, first: int, last: int, tp: int = 1, tp_rank: int = 0) -> None:
        super().__init__()
        self.first, self.last = first, last
        if first == 0:
            self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(tp) for _ in range(last - first))
        for layer in self.layers:
            layer.at = tp_rank
        if last == LAYERS:
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)
            if first == 0:
                self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.first == 0 else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).sum() if self.last == LAYERS else x

    def renames(self) -> list[Rename]:
        found = [rename(r"^layers\.(\d+)\.", offset=self.first)]
        return found + ([rename("^head.weight$", "embed.weight")] if self.last == LAYERS and self.first else [])


@dataclass(frozen=True)
class World:
    """Where the stages end. ``tp`` ranks share each stage, and ``dp`` such pipelines have other batches."""

    ends: tuple[int, ...]
    tp: int = 1
    dp: int = 1

    @property
    def n_ranks(self) -> int:
        return len(self.ends) * self.tp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Data parallel rank, stage, tensor parallel rank."""
        return rank // (len(self.ends) * self.tp), rank // self.tp % len(self.ends), rank % self.tp

    def build(self, rank: int, seed: int = 0) -> tuple[Stage, torch.optim.Optimizer]:
        _, stage, tp_rank = self.place(rank)
        model = Stage((0, *self.ends)[stage], self.ends[stage], self.tp, tp_rank)
        torch.manual_seed(seed)
        wholes = {"embed.weight": torch.randn(TOKENS, WIDTH)}
        for number in range(LAYERS):
            wholes[f"layers.{number}.linear.weight"] = torch.randn(WIDTH, WIDTH)
            wholes[f"layers.{number}.linear.bias"] = torch.randn(WIDTH)
        with torch.no_grad():
            for name, p in model.named_parameters():
                whole = wholes[name_by_hand(name, model.first)]
                p.copy_(whole.chunk(self.tp, 1)[tp_rank] if name.endswith("linear.weight") else whole)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=1e-2)

    def layout(self, rank: int, model: Stage, renames: Sequence[Rename] | None = None) -> Layout | None:
        """None for a single rank: it builds the whole model."""
        if self.n_ranks == 1:
            return None
        _, stage, tp_rank = self.place(rank)
        rules: dict[str, Rule] = {r"layers\.\d+\.linear\.weight": Shard(1)} if self.tp > 1 else {}
        renames = model.renames() if renames is None else renames
        return Layout(rules, tp_rank, self.tp, stage=stage, stages=len(self.ends), rename=renames)


def name_by_hand(name: str, first: int) -> str:
    if name == "head.weight":
        return "embed.weight"
    kind, _, rest = name.partition(".")
    if kind != "layers":
        return name
    number, _, key = rest.partition(".")
    return f"layers.{int(number) + first}.{key}"


Tensors = dict[tuple[str, str], torch.Tensor]


def local_tensors(model: Stage, optimizer: torch.optim.Optimizer) -> Tensors:
    """(name in the whole model, key of its state or "") -> a copy. ``n_calls`` of a layer is there as a number."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    found = {(name_by_hand(name, model.first), ""): one.detach().clone() for name, one in tensors.items()}
    for number, layer in enumerate(model.layers):
        found[f"layers.{number + model.first}.calls", ""] = torch.tensor(layer.n_calls)
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[name_by_hand(name, model.first), str(key)] = value.clone()
    return found


def wholes_by_hand(world: World, locals_: Sequence[Tensors]) -> Tensors:
    """All ranks that hold the same must have the same."""
    found: Tensors = {}
    for rank in range(0, world.n_ranks, world.tp):
        for name, key in locals_[rank]:
            parts = [locals_[rank + at][name, key] for at in range(world.tp)]
            is_cut = name.endswith("linear.weight") and parts[0].ndim == 2
            whole = torch.cat(parts, 1) if is_cut else parts[0]
            same = found.setdefault((name, key), whole)
            assert torch.equal(same, whole) or name.endswith("seen"), (name, key)
    return found


def update(world: World, rank: int, step: int, model: Stage, optimizer: torch.optim.Optimizer, groups: Any) -> None:
    of_dp, of_tie, of_tp = groups
    for layer in model.layers:
        layer._group = of_tp
    dp_rank, stage, _ = world.place(rank)
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    x: torch.Tensor = torch.randint(0, TOKENS, (2, 3), generator=generator)
    optimizer.zero_grad()
    if stage:
        x = torch.empty(2, 3, WIDTH)
        dist.recv(x, rank - world.tp)
        x.requires_grad_()
    out = model(x)
    if stage < len(world.ends) - 1:
        dist.send(out.detach(), rank + world.tp)
        grad = torch.empty_like(out)
        dist.recv(grad, rank + world.tp)
        out.backward(grad)
    else:
        out.backward()
    if stage:
        assert x.grad is not None
        dist.send(x.grad, rank - world.tp)
    for name, p in model.named_parameters():
        assert p.grad is not None
        if of_tie is not None and name in ("embed.weight", "head.weight"):
            dist.all_reduce(p.grad, group=of_tie)
        if world.dp > 1:
            dist.all_reduce(p.grad, group=of_dp)
    optimizer.step()


def groups_of(world: World, rank: int) -> tuple[Any, Any, Any]:
    """The process groups of this rank: data parallel, of the copies of the embedding, and tensor parallel."""
    if world.n_ranks == 1:
        return None, None, None
    each = len(world.ends) * world.tp
    own: list[Any] = [None, None, None]
    of_tp = [list(range(first, first + world.tp)) for first in range(0, world.n_ranks, world.tp)]
    of_dp = [list(range(first, world.n_ranks, each)) for first in range(each)]
    ends = [(first, first + each - world.tp) for first in range(world.n_ranks) if world.place(first)[1] == 0]
    of_tie = [list(pair) for pair in ends if pair[0] != pair[1]]
    for kind, many in enumerate((of_dp, of_tie, of_tp if world.tp > 1 else [])):
        for ranks in many:
            made = dist.new_group(ranks)
            own[kind] = made if rank in ranks else own[kind]
    return own[0], own[1], own[2]


@dataclass
class Run:
    """What one rank returns."""

    began: int
    first: Tensors
    last: Tensors
    exact: bool | None
    lines: list[str]


def body(
    world: World,
    pools: Path | None,
    updates: int,
    *,
    seed: int = 0,
    kill: tuple[int, int] | None = None,
    renames: Callable[[Stage], list[Rename]] = Stage.renames,
    change: Callable[[Stage, int], None] = lambda model, rank: None,
) -> Callable[[int], Run]:
    """``change``: of the model, before the attach."""

    def run(rank: int) -> Run:
        groups = groups_of(world, rank)
        model, optimizer = world.build(rank, seed)
        change(model, rank)
        layout, session = world.layout(rank, model, renames(model)), None
        with ranked.log_lines() as lines:
            if pools is not None:
                given = {"optimizer": optimizer, "resume": True, "timeout": 60, "layout": layout}
                session = lightck.attach(model, pools, **given)
            began, first = 0 if session is None else session.step, local_tensors(model, optimizer)
            for step in range(began, updates):
                if kill == (rank, step):
                    ranked.die()
                update(world, rank, step, model, optimizer, groups)
                if session is not None:
                    session.end_step()
            recovered = None if session is None else session.recovered
            if session is not None:
                session.close()
        exact = None if recovered is None else recovered.exact
        return Run(began, first, local_tensors(model, optimizer), exact, lines)

    return run


def run_world(world: World, run: Callable[[int], Any]) -> list[ranked.Ended]:
    return ranked.run_ranks(world.n_ranks, run, has_group=world.n_ranks > 1)


def train(world: World, pools: Path | None, updates: int, **options: Any) -> list[Run]:
    return ranked.values(run_world(world, body(world, pools, updates, **options)))
