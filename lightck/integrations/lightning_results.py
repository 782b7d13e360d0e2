"""What a Trainer of Lightning has logged so far: sums of the metrics of the epoch, and the last value of each metric.

Lightning adds up what ``self.log(..., on_epoch=True)`` gets until the epoch ends, and its own checkpoints do not hold
these sums. ``saved`` returns them as plain values and tensors, and ``restore`` makes Lightning's objects again.

Failure case: a metric that is summed over a process group of the user's own is not saved, and a warning names it.
"""

from __future__ import annotations

import json
import logging
import operator
import sys
from typing import Any

import torch

from lightck.integrations.attributes import assigned_in

log = logging.getLogger("lightck")
_FLAGS_OF_LOG = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_META = ("fx", "name", *_FLAGS_OF_LOG, "dataloader_idx", "metric_attribute")
"""Fields of what Lightning knows of a metric, its reduction and its process group left out."""
_REDUCTIONS = {name: getattr(torch, name) for name in ("mean", "sum", "max", "min")}
_BUILTIN_REDUCTIONS = {"sum": sum, "max": max, "min": min}
_LAST_VALUES = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
_FLAGS = ("_first_loop_iter", "_current_fx")
USED_OF_CONNECTOR = (*_LAST_VALUES, *_FLAGS)
"""Attributes of the Trainer's ``_logger_connector`` that this file uses."""
_warned: set[str] = set()
"""Metrics that a warning has named."""


def saved(trainer: Any) -> dict[str, Any]:
    """Return what was logged so far in this training."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    kept = [(key, metric) for key, metric in results.items() if _can_be_saved(key, metric)]
    return {
        "metrics": json.dumps([[key, _description(metric)] for key, metric in kept]).encode(),
        "sums": [_sums(metric) for _, metric in kept],
        "last": {name: dict(getattr(connector, name)) for name in _LAST_VALUES},
        "flags": {name: getattr(connector, name) for name in _FLAGS},
        "objects": {name: _metric_state(one) for name, one in metrics_of(trainer.lightning_module)},
    }


def restore(trainer: Any, value: dict[str, Any]) -> None:
    """Set what `saved` has returned."""
    connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
    results.clear()
    for (key, description), sums in zip(json.loads(value["metrics"]), value["sums"], strict=True):
        results[key] = _metric_of(trainer, results, description, sums)
    for name, values in value["last"].items():
        device = trainer.strategy.root_device
        setattr(connector, name, {key: _on(device, one) for key, one in values.items()})
    for name, flag in value["flags"].items():
        setattr(connector, name, flag)
    for name, one in metrics_of(trainer.lightning_module):
        if name in value["objects"]:
            for attribute, state in value["objects"][name].items():
                setattr(one, attribute, _on(one.device, state))


def metrics_of(module: Any) -> list[tuple[str, Any]]:
    """Return name and object of each metric (of torchmetrics) that is a part of the module."""
    return [(name, one) for name, one in module.named_modules() if hasattr(one, "_defaults")]


def known_of_metric(metric: Any) -> set[str]:
    """Return the names of the attributes of a metric that this file saves, or that the code of all metrics assigns. A
    metric may have others that its updates change, as the extremes of ``MinMaxMetric``."""
    bases = [one for one in type(metric).__mro__ if one.__module__ == "torchmetrics.metric"]
    return set(metric._defaults).union(*map(assigned_in, bases))


def _metric_state(metric: Any) -> dict[str, Any]:
    """Return the sums of a metric, which its ``state_dict()`` leaves out unless they are made persistent."""
    found = {name: getattr(metric, name) for name in metric._defaults}
    for name in ("_update_count", "_forward_cache", "_computed"):
        found[name] = getattr(metric, name, None)
    return {name: _detached(value) for name, value in found.items()}


def _detached(value: Any) -> Any:
    if isinstance(value, list):
        return [_detached(one) for one in value]
    return value.detach() if isinstance(value, torch.Tensor) else value


def _can_be_saved(key: str, metric: Any) -> bool:
    meta = metric.meta
    if meta.sync.group is None and _reduction(meta) in _REDUCTIONS:
        return True
    if key not in _warned:
        _warned.add(key)
        log.warning(
            "lightck: the sum of the metric %r over an epoch is not saved, because it has a process group of its "
            "own. After a resume in mid-epoch, its value for that epoch misses the batches before",
            meta.name,
        )
    return False


def _reduction(meta: Any) -> str:
    """Return "mean", "sum", "max" or "min". (The function may be one of torch, or Python's own. The "a" of names such
    as ``amax`` is removed.)"""
    return str(meta.reduce_fx.__name__.removeprefix("a"))


def _description(metric: Any) -> dict[str, Any]:
    """Return all of a metric but its sums: it is saved as JSON, which takes a fraction of the time."""
    meta, sync = metric.meta, metric.meta.sync
    reduction = _reduction(meta)
    return {
        "meta": {name: getattr(meta, name) for name in _META} | {"reduce_fx": reduction},
        "is_builtin": meta.reduce_fx is not _REDUCTIONS[reduction],
        "sync": [sync.should, sync.rank_zero_only, sync.op],
        "is_tensor": metric.is_tensor,
        "has_reset": metric.has_reset,
        "updates": metric._update_count,
    }


def _sums(metric: Any) -> dict[str, torch.Tensor]:
    found = {name: getattr(metric, name, None) for name in ("value", "cumulated_batch_size", "_forward_cache")}
    return {name: one.detach() for name, one in found.items() if isinstance(one, torch.Tensor)}


def _metric_of(trainer: Any, results: Any, saved_one: dict[str, Any], sums: dict[str, torch.Tensor]) -> Any:
    module = sys.modules[type(results).__module__]
    fields, (should, rank_zero_only, op) = dict(saved_one["meta"]), saved_one["sync"]
    name = fields["reduce_fx"]
    fields["reduce_fx"] = (_BUILTIN_REDUCTIONS if saved_one["is_builtin"] else _REDUCTIONS)[name]
    meta = module._Metadata(**fields)
    sync = module._Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only, _op=op)
    meta.sync = sync
    metric = module._ResultMetric(meta, saved_one["is_tensor"])
    if not saved_one["is_tensor"]:
        metric.value = operator.attrgetter(fields["metric_attribute"])(trainer.lightning_module)
    for attribute, value in sums.items():
        setattr(metric, attribute, value.clone())
    metric.has_reset, metric._update_count = saved_one["has_reset"], saved_one["updates"]
    return metric.to(trainer.strategy.root_device)


def _on(device: torch.device, value: Any) -> Any:
    """Return a copy on the device, so that the same value can be restored once more."""
    if isinstance(value, list):
        return [_on(device, one) for one in value]
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
