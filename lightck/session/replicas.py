"""``replicas=`` of attach: on how many hosts each rank's pool lies."""

from __future__ import annotations

from dataclasses import dataclass

from lightck.pool.format.structures import NUMBER_MAX


@dataclass(frozen=True, slots=True)
class Replicas:
    """On how many hosts each rank's pool lies, and how often it is copied:
    ``attach(..., replicas=Replicas(2, every=100))``.

    Args:
        count: 1 or 2. With 2, each rank keeps a copy of its pool on another host, from which training goes on if a
            host is lost.
        every: steps between two copies, a multiple of ``interval``. The loss of a host loses up to this many steps,
            and those that are made while a copy is under way. None: rank 0 chooses the smallest number of steps with
            which copying at full speed would take at most a fiftieth of the training time, and at least twice
            ``interval``.
    """

    count: int = 2
    every: int | None = None

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count not in (1, 2):
            raise ValueError(f"replicas={self.count!r}: pass 2 for a copy of each pool on another host, or 1 for none.")
        every = self.every
        if every is not None and (type(every) is not int or not 1 <= every < NUMBER_MAX):
            raise ValueError(f"every={every!r}: pass the number of steps between two copies, an int of at least 1.")
        if every is not None and self.count == 1:
            raise ValueError(f"every={every} and count=1: without copies there is nothing to do every {every} steps.")

    @classmethod
    def of(cls, replicas: object) -> Replicas:
        """Return the ``replicas`` argument of attach as an object. Raises ``ValueError`` or ``TypeError``."""
        if isinstance(replicas, Replicas):
            return replicas
        if type(replicas) is not int:
            raise TypeError(f"replicas is a {type(replicas).__name__}. Pass 1, 2 or lightck.Replicas(2, every=100).")
        return cls(replicas)

    @property
    def slots_min(self) -> int:
        """The least number of slots in a rank's pool. One holds the newest checkpoint, and one is being written. A
        third one holds the checkpoint before, which may be the newest that all ranks have. With peer copies, a fourth
        one holds the newest checkpoint that all copies have."""
        return 3 if self.count == 1 else 4

    def check(self, interval: int) -> None:
        """Raise ``ValueError`` if copies would be due at steps that have no checkpoint."""
        if self.every is not None and self.every % interval:
            raise ValueError(
                f"every={self.every} of replicas= is no multiple of interval={interval}, so there would be no "
                f"checkpoint to copy at these steps. Pass a multiple of {interval}."
            )
