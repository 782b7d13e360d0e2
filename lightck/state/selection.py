"""Which entries of a gradient are kept: those of largest magnitude.

What is kept depends on the gradient alone, and on no algorithm, thread or device: the magnitude of the k-th largest
entry is found exactly, and of the entries that have this magnitude, the first ones (in row-major order) are kept. So a
resumed training makes the same choice. Magnitudes are compared as integers: the bits of a floating-point number without
its sign grow with it, and NaN is larger than infinity.
"""

from __future__ import annotations

import torch

from lightck.state.device_transfers import is_dense_tensor

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
"""Dtype of a gradient -> that of the integers with the same bits."""
_DIGIT_BITS = 16
PART_NUMEL = 1 << 20
"""Elements that are looked at together."""
SMALL_NUMEL_MAX = 1 << 16
"""The largest number of elements among which ``torch.kthvalue`` finds the k-th largest magnitude. (For so few elements,
it would take longer to count them in 65,536 counters.)"""


def is_selectable(gradient: torch.Tensor) -> bool:
    """Whether entries can be chosen from a gradient: it is dense, and of a common floating-point dtype."""
    return type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.dtype in BITS


def keep_largest(gradient: torch.Tensor, k: int, residual: torch.Tensor | None = None) -> None:
    """Keep the ``k`` entries of largest magnitude of a gradient, and set the others to zero, in place. The gradient
    must be dense in memory (``is_dense_tensor``), and ``is_selectable``.

    ``residual``: of the shape and dtype of the gradient, contiguous. It is added to the gradient first, and then
    becomes what was set to zero."""
    assert is_dense_tensor(gradient)
    with torch.no_grad():
        gradient = gradient.detach()
        if residual is not None:
            gradient.add_(residual)
        flat = gradient.reshape(-1)  # a view, or a copy in row-major order
        kept = kept_entries(flat, k)
        for part in _slices(flat):
            if residual is not None:
                residual.view(-1)[part].copy_(flat[part]).masked_fill_(kept[part], 0)
            flat[part].masked_fill_(~kept[part], 0)
        if flat.data_ptr() != gradient.data_ptr():
            gradient.copy_(flat.view(gradient.shape))


def kept_entries(flat: torch.Tensor, k: int) -> torch.Tensor:
    """Return a mask of the ``k`` entries of largest magnitude of a tensor of one dimension."""
    kept = torch.ones_like(flat, dtype=torch.bool)
    if k >= flat.numel():
        return kept
    least, n_equal, n_kept = _kth_largest_magnitude(flat, k)
    for part in _slices(flat):
        magnitudes = _magnitudes(flat[part])
        torch.ge(magnitudes, least, out=kept[part])
        if n_kept < n_equal:
            equal = torch.nonzero(magnitudes == least).view(-1)
            kept[part][equal[n_kept:]] = False
            n_equal, n_kept = n_equal - len(equal), max(n_kept - len(equal), 0)
    return kept


def _kth_largest_magnitude(flat: torch.Tensor, k: int) -> tuple[int, int, int]:
    """Return the k-th largest magnitude as an integer, how many entries have it, and how many of these are among the
    ``k`` largest."""
    if flat.numel() <= SMALL_NUMEL_MAX:
        magnitudes = _magnitudes(flat)
        least = int(torch.kthvalue(magnitudes, flat.numel() - k + 1).values)
        n_above = int(torch.count_nonzero(magnitudes > least))
        return least, int(torch.count_nonzero(magnitudes == least)), k - n_above
    shift = 8 * flat.element_size() - _DIGIT_BITS
    counts = torch.zeros(1 << _DIGIT_BITS, dtype=torch.int64, device=flat.device)
    for part in _slices(flat):
        counts += _counts_of(_magnitudes(flat[part]) >> shift)
    digit, k = _digit_of(counts, k)
    if not shift:
        return digit, int(counts[digit]), k
    rest = []
    for part in _slices(flat):
        magnitudes = _magnitudes(flat[part])
        rest.append(magnitudes[magnitudes >> shift == digit])
    low, k = kth_largest(torch.cat(rest), k, shift - _DIGIT_BITS)
    least = digit << shift | low
    return least, int(sum(torch.count_nonzero(one == least) for one in rest)), k


def kth_largest(numbers: torch.Tensor, k: int, shift: int) -> tuple[int, int]:
    """Return the k-th largest number, and how many of the ``k`` largest numbers are equal to it. Only the lowest
    ``shift`` + 16 bits of the number are returned; the bits above must be the same in all numbers. The numbers must not
    be negative.

    It counts how often each value of the 16 bits from ``shift`` on occurs, which gives these bits of the result. Then
    it does the same with the next 16 bits, among the numbers that have these bits, and so on. So the time does not
    depend on the numbers."""
    found = 0
    while True:
        digits = (numbers >> shift) & ((1 << _DIGIT_BITS) - 1) if numbers.dtype != torch.int16 else numbers
        digit, k = _digit_of(_counts_of(digits), k)
        found |= digit << shift
        if not shift:
            return found, k
        numbers, shift = numbers[digits == digit], shift - _DIGIT_BITS


def _counts_of(digits: torch.Tensor) -> torch.Tensor:
    return torch.bincount(digits, minlength=1 << _DIGIT_BITS)


def _digit_of(counts: torch.Tensor, k: int) -> tuple[int, int]:
    """Return the k-th largest digit, if each digit ``d`` occurs ``counts[d]`` times, and how many of the ``k`` largest
    are equal to it."""
    at_least = counts.flip(0).cumsum(0).flip(0)
    digit = int(torch.count_nonzero(at_least >= k)) - 1
    return digit, k - int(at_least[digit] - counts[digit])


def _slices(flat: torch.Tensor) -> list[slice]:
    """Return slices that together are the whole. On a processor, what is computed of each stays in its cache."""
    numel = PART_NUMEL if flat.is_cpu else max(flat.numel(), 1)
    return [slice(start, start + numel) for start in range(0, flat.numel(), numel)]


def _magnitudes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(BITS[flat.dtype]) & torch.iinfo(BITS[flat.dtype]).max
