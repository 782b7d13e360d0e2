"""The first inputs after a moment of a training, as checksums: the first batch of each session loader, the arguments of
the first training forward, and torch's random state at that forward (or at the first update, if no forward is seen).

A script may take a batch only to inspect it, for example to print a sample before the loop. So the first batch of a
later pass replaces the first batch of an earlier pass, until a training forward or an update shows that the loop trains
on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from lightck._native import ffi, lib
from lightck.dataloader.batch import TensorChecksums, checksum_of
from lightck.dataloader.passes import Pass

BATCH, LATER_BATCH, FORWARD, FORWARD_OF_BATCH, RANDOM, RANDOM_OF_BATCH, RANDOM_AT_UPDATE = 1, 2, 3, 4, 5, 6, 7
"""Kinds of first inputs; pools store these numbers. ``BATCH``: a session loader's first batch, if it came before the
first update; ``LATER_BATCH``: the same, if it came after the first update. ``FORWARD``: the arguments of the first
training forward; ``FORWARD_OF_BATCH``: the arguments of the first forward after a session loader gave a batch.
``RANDOM``: torch's random state when the forward of ``FORWARD`` begins; ``RANDOM_OF_BATCH``: the same for
``FORWARD_OF_BATCH``; ``RANDOM_AT_UPDATE``: torch's random state before the first update, if no forward was seen."""
RANDOM_STATES = (RANDOM, RANDOM_OF_BATCH, RANDOM_AT_UPDATE)


class FirstInput(NamedTuple):
    """The checksum of one first input. ``name``: the loader's name; empty for the forward's arguments and the random
    state. ``update_parts.py`` gives the parts of an update names of their own."""

    name: str
    kind: int
    checksum: int


class FirstInputs:
    """Collects the first inputs that come after this object was created. ``inputs``: the collected inputs; the list
    only grows. The methods run at every step."""

    def __init__(self, *, both_forwards: bool = False) -> None:
        """``both_forwards``: collect the first forward as ``FORWARD``, and the first forward after a loader gave a
        batch as ``FORWARD_OF_BATCH`` (one forward can be both). If False, collect the first forward only, as
        ``FORWARD_OF_BATCH`` if a loader gave a batch before it, otherwise as ``FORWARD``. (The recorder stores one
        kind. A comparison collects both, because it does not know which one was stored.)"""
        self.inputs: list[FirstInput] = []
        self.is_updated = False
        """Whether an update was made since this object was created."""
        self._both_forwards = both_forwards
        self._saw_forward = self._saw_forward_of_batch = False
        self._batches: dict[str, tuple[Pass | None, int, int | None]] = {}
        """Name of a loader -> pass, kind and checksum of its first batch. The pass is None when the batch is final and
        was added to ``inputs``."""
        self._has_new_batch = False
        """Whether ``_batches`` holds a batch that is not final, so that the first batch of a later pass replaces it."""
        self._cache: TensorChecksums = {}
        """Checksums of tensors of the batches. They are kept because the forward is often called with the same
        tensors."""
        self._updates: set[int | None] = set()
        """Indexes of the optimizers that made an update since this object was created."""

    @property
    def loaders(self) -> list[str]:
        """Names of the loaders that gave a batch."""
        return list(self._batches)

    def batch_given(
        self, name: str, pass_: Pass, batch: object, checksum: int | None, cache: TensorChecksums | None = None
    ) -> None:
        """A loader gave a batch in a training pass. ``checksum``: the batch's checksum; None if it was not computed
        yet. ``cache``: the checksums of the tensors of the batch."""
        known = self._batches.get(name)
        if known is not None and (known[0] is pass_ or known[0] is None):
            return
        self._cache = {} if cache is None else cache
        if checksum is None:
            checksum = checksum_of(batch, self._cache)
        self._batches[name] = pass_, LATER_BATCH if self.is_updated else BATCH, checksum
        self._has_new_batch = True

    def forward(self, inputs: object) -> bool:
        """A training forward begins with these arguments. Returns whether ``inputs`` grew."""
        grew = self._has_new_batch and self._add_batches()
        if self.is_updated:
            return grew
        is_first, has_batch = not self._saw_forward, bool(self._batches)
        is_of_batch = has_batch and not self._saw_forward_of_batch and (is_first or self._both_forwards)
        if not (is_first or is_of_batch):
            return grew
        self._saw_forward = True
        self._saw_forward_of_batch |= has_batch
        checksum, state = checksum_of(inputs, self._cache), random_checksum()
        self._cache = {}
        if is_of_batch:
            self._add_forward(FORWARD_OF_BATCH, checksum, RANDOM_OF_BATCH, state)
        if is_first and (self._both_forwards or not has_batch):
            self._add_forward(FORWARD, checksum, RANDOM, state)
        return True

    def _add_forward(self, kind: int, checksum: int | None, random_kind: int, state: int) -> None:
        if checksum is not None:
            self.inputs.append(FirstInput("", kind, checksum))
        self.inputs.append(FirstInput("", random_kind, state))

    def update(self, index: int | None, parts: Callable[[int], Iterable[FirstInput]]) -> bool:
        """An update is about to be made by the optimizer ``index`` (None if none is followed). ``parts``: returns the
        checksums of what the update uses. Returns whether ``inputs`` grew."""
        if index in self._updates:
            return self._has_new_batch and self._add_batches()
        self._updates.add(index)
        had_no_forward = not (self.is_updated or self._saw_forward)
        self.is_updated = True
        before = len(self.inputs)
        if self._has_new_batch:
            self._add_batches()
        if had_no_forward:
            self.inputs.append(FirstInput("", RANDOM_AT_UPDATE, random_checksum()))
        if index is not None:
            self.inputs.extend(parts(index))
        self._cache = {}
        return len(self.inputs) > before

    def _add_batches(self) -> bool:
        """Make the batches final and add them to ``inputs``. Returns whether ``inputs`` grew."""
        before = len(self.inputs)
        for name, (pass_, kind, checksum) in self._batches.items():
            if pass_ is not None:
                self._batches[name] = None, kind, None
                if checksum is not None:
                    self.inputs.append(FirstInput(name, kind, checksum))
        self._has_new_batch = False
        return len(self.inputs) > before


def random_checksum() -> int:
    """Return a checksum of the states of torch's global generators: on the CPU, and on CUDA devices if CUDA is in use.

    Dropout and most augmentation draw from them. The states of Python and numpy are left out, because they take ten
    times as long to read. The lowest bit of the checksum is 0, which means that the states were read completely (see
    ``dataloader/batch.py``)."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += [generator.get_state() for generator in torch.cuda.default_generators]
    checksum = 0
    for state in states:
        checksum = checksum * 31 + lib.lck_crc32c(ffi.cast("void *", state.data_ptr()), state.numel())
    return checksum & 0xFFFFFFFE
