"""Accelerate: what ``accelerator.prepare`` returned, and what is registered for checkpoints, survives a crash.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    session = lightck.integrations.accelerate.attach(accelerator, "run.pool")
    loader = session.loader(loader)         # the loop is the user's

The Accelerator knows its models, optimizers and registered objects, and ``attach`` hands them to ``lightck.attach``,
which finds the schedulers itself. Accumulation, mixed precision and ``accelerator.backward`` need nothing: a step is
counted where the optimizer inside has stepped.

With ``automatic_checkpoint_naming``, Accelerate numbers the folders of ``save_state()`` from 0 in each process, and
refuses a folder that exists. So after a resume the number becomes one more than the highest that is there.

Failure cases: ``attach`` raises an error that names the reason if an attribute of the Accelerator does not exist, or,
without ``model=``, if not exactly one model was prepared.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

import lightck
from lightck.errors import AmbiguousError, LateError, UnsupportedError

try:
    import accelerate
    from accelerate.utils import DistributedType, gather_object
except ImportError as err:
    raise ImportError(
        "lightck.integrations.accelerate needs accelerate. Install it with: pip install 'lightck[accelerate]'"
    ) from err

log = logging.getLogger("lightck")

MAJOR = 1
"""The supported major release of accelerate."""
_USED = ("_models", "_optimizers", "_schedulers", "_custom_objects", "distributed_type", "project_configuration")
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
        raise TypeError("Do not pass optimizer= here: lightck takes the optimizers that were prepared.")
    given = dict(state or {})
    for number, one in enumerate(accelerator._custom_objects):
        if not any(one is other for other in given.values()):
            given[f"registered {number}"] = one
    session = lightck.attach(
        _model_of(accelerator) if model is None else model,
        pool_path,
        optimizer=list(accelerator._optimizers) or None,
        state=given,
        resume=resume,
        **options,
    )
    if session.step > 0:
        _number_after_existing_folders(accelerator)
    return session


def _number_after_existing_folders(accelerator: accelerate.Accelerator) -> None:
    """Let ``save_state()`` go on after the folders that earlier runs have made, with the same number on all ranks. A
    higher number that the script has set stays."""
    config = accelerator.project_configuration
    if not config.automatic_checkpoint_naming or config.project_dir is None:
        return
    found = [max(_folder_numbers(os.path.join(config.project_dir, "checkpoints")), default=-1)]
    # Hosts may have folders of their own. And no rank makes or removes a folder before all ranks have looked.
    highest = max(gather_object(found) if accelerator.num_processes > 1 else found)
    if highest >= config.iteration:
        config.iteration = highest + 1
        log.info("lightck: the next folder of accelerator.save_state() is checkpoint_%d", config.iteration)


def _folder_numbers(folder: str) -> Iterator[int]:
    """Yield n for each ``checkpoint_<n>`` in a folder, which may not exist."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        matched = re.fullmatch(r"checkpoint_([0-9]+)", name)
        if matched is not None:
            yield int(matched[1])


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
