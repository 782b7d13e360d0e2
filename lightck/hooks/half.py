"""Updates that are half made: in a layer-wise update some layers are new, and ``step()`` is still to come."""

from __future__ import annotations

from collections.abc import Callable

from lightck.errors import SessionError, StateChangedError


class HalfUpdated:
    """The optimizers (by index) whose update is half made, and an error that waits for their ``step()``."""

    def __init__(self) -> None:
        self._indexes: set[int] = set()
        self._error: StateChangedError | None = None

    def __bool__(self) -> bool:
        return bool(self._indexes)

    def begin(self, index: int) -> None:
        self._indexes.add(index)

    def end(self, index: int) -> None:
        self._indexes.discard(index)

    def refuse_boundary(self) -> None:
        """Raises ``SessionError``: no state between two steps is one from which a step starts."""
        if self._indexes:
            raise SessionError(
                "A version cannot be closed between backward() and step(): with lightck.layerwise some layers are "
                "updated then, and others are not. Call step() of each such optimizer first. (A backward() that "
                "reaches the parameters of another optimizer updates those too: give that one no layers.)"
            )

    def defer(self, work: Callable[[], None]) -> bool:
        """Do it inside a backward pass. False where it raised what a loop may catch and go on from: that is raised by
        ``raise_deferred``, since a backward that ends here would have made some gradients, and not others."""
        try:
            work()
        except StateChangedError as err:
            self._error = err
            return False
        return True

    def raise_deferred(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
