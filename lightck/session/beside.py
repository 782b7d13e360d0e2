"""What stands beside the pipeline of a session: pins, exports, the look at values that are not finite."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightck.errors import SessionError
from lightck.pipeline.finite import Finite
from lightck.pipeline.pipeline import Pipeline
from lightck.tiers.keep import Keeper
from lightck.tiers.pin import Hold, Holds


@dataclass(frozen=True, slots=True)
class Beside:
    """Of one session. The pipeline knows them as listeners of commits, and as those that have a say in them."""

    holds: Holds = field(default_factory=Holds)
    keeper: Keeper | None = None
    finite: Finite | None = None

    def join(self, pipeline: Pipeline) -> None:
        """Before the pool is made or opened."""
        pipeline.decisions.add(self.holds)
        if self.finite is not None:
            pipeline.decisions.add(self.finite)
        pipeline.events.add(self.holds)
        if self.keeper is not None:
            pipeline.pool.add_spare_slot()
            pipeline.events.add(self.keeper)

    def pin(self, pipeline: Pipeline) -> Hold:
        """Hold the newest committed version; where less than two slots would be left, the pool moves to a new file."""
        pipeline.finish()
        writer = pipeline.pool.writer
        if writer is None or pipeline.committed is None:
            raise SessionError("Nothing is committed yet that could be pinned. Pin after the first step.")
        writer.refuse_lost_pool()
        needed = self.holds.slots_for_a_pin(pipeline.pool.spare_slots)
        hold = self.holds.take(writer, is_pin=True)
        try:
            pipeline.have_slots(needed)
        except BaseException:
            self.holds.release(hold)
            raise
        return hold
