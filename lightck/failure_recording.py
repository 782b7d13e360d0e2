"""A file that remembers why a write to it failed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class FailureRecordingFile(io.FileIO):
    """What writes through it may tell less, or mix it up: torch.save makes a RuntimeError of it that does not say why,
    and an error of the standard output has the same words as one of any other file."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as err:
            self.failure = err
            raise
