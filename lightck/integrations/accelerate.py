"""Accelerate: what ``accelerator.prepare`` returned, and what is registered for checkpoints, survives a crash.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    session = lightck.integrations.accelerate.attach(accelerator, "run.pool")
    loader = session.loader(loader)         # the loop is the user's

The Accelerator knows its models, optimizers and registered objects, and ``attach`` hands them to ``lightck.attach``,
which finds the schedulers itself. Accumulation, mixed precision and ``accelerator.backward`` need nothing: a step is
counted where the optimizer inside has stepped.

Failure cases: ``attach`` raises an error that names the reason if an attribute of the Accelerator does not exist, if
nothing was prepared, or if more than one model was prepared.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

import lightck
from lightck.errors import AmbiguousError, LateError, UnsupportedError

try:
    import accelerate
    from accelerate.utils import DistributedType
except ImportError as err:
    raise ImportError(
        "lightck.integrations.accelerate needs accelerate. Install it with: pip install 'lightck[accelerate]'"
    ) from err

MAJOR = 1
"""The supported major release of accelerate."""
_USED = ("_models", "_optimizers", "_schedulers", "_custom_objects", "distributed_type")
"""Attributes that an ``Accelerator`` of a known release has. This file uses all but ``_schedulers``."""


def attach(
    accelerator: accelerate.Accelerator,
    pool_path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    state: dict[str, object] | None = None,
    resume: bool = True,
    **options: Any,
) -> lightck.Session:
    """Make every finished update of what an Accelerator has prepared survive a crash, and continue from the pool.

    Call it after ``accelerator.prepare`` and ``accelerator.register_for_checkpointing``, and iterate over
    ``session.loader(loader)`` in place of the prepared ``loader``.

    Args:
        accelerator: the Accelerator.
        pool_path: the pool's file, made if it does not exist. In a group of ranks: a directory.
        model: if several models are prepared: the module that contains them all (``nn.ModuleDict`` of them).
        state: name -> further object with ``state_dict`` and ``load_state_dict``. Schedulers are found, and registered
            objects have the names ``registered 0``, ``registered 1``, ...
        resume: continue from what the pool holds. False: raise ``CheckpointExistsError`` if it holds a checkpoint.
        options: other keywords of ``lightck.attach``. ``optimizer`` is what was prepared.

    Raises:
        LateError: nothing is prepared yet.
        AmbiguousError: several models are prepared, and ``model`` is not given.
        UnsupportedError: a release of accelerate, or a kind of training, that lightck does not know.
        TypeError: ``accelerator`` is no Accelerator, or ``optimizer=`` was passed.
    """
    _refuse_unsupported(accelerator)
    if "optimizer" in options:
        raise TypeError("optimizer= is not passed here: lightck takes the optimizers that were prepared.")
    given = dict(state or {})
    for number, one in enumerate(accelerator._custom_objects):
        if not any(one is other for other in given.values()):
            given[f"registered {number}"] = one
    return lightck.attach(
        _model_of(accelerator) if model is None else model,
        pool_path,
        optimizer=list(accelerator._optimizers) or None,
        state=given,
        resume=resume,
        **options,
    )


def _refuse_unsupported(accelerator: object) -> None:
    if not isinstance(accelerator, accelerate.Accelerator):
        raise TypeError(f"accelerator is a {type(accelerator).__name__}. Pass an accelerate.Accelerator.")
    missing = [name for name in _USED if not hasattr(accelerator, name)]
    if missing or int(accelerate.__version__.partition(".")[0]) != MAJOR:
        fact = f"its Accelerator has no {missing[0]}" if missing else f"lightck knows {MAJOR}.x"
        raise UnsupportedError(
            f"accelerate {accelerate.__version__} is not supported: {fact}. Install another release, or attach with "
            "lightck.attach(model, path, optimizer=optimizer, state=...)."
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UnsupportedError(
            f"{kind.value} under Accelerate has its own optimizers and partitions, which lightck does not know. Use "
            "accelerator.save_state()."
        )


def _model_of(accelerator: accelerate.Accelerator) -> nn.Module:
    models = list(accelerator._models)
    if not models:
        raise LateError(
            "The Accelerator has prepared no model yet. Call attach after accelerator.prepare(model, optimizer, ...)."
        )
    if len(models) > 1:
        raise AmbiguousError(
            f"The Accelerator has prepared {len(models)} models, and a pool has one root. Pass a module that contains "
            "them all: attach(accelerator, path, model=torch.nn.ModuleDict({'first': first, 'second': second}))."
        )
    return models[0]  # type: ignore[no-any-return]
