"""``lightck diff``: equal means equal in bits, and each difference is found, measured and shown with its path."""

from __future__ import annotations

import math

import pytest
import torch
from calls import call, call_json
from toys import adam, net, pool_with, train

import lightck
from lightck.cli import compare


def saved(path, value=None, model=None, lr=0.05, **options):
    """Make a pool with one step of a fixed training that has ``value`` in its state."""
    model = net() if model is None else model
    optimizer = adam(model, lr)

    class Holder:
        def state_dict(self):
            return {"value": value}

        def load_state_dict(self, state):
            pass

    with lightck.attach(model, path, optimizer=optimizer, state={"mine": Holder()}, **options):
        train(model, optimizer, 1)
    return path


def values(facts):
    return {v["path"]: v["change"] for v in facts["values"]}


def test_two_pools_of_the_same_training_are_equal(folder):
    a, b = saved(folder / "a"), saved(folder / "b")
    result = call("diff", a, b)
    assert result.exit_code == 0
    assert "EQUAL, bit for bit" in result.stdout


def test_two_steps_differ_in_weights_state_and_counters(good):
    status, facts = call_json("diff", good, "--steps", 2, 4)
    assert status == 1
    assert (facts["a"]["step"], facts["b"]["step"]) == (2, 4)
    assert values(facts)["step"] == "2 -> 4"
    assert {t["tensor"] for t in facts["tensors"]} >= {"model/0.weight", "optimizer/0.weight/exp_avg"}
    assert call("diff", good, "--steps", 4, 4).exit_code == 0


def test_distance_is_that_of_the_tensors(good):
    one, two = (lightck.recover(good, step=step).model["0.weight"].double() for step in (3, 4))
    _, facts = call_json("diff", good, "--steps", 3, 4)
    found = next(t["distance"] for t in facts["tensors"] if t["tensor"] == "model/0.weight")
    assert found["elements"] == one.numel()
    assert found["differing"] == int((one != two).sum())
    assert found["max_abs"] == float((one - two).abs().max())
    assert found["max_rel"] == float(((one - two).abs() / torch.maximum(one.abs(), two.abs())).max())


def test_one_pool_without_steps_is_a_usage_error(good):
    result = call("diff", good)
    assert result.exit_code == 2
    assert "--steps M N" in result.stderr


def test_tensors_that_came_went_or_changed_their_kind(folder):
    a = saved(folder / "a", model=torch.nn.Sequential(torch.nn.Linear(4, 2)))
    b = saved(folder / "b", model=torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False)))
    _, facts = call_json("diff", a, b)
    changes = {t["tensor"]: t["change"] for t in facts["tensors"]}
    assert changes["model/0.weight"] == "shape (2, 4) -> (3, 4)"
    assert changes["model/0.bias"] == "only in A"
    _, facts = call_json("diff", b, a)
    assert {t["tensor"]: t["change"] for t in facts["tensors"]}["model/0.bias"] == "only in B"


def test_a_learning_rate_and_a_group_are_found_by_path(folder):
    a, b = saved(folder / "a", lr=0.05), saved(folder / "b", lr=0.06)
    assert values(call_json("diff", a, b)[1])["optimizer/param_groups/0/lr"] == "0.05 -> 0.06"


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (1, 2, "1 -> 2"),
        (1, 1.0, "1 -> 1.0"),
        (0.0, -0.0, "0.0 -> -0.0"),
        ("x", None, "'x' -> None"),
        ([1, 2], [1, 2, 3], "2 items -> 3 items"),
        ({1, 2}, {1, 3}, "set of 2 -> set of 2"),
        (b"a", b"b", "differs"),
        (torch.ones(3), torch.zeros(3), "3 of 3 elements differ, by at most 1"),
        (torch.ones(3), torch.ones(2), "float32 tensor of shape (3,) -> float32 tensor of shape (2,)"),
        (torch.tensor(1.0), torch.tensor(2.0), "1.0 -> 2.0"),
    ],
)
def test_small_values_are_compared_by_type_and_bits(folder, one, other, said):
    _, facts = call_json("diff", saved(folder / "a", one), saved(folder / "b", other))
    assert values(facts) == {"state/mine/value": said}


@pytest.mark.parametrize("value", [math.nan, -0.0, (1, [2, {"x": b"y"}]), {1, 2}, torch.tensor([math.nan, 1.0])])
def test_equal_small_values_are_equal(folder, value):
    assert call("diff", saved(folder / "a", value), saved(folder / "b", value)).exit_code == 0


def test_keys_that_came_or_went(folder):
    a, b = saved(folder / "a", {"x": 1, "z": 1}), saved(folder / "b", {"y": 1, "z": 1})
    found = values(call_json("diff", a, b)[1])
    assert found == {"state/mine/value/x": "only in A", "state/mine/value/y": "only in B"}


def test_a_large_tensor_in_state_is_compared_as_a_tensor(folder):
    big = torch.arange(5000.0)
    other = big.clone()
    other[7] = math.nan
    status, facts = call_json("diff", saved(folder / "a", big), saved(folder / "b", other))
    assert status == 1
    [found] = facts["tensors"]
    assert found["tensor"] == "state/mine/value"
    assert (found["distance"]["differing"], found["distance"]["nan_a"], found["distance"]["nan_b"]) == (1, 0, 1)
    assert "NaN: 0 -> 1" in call("diff", folder / "a", folder / "b").stdout


def test_infinity_is_valid_json(folder):
    big = torch.ones(5000)
    other = big.clone()
    other[0] = math.inf
    _, facts = call_json("diff", saved(folder / "a", big), saved(folder / "b", other))
    assert facts["tensors"][0]["distance"]["max_abs"] == "inf"
    assert call("diff", folder / "a", folder / "b").exit_code == 1


def test_many_differences_are_cut_and_named_with_all(good):
    short, whole = call("diff", good, "--steps", 3, 4).stdout, call("diff", good, "--steps", 3, 4, "--all").stdout
    assert set(short.splitlines()) - {line for line in short.splitlines() if "more" in line} <= set(whole.splitlines())


# -- distance, by dtype ----------------------------------------------------------------------------------------------

FLOATS = [d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point and d.itemsize]
FLOATS = [d for d in FLOATS if d.itemsize * 8 in (8, 16, 32, 64) and "x2" not in str(d)]


@pytest.mark.parametrize("dtype", [*dict.fromkeys(FLOATS)], ids=str)
def test_floats_of_every_width(dtype):
    a = torch.tensor([1.0, 2.0, 4.0, 1.0]).to(dtype)
    b = torch.tensor([1.0, 2.0, 8.0, 2.0]).to(dtype)
    found = compare.distance(a, b)
    assert (found.differing, found.max_abs, found.max_rel) == (2, 4.0, 0.5)
    assert compare.distance(a, a.clone()).differing == 0


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "complex64",
        "complex128",
        "complex32",
    ],
)
def test_integers_and_complex_numbers(dtype):
    a, b = (torch.tensor(t).to(getattr(torch, dtype)) for t in ([1, 0, 1], [1, 1, 1]))
    found = compare.distance(a, b)
    assert (found.differing, found.max_abs, found.max_rel) == (1, 1.0, 1.0)


BITS = [torch.float4_e2m1fn_x2, torch.bits8, torch.bits16]


def differing_bits(folder, dtype, count):
    """Make two pools whose states differ in the first of ``count`` elements."""
    one = torch.zeros(count * dtype.itemsize, dtype=torch.uint8)
    other = one.clone()
    other[0] = 3
    return (saved(folder / name, value.view(dtype)) for name, value in (("a", one), ("b", other)))


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_what_torch_does_not_compute_with_is_compared_by_bits(folder, dtype):
    a, b = differing_bits(folder, dtype, 5000)
    status, facts = call_json("diff", a, b)
    assert status == 1
    unknown = dict.fromkeys(("max_abs", "max_rel", "nan_a", "nan_b"))
    assert [t["distance"] for t in facts["tensors"]] == [{"elements": 5000, "differing": 1, **unknown}]
    row = next(line for line in call("diff", a, b).stdout.splitlines() if line.startswith("state/mine/value"))
    assert row.split() == ["state/mine/value", "1", "of", "5,000", "-", "-"]
    assert call("diff", a, a).exit_code == 0


@pytest.mark.parametrize("count", [5, 1])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_the_same_in_small_state(folder, dtype, count):
    _, facts = call_json("diff", *differing_bits(folder, dtype, count))
    assert values(facts) == {"state/mine/value": f"1 of {count} elements differ"}


def test_signed_zero_differs_in_bits_only():
    found = compare.distance(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.differing, found.max_abs, found.max_rel) == (1, 0.0, 0.0)


def test_layouts_are_compared_by_element():
    a = torch.arange(24.0).reshape(1, 2, 3, 4)
    b = a.to(memory_format=torch.channels_last)
    assert compare.distance(a, b).differing == 0
    c = b.clone()
    c[0, 1, 2, 3] = 0
    assert compare.distance(b, c).differing == compare.distance(a, c).differing == 1
    assert compare.distance(torch.tensor(1.0), torch.tensor(3.0)).max_abs == 2
    assert compare.distance(torch.arange(8.0)[5::7], torch.tensor([6.0])).max_abs == 1
    assert compare.distance(torch.empty(0, 3), torch.empty(0, 3)).differing == 0


def test_chunks_add_up(monkeypatch):
    torch.manual_seed(3)
    a = torch.randn(1000)
    b = torch.where(torch.rand(1000) < 0.3, a + torch.randn(1000), a)
    whole = compare.distance(a, b)
    monkeypatch.setattr(compare, "_CHUNK", 7)
    assert compare.distance(a, b) == whole


def test_memory_is_bounded_by_the_tensors_not_the_checkpoint(folder, monkeypatch):
    """At most the two sides of one tensor are in memory at any time."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    pool = folder / "it"
    pool_model(pool, model)
    alive, most, load = [], [], compare.load_tensor

    def counted(source, name):
        import weakref

        tensor = load(source, name)
        alive.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(compare, "load_tensor", counted)
    assert call("diff", pool, "--steps", 1, 2).exit_code == 1
    assert len(most) > 40
    assert max(most) <= 3, "two, and one that is being let go"


def pool_model(path, model):
    optimizer = adam(model)
    with lightck.attach(model, path, optimizer=optimizer):
        train(model, optimizer, 2)


def test_the_matrix_s_pools_are_reproducible(folder):
    """The tests for equality assume this: the same toy training gives the same bits."""
    pool_with(folder / "a")
    pool_with(folder / "b")
    status, facts = call_json("diff", folder / "a", folder / "b")
    assert {t["tensor"] for t in facts["tensors"]} == set(), status
