"""A file object that keeps the error of a failed write."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class FailureRecordingFile(io.FileIO):
    """A file that keeps the last error of ``write`` in ``failure``. Callers need the error in two cases: torch.save
    raises a RuntimeError without the reason, and an error of standard output does not say where it comes from."""

    failure: OSError | None = None
    """The error of the last failed ``write``; None if none failed."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as err:
            self.failure = err
            raise
