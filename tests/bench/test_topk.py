"""The bench of TopK at a small size: every part is measured, and compressed records are smaller."""

from __future__ import annotations

import lightck
from bench import topk


def test_every_part_is_measured():
    found = topk.costs(5000, lightck.TopK(0.01), repeats=1)
    assert list(found) == ["memcpy", "torch.topk", "selection", "indexed form", "dense form"]
    assert all(seconds > 0 for seconds in found.values())


def test_compressed_records_are_smaller():
    dense, compressed = (
        topk.written(200, lightck.Gradients(topk.BASE_EVERY, compress=compress))
        for compress in (None, lightck.TopK(0.01))
    )
    assert compressed < 0.5 * dense
