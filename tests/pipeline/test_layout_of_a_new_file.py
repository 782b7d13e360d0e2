"""Which tensors of carried checkpoints a new file has room for beside those of the training."""

from __future__ import annotations

from pools_by_hand import entry

from lightck.pipeline.current_pool import pool_layout
from lightck.pool.format.layout import HOME_PLACE


def test_a_carried_unit_takes_no_room_beside_its_homes() -> None:
    """The pool that the checkpoint comes from says that the tensor lies in a home. Where it lies in the new file is not
    decided yet; it once got an extent of twice its size in each slot, too."""
    now, held = entry("model/a", (700,)), entry("model/a", (700,), place=HOME_PLACE)
    layout, beside = pool_layout(None, [now], [held])
    assert layout == {"model/a": now}
    assert beside == []


def test_a_carried_tensor_of_another_shape_gets_room_of_its_own() -> None:
    for place in ("slot", HOME_PLACE):
        held = entry("model/a", (500,), place=place)
        assert pool_layout(None, [entry("model/a", (700,))], [held])[1] == [held]
