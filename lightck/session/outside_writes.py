"""Finds writes to parameters and optimizer state between two updates, which no gradient explains.

Right after each ``step`` the tensors' version counters and memory layouts are recorded, and the checksums of some of
their bytes. They are compared at the boundary, and again when the next ``step`` begins. So all time outside of updates
is covered. ``.data``, numpy and fused kernels move no version counter; such a write is found by its bytes: in the first
updates all bytes are read, later 16 MiB for each update, in turn.

The ``step`` of a class of ``torch.optim`` writes nothing but its own parameters and their state. For other classes
``WritesInStep`` compares all other tensors before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from lightck.state.blocks import ALL, FULLY_COMPARED_FIRST, NO_BLOCKS, Blocks, Positions, RoundRobin
from lightck.state.inventory import Live, address_of, is_plain, unit_of
from lightck.state.signatures import MemoryLayouts, Registrations, VersionCounters

BLOCK = 64 << 10
"""Bytes of a block that is read in turn."""
BUDGET_NBYTES = 16 << 20
"""How many bytes are read for one update. (``FullState`` reads fewer: a write that it misses is in its next
checkpoint.)"""


class OutsideWrites:
    """Compares tensors with what they were when the last ``step`` ended."""

    def __init__(self, *, reads_all: bool = False) -> None:
        """``reads_all``: read all bytes for each update."""
        self._reads_all = reads_all
        self.lives: Sequence[Live] = ()
        """The tensors that are compared."""
        self._layouts, self._counters = MemoryLayouts([]), VersionCounters([])
        self._registrations = Registrations([])
        self._blocks, self._owners = NO_BLOCKS, list[Live]()
        self._addresses: list[int] = []
        """The addresses for which ``_blocks`` was computed."""
        self.token: object = None
        """What the last ``step_ended`` was called with."""
        self._round_robin = RoundRobin()
        self._chosen: Positions | slice = ALL
        self._checksums: npt.NDArray[np.uint32] = np.zeros(0, np.uint32)
        self._n_taken = 0
        self.has_compared_bytes = True
        """Whether the last ``written_names`` compared bytes. If the memory of one tensor was exchanged, it compares
        none."""

    def step_ended(self, lives: Sequence[Live], token: object) -> None:
        """Record these tensors, now that a ``step`` has ended. ``token``: if it is that of the last call, and not None,
        they are the same tensors, in the same memory."""
        if token is None or token is not self.token:
            self._record(lives)
            self.token = token
        self._counters = VersionCounters(self._layouts.tensors, self._registrations.dtensors)
        budget = None if self._reads_all or self._n_taken < FULLY_COMPARED_FIRST else BUDGET_NBYTES
        self._n_taken += 1
        self._chosen, _ = self._round_robin.next_blocks(self._blocks, budget)
        self._checksums = self._blocks.checksums(self._chosen)

    def _record(self, lives: Sequence[Live]) -> None:
        tensors = [live.tensor for live in lives]
        self.lives, self._registrations = lives, Registrations(lives)
        self._layouts = MemoryLayouts(tensors)
        if self._layouts.addresses != self._addresses:
            self._addresses = self._layouts.addresses
            self._owners = [live for live in lives if is_plain(live.tensor) and live.tensor.nbytes]
            addresses = [address_of(live.tensor) for live in self._owners]
            sizes = [live.tensor.nbytes for live in self._owners]
            self._blocks = Blocks.of(addresses, sizes, [0] * len(sizes), BLOCK)

    def written_names(self) -> list[str]:
        """Return the names of tensors that were written since the last ``step`` ended."""
        names = set(self._gone())
        self.has_compared_bytes = are_there = self._layouts.are_unchanged()
        if not (are_there and self._counters.are_unchanged()):
            names |= {self.lives[i].name for i in self._layouts.changed() | self._counters.changed()}
        if are_there:  # else some memory may be gone
            differs = self._blocks.checksums(self._chosen) != self._checksums
            names |= {self._owners[i].name for i in self._blocks.owners[self._chosen][differs].tolist()}
        return sorted(names)

    def _gone(self) -> list[str]:
        """Return the names of tensors that their module or optimizer does not hold any more."""
        try:
            if self._registrations.are_unchanged():
                return []
        except KeyError:
            pass
        return [live.name for live in self.lives if not live.is_current()]

    def rebaseline(self) -> None:
        """Use the present content of the tensors as the new baseline, as if the last ``step`` had just ended."""
        self.step_ended(self.lives, None)

    def forget(self) -> None:
        """Drop all references to tensors."""
        self.__init__()  # type: ignore[misc]


class WritesInStep:
    """Finds writes inside the ``step`` of an optimizer to tensors that are not its own: weights that it averages, or
    the parameters of another optimizer. A replay does not repeat them."""

    def __init__(self, *, reads_all: bool = False) -> None:
        """``reads_all``: as for ``OutsideWrites``."""
        self._reads_all = reads_all
        self._others: dict[int, OutsideWrites] = {}
        """Index of an optimizer -> its search, which begins with each ``step`` of it."""
        self._running: set[int] = set()

    def step_begins(self, index: int, names: Sequence[Sequence[str]], lives: Sequence[Live], token: object) -> None:
        """``names``: of the optimizer's parameters, for each of its groups. ``lives``: all tensors, its own too.
        ``token``: as for ``OutsideWrites.step_ended``."""
        others = self._others.setdefault(index, OutsideWrites(reads_all=self._reads_all))
        found = others.lives
        if token is None or token is not others.token:
            own = set(chain.from_iterable(names))
            found = [live for live in lives if unit_of(live) not in own]
        others.step_ended(found, token)
        self._running.add(index)

    def written_names(self, index: int) -> list[str]:
        """Return the names of the other tensors that were written since the ``step`` of this optimizer began. Call it
        once, when this ``step`` has ended."""
        is_running = index in self._running
        self._running.discard(index)
        return self._others[index].written_names() if is_running else []

    def forget(self) -> None:
        """Drop all references to tensors."""
        self._others.clear()
        self._running.clear()
