"""A file object that keeps the error of a failed write."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class FailureRecordingFile(io.FileIO):
    """A file that keeps the last error of ``write`` in ``failure``. Two callers need it: an export, because torch.save
    replaces the error by a RuntimeError without the reason; and a command, because it must know whether an error was
    raised by a write to its standard output."""

    failure: OSError | None = None
    """The error of the last failed ``write``; None if none failed."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as err:
            self.failure = err
            raise
