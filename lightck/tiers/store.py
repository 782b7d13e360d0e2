"""What lightck needs of the place where a tier lies."""

from __future__ import annotations

from typing import Protocol

from lightck.tiers.decisions import Listing


class Store(Protocol):
    """Where a tier lies. What is put is durable when ``put`` returns."""

    def listing(self) -> Listing: ...

    def now(self) -> float:
        """The time of the store, in the seconds of its listings."""
        ...

    def put(self, name: str, data: bytes | memoryview) -> None: ...

    def get(self, name: str, nbytes_max: int) -> bytes: ...

    def delete(self, name: str) -> None: ...

    def link(self, name: str, new_name: str) -> bool:
        """Store a copy of an object under a new name, without moving its bytes. Returns False if the store cannot, or
        if there is no such object."""
        ...
