"""The indexed form of a gradient gives the gradient back, bit for bit, or there is no indexed form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import same

from lightck.state.indexed_gradient import IndexedGradient, capacity, dense_gradient, indexed, problem_of
from lightck.state.selection import BITS


@given(
    bits=st.lists(st.just(0) | st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=30),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
@settings(max_examples=100, deadline=None)
def test_any_bits_come_back(bits, dtype):
    """Zeros with a sign, infinities, and every NaN are among them."""
    gradient = torch.tensor(bits, dtype=torch.int16).view(dtype)
    form = indexed(gradient, 30)
    assert form is not None
    assert form.n_used == sum(map(bool, bits))
    assert problem_of(form, len(bits)) is None
    assert same(dense_gradient(form, gradient.shape, gradient.stride()), gradient)


@pytest.mark.parametrize("dtype", list(BITS), ids=str)
def test_strides_come_back(dtype):
    gradient = torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)
    gradient[1, 2, 3, 4], gradient[0, 1, 0, 2] = -0.0, 2.0
    form = indexed(gradient, 2)
    assert form is not None
    found = dense_gradient(form, gradient.shape, gradient.stride())
    assert found.stride() == gradient.stride()
    assert same(found, gradient)


def test_a_zero_with_a_sign_takes_room():
    gradient = torch.tensor([0.0, -0.0, 1.0, 0.0])
    assert indexed(gradient, 1) is None
    assert indexed(gradient, 2) is not None


def test_gradients_of_other_kinds_have_no_indexed_form():
    assert indexed(torch.zeros(4, dtype=torch.complex64), 4) is None


def test_there_is_no_room_where_the_dense_form_is_smaller():
    assert capacity(1024, 4, 11) is None  # 4 KiB: one page
    assert capacity(100_000, 4, 1000) == 1000
    assert capacity(100_000, 4, 50_000) is None
    assert capacity(100_000, 2, 33_334) is None
    assert capacity(2**31, 4, 1000) is None  # more elements than int32 can name


@pytest.mark.parametrize(
    "form",
    [
        IndexedGradient(torch.tensor([1, 0], dtype=torch.int32), torch.ones(2), 2),
        IndexedGradient(torch.tensor([1, 1], dtype=torch.int32), torch.ones(2), 2),
        IndexedGradient(torch.tensor([0, 4], dtype=torch.int32), torch.ones(2), 2),
        IndexedGradient(torch.tensor([-1, 0], dtype=torch.int32), torch.ones(2), 2),
        IndexedGradient(torch.tensor([0, 1], dtype=torch.int32), torch.ones(2), 3),
        IndexedGradient(torch.tensor([0, 1], dtype=torch.int32), torch.ones(2), -1),
        IndexedGradient(torch.tensor([0, 1], dtype=torch.int32), torch.ones(3), 1),
        IndexedGradient(torch.tensor([0, 1]), torch.ones(2), 1),
        IndexedGradient(torch.tensor([0, 1], dtype=torch.int32), torch.ones(2, dtype=torch.int32), 1),
        IndexedGradient(torch.tensor([[0]], dtype=torch.int32), torch.ones(1, 1), 1),
    ],
    ids=str,
)
def test_damaged_forms_are_named(form):
    assert problem_of(form, 4) is not None
