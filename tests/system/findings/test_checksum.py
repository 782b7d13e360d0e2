"""The checksum of a batch: what it sees, what it leaves alone, and that it waits for no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightck.dataloader.batch import checksum_of, differ, is_partial


def seen(batch: Any) -> int:
    checksum = checksum_of(batch)
    assert checksum is not None
    return checksum


def changed(tensor: torch.Tensor, at: int) -> torch.Tensor:
    other = tensor.clone(memory_format=torch.preserve_format)
    other.view(-1)[at] += 1
    return other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4, 2), torch.zeros(2, 4)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (torch.zeros(4), torch.zeros(8)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.float32(1), np.float64(1)),
        (np.full((4, 4), "a", dtype="U2000")[:, ::2], np.full((4, 4), "b", dtype="U2000")[:, ::2]),
        ((torch.ones(3), 1), (torch.ones(3), 2)),
        ({"x": [torch.ones(3), {"y": "a"}]}, {"x": [torch.ones(3), {"y": "b"}]}),
        (torch.ones(3, 4).t(), torch.ones(4, 3) * 2),
        (torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))),
        ([torch.ones(1)] * 20, [torch.ones(1)] * 21),
    ],
)
def test_batches_that_differ(one: Any, other: Any) -> None:
    assert differ(seen(one), seen(other))
    assert not differ(seen(one), seen(one))


@pytest.mark.parametrize("at", [0, 5_000, 250_000, 499_999])
def test_padding_at_the_beginning_hides_nothing(at: int) -> None:
    """A run of changed elements anywhere in a large tensor."""
    batch = torch.zeros(500_000)
    other = batch.clone()
    other[max(at - 20_000, 0) : at + 20_000] = 1
    assert differ(seen(batch), seen(other))


@pytest.mark.parametrize("layout", ["channels last", "transposed", "expanded", "sliced"])
def test_layouts(layout: str) -> None:
    x = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    views = {
        "channels last": lambda t: t.to(memory_format=torch.channels_last),
        "transposed": lambda t: t.transpose(0, 3),
        "expanded": lambda t: t[:, :1].expand(16, 3, 64, 64),
        "sliced": lambda t: t[::2, :, ::3],
    }
    view = views[layout]
    assert not differ(seen(view(x)), seen(view(x.clone())))
    assert differ(seen(view(x)), seen(view(x + 1)))


def test_of_a_tensor_on_a_device_shape_and_dtype_count() -> None:
    one, other = torch.empty(3, device="meta"), torch.empty(4, device="meta")
    assert is_partial(seen(one))
    assert differ(seen(one), seen(other))
    assert differ(seen(one), seen(one.to(torch.float16)))
    assert not differ(seen(one), seen(torch.ones(3))), "here and there: nothing says that they differ"
    assert not is_partial(seen(torch.ones(3)))


def test_what_is_not_looked_into() -> None:
    class Text(str):
        pass

    class Image(torch.Tensor):
        pass

    assert checksum_of(Text("a")) is None
    assert checksum_of([object(), None]) is None
    assert is_partial(seen([object(), 1]))
    image = torch.ones(3).as_subclass(Image)
    assert differ(seen(image), seen(torch.ones(4).as_subclass(Image)))
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    assert is_partial(seen(freed))
    assert is_partial(seen(torch.eye(3).to_sparse()))
    assert not is_partial(seen(torch.ones(3, dtype=torch.complex64).conj()))


def test_nothing_is_copied_whole_or_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loud(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("its own code was run")

    assert seen(Loud([1, 2])) == seen([1, 2])
    wide = torch.zeros(1).expand(1 << 40)  # four terabytes, if it were copied
    assert not differ(seen(wide), seen(torch.zeros(1).expand(1 << 40)))


def row_ends(begin: int, rows: int = 64, row: int = 1024) -> torch.Tensor:
    """Rows of zeros, as padded sequences are, but for what comes behind byte ``begin`` of each."""
    batch = torch.zeros(rows, row, dtype=torch.uint8)
    batch[:, begin:] = torch.randint(1, 255, (rows, row - begin), generator=torch.Generator().manual_seed(2))
    return batch


@pytest.mark.parametrize("begin", [0, 500, 900, 960])
@pytest.mark.parametrize("row", [1000, 1024, 4096])
def test_rows_that_are_padding_for_the_most_part(begin: int, row: int) -> None:
    """No length of a row keeps step with what is looked at."""
    batch = row_ends(begin * row // 1024, row=row)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t.contiguous().numpy(), lambda t: t.t().numpy()):
        assert differ(seen(view(batch)), seen(view(torch.zeros_like(batch))))
    text = bytes(batch.numpy().tobytes())
    assert differ(seen(text), seen(bytes(len(text))))
    assert differ(seen(text.decode("latin-1")), seen("\0" * len(text)))
    assert differ(seen(list(text)), seen([0] * len(text)))


def test_where_a_tensor_begins_in_memory_does_not_count() -> None:
    memory = torch.randint(255, (100_008,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    assert not differ(seen(memory[3:100_003]), seen(memory[3:100_003].clone()))


def test_shapes_of_all_tensors_count() -> None:
    batch = [{"x": torch.zeros(5, 2), "y": [torch.zeros(3)]} for _ in range(60)]
    other = [{**item, "y": [torch.zeros(3 + (index == 17))]} for index, item in enumerate(batch)]
    assert differ(seen(batch), seen(other))
