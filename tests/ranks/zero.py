"""Trainings with DeepSpeed's ZeRO on the ranks of ``run_ranks``, and what DeepSpeed saves of them.

DeepSpeed is imported in the forked processes only: the process of the tests stays as it is. What comes back from there
has numbers and tensors, and no classes of DeepSpeed.
"""

from __future__ import annotations

import argparse
import importlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from ranked import run_ranks, values
from torch import nn
from torch.nn import functional as F

N_RANKS = 2
STEPS = 3
BATCH = 4
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
"""What DeepSpeed saves of each parameter: the weights in fp32, and AdamW's state."""


@dataclass(frozen=True)
class Case:
    """How DeepSpeed trains. ``zero``: further options of ``zero_optimization``; ``others``: further options."""

    stage: int
    dtype: torch.dtype
    zero: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "bf16": {"enabled": self.dtype == torch.bfloat16},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0, **self.zero},
            "zero_allow_untested_optimizer": True,
            **self.others,
        }


ROUND_ROBIN = "ZeRO-2, round robin"
CASES = {
    "ZeRO-1": Case(1, torch.float32),
    "ZeRO-1 in bf16": Case(1, torch.bfloat16),
    # Another optimizer of DeepSpeed, with partitions of its own.
    "ZeRO-1 in bf16, gradients in fp32": Case(1, torch.bfloat16, others={"data_types": {"grad_accum_dtype": "fp32"}}),
    "ZeRO-2": Case(2, torch.float32),
    "ZeRO-2 in bf16": Case(2, torch.bfloat16),
    # The parameters lie in another order. DeepSpeed 0.19.8 saves the order, but its tool does not know it and mixes the
    # parameters up: the universal checkpoint has other weights than the model.
    ROUND_ROBIN: Case(2, torch.float32, {"round_robin_gradients": True}),
    "ZeRO-2 in bf16, aligned": Case(2, torch.bfloat16, {"parameter_alignment": True}),  # padding between parameters
    "ZeRO-2, both": Case(2, torch.float32, {"round_robin_gradients": True, "parameter_alignment": True}),
    "ZeRO-3": Case(3, torch.float32),
    "ZeRO-3 in bf16": Case(3, torch.bfloat16),
    "ZeRO-3, subgroups": Case(3, torch.float32, {"sub_group_size": 200}),  # a flat buffer for a few parameters each
}


# -- training ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Tensors of 1 to 4 dimensions. The sizes of most do not divide by the number of ranks. (DeepSpeed refuses tensors
    without dimensions.)"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))
        self.convolution = nn.Conv2d(3, 5, (3, 2))
        self.norm = nn.LayerNorm(7)
        self.hidden = nn.Linear(5 * 3 * 7, 11)
        self.mixed = nn.Parameter(torch.randn(3, 11, 5) / 10)
        self.last = nn.Linear(3 * 5, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.convolution(images)).flatten(1)
        hidden = torch.tanh(self.hidden(features)) * self.scale
        return self.last(torch.einsum("bi,hij->bhj", hidden, self.mixed).flatten(1))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: tensors of several dimensions are decayed, the others are not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def imported(rank: int, n_ranks: int) -> Any:
    """Import DeepSpeed for the CPU, in a process group that exists."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_ranks)}
    deepspeed = importlib.import_module("deepspeed")
    # An operator for shared memory would be compiled, which takes minutes. gloo does without it.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return deepspeed


def _train(deepspeed: Any, rank: int, case: Case, folder: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.config)
    torch.manual_seed(1 + rank)
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, 5, 8, dtype=case.dtype)
        engine.backward(F.mse_loss(engine(images).float(), torch.ones(BATCH, 1)))
        engine.step()
    engine.save_checkpoint(str(folder), tag="saved")
    engine.destroy()


# -- what was saved ----------------------------------------------------------------------------------------------------

Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass
class Group:
    """A flat buffer, in which several parameters lie one after the other. Each rank has a partition of it."""

    partitions: list[Tensors]
    """For each rank: kind (one of ``KINDS``) -> its partition. Padding at its end may be left out."""
    shapes: dict[str, tuple[int, ...]]
    """Parameter -> its shape, in the order of the buffer."""
    fragments: list[dict[str, tuple[int, int]]]
    """For each rank, as DeepSpeed tells: parameter -> where its part begins in the partition, and how long it is. Empty
    for stage 3, of which DeepSpeed saves no such thing."""
    paddings: list[int]
    """How many elements of padding follow each parameter."""


@dataclass
class Saved:
    """A checkpoint of DeepSpeed."""

    stage: int
    groups: list[Group]
    universal: dict[str, Tensors]
    """The universal checkpoint that DeepSpeed's tool has made of it: parameter -> kind -> tensor (flat for stage 3)."""
    model: Tensors
    """The model's own parameters. Those of stage 3 are empty."""


def trained(folder: Path) -> dict[str, Saved]:
    """Train as each of ``CASES`` says, save and convert. Return what was saved."""

    def trains(rank: int) -> None:
        deepspeed = imported(rank, N_RANKS)
        for name, case in CASES.items():
            _train(deepspeed, rank, case, folder / name)

    def converts(rank: int) -> dict[str, Saved]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        for name in CASES:
            convert(folder / name)
        return {name: saved(case.stage, folder / name) for name, case in CASES.items()}

    values(run_ranks(N_RANKS, trains))
    return values(run_ranks(1, converts, has_group=False))[0]


def saved(stage: int, folder: Path, slice_number: int = 0) -> Saved:
    """Read what was saved, under tensor parallelism that of the ranks with this slice."""
    of_slice = f"*mp_rank_{slice_number:02d}"
    states = [
        _load(path)["optimizer_state_dict"] for path in sorted((folder / "saved").glob(f"{of_slice}_optim_states.pt"))
    ]
    model = _load(min((folder / "saved").glob(f"{of_slice}_model_states.pt")))
    groups = [_group(stage, states, number, shapes) for number, shapes in enumerate(model["param_shapes"])]
    universal = {name: _universal(folder, name) for group in groups for name in group.shapes}
    return Saved(stage, groups, universal, model["module"])


def convert(folder: Path) -> None:
    """Run DeepSpeed's tool, in this process."""
    tool = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    folders = {"input_folder": str(folder / "saved"), "output_folder": str(folder / "universal")}
    tool.main(argparse.Namespace(**folders, **options, inject_missing_state=True))


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _group(stage: int, states: list[Any], number: int, shapes: dict[str, torch.Size]) -> Group:
    of_adamw, of_weights = (
        ("optimizer_state_dict", "fp32_flat_groups")
        if stage == 3
        else ("base_optimizer_state", "single_partition_of_fp32_groups")
    )
    partitions = [
        {kind: state[of_adamw]["state"][number][kind] for kind in KINDS[1:]} | {"fp32": state[of_weights][number]}
        for state in states
    ]
    fragments = [
        {name: (one.start, one.numel) for name, one in state["param_slice_mappings"][number].items()}
        for state in states
        if stage < 3
    ]
    paddings = states[0].get("param_alignment_paddings", {number: [0] * len(shapes)})[number]
    return Group(partitions, {name: tuple(shape) for name, shape in shapes.items()}, fragments, paddings)


def _universal(folder: Path, name: str) -> Tensors:
    loaded = {kind: _load(folder / "universal" / "zero" / name / f"{kind}.pt") for kind in KINDS}
    return {kind: value["param"] if isinstance(value, dict) else value for kind, value in loaded.items()}
