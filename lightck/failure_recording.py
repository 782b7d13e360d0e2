"""A file that remembers why a write to it failed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class FailureRecordingFile(io.FileIO):
    """A file that keeps the last error of ``write`` in ``failure``, because its callers may lose it: torch.save raises
    a RuntimeError without the reason, and an error on standard output looks like that of any other file."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as err:
            self.failure = err
            raise
