"""The contents of a checkpoint in terms of torch: names, groups, values and tensors, parsed from untrusted bytes.

``Contents`` is parsed from the small state of a checkpoint before any payload (tensor bytes) is read. A ``Source``
reads the payload: from the pool (``StoredCheckpoint``, which verifies every block that it reads) or from memory
(``MemorySource``, which holds all tensors of a checkpoint).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol

import torch

from lightck.errors import CorruptPoolError, NoTensorError
from lightck.pool.format.group import RANKS_MAX
from lightck.pool.format.layout import Entry
from lightck.pool.format.saved_by import CLAIM_KEY, RUN_ID_KEY, RUN_ID_NBYTES
from lightck.pool.format.structures import CommitRecord
from lightck.restore.saved_layout import SavedLayout
from lightck.state import values
from lightck.state.build_record import BuildRecord
from lightck.state.rng import RngState
from lightck.state.storable import dtype_from_name
from lightck.state.values import typed

NOT_EXACT_KEY = "not_exact"
"""Key of the small state: why the checkpoint does not have exactly the bits of the training at its step. The key is
absent if it does."""


class Source(Protocol):
    """Reads the tensor bytes of one checkpoint; the methods are those of ``StoredCheckpoint``."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Name in the pool -> entry."""
        ...

    def read_into(self, name: str, address: int) -> None:
        """Copy the bytes of a tensor to an address in host memory. Raises ``DamagedError`` at a bad block."""
        ...

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        """``read_into`` for several tensors. ``places``: (name, address in host memory) of each."""
        ...


class Saved(Source, Protocol):
    """One checkpoint in one or several pools; the members are those of ``StoredCheckpoint``."""

    @property
    def step(self) -> int: ...

    @property
    def iteration(self) -> int: ...

    @property
    def state(self) -> bytes:
        """The packed small state."""
        ...

    @property
    def record(self) -> CommitRecord: ...

    @property
    def path(self) -> str:
        """The path of the pool, or of the directory of the pools."""
        ...

    @property
    def uuid(self) -> bytes:
        """The uuid of the pool, or of the first of the pools."""
        ...

    def owns_slot(self) -> bool:
        """Whether no slot of the checkpoint was reused."""
        ...


class MemorySource:
    """All tensors of a checkpoint in memory; they were verified when they were read from the pool."""

    def __init__(self, entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor]) -> None:
        self.entries = dict(entries)
        self.tensors = dict(tensors)

    def read_into(self, name: str, address: int) -> None:
        entry, tensor = self.entries[name], self.tensors[name].detach()
        if tensor.device.type != "cpu" or tuple(tensor.stride()) != entry.stride:
            tensor = empty_for(entry, "cpu").copy_(tensor)
        if entry.nbytes and address:
            ctypes.memmove(address, tensor.data_ptr(), entry.nbytes)

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        for name, address in places:
            self.read_into(name, address)


class RowsOfOther(NamedTuple):
    """Checksums of rows that this rank holds and another rank writes, computed from the bytes that this rank held
    (``rows_of_others.py``)."""

    rank: int
    """The rank that writes them."""
    first: int
    """The number of the first block, in the order of blocks that ``rows_of_others.py`` defines."""
    checksums: bytes
    """The checksum of each block without the block's seed (``raw_checksums``), as 4 bytes in little-endian order."""


@dataclass(frozen=True, slots=True)
class OptimizerContents:
    """One optimizer as it was saved."""

    class_name: str
    names: list[list[str]]
    """For each group, the names of its parameters."""
    groups: list[dict[str, object]]
    """For each group, its options."""
    packed_param_state: bytes
    """Packed: parameter name -> the part of its optimizer state that is not stored as tensors of the pool."""
    packed_other_state: bytes
    """Packed: the state under keys of ``optimizer.state`` that are no parameters."""
    wraps: bool = False
    """Whether this optimizer wraps another one. If so, the state tensors that the pool holds for its parameters belong
    to the wrapped optimizer."""

    @property
    def all_names(self) -> list[str]:
        return [name for group in self.names for name in group]


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a checkpoint except the bytes of its large tensors."""

    step: int
    iteration: int
    """Number of iterations of the loop so far. An iteration whose update a GradScaler skipped counts too."""
    event: str
    """The step event that closed the checkpoint."""
    explicit: bool
    """Whether ``session.end_step()`` had been called. If so, only the user's calls of ``end_step()`` are boundaries."""
    rng: RngState
    rng_forward: RngState | None
    """Random states at the start of the forward that closed the checkpoint; None if another event closed it."""
    optimizers: list[OptimizerContents]
    state: dict[str, bytes]
    """Name in ``state`` -> packed result of the object's ``state_dict()``."""
    classes: dict[str, str]
    """Name in ``state`` -> class of the object that was saved under it."""
    extra: dict[str, bytes]
    """Name of a module's extra state -> packed result of its ``get_extra_state()``."""
    loaders: dict[str, dict[str, object]]
    """Name of a session loader -> its position."""
    copied_at_boundary: list[str]
    """Names of tensors that are always copied at the boundary, because something once wrote to them during a background
    copy."""
    resizable: frozenset[str]
    """Names of buffers that appeared, disappeared or changed their size during the training. A restore gives such a
    buffer the saved size, or removes it."""
    built: BuildRecord | None
    """Options, and parameters with ``requires_grad=False``, as the script had built them at attach; None in a pool of
    an older lightck."""
    without_grad: list[str] | None
    """Names of parameters with ``requires_grad=False`` at this checkpoint; None if they are those of ``built``."""
    fingerprint: dict[str, object]
    entries: Mapping[str, Entry]
    stale_after: int | None = None
    """Checkpoints whose generation lies between this number and the generation of this checkpoint (both excluded) are
    stale: they hold wrong bytes of a tensor, or lead to them. None if none is stale."""
    persistent_started: bool = False
    """Whether a DataLoader outside the session had started its persistent workers."""
    done: bool = False
    """Whether the training had ended: ``session.close(done=True)``."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Numbers that modules keep as plain attributes, and that the training had changed: name -> value."""
    copied_from: int | None = None
    """The rank from whose pool this checkpoint was taken, if the pool of its own rank was lost; else None."""
    rows_of_others: tuple[RowsOfOther, ...] = ()
    """Checksums of the rows that this rank holds and other ranks write for it."""
    from_world: int | None = None
    """If this checkpoint was loaded from the pools of another world: how many ranks had saved it."""
    from_stages: bool = False
    """Whether pipeline stages have saved this checkpoint. A tensor that the whole model has under several names may
    then have only one of them."""
    averaged_names: tuple[str, ...] = ()
    """If this checkpoint was loaded from the pools of another world: the names of the parameters and buffers that
    were averaged (``averages.py``)."""
    layout: SavedLayout | None = None
    """The layout with which the rank saved it; None: it had none."""
    first_of_world: bool = False
    """Whether this is the first checkpoint that its rank saved in this world (only saves without a session set it). So
    if pools of this world are missing, a kill may have come before all ranks had made theirs, and an older world
    counts."""
    not_exact: str = ""
    """Why a training that continues from this checkpoint is not bit-identical to the training that saved it; empty if
    it is."""
    run_id: str = ""
    """32 hexadecimal digits: which training saved it. Empty in the pool of a rank, and in that of an older lightck."""
    claim: str = ""
    """The newest claim of tiers that the training had made; empty if it had none."""

    @classmethod
    def parse(cls, small_state: bytes, step: int, iteration: int, entries: Mapping[str, Entry]) -> Contents:
        """Parse the small state. Raises ``CorruptPoolError`` if it is malformed or has an unknown format."""
        raw = unpack_dict(small_state)
        try:
            if typed(raw["version"], int) != values.STATE_VERSION:
                raise CorruptPoolError(
                    f"its options, counters and random states were saved in format {raw['version']!r}, and this "
                    f"lightck reads {values.STATE_VERSION}: read it with the release that saved it"
                )
            # Some keys are older names of the fields: "at_once" (copied_at_boundary), "elastic" (resizable), and
            # "frozen" (without_grad: it means requires_grad=False, and not what "frozen" means elsewhere).
            return cls(
                step=step,
                iteration=iteration,
                event=typed(raw["event"], str),
                explicit=typed(raw["explicit"], bool),
                rng=RngState.from_value(raw["rng"]),
                rng_forward=None if raw["rng_forward"] is None else RngState.from_value(raw["rng_forward"]),
                optimizers=[_optimizer(o) for o in typed(raw["optimizers"], list)],
                state=_bytes_map(raw["state"]),
                classes={typed(k, str): typed(v, str) for k, v in typed(raw.get("classes", {}), dict).items()},
                extra=_bytes_map(raw["extra"]),
                loaders={typed(k, str): typed(v, dict) for k, v in typed(raw["loaders"], dict).items()},
                copied_at_boundary=[typed(n, str) for n in typed(raw["at_once"], list)],
                resizable=frozenset(typed(n, str) for n in typed(raw.get("elastic", []), list)),
                built=None if raw.get("built") is None else BuildRecord.parse(raw["built"]),
                without_grad=None if raw.get("frozen") is None else [typed(n, str) for n in typed(raw["frozen"], list)],
                fingerprint=typed(raw["fingerprint"], dict),
                entries=entries,
                stale_after=None if raw.get("stale_after") is None else typed(raw["stale_after"], int),
                persistent_started=typed(raw.get("persistent_started", False), bool),
                done=typed(raw.get("done", False), bool),
                numbers={typed(k, str): typed(v, int) for k, v in typed(raw.get("numbers", {}), dict).items()},
                copied_from=_rank_number(raw.get("copied_from"), RANKS_MAX - 1),
                rows_of_others=tuple(map(_rows_of_other, typed(raw.get("others", []), list))),
                from_world=_rank_number(raw.get("from_world"), RANKS_MAX),
                from_stages=typed(raw.get("from_stages", False), bool),
                averaged_names=tuple(typed(name, str) for name in typed(raw.get("means", []), list)),
                layout=SavedLayout.parse(raw.get("layout")),
                first_of_world=typed(raw.get("first_of_world", False), bool),
                not_exact=typed(raw.get(NOT_EXACT_KEY, ""), str),
                run_id=_run_id(raw.get(RUN_ID_KEY, "")),
                claim=typed(raw.get(CLAIM_KEY, ""), str),
            )
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as err:
            raise CorruptPoolError(
                f"its saved options, counters or random states are malformed ({type(err).__name__}: {err})"
            ) from err

    @property
    def model_entries(self) -> dict[str, Entry]:
        """Name in the model's state_dict -> entry."""
        return {n.removeprefix("model/"): e for n, e in self.entries.items() if n.startswith("model/")}


def unpack_dict(packed: bytes, tensor: Callable[[str], torch.Tensor] | None = None) -> dict[Any, object]:
    """Unpack bytes that must hold a dict, and return the dict. ``tensor``: as in ``values.unpack``. Raises
    ``CorruptPoolError`` for any other bytes."""
    return typed(values.unpack(packed, tensor=tensor), dict)


def _run_id(value: object) -> str:
    found = typed(value, str)
    if found and not re.fullmatch(rf"[0-9a-f]{{{2 * RUN_ID_NBYTES}}}", found):
        raise CorruptPoolError("its saved options, counters or random states name no run")
    return found


def _rank_number(value: object, most: int) -> int | None:
    """Return a rank, or a number of ranks. ``most``: the largest one that there can be."""
    if value is not None and not 0 <= typed(value, int) <= most:
        raise CorruptPoolError("its saved options, counters or random states name a rank that cannot exist")
    return None if value is None else typed(value, int)


def _rows_of_other(value: object) -> RowsOfOther:
    rank, first, checksums = typed(value, list)
    found = RowsOfOther(typed(rank, int), typed(first, int), typed(checksums, bytes))
    if min(found.rank, found.first) < 0 or len(found.checksums) % 4:
        raise CorruptPoolError("its saved options, counters or random states name rows of another rank wrongly")
    return found


def _bytes_map(value: object) -> dict[str, bytes]:
    return {typed(k, str): typed(v, bytes) for k, v in typed(value, dict).items()}


def _optimizer(saved: object) -> OptimizerContents:
    value = typed(saved, dict)
    names = [[typed(n, str) for n in typed(group, list)] for group in typed(value["names"], list)]
    groups = [typed(g, dict) for g in typed(values.unpack(typed(value["groups"], bytes)), list)]
    if len(groups) != len(names):
        raise CorruptPoolError(
            f"its optimizer has {len(names)} groups of parameters and {len(groups)} groups of options"
        )
    packed, rest = typed(value["values"], bytes), typed(value["rest"], bytes)
    wraps = typed(value.get("wraps", False), bool)
    return OptimizerContents(typed(value["class"], str), names, groups, packed, rest, wraps)


def refuse_unusable_device(device: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a device on which no tensor can be made. Without this check torch would
    raise various errors, in the middle of a load."""
    if not isinstance(device, (str, int, torch.device)) or isinstance(device, bool):
        kind = type(device).__name__
        raise TypeError(f'device={device!r} is a {kind}. Pass a torch.device or its name: device="cpu".')
    try:
        is_meta = torch.empty(0, device=device).is_meta
    except (RuntimeError, AssertionError, ImportError) as err:
        why = str(err).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"device={str(device)!r} cannot be used here: {why}. Nothing was read. Pass a device that this machine and "
            "this torch support. Or leave device= out, and the tensors are made on the CPU."
        ) from err
    if is_meta:
        raise ValueError(
            "device='meta': a tensor on the meta device has no bytes, so nothing of the checkpoint would be loaded. "
            "Leave device= out, and read names, shapes and dtypes from the checkpoint's tensors."
        )


def empty_for(entry: Entry, device: torch.device | str) -> torch.Tensor:
    """Return an uninitialised tensor with the dtype, shape and strides of an entry."""
    dtype = dtype_from_name(entry.dtype)
    return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device=device)


def load_tensor(source: Source, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Read and verify one tensor of a checkpoint, and return it as a new tensor on ``device``. Raises ``DamagedError``
    at a bad block."""
    tensor = empty_for(source.entries[name], "cpu")
    if tensor.numel():
        source.read_into(name, tensor.data_ptr())
    return tensor.to(device)


def load_tensors(source: Source, names: Sequence[str], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Read and verify several tensors, and return name -> new tensor on ``device``. For the CPU they are read together;
    for another device one by one, to save host memory. Raises ``DamagedError`` at a bad block."""
    if torch.device(device).type != "cpu":
        return {name: load_tensor(source, name, device) for name in names}
    tensors = {name: empty_for(source.entries[name], "cpu") for name in names}
    source.read_many([(name, tensor.data_ptr()) for name, tensor in tensors.items() if tensor.numel()])
    return tensors


def in_memory(source: Source, device: torch.device | str = "cpu") -> MemorySource:
    """Read and verify all tensors of a checkpoint into new memory. The result does not need the pool: it stays valid if
    the slot is overwritten or the reader is closed. Raises ``DamagedError`` at a bad block."""
    own = [name for name, entry in source.entries.items() if entry.alias is None]
    return MemorySource(source.entries, load_tensors(source, own, device))


def existing_entry(entries: Mapping[str, Entry], name: str) -> Entry:
    """Return the entry of a tensor that the small state names. Raises ``CorruptPoolError`` if the checkpoint has no
    such entry."""
    if name not in entries:
        raise CorruptPoolError(
            f"its saved options, counters or random states name a tensor {name!r} that the checkpoint does not hold"
        )
    return entries[name]


def tensor_reader(source: Source, loaded: dict[str, torch.Tensor] | None = None) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a large tensor by name, for ``values.unpack``. The function adds each tensor that it
    reads to ``loaded``."""

    def read(name: str) -> torch.Tensor:
        existing_entry(source.entries, name)
        tensor = load_tensor(source, name)
        if loaded is not None:
            loaded[name] = tensor
        return tensor

    return read


def refuse_unknown(name: str, entries: Mapping[str, Entry]) -> None:
    """Raise ``NoTensorError`` for a name under which a checkpoint stores no tensor."""
    entry = entries.get(name)
    if entry is None:
        ending = [known for known in entries if known.endswith(f"/{name}")][:3]
        similar = ending or get_close_matches(str(name), entries, n=3)
        hint = f"Similar names: {', '.join(map(repr, similar))}. " if similar else ""
        raise NoTensorError(
            f"The checkpoint holds no tensor {name!r}. Ask for a tensor by its name in the pool, such as "
            "'model/0.weight'. "
            f"{hint}Checkpoint.names lists them all."
        )
    if entry.alias is not None:
        raise NoTensorError(
            f"{name!r} is another name of the tensor {entry.alias!r}, and the checkpoint stores the tensor once. Ask "
            f"for {entry.alias!r}."
        )
