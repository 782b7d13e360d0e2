"""DTensors and their local tensors.

A DTensor describes a logical tensor that the ranks of a device mesh hold together. It has no memory of its own: its
bytes in this process are those of its local tensor. Modules and optimizers hold the DTensor. lightck copies, watches
and restores the local tensor. On a mesh of one rank the local tensor is the whole logical tensor. On several ranks it
is a part of the logical tensor (``state/parts.py``).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from lightck.errors import UnsupportedError
from lightck.state.module_tree import modules_of

_PLAIN_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))
"""Keys of optimizer state that torch's optimizers keep as plain tensors without dimensions."""
PLAIN_TYPES = frozenset((torch.Tensor, nn.Parameter))
"""The types of almost all tensors, which are neither DTensors nor other wrappers, nor lazy."""


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether the value is a DTensor. False if torch's module of DTensors was never imported: importing it takes half a
    second."""
    if type(value) in PLAIN_TYPES:
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor: the same object, as long as the DTensor keeps it. Any other tensor is
    returned unchanged. A DTensor on a mesh of other ranks, of which this process holds nothing, is returned unchanged
    too."""
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # ``to_local()`` of a parameter is a new view at each call
    if tensor.device_mesh.size() == 1:
        # A rank outside the mesh has an empty local tensor.
        return local if local.shape == tensor.shape else tensor
    return tensor if tensor.device_mesh.get_coordinate() is None else local


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the module. Between its ``unshard`` and ``reshard`` such a module, and each
    module below it, holds plain parameters in place of the DTensors that the optimizer updates."""
    return issubclass(type(module), fully_sharded_class())


def fully_sharded_class() -> tuple[type, ...]:
    """Return the class of the modules for which ``fully_shard`` was called, for ``issubclass``. Empty if torch's module
    of ``fully_shard`` was never imported."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return () if kind is None else (kind,)


def _fully_sharded_in(model: nn.Module) -> list[nn.Module]:
    kind = fully_sharded_class()
    return [module for module in modules_of(model) if issubclass(type(module), kind)] if kind else []


def params_of_fully_shard(model: nn.Module) -> Mapping[object, Sequence[torch.Tensor]]:
    """Return the sharded parameters whose gradients ``fully_shard`` reduces, of each module that owns some, also while
    the module is unsharded and holds other tensors. Raises ``UnsupportedError`` if this torch keeps them elsewhere."""
    found: dict[object, list[torch.Tensor]] = {}
    for module in _fully_sharded_in(model):
        try:
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch before 2.11
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            for group in groups:
                for one in group.fsdp_params:
                    found.setdefault(one._module_info.module, []).append(one.sharded_param)
        except AttributeError as err:
            raise UnsupportedError(
                f"lightck does not know where torch {torch.__version__} keeps the parameters of fully_shard: {err}. "
                "Leave out lightck.layerwise()."
            ) from err
    return found


def is_unsharded_form(held: torch.Tensor, dtensor: torch.Tensor) -> bool:
    """Whether a module of ``fully_shard`` holds ``held`` in place of the parameter ``dtensor`` for a time. It is a
    plain tensor, or, with tensor parallelism, a DTensor on the mesh of the tensor parallel ranks alone."""
    if held is dtensor:
        return False
    assert is_dtensor(dtensor)
    return not is_dtensor(held) or held.device_mesh != dtensor.device_mesh


def reshard(model: nn.Module) -> None:
    """Put the DTensors of ``fully_shard`` back into the modules, as FSDP does after a backward. The plain parameters of
    an unsharded module are dropped with their values, as at every reshard."""
    for module in _fully_sharded_in(model):
        module.reshard()  # type: ignore[operator]


def has_placements_of(param: torch.Tensor, key: object, local_shape: Sequence[int]) -> bool:
    """Whether state of this shape under ``key`` is a DTensor with the placements of the parameter: the parameter is a
    DTensor, its local tensor has this shape, and the state is no step count."""
    own = local_of(param)
    if own is param or tuple(local_shape) != tuple(own.shape):
        return False
    return bool(local_shape) or key not in _PLAIN_SCALARS


def as_state_of(param: torch.Tensor, key: object, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as the state of a parameter under ``key``. If the parameter is a DTensor whose local tensor has
    the same shape, this is a DTensor with the mesh and the placements of the parameter, as torch's optimizers create
    it. Other state, such as a step count, is returned unchanged."""
    if not has_placements_of(param, key, local.shape):
        return local
    assert is_dtensor(param)
    made: torch.Tensor = param.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return made


def refuse_unrestorable_state(name: str, param: torch.Tensor, key: object, value: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` for state that ``as_state_of`` would not restore as it is: a plain tensor where
    ``as_state_of`` makes a DTensor, or a DTensor with another shape, mesh or placements than the parameter's. To be
    called if the parameter or the value is a DTensor. ``name``: the name of the state."""
    restored = as_state_of(param, key, local_of(value))
    is_same = is_dtensor(value) == is_dtensor(restored)
    if is_dtensor(value) and is_dtensor(param) and value.device_mesh == param.device_mesh:
        _refuse_other_placements(name, param, value)
    if is_same and is_dtensor(value) and is_dtensor(restored):
        kinds = [(one.shape, one.device_mesh, one.placements) for one in (value, restored)]
        is_same = kinds[0] == kinds[1]
    if not is_same:
        raise UnsupportedError(
            f"The state {name!r} could not be restored as it is. State of a DTensor has to be a DTensor with the "
            "shape, mesh and placements of its parameter (torch.zeros_like(p)), or a plain tensor of another shape; "
            "state of a plain parameter has to be a plain tensor. Let the optimizer keep only state "
            "that has one of these forms."
        )


def _refuse_other_placements(name: str, param: Any, value: Any) -> None:
    """Raise ``UnsupportedError`` if state of the parameter's shape has other placements. SGD's momentum begins as a
    copy of the gradient, and torch's tensor parallelism gives some gradients other placements."""
    if value.shape == param.shape and value.placements != param.placements:
        raise UnsupportedError(
            f"The state {name!r} has the placements {value.placements}, and its parameter {param.placements}, so it "
            "could not be restored as it is. It is probably a copy of the gradient, as the momentum of SGD is, and "
            "torch gave the gradient these placements. Call param.register_hook(lambda grad: "
            "grad.redistribute(placements=param.placements)) on this parameter before the first backward pass, or use "
            "an optimizer that makes its state like the parameter, such as AdamW."
        )


def refuse_optimizer_before_dtensors(
    model_params: Iterable[torch.Tensor], params_of_optimizers: Sequence[tuple[str, Sequence[tuple[str, torch.Tensor]]]]
) -> None:
    """Raise ``UnsupportedError`` if the model got its DTensors after its optimizer was made. The optimizer then updates
    the plain parameters that the model had before, and does not train the model.

    ``model_params``: the parameters of the model. ``params_of_optimizers``: for each followed optimizer, the name of
    its class, and name and tensor of each of its parameters. The name begins with ``outside/`` if the model does not
    hold the tensor."""
    dtensors = list(filter(is_dtensor, model_params))
    followed = {id(p) for _, params in params_of_optimizers for _, p in params} if dtensors else set()
    idle = {id(p): p for p in dtensors if p.requires_grad and id(p) not in followed}
    for optimizer, params in params_of_optimizers if idle else ():
        outside = [p for name, p in params if name.startswith("outside/") and not is_dtensor(p)]
        if _have_shapes_of(outside, list(idle.values())):
            raise UnsupportedError(
                f"{optimizer} was made before the parameters of the model became DTensors (by fully_shard, for "
                "example), so it updates tensors that the model does not use. Make the optimizer after that."
            )


def _have_shapes_of(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether ``tensors`` have at least as many tensors of each shape as ``others`` have. False if ``others`` is
    empty."""
    return bool(others) and not Counter(p.shape for p in others) - Counter(p.shape for p in tensors)
