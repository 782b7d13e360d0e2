"""What a recovery may return at one moment of a trace: the promise of docs/guarantees.md, as a rule over marks."""

from __future__ import annotations

from crash.oracle import Outcome, Refused
from crash.recording import Tape
from crash.trace import LOST, Event, Mark
from lightck import _native


class Promise:
    """Which contents a recovery may return at one moment of the trace."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._acked = tape.acked
        self.begun: list[int] = []
        """Generations that were begun since the last one that was acknowledged."""

    def feed(self, event: Event) -> None:
        if not isinstance(event, Mark):
            return
        if event.mark == _native.lib.LCK_MARK_BEGIN:
            self.begun.append(event.value)
        elif event.mark == _native.lib.LCK_MARK_ACK:
            self._acked = event.value
            self.begun = [g for g in self.begun if g > event.value]
        elif event.mark == LOST:
            self.begun += [] if self._acked is None else [self._acked]
            self._acked = event.value

    def state(self) -> str:
        """All that the answers of ``broken_by`` depend on."""
        contents = [self._tape.content.get(g, g) for g in self._lines()]
        return repr([self._acked, *((content, self._tape.expected.get(content)) for content in contents)])

    def _lines(self) -> list[int]:
        """Generations of which one may be recovered."""
        return [*self.begun, *([] if self._acked is None else [self._acked])]

    def broken_by(self, outcome: Outcome) -> str | None:
        """The reason why this outcome breaks the promise, or None."""
        if isinstance(outcome, Refused):
            if self._acked is None and outcome.error == "NoCheckpointError":
                return None
            before = "before" if self._acked is None else f"though generation {self._acked} was acknowledged, not"
            return f"{outcome.error} {before} anything was acknowledged: {outcome.message}"
        allowed = {self._tape.content.get(g, g) for g in self._lines()}
        if outcome.generation not in allowed:
            return f"generation {outcome.generation} was recovered, only {sorted(allowed)} may be"
        known = self._tape.expected.get(outcome.generation)
        if known is None:
            return f"generation {outcome.generation} was recovered, and nobody knows what it has to hold"
        if (known.step, known.digest) != (outcome.step, outcome.digest):
            return f"generation {outcome.generation} was recovered as step {outcome.step} with other values"
        return None
