"""Which elements of each parameter this rank's optimizer of ZeRO updates, and where these elements lie.

ZeRO keeps the master weights of several parameters in one flat tensor, one after the other, and each rank holds a range
of it. Stages 1 and 2 cut the flat tensor of a group into one partition for each rank, so a partition may begin in the
middle of a parameter. Stage 3 cuts each parameter.

Invariant: what ``partitions_of`` returns was compared with the parameters of the model, bit by bit
(``refuse_unequal``). So an offset that another release of DeepSpeed computes in another way is an error at attach, and
never a wrong checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightck.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Fragment:
    """The elements ``start`` to ``stop`` (excluded, in C order) of one parameter, which begin at ``offset`` in a
    partition. There may be none."""

    name: str
    param: torch.Tensor
    """The model's own parameter, which the forward uses."""
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def of(self, flat: torch.Tensor, *, is_alone: bool) -> torch.Tensor:
        """Return the fragment's elements of a tensor that is as long as the partition: a view, with the same version
        counter. ``is_alone``: whether there is a single rank; then the view has the shape of the parameter."""
        view = flat.detach().narrow(0, self.offset, self.length)
        return view.view(self.shape) if is_alone else view


@dataclass(frozen=True, slots=True)
class Partition:
    """A flat tensor that the optimizer inside ZeRO updates."""

    master: torch.Tensor
    group: int
    """Number of the optimizer's parameter group to which it belongs."""
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class Partitions:
    """All partitions of this rank. ``refresh``: write the master weights of all ranks into the model's parameters; all
    ranks call it."""

    partitions: tuple[Partition, ...]
    frozen: tuple[tuple[Fragment, torch.Tensor], ...]
    """Parameters of which a rank holds a part, and which the optimizer does not have: fragment, and the tensor in which
    it lies."""
    refresh: Callable[[], None]


_USED_BY_STAGE_1_AND_2 = (
    "bit16_groups",
    "round_robin_bit16_groups",
    "single_partition_of_fp32_groups",
    "partition_size",
    "update_lp_params",
)
_USED_BY_BF16 = ("bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition", "update_lp_params")
_USED_BY_STAGE_3 = (
    "fp16_groups",
    "fp32_partitioned_groups_flat",
    "sub_group_to_group_id",
    "_reassign_or_swap_out_partitioned_parameters",
    "checkpoint_event_prologue",
    "checkpoint_event_epilogue",
)


def partitions_of(zero: Any, names: dict[int, str], rank: int, size: int) -> Partitions:
    """Return the partitions of this rank. ``zero``: DeepSpeed's optimizer. ``names``: id -> name of the model's
    parameters. ``rank``, ``size``: of the group of data-parallel ranks.

    Raises ``UnsupportedError`` if one of the attributes that are needed does not exist, or if a partition does not hold
    what the model's parameters hold."""
    kind = type(zero).__name__
    makers = {
        "DeepSpeedZeroOptimizer": (_USED_BY_STAGE_1_AND_2, _of_stage_1_and_2),
        "BF16_Optimizer": (_USED_BY_BF16, _of_bf16),
        "DeepSpeedZeroOptimizer_Stage3": (_USED_BY_STAGE_3, _of_stage_3),
    }
    if kind not in makers:
        raise UnsupportedError(
            f"The optimizer {kind} of DeepSpeed is not supported: lightck knows {', '.join(makers)}. Use "
            "engine.save_checkpoint()."
        )
    used, make = makers[kind]
    refuse_missing(zero, used)
    found = make(zero, names, rank, size)
    for partition in found.partitions:
        for fragment in partition.fragments:
            refuse_unequal(fragment, partition.master)
    return found


def refuse_missing(owner: object, used: Sequence[str]) -> None:
    """Raise ``UnsupportedError`` if an attribute that lightck needs does not exist."""
    missing = [name for name in used if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"The {type(owner).__name__} of this release of DeepSpeed has no {missing[0]}, which lightck needs to "
            "resume exactly. Install another release: 0.19 has it."
        )


def refuse_unequal(fragment: Fragment, master: torch.Tensor) -> None:
    """Raise ``UnsupportedError`` unless the parameter is what follows from the master weights."""
    held = getattr(fragment.param, "ds_tensor", None)
    with torch.no_grad():
        expected = master.detach().narrow(0, fragment.offset, fragment.length).to(fragment.param.dtype)
        if held is None:
            found = fragment.param.detach().reshape(-1)[fragment.start : fragment.stop]
        else:  # stage 3: the part of this rank
            found = held.detach().narrow(0, 0, fragment.length)
        is_equal = torch.equal(_as_integers(found), _as_integers(expected))
    if not is_equal:
        raise UnsupportedError(
            f"The parameter {fragment.name!r} holds other values than DeepSpeed's master weights, so that the next "
            "step would overwrite them, and lightck cannot know which are right. Load weights into the model before "
            "deepspeed.initialize(), or with engine.load_checkpoint(). If you have done so, this release of DeepSpeed "
            "partitions parameters in a way that lightck does not know."
        )


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits, which compare equal also where a value is no number."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _in_flat_group(
    params: Sequence[torch.Tensor], params_at: Sequence[int], names: dict[int, str], partition_at: int, length: int
) -> tuple[Fragment, ...]:
    """Return the fragments of one partition, which is a part of a flat tensor. ``params_at``: where each parameter
    begins in the flat tensor. ``partition_at``, ``length``: where the partition begins there, and its length."""
    found = []
    for param, param_at in zip(params, params_at, strict=True):
        low, high = max(param_at, partition_at), min(param_at + param.numel(), partition_at + length)
        start, stop, offset = (low - param_at, high - param_at, low - partition_at) if low < high else (0, 0, 0)
        found.append(Fragment(names[id(param)], param, tuple(param.shape), start, stop, offset))
    return tuple(found)


def _without_gaps(params: Sequence[torch.Tensor]) -> list[int]:
    """Return where each parameter begins, if one lies right after the other."""
    return [0, *itertools.accumulate(param.numel() for param in params)][:-1]


def _of_stage_1_and_2(zero: Any, names: dict[int, str], rank: int, size: int) -> Partitions:
    partitions = []
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        # The parameters lie in this order in the flat tensor; with round_robin_gradients it is not that of the group.
        in_order = zero.round_robin_bit16_groups[group]
        if hasattr(zero, "parameter_alignment"):  # releases that may put padding between parameters
            refuse_missing(zero, ("round_robin_bit16_offsets",))
            offsets = zero.round_robin_bit16_offsets[group]
        else:
            offsets = _without_gaps(in_order)
        begins = {id(param): begin for param, begin in zip(in_order, offsets, strict=True)}
        params, length = zero.bit16_groups[group], int(zero.partition_size[group])
        fragments = _in_flat_group(params, [begins[id(p)] for p in params], names, rank * length, length)
        partitions.append(Partition(master, group, fragments))
    return Partitions(tuple(partitions), (), zero.update_lp_params)


def _of_bf16(zero: Any, names: dict[int, str], rank: int, size: int) -> Partitions:
    partitions = []
    for group, master in enumerate(zero.fp32_groups_flat_partition):
        params = zero.bf16_groups[group]
        begins = _without_gaps(params)
        length = zero.bf16_groups_flat[group].numel() // size
        partitions.append(
            Partition(master, group, _in_flat_group(params, begins, names, rank * length, length)),
        )
    return Partitions(tuple(partitions), (), zero.update_lp_params)


def _of_stage_3(zero: Any, names: dict[int, str], rank: int, size: int) -> Partitions:
    partitions, in_optimizer = [], set()
    for number, (params, master) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
        fragments, offset = [], 0
        for param in params:
            fragments.append(_of_rank(names[id(param)], param, rank, offset))
            offset += param.ds_tensor.ds_numel
            in_optimizer.add(id(param))
        partitions.append(Partition(master, zero.sub_group_to_group_id[number], tuple(fragments)))
    frozen = tuple(
        (_of_rank(names[id(param)], param, rank, 0), param.ds_tensor)
        for param in zero.module.parameters()
        if id(param) not in in_optimizer
    )

    def refresh() -> None:
        zero.checkpoint_event_prologue()  # releases gathered parameters, which would keep their old values
        for number in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        zero.checkpoint_event_epilogue()

    return Partitions(tuple(partitions), frozen, refresh)


def _of_rank(name: str, param: Any, rank: int, offset: int) -> Fragment:
    """Return the part of a parameter that stage 3 gives to this rank. The last parts may be padded."""
    each, n = int(param.ds_tensor.ds_numel), int(param.ds_numel)
    start = min(rank * each, n)
    return Fragment(name, param, tuple(param.ds_shape), start, min(start + each, n), offset)
