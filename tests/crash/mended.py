"""Faults of lightck that are reported and not mended yet: mended here, so that the tests find what lies behind them.

``suite/test_gradient_power_cut.py`` has a test for each of them that is expected to fail. When it passes, remove the
mend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from lightck.pool.commit_log import candidates
from lightck.pool.reader import PoolReader, RejectedCheckpoint
from lightck.restore import recover
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.replayed import ReplayedCheckpoint, replayed_checkpoints


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """A pool with gradient records that holds no checkpoint yet has none to try. (``zip`` raises ``ValueError``.)"""

    def mended(
        reader: PoolReader, optimizers: OptimizersAtHand, step: int | None = None
    ) -> Iterator[ReplayedCheckpoint | RejectedCheckpoint]:
        if candidates(reader.commit_log()) or step is not None:
            yield from replayed_checkpoints(reader, optimizers, step)

    with patch.object(recover, "replayed_checkpoints", mended):
        yield
