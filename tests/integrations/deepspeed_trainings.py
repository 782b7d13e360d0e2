"""Small trainings under DeepSpeed on some ranks, killed at a numbered event, and what is left of them.

What is left is read with DeepSpeed's own functions, and not through the integration.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from ranked import Ended, run_ranks, values
from torch import nn
from torch.nn import functional as F

import lightck.integrations.deepspeed as integration

EPOCHS = 3
N_DATA, BATCH, WIDTH = 88, 4, 6


@dataclass(frozen=True)
class Program:
    """How a training runs. ``zero``: options of ``zero_optimization``; ``config``: further options."""

    stage: int
    dtype: torch.dtype = torch.float32
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"
    scheduler: str = ""
    workers: int = 0
    evaluates: bool = False
    ranks: int = 2
    engine_loads: bool = False
    """Whether the engine makes the loader (``training_data``)."""
    draws: bool = False
    """Whether the loop draws its batches, without a loader."""


BF16 = torch.bfloat16
ROUND_ROBIN = {"round_robin_gradients": True, "parameter_alignment": True}
if "parameter_alignment" not in DeepSpeedZeroConfig.model_fields:
    # Without it, what DeepSpeed puts together of parameters that take turns is wrong, so nothing can be compared.
    ROUND_ROBIN = {}
PROGRAMS = {
    "ZeRO-0, accumulation, evaluation": Program(0, config={"gradient_accumulation_steps": 3}, evaluates=True),
    "ZeRO-0 in bf16, scheduler of each update": Program(0, BF16, scheduler="cosine", config={"gradient_clipping": 0.5}),
    "ZeRO-1, SGD, clipping": Program(1, optimizer="SGD", config={"gradient_clipping": 0.1}, scheduler="epochs"),
    "ZeRO-1 in bf16, gradients in fp32": Program(
        1, BF16, config={"data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 2}, evaluates=True
    ),
    "ZeRO-2 in bf16, accumulation, workers, clipping": Program(
        2,
        BF16,
        config={"gradient_accumulation_steps": 2, "gradient_clipping": 0.3},
        scheduler="warmup",
        workers=2,
        evaluates=True,
    ),
    "ZeRO-2, round robin, aligned": Program(2, zero=ROUND_ROBIN),
    "ZeRO-2, one rank": Program(2, BF16, scheduler="warmup", ranks=1),
    "ZeRO-3 in bf16, persistent parameters": Program(3, BF16, evaluates=True, scheduler="cosine"),
    "ZeRO-3, subgroups, accumulation, workers": Program(
        3,
        zero={"sub_group_size": 60, "stage3_param_persistence_threshold": 0},
        config={"gradient_accumulation_steps": 2},
        scheduler="epochs",
        workers=1,
    ),
    "ZeRO-3, one rank, RMSprop": Program(3, optimizer="RMSprop", ranks=1),
    "ZeRO-3 in bf16, three ranks": Program(
        3, BF16, zero={"stage3_param_persistence_threshold": 0}, config={"gradient_clipping": 0.5}, ranks=3
    ),
    "ZeRO-1, the engine's loader": Program(1, engine_loads=True, scheduler="warmup"),
    "ZeRO-2, no loader": Program(2, BF16, draws=True, config={"gradient_accumulation_steps": 2}),
}


class Data(torch.utils.data.Dataset[torch.Tensor]):
    """Items with noise, which is drawn in the process that fetches them."""

    def __len__(self) -> int:
        return N_DATA

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(index)) / N_DATA + 0.1 * torch.rand(WIDTH)


class Centered(nn.Module):
    """Subtracts a running mean, which is a buffer in fp32 (torch's BatchNorm takes none with weights in bf16)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
            self.count += 1
        return (x - self.mean.to(x.dtype)) * self.weight


class Model(nn.Module):
    """Odd sizes, a parameter of one element, a tied and a frozen one, buffers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.norm = Centered()
        self.middle = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 7)])
        self.again = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.again.weight
        self.dropout = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(1))
        self.out = nn.Linear(7, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(torch.tanh(self.into(x))))
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.out(self.dropout(x + self.tied(torch.tanh(self.again(x)))) * self.scale)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: matrices are decayed, the others are not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]


def optimizer_of(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"momentum": 0.9} if program.optimizer in ("SGD", "RMSprop") else {}
    return getattr(torch.optim, program.optimizer)(groups(model), lr=1e-2, **settings)


def engine_of(program: Program, seed: int = 0, **others: Any) -> Any:
    """Make an engine, in a process group that exists."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    # An operator for shared memory would be compiled, which takes minutes. gloo does without it.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    torch.manual_seed(seed)
    model = Model()
    optimizer = optimizer_of(program, model)
    schedulers = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        "warmup": lambda: WarmupDecayLR(optimizer, 40, warmup_max_lr=1e-2, warmup_num_steps=5),
    }
    scheduler = schedulers[program.scheduler]() if program.scheduler in schedulers else None
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": program.dtype == BF16},
        "zero_optimization": {"stage": program.stage, **program.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **program.config,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, **others)
    return engine


def train(program: Program, pools: Path | None, kill_at: int = 0, save_to: Path | None = None) -> dict[str, Any]:
    """Train to the end, or to the kill at this event of this rank. ``save_to``: where DeepSpeed saves a checkpoint."""
    warnings = Warnings()
    engine = engine_of(program, **({"training_data": Data()} if program.engine_loads else {}))
    if program.engine_loads:
        sampler, loader = None, engine.training_dataloader
    else:
        sampler = torch.utils.data.DistributedSampler(Data(), dist.get_world_size(), dist.get_rank(), seed=3)
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=BATCH, sampler=sampler, num_workers=program.workers, drop_last=True
        )
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    decay = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5) if program.scheduler == "epochs" else None
    torch.manual_seed(10 + dist.get_rank())
    events = Events(kill_at)
    inner.register_step_post_hook(lambda *_: events.next())  # inside engine.step()
    session, first = None, 0
    if pools is not None:
        session = integration.attach(engine, pools)
        if not program.draws:
            loader = session.loader(loader)
            first = loader.epoch
    losses: dict[int, float] = {}
    while program.draws and engine.micro_steps < 16:
        _iteration(engine, program, torch.rand(BATCH, WIDTH), events, losses)
    for epoch in () if program.draws else range(first, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            events.next()
            _iteration(engine, program, batch, events, losses)
        if decay is not None:
            decay.step()
    if session is not None:
        assert session.step == engine.global_steps
        session.close(done=True)
    found = left(engine, inner, decay)
    if save_to is not None:
        engine.save_checkpoint(str(save_to), tag="saved")
    return {**found, "losses": losses, "events": events.count, "warnings": warnings.texts}


def _iteration(engine: Any, program: Program, batch: torch.Tensor, events: Events, losses: dict[int, float]) -> None:
    batch = batch.to(program.dtype)
    loss = F.mse_loss(engine(batch).float(), batch.float())
    events.next()
    engine.backward(loss)
    events.next()
    engine.step()
    events.next()
    losses[engine.micro_steps] = loss.item()
    if program.evaluates and engine.micro_steps % 4 == 0:
        engine.eval()
        with torch.no_grad():
            losses[-engine.micro_steps] = engine(torch.ones(3, WIDTH, dtype=program.dtype)).float().sum().item()
        engine.train()
        events.next()


class Warnings(logging.Handler):
    """Collects lightck's warnings in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("lightck").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Events:
    """Counts the events of a run, and kills the process at one of them."""

    def __init__(self, kill_at: int) -> None:
        self.count, self._kill_at = 0, kill_at

    def next(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def left(engine: Any, inner: torch.optim.Optimizer, *schedulers: Any) -> dict[str, Any]:
    """What a training has left on this rank."""
    return {
        "weights": {name: used(param) for name, param in engine.module.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        "masters": masters(engine),
        "options": [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups],
        "schedulers": [one.state_dict() for one in (engine.lr_scheduler, *schedulers) if one is not None],
        "counters": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "random": torch.get_rng_state(),
    }


def used(param: Any) -> torch.Tensor:
    """The parameter that the forward uses; of stage 3 this rank's part, without padding."""
    if not hasattr(param, "ds_tensor"):
        return param.detach().clone()
    each = param.ds_tensor.ds_numel
    n = max(0, min(each, param.ds_numel - dist.get_rank() * each))
    return param.ds_tensor.detach()[:n].clone()


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """The whole master weights and optimizer state, as DeepSpeed puts them together of all ranks."""
    found: dict[str, torch.Tensor] = {}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    keys = sorted({key for state in inner.state.values() for key, value in state.items() if value.ndim})
    for number, (name, master) in enumerate(_whole(engine)):
        for key in keys:
            found[f"{name}/{key}"] = inner.state[master][key].clone()
        found[name] = master.detach().clone()
        assert number >= 0
    if found:
        return found
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # After the first step DeepSpeed 0.19.8 links the state of the first parameter group only.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param).clone()
            for key in keys:
                found[f"{name}/{key}"] = safe_get_full_optimizer_state(param, key).clone()
    return found


def _whole(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Of stage 0: name and master weights of each parameter."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    outer = engine.optimizer
    if isinstance(outer, torch.optim.Optimizer):
        yield from ((names[id(p)], p) for group in outer.param_groups for p in group["params"])
    elif hasattr(outer, "fp32_groups"):
        for params, found in zip(outer.fp16_groups, outer.fp32_groups, strict=True):
            yield from ((names[id(p)], master) for p, master in zip(params, found, strict=True))


def run(
    name: str, pools: Path | None, kill_at: int = 0, kill_rank: int = 0, save_to: Path | None = None
) -> list[Ended]:
    """Run a program on its ranks. One of them may be killed; then the others are killed too."""
    program = PROGRAMS[name]
    return run_ranks(program.ranks, lambda rank: train(program, pools, kill_at * (rank == kill_rank), save_to))


def ended(name: str, pools: Path | None, save_to: Path | None = None) -> list[dict[str, Any]]:
    """What a program leaves on each rank, if none is killed."""
    return values(run(name, pools, save_to=save_to))
