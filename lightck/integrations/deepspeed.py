"""DeepSpeed: each step of an engine survives a crash, with ZeRO 0 to 3, and any number of ranks reads what was saved.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    session = lightck.integrations.deepspeed.attach(engine, "pools")
    loader = session.loader(loader)         # the loop is the user's

How it works:

    the master weights        ZeRO keeps them in flat partitions. lightck follows a mirror of the model, whose
                              parameters are views of them (``deepspeed_mirror.py``, ``deepspeed_partitions.py``), and
                              an optimizer whose state is views of their state (``deepspeed_masters.py``).
                              ``lightck.layout.Flat`` says which elements of a parameter a view has
    engine(batch)             runs inside the forward of the mirror, so lightck sees the forward
    engine.step()             at the end of an accumulation it calls the step of DeepSpeed's optimizer, which runs
                              between the step hooks of the mirror's optimizer. So an update waits for the copies
    a resume                  lightck writes into the views. Then the state goes into the optimizer inside ZeRO, and the
                              parameters that the forward uses are made of the master weights

Invariant: the parameters that the forward uses follow from the master weights (``refuse_unequal``), so they are not
saved. What the engine counts is saved with each checkpoint (``Counters``).

Failure cases: an attribute of DeepSpeed that this file uses does not exist, the partitions are others than expected, or
a kind of training cannot be resumed exactly: ``UnsupportedError`` at attach.
"""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

import lightck
from lightck.errors import AmbiguousError, LateError, SessionError, UnsupportedError
from lightck.layout import Flat, Layout

try:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
except ImportError as err:
    raise ImportError(
        "lightck.integrations.deepspeed needs deepspeed. Install it with: pip install 'lightck[deepspeed]'"
    ) from err

from lightck.integrations.deepspeed_masters import ELEMENT_WISE, PartitionedOptimizer
from lightck.integrations.deepspeed_mirror import mirror_of
from lightck.integrations.deepspeed_partitions import (
    Fragment,
    Partitions,
    partitions_of,
    refuse_missing,
    refuse_unequal,
)

log = logging.getLogger("lightck")
VERSIONS = ((0, 19), (0, 20))
"""The first supported release of deepspeed, and the first one that is not known."""
STATE_NAME, SCHEDULER_NAME = "deepspeed", "scheduler"
"""Names in ``state`` under which ``Counters`` and the engine's scheduler are saved."""
_COUNTED = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_USED = (
    *_COUNTED,
    "module",
    "optimizer",
    "client_optimizer",
    "lr_scheduler",
    "training_dataloader",
    "forward",
    "_take_model_step",
    "dp_world_size",
    "mpu",
    "autotp_size",
    "gradient_accumulation_steps",
    "zero_hpz_partition_size",
    "zero_offload_optimizer",
    "zero_offload_param",
)
"""Attributes of the engine that this file uses. (``_take_model_step``, in which the engine calls the optimizer's step,
is only checked for.)"""
_USED_OF_LOADER = (
    "dataset",
    "batch_size",
    "pin_memory",
    "data_sampler",
    "num_local_io_workers",
    "dataloader_drop_last",
    "collate_fn",
)
"""Attributes of the engine's loader that this file uses."""
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's loss scalers that change."""
_UNFUSED = "FP16_UnfusedOptimizer"
"""DeepSpeed's optimizer of stage 0 in bf16. It keeps the master weights of each parameter in a tensor of its own."""
_REFUSED: dict[str, str] = {
    "pipeline_parallelism": "a stage of a pipeline has parts of the model that other ranks do not have",
    "has_moe_layers": "ranks have different experts, and lightck does not know which",
    "fp16_enabled": "its dynamic loss scale was not tested with lightck",
    "torch_autocast_enabled": "it was not tested with lightck",
    "fp16_master_weights_and_gradients": "there are no master weights in fp32",
    "bf16_master_weights_and_gradients": "there are no master weights in fp32",
    "bf16_optimizer_states": "it was not tested with lightck",
    "zenflow": "its updates overlap with the next step",
    "super_offload": "the optimizer's state is swapped out",
    "random_ltd_enabled": "its schedule is not saved",
    "curriculum_learning_enabled": "its schedule and its sampler are not saved",
    "data_sampling_enabled": "the state of its sampler is not saved",
    "zero_quantized_weights": "weights that are gathered are not those that are saved",
    "zero_quantized_nontrainable_weights": "weights that are gathered are not those that are saved",
    "zero_quantized_gradients": "it was not tested with lightck",
    "is_deepcompile_enabled": "it replaces the hooks of ZeRO",
}
"""Attribute or method of the engine -> why ``attach`` refuses the engine if it is true."""


def attach(
    engine: DeepSpeedEngine,
    pool_path: str | os.PathLike[str],
    *,
    state: Mapping[str, object] | None = None,
    resume: bool = True,
    **options: Any,
) -> lightck.Session:
    """Make every finished step of a DeepSpeed engine survive a crash, and continue from the pools.

    Call it on all ranks, after ``deepspeed.initialize`` and before the first forward. Iterate over
    ``session.loader(loader)``, and call ``engine(batch)``, ``engine.backward(loss)`` and ``engine.step()`` as ever.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        pool_path: the directory of the ranks' pools, made if it does not exist. With a single rank: a file.
        state: name -> further object with ``state_dict`` and ``load_state_dict``. The engine's scheduler is found.
        resume: continue from what the pools hold. False: raise ``CheckpointExistsError`` if they hold a checkpoint.
        options: other keywords of ``lightck.attach``. ``optimizer`` and ``layout`` are the engine's.

    Raises:
        UnsupportedError: a release, an optimizer or a configuration that cannot be resumed exactly; the message says
            which.
        LateError: a forward is running, or the engine has no optimizer.
        AmbiguousError: several schedulers drive the engine's optimizer, and ``state`` has none of them.
        SessionError: the engine is attached already.
        TypeError: ``engine`` is no engine, or ``optimizer=`` or ``layout=`` was passed.
    """
    _refuse_unsupported(engine)
    for name in ("optimizer", "layout"):
        if name in options:
            raise TypeError(f"Do not pass {name}= here: lightck takes it from the engine.")
    if not isinstance(options.get("strategy") or lightck.FullState(), lightck.FullState):
        raise UnsupportedError(
            f"strategy={options['strategy']!r} cannot be used with DeepSpeed, whose gradients lightck does not see. "
            "Leave it out."
        )
    given = {STATE_NAME: Counters(engine), **_scheduler(engine, state), **(state or {})}
    _make_inner_loader(engine)
    followed = _followed(engine)
    session = lightck.attach(
        followed.model,
        pool_path,
        optimizer=followed.optimizer,
        layout=followed.layout,
        state=given,
        resume=resume,
        **options,
    )
    try:
        if session.recovered is not None:
            followed.after_restore()
    except BaseException:
        session.abandon()
        raise
    followed.install_hooks()
    engine.__dict__["lightck_session"] = session
    return session


class _Followed(NamedTuple):
    """What lightck follows of an engine. ``after_restore``: called after a restore; ``install_hooks``: lets DeepSpeed
    call lightck's hooks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    layout: Layout | None
    after_restore: Callable[[], None]
    install_hooks: Callable[[], None]


def _followed(engine: Any) -> _Followed:
    outer = engine.optimizer
    if isinstance(outer, torch.optim.Optimizer):  # stage 0 in fp32: torch's optimizer, and the model's own parameters
        return _Followed(engine.module, outer, None, _nothing, _nothing)
    if type(outer).__name__ == _UNFUSED:
        return _of_unfused(engine)
    return _of_zero(engine)


def _names(engine: Any) -> dict[int, str]:
    return {id(param): name for name, param in engine.module.named_parameters()}


def _nothing() -> None:
    """There is nothing to do."""


def _of_unfused(engine: Any) -> _Followed:
    """Stage 0 in bf16: each parameter has master weights of its own, of which torch's optimizer has the state."""
    outer = engine.optimizer
    refuse_missing(outer, ("optimizer", "fp16_groups", "fp32_groups", "loss_scale_config"))
    pairs = [
        pair for groups in zip(outer.fp16_groups, outer.fp32_groups, strict=True) for pair in zip(*groups, strict=True)
    ]
    names = _names(engine)
    for param, master in pairs:
        whole = Fragment(names[id(param)], param, tuple(param.shape), 0, param.numel(), 0)
        refuse_unequal(whole, master.reshape(-1))
    model = mirror_of(engine.module, {id(param): master for param, master in pairs}, engine.forward)

    @torch.no_grad()
    def after_restore() -> None:
        for param, master in pairs:
            param.copy_(master)

    return _Followed(model, outer.optimizer, None, after_restore, lambda: _call_in_forward(engine, model))


def _of_zero(engine: Any) -> _Followed:
    outer, rank, size = engine.optimizer, dist.get_rank(), dist.get_world_size()
    found = partitions_of(outer, _names(engine), rank, size)
    inner = PartitionedOptimizer(outer.optimizer, found.partitions, is_alone=size == 1)
    tensors = dict(inner.tensors)
    for fragment, tensor in found.frozen:
        tensors[id(fragment.param)] = fragment.of(tensor, is_alone=size == 1)
    model = mirror_of(engine.module, tensors, engine.forward)

    def after_restore() -> None:
        inner.take_over()
        found.refresh()

    def install_hooks() -> None:
        outer.step = inner.step_with(outer.step)
        _call_in_forward(engine, model)

    layout = None if size == 1 else _layout(found, rank, size)
    return _Followed(model, inner.view, layout, after_restore, install_hooks)


def _layout(found: Partitions, rank: int, size: int) -> Layout:
    fragments = [one for partition in found.partitions for one in partition.fragments]
    fragments += [one for one, _ in found.frozen]
    return Layout({re.escape(one.name): Flat(one.shape, one.start, one.stop) for one in fragments}, rank, size)


def _call_in_forward(engine: Any, model: nn.Module) -> None:
    """Replace the engine's forward by a call of ``model``, the mirror, whose forward is the engine's original one. So
    the hooks of the mirror run."""
    engine.__dict__["forward"] = lambda *args, **kwargs: model(*args, **kwargs)


def _make_inner_loader(engine: Any) -> None:
    """Make the DataLoader inside the engine's loader now. DeepSpeed makes one like it only at the beginning of a pass,
    and ``session.loader`` should see the same in the first process and after a resume."""
    loader = engine.training_dataloader
    if loader is None or hasattr(loader, "dataloader"):
        return
    refuse_missing(loader, _USED_OF_LOADER)
    given = {} if loader.collate_fn is None else {"collate_fn": loader.collate_fn}
    loader.dataloader = DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        pin_memory=loader.pin_memory,
        sampler=loader.data_sampler,
        num_workers=loader.num_local_io_workers,
        drop_last=loader.dataloader_drop_last,
        **given,
    )


class Counters:
    """What the engine counts, and the loss scale. Saved in each checkpoint (``state=``)."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        scaler = self._scaler
        return {
            **{name: getattr(self._engine, name) for name in _COUNTED},
            "gradient_accumulation_steps": self._engine.gradient_accumulation_steps(),
            "scale": {name: getattr(scaler, name) for name in _SCALE if hasattr(scaler, name)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTED:
            setattr(self._engine, name, state[name])
        for name, value in state["scale"].items():
            if hasattr(self._scaler, name):
                setattr(self._scaler, name, value)
        each = self._engine.gradient_accumulation_steps()
        # An accumulation has another number of batches now. The count goes back to the last multiple of that number, so
        # that a new accumulation begins here.
        if each != state["gradient_accumulation_steps"]:
            self._engine.micro_steps = self._engine.micro_steps // each * each

    @property
    def _scaler(self) -> Any:
        outer = self._engine.optimizer
        return getattr(outer, "loss_scaler", None) or getattr(outer, "loss_scale_config", None)


def _scheduler(engine: Any, state: Mapping[str, object] | None) -> dict[str, object]:
    """Return the scheduler that the engine steps, or that the script has built on its optimizer. Raises
    ``AmbiguousError``."""
    given = list((state or {}).values())
    if SCHEDULER_NAME in (state or {}):
        return {}
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = [engine.lr_scheduler] if engine.lr_scheduler is not None else []
    live = [one for one in gc.get_objects() if issubclass(type(one), LRScheduler)]
    parts = {id(part) for one in live for part in getattr(one, "_schedulers", ())}
    drives = [
        one for one in live if getattr(one, "optimizer", None) in (inner, engine.optimizer, engine.client_optimizer)
    ]
    found += [one for one in drives if id(one) not in parts and one is not engine.lr_scheduler]
    if any(one is other for one in found for other in given):
        own = engine.lr_scheduler
        not_saved = [type(one).__name__ for one in found if one is not own and _is_not_given(one, given)]
        if not_saved:
            log.warning(
                "lightck: %s drives the engine's optimizer too, and is not saved: another scheduler was passed. If "
                'your loop steps it, pass it as well: attach(engine, path, state={"warmup": a, "decay": b})',
                ", ".join(not_saved),
            )
        return {SCHEDULER_NAME: own} if _is_not_given(own, given) else {}
    if len(found) > 1:
        raise AmbiguousError(
            f"{len(found)} live schedulers drive the engine's optimizer: {', '.join(type(s).__name__ for s in found)}. "
            "lightck cannot know which of them your loop steps. Pass those by name: attach(engine, path, "
            'state={"warmup": a, "decay": b}).'
        )
    return {SCHEDULER_NAME: found[0]} if found else {}


def _is_not_given(scheduler: object, given: list[object]) -> bool:
    return scheduler is not None and not any(scheduler is one for one in given)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _refuse_unsupported(engine: object) -> None:
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"engine is a {type(engine).__name__}. Pass the engine, which deepspeed.initialize returns first."
        )
    version = tuple(int(part) for part in re.findall(r"\d+", deepspeed.__version__)[:2])
    if not VERSIONS[0] <= version < VERSIONS[1]:
        raise UnsupportedError(
            f"deepspeed {deepspeed.__version__} is not supported: lightck knows {VERSIONS[0][0]}.{VERSIONS[0][1]}. "
            "Install such a release, or use engine.save_checkpoint()."
        )
    refuse_missing(engine, (*_USED, *_REFUSED))
    if "lightck_session" in engine.__dict__:
        raise SessionError("This engine is attached to a pool already. One attach for each engine.")
    if type(engine) is not DeepSpeedEngine:
        raise _unsupported(type(engine).__name__, "it is not the plain engine")
    for name, reason in _REFUSED.items():
        value = getattr(engine, name)
        if value() if callable(value) else value:
            raise _unsupported(name.removesuffix("_enabled"), reason)
    _refuse_offload(engine)
    _refuse_other_groups(engine)
    _refuse_optimizer(engine)


def _unsupported(what: str, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} cannot be used with lightck: {reason}. Leave it out, or use engine.save_checkpoint()."
    )


def _refuse_offload(engine: Any) -> None:
    for name in ("zero_offload_optimizer", "zero_offload_param"):
        offload = getattr(engine, name)()
        if offload is not None and getattr(offload.device, "value", offload.device) != "none":
            raise _unsupported(name.removeprefix("zero_"), "the optimizer's state or the parameters leave the device")


def _refuse_other_groups(engine: Any) -> None:
    """Raise ``UnsupportedError`` unless all ranks are data-parallel ranks, which divide each flat tensor among them."""
    for what, number in (
        ("A model parallel unit (mpu)", 1 if engine.mpu is None else 2),
        ("autotp_size", engine.autotp_size() or 1),
        ("zero_hpz_partition_size", engine.zero_hpz_partition_size() or 1),
        ("A data-parallel group that does not contain all ranks", dist.get_world_size() // engine.dp_world_size),
    ):
        if number > 1:
            raise _unsupported(what, "lightck knows only data-parallel ranks, which hold all partitions together")


def _refuse_optimizer(engine: Any) -> None:
    outer = engine.optimizer
    if outer is None or type(outer).__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"):
        raise LateError("The engine has no optimizer. Pass one to deepspeed.initialize(optimizer=...), then attach.")
    inner = outer if isinstance(outer, torch.optim.Optimizer) else getattr(outer, "optimizer", None)
    kind = type(inner)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ not in ELEMENT_WISE:
        raise UnsupportedError(
            f"The optimizer {kind.__name__} inside DeepSpeed is not supported: lightck knows how torch's own optimizers"
            f" keep their state in ZeRO's partitions ({', '.join(ELEMENT_WISE)}). Pass one of these to "
            'deepspeed.initialize(optimizer=...), or set "torch_adam": true in the parameters of the configuration\'s '
            "optimizer."
        )
