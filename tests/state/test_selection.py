"""The entries of largest magnitude of a gradient are kept, the first ones of equal magnitude, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import same

from lightck.state import selection
from lightck.state.selection import BITS, is_selectable, keep_largest, kept_entries, kth_largest

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, float("inf"), -float("inf"), float("nan"), 65504.0]
DTYPES = list(BITS)


def by_hand(flat: torch.Tensor, k: int) -> torch.Tensor:
    """A stable sort by magnitude, in which NaN is the largest."""
    magnitudes = np.nan_to_num(flat.double().abs().numpy(), nan=np.inf)
    order = np.lexsort((np.arange(flat.numel()), -magnitudes, ~np.isnan(flat.double().numpy())))
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[torch.from_numpy(order[:k].copy())] = True
    return mask


@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    numbers=st.lists(st.sampled_from(SPECIAL) | st.floats(-10, 10, width=16), min_size=1, max_size=40),
    small_max=st.sampled_from([0, 1 << 16]),
)
@settings(max_examples=200, deadline=None)
def test_kept_entries_are_those_of_a_stable_sort(data, dtype, numbers, small_max):
    flat = torch.tensor(numbers).to(dtype)
    k = data.draw(st.integers(1, len(numbers)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "SMALL_NUMEL_MAX", small_max)
        assert torch.equal(kept_entries(flat, k), by_hand(flat, k))


@pytest.mark.parametrize("small_max", [0, 1 << 16], ids=["counted", "searched by torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_entries_of_a_large_gradient_are_those_of_a_stable_sort(dtype, small_max, monkeypatch):
    monkeypatch.setattr(selection, "SMALL_NUMEL_MAX", small_max)
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    for k in (1, 50, 4999, 5000):
        assert torch.equal(kept_entries(flat, k), by_hand(flat, k))


@given(
    numbers=st.lists(st.integers(0, 2**62 - 1) | st.integers(0, 70_000), min_size=1, max_size=30),
    dtype=st.sampled_from([torch.int16, torch.int32, torch.int64]),
)
@settings(max_examples=100, deadline=None)
def test_kth_largest_is_that_of_a_sort(numbers, dtype):
    tensor = torch.tensor([number % (torch.iinfo(dtype).max + 1) for number in numbers], dtype=dtype)
    ordered = sorted(tensor.tolist(), reverse=True)
    found = [kth_largest(tensor, k + 1, 8 * tensor.element_size() - 16) for k in range(len(ordered))]
    assert found == [(number, k + 1 - ordered.index(number)) for k, number in enumerate(ordered)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_looked_at_in_parts(dtype, monkeypatch):
    """Equal magnitudes lie in several parts, and only the first of them are kept."""
    monkeypatch.setattr(selection, "PART_NUMEL", 7)
    monkeypatch.setattr(selection, "SMALL_NUMEL_MAX", 0)
    flat = torch.randint(-4, 5, (100,), generator=torch.Generator().manual_seed(1)).to(dtype)
    for k in range(1, 101):
        assert torch.equal(kept_entries(flat, k), by_hand(flat, k)), k


def test_entries_of_a_transposed_gradient_are_chosen_in_row_major_order():
    gradient = torch.ones(3, 4).t()
    keep_largest(gradient, 5)
    assert gradient.reshape(-1).tolist() == [1.0] * 5 + [0.0] * 7


def test_what_is_left_out_becomes_the_residual():
    gradient, residual = torch.tensor([3.0, -1.0, 2.0, 0.5]), torch.tensor([0.0, -4.0, 0.0, 1.0])
    keep_largest(gradient, 2, residual)
    assert same([gradient, residual], [torch.tensor([3.0, -5.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 2.0, 1.5])])


def test_sparse_and_complex_gradients_are_left_alone():
    assert is_selectable(torch.ones(2))
    assert not is_selectable(torch.ones(2, dtype=torch.complex64))
    assert not is_selectable(torch.ones(2).to_sparse())
