"""Detect options that the script builds differently than in the run that saved the checkpoint.

A restore sets the options of optimizers, and ``requires_grad``, to the values in the checkpoint. If the script now
builds an option with another value than at the start of the training, a warning names the option, because the
checkpoint's value replaces the new one. Values that only the training changed (a scheduled lr, layers that were
unfrozen) are not named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lightck.errors import StateValueError, listed
from lightck.restore.contents import Contents, OptimizerContents
from lightck.state import values
from lightck.state.build_record import names_without_grad
from lightck.state.inventory import ModelView, OptimizerView

log = logging.getLogger("lightck")


def descriptions(
    contents: Contents, pairs: Sequence[tuple[OptimizerContents, OptimizerView]], objects: Mapping[str, object]
) -> list[str]:
    """Return a text for each option of an optimizer or scheduler that the script now builds with another value, and
    that the restore will replace. The values are compared with those that the script built at the start of the
    training. Call this function before the restore. ``pairs``: saved and live optimizers. ``objects``: name in
    ``state`` -> live object."""
    built = contents.built
    if built is None:
        return []
    found: list[str] = []
    for saved, live in pairs:
        index = next(i for i, one in enumerate(contents.optimizers) if one is saved)
        if index >= len(built.groups) or len(live.optimizer.state) != built.state_counts[index]:
            continue  # the live optimizer was stepped: its options may differ from those that it was built with
        for g, (then, now, kept) in enumerate(zip(built.groups[index], live.groups(), saved.groups, strict=False)):
            where = f" of group {g}" if len(saved.groups) > 1 else ""
            found += [f"{live.class_name}'s {key}{where} {text}" for key, text in _edited(then, now, kept)]
    for name, obj in objects.items():
        then = built.schedulers.get(name, {})
        if isinstance(obj, LRScheduler) and then:
            now = dict(obj.state_dict())
            kept = values.unpack(contents.state[name], tensor=lambda name: torch.empty(0))
            if _is_equal(_step_counts(now), _step_counts(then)) and isinstance(kept, Mapping):
                edited = _edited(then, now, kept)
                # Private values usually follow from public ones, and are named only if no public value was edited.
                public = [one for one in edited if not one[0].startswith("_")]
                found += [f"{type(obj).__name__}'s {key} {text}" for key, text in public or edited]
    return found


def _step_counts(state: Mapping[Any, object]) -> list[object]:
    """Return the step counts in a scheduler's state_dict, and those of the schedulers that it is composed of."""
    parts = state.get("_schedulers", ())
    nested = (
        [_step_counts(part) for part in parts if isinstance(part, Mapping)] if isinstance(parts, (list, tuple)) else []
    )
    return [state.get("last_epoch"), state.get("_step_count"), *nested]


def _edited(then: Mapping[Any, object], now: Mapping[Any, object], kept: Mapping[Any, object]) -> list[tuple[str, str]]:
    """Return (key, text) of each option whose value in ``now`` differs from its values in ``then`` and ``kept``.
    ``then``: the options as built at the start of the training; ``now``: as built by this script; ``kept``: as the
    checkpoint holds them."""
    keys = [key for key in then if key in now and key in kept]
    return [
        (
            str(key),
            f"({_text(now[key])} in this run, {_text(then[key])} at the start of the training, {_text(kept[key])} in "
            "the checkpoint)",
        )
        for key in keys
        if not _is_equal(then[key], now[key]) and not _is_equal(now[key], kept[key])
    ]


def _is_equal(one: object, other: object) -> bool:
    """Whether two values pack to the same bytes. True if a value cannot be packed."""
    try:
        return values.pack(one, path="") == values.pack(other, path="")
    except StateValueError:
        return True  # the save refuses such a value


def _text(value: object) -> str:
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def warn_options(found: Sequence[str]) -> None:
    if found:
        log.warning(
            "lightck: the script sets other options than it did when this training began: %s. The checkpoint's "
            "options are used. To change them, set them after attach",
            listed(found),
        )


def set_requires_grad(contents: Contents, model: ModelView) -> None:
    """Set ``requires_grad`` of every parameter of the model to its value in the checkpoint, and log the changed
    parameters: as a warning if the script built the value differently than at the start of the training."""
    built = contents.built
    if built is None:
        return
    lives = model.tensors(None)
    saved_without_grad = set(built.without_grad if contents.without_grad is None else contents.without_grad)
    edited = set(built.without_grad) ^ set(names_without_grad(lives))
    changed = []
    for live in lives:
        name, tensor = live.name.removeprefix("model/"), live.registered
        can_require_grad = tensor.is_floating_point() or tensor.is_complex()
        if (
            live.role == "param"
            and tensor.requires_grad == (name in saved_without_grad)
            and (tensor.requires_grad or can_require_grad)
        ):
            tensor.requires_grad_(name not in saved_without_grad)
            changed.append(name)
    overridden = [f"{name} ({'False' if name in saved_without_grad else 'True'})" for name in changed if name in edited]
    if overridden:
        log.warning(
            "lightck: requires_grad is set as in the checkpoint, and not as this script built it, for %s. To "
            "change it, set it after attach",
            listed(overridden),
        )
    elif changed:
        log.info("lightck: requires_grad is set as in the checkpoint, for %s", listed(changed))
