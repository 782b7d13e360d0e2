"""Tensors that overlap in memory are found."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightck.restore import tensor_writes

BASE_NUMEL = 40


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of a few storages: with gaps, transposed, expanded, empty, and duplicates."""
    bases = [torch.zeros(BASE_NUMEL), torch.zeros(BASE_NUMEL, dtype=torch.float16)]
    found: list[torch.Tensor] = []
    for _ in range(draw(st.integers(0, 8))):
        if found and draw(st.integers(0, 5)) == 0:
            found.append(draw(st.sampled_from(found)))
            continue
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        stride = [draw(st.integers(0, 5)) for _ in shape]
        start = draw(st.integers(0, BASE_NUMEL - 21))
        found.append(draw(st.sampled_from(bases)).as_strided(shape, stride, start))
    return found


def places(tensor: torch.Tensor) -> range:
    """Return the addresses from the first byte to the last."""
    if not tensor.numel():
        return range(0)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


@given(views())
def test_a_tensor_is_crowded_if_another_lies_in_its_range_of_memory(tensors: list[torch.Tensor]) -> None:
    expected = {
        id(one)
        for i, one in enumerate(tensors)
        for k, other in enumerate(tensors)
        if i != k and max(places(one).start, places(other).start) < min(places(one).stop, places(other).stop)
    }
    assert tensor_writes.sharing_memory([(str(i), tensor) for i, tensor in enumerate(tensors)]) == expected


def test_bits_are_compared_in_the_order_of_indices():
    columns = torch.arange(6.0).reshape(2, 3).t()
    assert tensor_writes.same_bits(columns, columns.contiguous())
    assert not tensor_writes.same_bits(columns, columns.flip(0))
    assert tensor_writes.same_bits(torch.arange(8.0)[5::7], torch.tensor([5.0]))  # one element with a stride of its own
    assert not tensor_writes.same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    turned = torch.tensor([1j, 2]).conj()
    assert tensor_writes.same_bits(turned, turned.resolve_conj().clone())
    assert not tensor_writes.same_bits(turned, torch.tensor([1j, 2]))
