"""What lightck needs of the place where a tier lies."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from lightck.tiers.decisions import Listing
from lightck.tiers.names import Claim, parse

TEMPORARY_PREFIX = ".tmp-"
"""The beginning of the names of the files that a store makes for itself. A process that is killed may leave one."""


def is_own(name: str) -> bool:
    """Whether lightck gives such a name to something directly below the root of a tier."""
    return name.startswith(TEMPORARY_PREFIX) or parse(f"{name}/claim.json") is not None


class Store(Protocol):
    """Where a tier lies. What is put is durable, and can be read under its name, when ``put`` returns. ``str(store)``
    is the root, as the user names it.

    Every method raises ``TierError`` if the place cannot be reached, or refuses."""

    n_parallel: int
    """How many calls at once are worth while. Where it is more than 1, ``put`` and ``get`` may be called by several
    threads."""

    lists_at_once: bool
    """Whether a listing shows everything that was put before it began. (That of an object store may be late.)"""

    knows_sizes: bool
    """Whether ``nbytes_of`` costs no request."""

    def has_claim(self) -> bool:
        """Whether a claim lies here: whether this is a tier."""
        ...

    def refuse_foreign_contents(self) -> None:
        """Raise ``TierError`` for a place that is no tier, and in which something lies."""
        ...

    def listing(self) -> Listing: ...

    def now(self) -> float:
        """The time of the store, in the seconds of its listings."""
        ...

    def put(self, name: str, data: bytes | memoryview) -> None: ...

    def get(self, name: str, nbytes_max: int) -> bytes:
        """Return an object of at most ``nbytes_max`` bytes. Raises ``FileNotFoundError`` if there is none, and
        ``DamagedError`` if it is larger."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object. It is no error if there is none."""
        ...

    def nbytes_of(self, name: str) -> int | None:
        """Number of bytes of a file, which is not read; None if there is none. Raises ``TierError``."""
        ...

    def link(self, name: str, new_name: str) -> bool:
        """Store a copy of an object under a new name, without moving its bytes. Returns False if the store cannot, or
        if there is no such object."""
        ...


class TemporaryFile(NamedTuple):
    """A file that was not given its name yet. One that is old was left by a process that was killed."""

    name: str
    """Below the root of the tier."""
    time: float
    """When it was written last, by the clock of the store."""
    nbytes: int


@runtime_checkable
class HasFolders(Protocol):
    """A store in which killed processes leave temporary files and empty folders. Not every store has them."""

    def temporary_files(self) -> list[TemporaryFile]: ...

    def delete_temporary(self, name: str) -> None: ...

    def empty_claims(self) -> list[tuple[Claim, float]]:
        """The claims of which only empty folders are left, each with the time of the last change in them."""
        ...

    def delete_folders(self, claim: Claim) -> None:
        """Remove the folders of a claim that are empty."""
        ...
