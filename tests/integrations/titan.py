"""torchtitan's trainer and debug model on a CPU with gloo, killed at a numbered event, and what is left of it.

torchtitan 0.3.0 is written for accelerators and a newer torch. What it asks of them and torch 2.13 has not on a CPU is
given here, before its trainer is imported: a device module, ``torch.distributed.set_timeout``, and attention whose
backward runs on a CPU, with the same mask. With gloo ``fully_shard`` sums, and divides by itself. Nothing else of it is
changed.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import types
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch compiles the creation of masks, which takes longer than a training here

import datasets
import torch
import torchtitan.tools.utils
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask


class _Cpu(types.ModuleType):
    """``torch.cpu``, and what torchtitan asks of a device beside it."""

    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_properties = staticmethod(lambda device=None: types.SimpleNamespace(total_memory=1 << 30, name="cpu"))
    memory_stats = staticmethod(lambda device=None: defaultdict(int))
    current_device = staticmethod(lambda: 0)
    reset_peak_memory_stats = empty_cache = set_device = staticmethod(lambda *_: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = _Cpu("cpu")
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import lightck.integrations.torchtitan as integration  # noqa: E402


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, scale: float, enable_gqa: bool, **_: Any
) -> tuple[torch.Tensor, None]:
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


FlexAttention._compiled_flex_attn = staticmethod(_attention)

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "goes", "home", "to", "sleep"]
STEPS = 12


def _documents(path: str) -> datasets.Dataset:
    drawn = random.Random(path)
    texts = [" ".join(drawn.choice(WORDS) for _ in range(drawn.randint(5, 60))) for _ in range(16)]
    return datasets.Dataset.from_list([{"text": text} for text in texts])


for _name in ("made", "held out"):
    text_datasets.DATASETS[_name] = DatasetConfig(
        path=_name, loader=_documents, sample_processor=lambda row: row["text"]
    )


def _tokenizer(folder: Path) -> str:
    """Write a tokenizer of these words, as torchtitan reads it."""
    folder.mkdir(exist_ok=True)
    numbers = {word: number for number, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return str(folder)


PROGRAMS: dict[str, Callable[[Trainer.Config], None]] = {}


def _program(name: str) -> Callable[[Callable[[Trainer.Config], None]], Callable[[Trainer.Config], None]]:
    return lambda change: PROGRAMS.setdefault(name, change)


@_program("evaluation and folders")
def _evaluation(config: Trainer.Config) -> None:
    config.validator.enable = True
    config.validator.freq, config.validator.steps = 3, 2
    config.validator.dataloader.dataset = "held out"
    config.checkpoint.interval = 5


@_program("accumulation, cosine")
def _accumulation(config: Trainer.Config) -> None:
    config.training.global_batch_size = 6
    config.lr_scheduler.decay_type = "cosine"


@_program("a worker, bf16")
def _worker(config: Trainer.Config) -> None:
    config.dataloader.num_workers = 1
    config.training.dtype = "bfloat16"
    config.metrics.log_freq = 2


@_program("data that ends")
def _ends(config: Trainer.Config) -> None:
    config.dataloader.infinite = False
    config.checkpoint.interval = 3
    config.training.steps = 1000


@_program("fully_shard")
def _fully_shard(config: Trainer.Config) -> None:
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch
    _evaluation(config)


@_program("tensor parallel")
def _tensor_parallel(config: Trainer.Config) -> None:
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.tensor_parallel_degree = 2


def config_of(program: str, folder: Path) -> Trainer.Config:
    """``folder``: for the files of torchtitan."""
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.hf_assets_path = _tokenizer(folder.parent / "tokenizer")
    config.dump_folder = str(folder)
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 32, 2, STEPS
    config.training.disable_cuda_graphs = True
    config.dataloader.dataset = "made"
    config.debug.seed = 1
    PROGRAMS[program](config)
    return config


class Events:
    """Counts the events of a run, and kills the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.count, self._kill_at = 0, kill_at

    def __call__(self) -> None:
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def at(self, owner: Any, name: str) -> None:
        """Count where this method begins, and where it ends."""
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self()
            result = original(*args, **kwargs)
            self()
            return result

        setattr(owner, name, counted)


def record_logs(trainer: Trainer, file: Path) -> None:
    """Write what is logged into a file that survives a kill, with all bits."""
    metrics = trainer.metrics_processor
    log, log_validation = metrics.log, metrics.log_validation

    def record(what: str, step: int, *values: float) -> None:
        with open(file, "a") as out:
            out.write(f"{what} {step} {' '.join(float(value).hex() for value in values)}\n")

    def recorded(step: int, *values: float, extra_metrics: dict[str, Any]) -> None:
        record("train", step, *values, *extra_metrics.values())
        log(step, *values, extra_metrics=extra_metrics)

    def recorded_validation(loss: float, step: int) -> None:
        record("validate", step, loss)
        log_validation(loss, step)

    metrics.log, metrics.log_validation = recorded, recorded_validation


def prepared(config: Trainer.Config, pool: Path | None, kill_at: int | None, **options: Any) -> tuple[Trainer, Events]:
    if pool is None:
        config.checkpoint.enable = True
    else:
        interval = config.checkpoint.interval
        config.checkpoint = integration.PoolCheckpointManager.Config(
            pool=str(pool), interval=interval, last_save_model_only=False, options=options
        )
    trainer, events = config.build(), Events(kill_at)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for owner, name in (
        (trainer, "forward_backward_step"),
        (trainer.optimizers, "step"),
        (trainer.lr_schedulers, "step"),
        (trainer.metrics_processor, "log"),
        (trainer.checkpointer, "save"),
    ):
        events.at(owner, name)
    if config.validator.enable:
        events.at(trainer.validator, "validate")
        events.at(trainer.metrics_processor, "log_validation")
    return trainer, events


def run(program: str, folder: Path, pool: Path | None, kill_at: int | None = None, **options: Any) -> dict[str, Any]:
    """Train to the end, or to the kill, as a rank of a group that the environment describes."""
    trainer, events = prepared(config_of(program, folder), pool, kill_at, **options)
    log = folder / f"log-{os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    record_logs(trainer, log)
    trainer.train()
    left = {
        "random": torch.get_rng_state(),  # first: to ask a loader for its state may draw a number
        "model": {name: _bits(tensor) for name, tensor in trainer.model_parts[0].state_dict().items()},
        "optimizers": [
            {key: [_bits(value) for value in state.values()] for key, state in enumerate(one.state.values())}
            for one in trainer.optimizers.optimizers
        ],
        "rates": [group["lr"] for one in trainer.optimizers.optimizers for group in one.param_groups],
        "scheduler": trainer.lr_schedulers.state_dict(),
        "trainer": trainer.state_dict(),
        "data": trainer.dataloader.state_dict(),
        "log": sorted(set(log.read_text().splitlines())) if log.exists() else [],
        "folders": {
            str(path.relative_to(folder)): _digest(path.read_bytes())
            for path in sorted(folder.glob("checkpoint/*/*.distcp"))
        },
        "events": events.count,
    }
    trainer.close()
    torch.distributed.destroy_process_group()
    return left


def _bits(value: Any) -> Any:
    """Dtype, shape and a digest of the bits of a tensor, of which a rank has a part; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    local = getattr(value, "_local_tensor", value).detach().contiguous()
    return local.dtype, tuple(local.shape), _digest(local.view(-1).view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
