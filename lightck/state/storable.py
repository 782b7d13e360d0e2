"""What can be saved: tensors that are completely described by dtype, shape and bytes. Any other tensor is refused by
name.

``refuse_unstorable`` checks one tensor. ``refuse_undeclared_state`` checks modules: what a module writes into its
``state_dict`` beside parameters, buffers and extra state would silently be lost. ``check_objects`` checks the objects
of ``state=``. ``is_key`` checks the keys of dicts and the items of sets in the small state. Nothing here reads bytes.

One table (``ITEM_NBYTES``) lists the dtypes that can be stored. A new dtype of a later torch is refused until it has a
line there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter, ge

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightck.errors import StateValueError, listed
from lightck.pool.format.layout import ITEM_NBYTES, NAME_NBYTES_MAX, are_names, is_name
from lightck.state.local_tensors import PLAIN_TYPES, is_dtensor

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_NBYTES if hasattr(torch, name)}
_DTYPE_NAMES = {item: name for name, item in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without ``torch.``, e.g. ``bfloat16``. Raises ``ValueError`` for a dtype that cannot be
    stored."""
    try:
        return _DTYPE_NAMES[dtype]
    except KeyError:
        raise ValueError(f"{dtype} cannot be stored; convert the tensor first") from None


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype whose name `dtype_name` returns. Raises ``ValueError`` if this torch has no such dtype."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__} that can be stored") from None


# -- tensors and modules ---------------------------------------------------------------------------------------------


_is_nested, _is_meta, _layout = attrgetter("is_nested"), attrgetter("is_meta"), attrgetter("layout")
_dtype, _nbytes, _storage = attrgetter("dtype"), attrgetter("nbytes"), torch.Tensor.untyped_storage
_KEEP_OUT = "or keep it out of what is saved (a buffer with persistent=False) and create it again in each run"


def refuse_unstorable_tensors(names: Sequence[str], tensors: Sequence[torch.Tensor], action: str) -> None:
    """Do ``refuse_unstorable`` for many tensors, in a third of the time if all of them are dense tensors in whole
    storages."""
    if not (are_names(names) and _are_whole(tensors)):
        for name, tensor in zip(names, tensors, strict=True):
            refuse_unstorable(name, tensor, action)


def _are_whole(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``unstorable_reason`` is None for each tensor. In some cases this returns False although it is."""
    return (
        PLAIN_TYPES.issuperset(map(type, tensors))
        and not any(map(_is_nested, tensors))
        and set(map(_layout, tensors)) <= {torch.strided}
        and not any(map(_is_meta, tensors))
        and _DTYPE_NAMES.keys() >= set(map(_dtype, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.storage_offset, tensors))
        and all(map(ge, map(torch.UntypedStorage.nbytes, map(_storage, tensors)), map(_nbytes, tensors)))
    )


def refuse_unstorable(name: str, tensor: torch.Tensor, action: str = "stored") -> None:
    """Raise ``StateValueError`` for a tensor that a pool cannot hold. ``action``: "stored" or "restored", for
    the message."""
    refuse_name(name)
    why = unstorable_reason(tensor)
    if why is not None:
        fact, cure = why
        if name.startswith("optimizer/") and tensor.layout != torch.strided and not tensor.is_nested:
            cure = (
                "Build the module whose gradients are sparse with sparse=False, or use an optimizer without this state"
            )
        raise StateValueError(f"The tensor {name!r} cannot be {action}: {fact}. {cure}.")


def refuse_name(name: str) -> None:
    """Raise ``StateValueError`` for a name that a pool cannot hold."""
    if not is_name(name):
        raise StateValueError(
            f"The tensor {name[:60]!r}... cannot be stored: its name has more than {NAME_NBYTES_MAX} bytes, or "
            "contains a NUL. A name joins the keys that lead to a tensor. Use shorter keys without NUL."
        )


def refuse_torchscript(prefix: str, module: nn.Module) -> None:
    """Raise ``StateValueError`` for TorchScript, which gives access to its parameters by name only."""
    if isinstance(module, torch.jit.ScriptModule):
        raise StateValueError(
            f"The module {prefix.rstrip('.') or type(module).__name__!r} is TorchScript. Its parameters lie outside of "
            "Python, and cannot be followed from step to step. Train the original module, with torch.compile "
            "for speed, and script it after the training."
        )


def unstorable_reason(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return why a tensor cannot be stored, and what to do about it; None for a tensor that is an array of plain bytes
    in memory."""
    # ``_reason_by_type`` takes longer than all other checks of a tensor.
    if type(tensor) not in PLAIN_TYPES and (why := _reason_by_type(tensor)):
        return why
    if tensor.is_nested:
        return (
            "it is a nested tensor, a list of tensors of several shapes",
            f"Keep its parts as separate tensors, {_KEEP_OUT}",
        )
    if tensor.layout != torch.strided:
        return (
            f"its layout is {tensor.layout}, which does not keep all values in one array",
            f"Make it dense, {_KEEP_OUT}",
        )
    if tensor.is_meta:
        cure = f"Give it memory (model.to_empty) and fill it before attach, {_KEEP_OUT}"
        return "it is on the meta device and has no bytes", cure
    if tensor.dtype not in _DTYPE_NAMES:
        return _reason_by_dtype(tensor.dtype)
    if tensor.numel() and not _is_backed(tensor):
        return (
            "its storage was freed or is smaller than its shape",
            "Call attach and session.end_step() while the tensor has its memory",
        )
    return None


def _reason_by_type(tensor: torch.Tensor) -> tuple[str, str] | None:
    kind = type(tensor)
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "it is lazy and has no shape yet", "Call the model once on a batch, build its optimizer, then attach"
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return None
    if is_dtensor(tensor):
        return (
            "it is a DTensor on a device mesh of other ranks, and this process holds nothing of it",
            f"Attach on the ranks of the mesh, {_KEEP_OUT}",
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
    """Whether the storage has bytes for the whole tensor: FSDP and others free storages of live tensors."""
    begin, held = tensor.storage_offset(), tensor.untyped_storage().nbytes()
    if tensor.is_contiguous():
        return held >= (begin * tensor.element_size() if begin else 0) + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return held >= (begin + last + 1) * tensor.element_size()


def refuse_undeclared_state(modules: Iterable[tuple[str, nn.Module]], known: set[str]) -> None:
    """Raise ``StateValueError`` if a module's own ``_save_to_state_dict`` writes names that are not ``known``."""
    for prefix, module in modules:
        if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
            continue
        written: dict[str, object] = {}
        module._save_to_state_dict(written, prefix, True)
        hidden = sorted(name for name, value in written.items() if value is not None and name not in known)
        if hidden:
            raise StateValueError(
                f"The module {prefix.rstrip('.') or 'at the root'} ({type(module).__name__}) keeps "
                f"state ({listed(hidden)}) outside of its parameters and buffers, and writes it in its own "
                "_save_to_state_dict. lightck saves parameters, buffers and extra state only, so this state would be "
                "lost. Register it as a buffer, or implement get_extra_state() and set_extra_state()."
            )


# -- keys of dicts and items of sets ----------------------------------------------------------------------------------

NUMPY_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
NUMPY_SCALARS: dict[type, str] = {np.dtype(code).type: np.dtype(code).str for code in NUMPY_CODES}
"""Type of a numpy scalar -> the name of its dtype, with its byte order."""
PLAIN = frozenset((type(None), bool, float, bytes))
"""Types of the small state that MessagePack encodes as they are. (``int`` and ``str`` are checked first.)"""
_SCALARS = frozenset((*PLAIN, int, str, *NUMPY_SCALARS))
_CONTAINERS = frozenset((tuple, frozenset))
COLLIDING_MAX = 100
"""A dict or set is refused if more than ``COLLIDING_MAX`` of its keys have the same hash as an earlier key."""
INT_NBYTES_MAX = 1700
"""The largest int that is stored, in bytes. Python converts no int of more than 4300 digits to text, and an error or a
report may have to print any int that is stored."""


def is_key(value: object) -> bool:
    """Whether a value can be a key of a dict or an item of a set, because it and everything in it is hashed by
    value."""
    kind = type(value)
    return kind in _SCALARS or (kind in _CONTAINERS and all(map(is_key, value)))  # type: ignore[call-overload]


def has_many_collisions(keys: Collection[object]) -> bool:
    """Whether more than ``COLLIDING_MAX`` keys have the hash of an earlier key, which does not happen by chance.

    Python's hash of numbers is public, so anybody can choose many different keys with one hash. A dict of n such keys
    takes O(n^2) time to build. To be called on untrusted keys before a dict is built.
    """
    return len(keys) > COLLIDING_MAX and len(keys) - len(set(map(hash, keys))) > COLLIDING_MAX


# -- objects in state= ------------------------------------------------------------------------------------------------


def class_name_of(obj: object) -> str:
    """Return the name of an object's class, without the module of the class, because classes move between modules. For
    a lazy module: the name of the class that it becomes."""
    kind = type(obj)
    return str((getattr(kind, "cls_to_become", None) or kind).__name__)


def is_loader(obj: object) -> bool:
    """Whether an object in ``state=`` yields batches, so that its position has to be read right after the update.

    Torch's DataLoaders, samplers and iterable datasets are loaders. Another iterable is a loader if it is an iterator
    or has a dataset, a batch size or a batch sampler. A history of losses, for example, is no loader.
    """
    if isinstance(obj, (DataLoader, Sampler, IterableDataset)):
        return True
    has_signs = any(hasattr(obj, name) for name in ("__next__", "dataset", "batch_size", "batch_sampler"))
    return hasattr(type(obj), "__iter__") and (
        has_signs or "IterableDataset" in {c.__name__ for c in type(obj).__mro__}
    )


def check_objects(objects: Mapping[str, object]) -> None:
    """Refuse, at attach, objects that cannot be saved. Raises ``StateValueError`` with the object's path."""
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
                "lightck saves and restores objects through these two methods. Pass an object that has them."
            )
