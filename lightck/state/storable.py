"""What can be saved: plain tensors whose bytes are all there is to them. Everything else is refused by name.

``refuse_unstorable`` looks at one tensor, ``refuse_hidden_state`` at the modules: what a module puts into its
``state_dict`` beside parameters, buffers and extra state would be lost without a word. ``check_objects`` looks at what
is passed in ``state=``, ``is_key`` at keys of dicts and items of sets in the small state. Reads no bytes.

One table (``ITEM_NBYTES``) says which dtypes can be stored: one that a later torch brings is refused until it has a
line there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightck.errors import StateValueError
from lightck.pool.format.layout import ITEM_NBYTES, NAME_NBYTES_MAX, is_name

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_NBYTES if hasattr(torch, name)}
_NAMES = {item: name for name, item in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without ``torch.``, e.g. ``bfloat16``. ValueError for a dtype that cannot be stored."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"{dtype} cannot be stored: its values are not whole bytes; convert it first") from None


def dtype_from_name(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. ValueError if there is no such dtype in this torch."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__} that can be stored") from None


# -- tensors and modules ---------------------------------------------------------------------------------------------


_PLAIN_TENSORS = frozenset((torch.Tensor, nn.Parameter))
"""Types that are neither lazy nor wrappers: to look whether others are takes longer than all else here."""

_KEEP_OUT = "or keep it out of what is saved (a buffer with persistent=False) and build it anew in each run"


def refuse_unstorable(name: str, tensor: torch.Tensor, action: str = "stored") -> None:
    """Raises ``StateValueError`` for a tensor that a pool cannot hold. ``fate``: what it was to be."""
    if not is_name(name):
        raise StateValueError(
            f"The tensor {name[:60]!r}... cannot be stored: its name has more than {NAME_NBYTES_MAX} bytes, or a NUL "
            "in it. A name joins the keys on the way to a tensor. Use shorter keys."
        )
    why = unstorable_reason(tensor)
    if why is not None:
        raise StateValueError(f"The tensor {name!r} cannot be {action}: {why[0]}. {why[1]}.")


def refuse_script(prefix: str, module: nn.Module) -> None:
    """Raises ``StateValueError`` for TorchScript, which hands out its parameters by name only."""
    if isinstance(module, torch.jit.ScriptModule):
        raise StateValueError(
            f"The module {prefix.rstrip('.') or type(module).__name__!r} is TorchScript. Its parameters lie outside of "
            "Python, and cannot be followed from step to step. Train the module that it was made of, with "
            "torch.compile where speed is wanted, and script it when the training is over."
        )


def unstorable_reason(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Reason and cure, where a tensor is more, or less, than an array of plain bytes in memory."""
    if type(tensor) not in _PLAIN_TENSORS and (why := _reason_by_type(tensor)):
        return why
    if tensor.is_nested:
        return "it is a nested tensor, a list of tensors of several shapes", f"Keep its parts apart, {_KEEP_OUT}"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, and not one array of its values", f"Make it dense, {_KEEP_OUT}"
    if tensor.is_meta:
        cure = f"Give it memory (model.to_empty) and fill it before attach, {_KEEP_OUT}"
        return "it is on the meta device and has no bytes", cure
    if tensor.dtype not in _NAMES:
        return _reason_by_dtype(tensor.dtype)
    if tensor.numel() and not _is_backed(tensor):
        return (
            "its storage was freed or is smaller than its shape",
            "Attach, and close versions (session.end_step()), where the tensor has its memory",
        )
    return None


def _reason_by_type(tensor: torch.Tensor) -> tuple[str, str] | None:
    kind = type(tensor)
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "it is lazy and has no shape yet", "Call the model once on a batch, build its optimizer, then attach"
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return None
    if kind.__name__ == "DTensor":
        return (
            "it is a DTensor, of which this process holds a part only",
            "Sharded training is not supported yet: attach before the model is distributed, in one process",
        )
    return (
        f"it is a {kind.__qualname__}, whose values lie in other tensors behind __torch_dispatch__",
        f"Attach a model of plain tensors (before it is quantized or wrapped), {_KEEP_OUT}",
    )


def _reason_by_dtype(dtype: torch.dtype) -> tuple[str, str]:
    name = str(dtype).removeprefix("torch.")
    if name.startswith(("qint", "quint")):
        return (
            f"its dtype is {dtype}, whose values need a scale beside their bytes",
            "Keep tensor.int_repr(), the scale and the zero point as plain tensors",
        )
    if name.lstrip("u").startswith("int"):
        return f"its dtype is {dtype}, which torch cannot copy", "Keep its bytes as uint8 (tensor.view(torch.uint8))"
    return f"its dtype is {dtype}, which this lightck does not know", f"Convert it, {_KEEP_OUT}"


def _is_backed(tensor: torch.Tensor) -> bool:
    """Whether the storage reaches as far as the tensor does: FSDP and friends free it behind live tensors."""
    begin, held = tensor.storage_offset(), tensor.untyped_storage().nbytes()
    if tensor.is_contiguous():
        return held >= (begin * tensor.element_size() if begin else 0) + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return held >= (begin + last + 1) * tensor.element_size()


def refuse_hidden_state(modules: Iterable[tuple[str, nn.Module]], known: set[str]) -> None:
    """Raises ``StateValueError`` where a module's own ``_save_to_state_dict`` writes what is not ``known``."""
    for dot, module in modules:
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        written: dict[str, object] = {}
        module._save_to_state_dict(written, dot, True)
        hidden = sorted(name for name, value in written.items() if value is not None and name not in known)
        if hidden:
            raise StateValueError(
                f"The module {dot.rstrip('.') or 'at the root'} ({type(module).__name__}) keeps {', '.join(hidden[:3])}"
                " outside of its parameters and buffers, and writes it by a _save_to_state_dict of its own. lightck "
                "saves parameters, buffers and extra state, so it would be lost. Register it as a buffer, or give it "
                "out by get_extra_state() and set_extra_state()."
            )


# -- keys, which are hashed by their value, to the bottom --------------------------------------------------------------

NUMPY_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
NUMPY_SCALARS: dict[type, str] = {np.dtype(code).type: np.dtype(code).str for code in NUMPY_CODES}
PLAIN = frozenset((type(None), bool, float, bytes))
_SCALARS = frozenset((*PLAIN, int, str, *NUMPY_SCALARS))
_GROUPS = frozenset((tuple, frozenset))
COLLIDING_MAX = 100
INT_NBYTES_MAX = 1700
"""Python makes no text of an int of more than 4300 digits, and an error or a report may have to name one."""


def is_key(value: object) -> bool:
    """Whether a value may be a key."""
    kind = type(value)
    return kind in _SCALARS or (kind in _GROUPS and all(map(is_key, value)))  # type: ignore[call-overload]


def has_many_collisions(keys: Collection[object]) -> bool:
    """Whether so many keys have a hash that another one has too that no program made them by chance.

    Python's hash of numbers is known, so that anybody can make as many different keys of one hash as he likes, and a
    dict of them takes a time that grows with the square of their number: to be asked before a dict is made."""
    return len(keys) > COLLIDING_MAX and len(keys) - len(set(map(hash, keys))) > COLLIDING_MAX


# -- objects in state= ------------------------------------------------------------------------------------------------


def class_name_of(obj: object) -> str:
    """Without its module, which may move. A lazy module's is that of what it becomes."""
    kind = type(obj)
    return str((getattr(kind, "cls_to_become", None) or kind).__name__)


def is_loader(obj: object) -> bool:
    """Whether an object in ``state`` gives out batches: its position has to be read right after the update.

    DataLoaders, samplers and iterable datasets of torch, and what looks like one: it iterates, and is an iterator or
    has a dataset or a batch size. A history of losses iterates too, and is none."""
    if isinstance(obj, (DataLoader, Sampler, IterableDataset)):
        return True
    looks = any(hasattr(obj, name) for name in ("__next__", "dataset", "batch_size", "batch_sampler"))
    return hasattr(type(obj), "__iter__") and (looks or "IterableDataset" in {c.__name__ for c in type(obj).__mro__})


def check_objects(objects: Mapping[str, object]) -> None:
    """Refuse what cannot be saved, at attach. Raises ``StateValueError`` by path."""
    for name, obj in objects.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise StateValueError(
                f"state has the key {name!r}. Names of saved objects are non-empty strings without '/'. Rename it."
            )
        if isinstance(obj, type):
            raise StateValueError(
                f"state[{name!r}] is the class {obj.__name__}, not an object of it. A class has no state to save. Pass "
                f"the object that the training uses: {obj.__name__}(...)."
            )
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise StateValueError(
                f"state[{name!r}] is of type {type(obj).__name__}, which has no state_dict() and load_state_dict(). "
                "lightck saves and restores objects through these two. Pass an object that has them."
            )
