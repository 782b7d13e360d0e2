"""Dtypes x layouts x roles: saved and restored bit for bit, or refused by name at attach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from table import ALL, PLACES, REFUSED, ROLES, STORED, Holder, bits, layouts_for, memory

import lightck
from lightck.errors import StateValueError
from lightck.pool.format.layout import is_dense

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize_per_tensor")


def test_every_dtype_of_torch_is_in_the_table():
    assert set(ALL) == STORED | REFUSED.keys(), "a new dtype needs a line in ITEM_NBYTES or in REFUSED"


def holder(dtype: torch.dtype, seed: int, *, contiguous: bool = False) -> Holder:
    """Each layout in each role, over memory of its own."""

    def tensors(role: str) -> dict[str, torch.Tensor]:
        made = {
            name: view(memory(dtype, seed + 100 * i + ROLES.index(role)))
            for i, (name, view) in enumerate(layouts_for(dtype).items())
        }
        return {name: torch.empty(t.shape, dtype=t.dtype) for name, t in made.items()} if contiguous else made

    return Holder(tensors)


def saved(pool: Any, dtype: torch.dtype) -> Holder:
    live = holder(dtype, seed=1)
    with lightck.attach(live.model, pool, optimizer=live.optimizer, state={"box": live.box}) as session:
        for _ in range(2):
            live.optimizer.step()
            session.end_step()
    return live


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


@pytest.mark.parametrize("name", sorted(STORED))
def test_round_trip_in_place_keeps_the_live_layout(pool, name):
    live = saved(pool, ALL[name])
    other = holder(ALL[name], seed=2)
    strides = {key: tensor.stride() for key, tensor in other.held().items()}
    lightck.recover(pool, **other.parts)
    assert_same(other.held(), live.held())
    kept = {key: tensor.stride() for key, tensor in other.held().items() if not key.startswith("s_")}
    assert kept == {key: strides[key] for key in kept}


@pytest.mark.parametrize("name", sorted(STORED))
def test_round_trip_into_another_layout(pool, name):
    live = saved(pool, ALL[name])
    other = holder(ALL[name], seed=2, contiguous=True)
    lightck.recover(pool, **other.parts)
    assert_same(other.held(), live.held())
    assert all(t.is_contiguous() for key, t in other.held().items() if not key.startswith("s_"))


@pytest.mark.parametrize("name", sorted(STORED))
def test_loaded_tensors_have_the_saved_order_of_dimensions(pool, name):
    live = saved(pool, ALL[name])
    checkpoint = lightck.recover(pool)
    found = {n: t for n, t in checkpoint.model.items() if n != "clock"} | checkpoint.optimizer["state"][0]
    found |= {f"s_{n}": t for n, t in checkpoint.state["box"]["value"].items()}
    wanted = live.held()
    assert_same(found, wanted)
    for key, tensor in found.items():
        assert is_dense(tensor.shape, tensor.stride()), key
        if is_dense(wanted[key].shape, wanted[key].stride()) and tensor.nbytes > 4096 and not wanted[key].is_conj():
            assert tensor.stride() == wanted[key].stride(), key


# -- every pattern of bits -------------------------------------------------------------------------------------------

_FLOATS = {4: (8, 23), 8: (11, 52)}


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of small dtypes; of others zeros, denormals, infinities, NaNs of both kinds, and random ones."""
    parts = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if parts <= 2:
        whole = torch.arange(1 << 8 * parts, dtype=torch.int64).to((torch.uint8, torch.uint16)[parts - 1])
    else:
        exponent, mantissa = _FLOATS[parts]
        top = ((1 << exponent) - 1) << mantissa
        mantissas = (0, 1, (1 << mantissa) - 1, 1 << (mantissa - 1), (1 << (mantissa - 1)) + 5, (1 << (mantissa - 2)))
        signs = (0, 1 << (8 * parts - 1))
        numbers = [sign | kind | low for sign in signs for kind in (0, top) for low in mantissas]
        raw = torch.tensor([n - (1 << 64) if n >= 1 << 63 else n for n in numbers], dtype=torch.int64)
        noise = torch.randint(-(1 << 63), (1 << 63) - 1, (1000,), generator=torch.Generator().manual_seed(3))
        whole = torch.cat([raw, noise]) if parts == 8 else torch.cat([raw, noise]).to(torch.int32)
    if dtype.is_complex:  # each real part with the next imaginary part
        whole = torch.stack([part.view(torch.uint8).view(-1, parts) for part in (whole, whole.roll(1))], 1)
    return whole.contiguous().view(torch.uint8).reshape(-1).view(dtype)


@pytest.mark.parametrize("name", sorted(STORED))
def test_every_pattern_of_bits_survives(pool, name):
    plain = patterns(ALL[name])
    rows = plain.view(torch.uint8).view(plain.numel(), -1)
    forms = {"plain": plain, "gaps": torch.cat([rows, rows], 1).reshape(-1).view(plain.dtype)[::2]}
    if name in ("complex64", "complex128"):
        forms["conjugated"] = plain.conj()
    live = Holder(lambda role: {key: tensor.clone() if key == "plain" else tensor for key, tensor in forms.items()})
    with lightck.attach(live.model, pool, optimizer=live.optimizer, state={"box": live.box}):
        live.optimizer.step()
    other = Holder(lambda role: {key: memory(plain.dtype, 5, plain.numel()) for key in forms})
    lightck.recover(pool, **other.parts)
    assert_same(other.held(), live.held())
    assert bits(plain) == rows.numpy().tobytes(), "the library changed what it was given"


# -- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 9000], ids=["small", "large"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_dtype_is_named_with_reason_and_cure(pool, name, role, size):
    live = Holder(lambda r: {"odd": torch.empty(size, dtype=ALL[name])} if r == role else {})
    with pytest.raises(StateValueError) as caught:
        lightck.attach(live.model, pool, optimizer=live.optimizer, state={"box": live.box})
    message = str(caught.value)
    for words in (PLACES[role], name, *REFUSED[name]):
        assert words in message
    assert not pool.exists(), "nothing was made"
