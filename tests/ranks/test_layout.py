"""Rules for plain tensors that are parts: a tensor parallel training by hand, killed, resumed, and moved."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import die, everything, log_lines, run_ranks, values
from sampling import every_second
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import lightck
from lightck.errors import DriftError, LayoutError, LightckError, RankError
from lightck.layout import Flat, Fused, Layout, Padded, Replicated, Shard
from lightck.pool.format.layout import Entry
from lightck.pool.reader import open_pool

from .tensor_parallel import (
    RULES,
    VOCABULARY,
    Run,
    World,
    body,
    build,
    local_tensors,
    plain,
    train,
    wholes_by_hand,
)
from .trainings import PLAN
from .trainings import Net as DTensorNet

STEPS = 3
SOURCES = {"1 x 2": World(1, 2), "2 x 1": World(2, 1), "2 x 2": World(2, 2), "4 x 1": World(4, 1)}
TARGETS = {"1 x 1": World(1, 1), **SOURCES}


def same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def without_seen(found: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Without the buffer, which differs between data parallel ranks: another world takes that of the first ones."""
    return {key: value for key, value in found.items() if key[0] != "seen"}


@pytest.fixture(scope="module")
def trained() -> Iterator[dict[str, tuple[Path, list[Run]]]]:
    """World -> its pools, and what each of its ranks held at the end."""
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    yield {
        name: (folder / name.replace(" ", "-"), train(world, folder / name.replace(" ", "-"), STEPS))
        for name, world in SOURCES.items()
    }
    shutil.rmtree(folder)


# -- the same world ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "has_hooks"), every_second([World(2, 1), World(2, 2)], [True, False]))
def test_killed_ranks_go_on_bit_identically(pools, world, has_hooks):
    """Padding too: every byte that a rank holds is compared."""
    last = world.n_ranks - 1
    for kill in ((0, 4), (last, 7)):
        assert run_ranks(world.n_ranks, body(world, pools, 10, kill=kill, has_hooks=has_hooks))[kill[0]].is_killed
    for path in pools.glob("*.pool"):
        with closing(open_pool(path)) as reader:
            assert entries_with_parts(reader.entries) == {"embed", "qkv", "proj.weight", "seen"}
    runs, expected = train(world, pools, 10, seed=1, has_hooks=has_hooks), plain(world, 10)
    assert {run.began for run in runs} <= {5, 6, 7}
    assert all(run.exact for run in runs)
    for run, other in zip(runs, expected, strict=True):
        assert same(run.last, other.last)


def entries_with_parts(entries: Sequence[Entry]) -> set[str]:
    """Which tensors are parts, and their state too. A tensor has one entry, so none was predicted as another one."""
    assert len({one.name for one in entries}) == len(entries)
    found = set()
    for name in ("embed", "qkv", "proj.weight", "seen", "norm", "proj.bias"):
        of_name = [one for one in entries if f"/{name}" in one.name and not one.name.endswith("/step")]
        assert of_name
        assert len({one.pieces is None for one in of_name}) == 1, name
        found |= {name} if of_name[0].pieces is not None else set()
    return found


def test_the_space_for_optimizer_state_is_that_of_parts(pools):
    """Before the first update, when the state is only predicted."""
    train(World(2, 1), pools, 0)
    for path in pools.glob("*.pool"):
        with closing(open_pool(path)) as reader:
            assert sum(one.role == "optimizer" for one in reader.entries) >= 2 * 7
            assert entries_with_parts(reader.entries) == {"embed", "qkv", "proj.weight", "seen"}


def test_a_training_without_lightck_is_the_same(trained):
    for name, (_, runs) in trained.items():
        assert all(same(a.last, b.last) for a, b in zip(runs, plain(SOURCES[name], STEPS), strict=True)), name


# -- another world -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), every_second(SOURCES, TARGETS))
def test_another_world_holds_the_same_logical_tensors(trained, pools, old, new):
    source, target = SOURCES[old], TARGETS[new]
    shutil.copytree(trained[old][0], pools)
    expected = wholes_by_hand(source, [run.last for run in trained[old][1]])
    runs = train(target, pools, STEPS + 2, seed=1)
    assert {run.began for run in runs} == {STEPS}
    assert {run.exact for run in runs} == {old == new}
    found = wholes_by_hand(target, [run.first for run in runs])
    assert same(found if old != new else without_seen(found), expected if old != new else without_seen(expected))
    again = train(target, pools, STEPS + 2, seed=2)  # the pools of the new world
    assert all(run.exact for run in again)
    assert all(same(a.last, b.first) for a, b in zip(runs, again, strict=True))


@pytest.mark.parametrize(("old", "new"), [("1 x 2", "4 x 1"), ("4 x 1", "1 x 1"), ("1 x 2", "2 x 1")])
def test_padding_is_zero_in_another_layout(trained, pools, old, new):
    shutil.copytree(trained[old][0], pools)
    runs = train(TARGETS[new], pools, STEPS, seed=1)
    for key in ("", "exp_avg", "exp_avg_sq"):
        padded = torch.cat([run.first["embed.weight", key] for run in runs[: TARGETS[new].tp]])
        assert len(padded) > VOCABULARY
        assert padded[:VOCABULARY].any()
        assert not padded[VOCABULARY:].any()


def test_padding_goes_with_the_part(trained, pools):
    """2 x 1 to 2 x 2: each new rank holds what an old one held."""
    shutil.copytree(trained["2 x 1"][0], pools)
    runs, had = train(SOURCES["2 x 2"], pools, STEPS, seed=1), trained["2 x 1"][1]
    assert had[1].last["embed.weight", ""][VOCABULARY - 8 :].any()
    assert all(same(run.first, had[rank % 2].last) for rank, run in enumerate(runs))


# -- recover -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", SOURCES)
def test_recover_gives_the_whole_tensors(trained, old):
    pools, runs = trained[old]
    expected = wholes_by_hand(SOURCES[old], [run.last for run in runs])
    checkpoint = lightck.recover(pools)
    assert checkpoint.step == STEPS
    found = {(name, ""): value for name, value in checkpoint.model.items()}
    found |= {
        tuple(name.removeprefix("optimizer/").rsplit("/", 1)): checkpoint.tensor(name)
        for name in checkpoint.names
        if name.startswith("optimizer/")
    }
    assert same(found, expected)
    with lightck.recover(pools, lazy=True) as lazy:
        rows = lazy.read("model/qkv.weight", (6, 1), (5, 2))
    assert torch.equal(rows, expected["qkv.weight", ""][6:11, 1:3])


@pytest.mark.parametrize("new", TARGETS)
def test_recover_fills_the_parts_of_a_model(trained, new):
    target = TARGETS[new]

    def run(rank: int) -> list[Any]:
        found = []
        for pools, _ in trained.values():
            model, optimizer = build(target, rank, seed=1)
            lightck.recover(pools, model, optimizer, layout=target.layout(rank))
            found.append(local_tensors(model, optimizer))
        return found

    of_ranks = values(run_ranks(target.n_ranks, run))
    for number, (old, (_, runs)) in enumerate(trained.items()):
        expected = wholes_by_hand(SOURCES[old], [one.last for one in runs])
        assert same(wholes_by_hand(target, [one[number] for one in of_ranks]), expected), f"{old} to {new}"


def test_a_process_alone_fills_the_parts_of_one_rank_after_the_other(trained):
    pools, runs = trained["2 x 2"]
    world, found = World(4, 1), []
    for rank in range(4):
        model, optimizer = build(world, rank, seed=1)
        lightck.recover(pools, model, optimizer, layout=world.layout(rank))
        found.append(local_tensors(model, optimizer))
    assert same(wholes_by_hand(world, found), wholes_by_hand(SOURCES["2 x 2"], [one.last for one in runs]))


def test_padding_that_differs_between_data_parallel_ranks_is_no_difference(pools):
    """It belongs to no tensor. (It is memory that was not set, for example.)"""
    world = World(2, 2)

    def run(rank: int) -> int:
        model, optimizer = build(world, rank)
        with torch.no_grad():
            model.embed.weight[-2:] += rank if rank % 2 else 0
        with lightck.attach(model, pools, optimizer=optimizer, layout=world.layout(rank), timeout=60) as session:
            session.flush()
            return session.step

    values(run_ranks(4, run))
    assert [one.began for one in train(World(2, 1), pools, 1)] == [0, 0]


# -- what is refused ---------------------------------------------------------------------------------------------------


def errors_of(world: World, pools: Path, rules: Any) -> list[BaseException]:
    """What attach raises on each rank. Nothing live and no pool is changed."""

    def run(rank: int) -> BaseException | None:
        model, optimizer = build(world, rank)
        before = local_tensors(model, optimizer)
        held = {path.name: path.read_bytes() for path in pools.glob("*.pool")}
        try:
            layout = rules(rank)
            lightck.attach(model, pools, optimizer=optimizer, resume=True, layout=layout, timeout=60)
        except LightckError as err:
            assert same(before, local_tensors(model, optimizer))
            assert held == {path.name: path.read_bytes() for path in pools.glob("*.pool")}
            return err
        return None

    return values(run_ranks(world.n_ranks, run))


REFUSED = [
    ({**RULES, r"nobody\..*": Shard(0)}, r"The rule 'nobody.* of layout= matches no parameter"),
    ({**RULES, r".*\.weight": Shard(0)}, r"Two rules of layout= match the tensor '\w+\.weight'"),
    ({**RULES, r"qkv\.(weight|bias)": Fused(0, (8, 4, 3))}, r"the tensor 'qkv\.weight'.*3 cannot be divided"),
    ({**RULES, r"qkv\.(weight|bias)": Fused(0, (4, 2, 2))}, r"the tensor 'qkv\.weight', .* shape \[8, 6\]"),
    ({**RULES, r"embed\.weight": Padded(0, 50257)}, r"does not fit the tensor 'embed\.weight'.*and not 50257"),
    ({**RULES, r"head\.weight": Shard(0)}, r"'model/embed\.weight' and 'model/head\.weight' are tied"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "words"), REFUSED)
@pytest.mark.parametrize("is_new", [True, False])
def test_rules_that_do_not_fit_are_refused_on_all_ranks(trained, pools, rules, words, is_new):
    world = World(2, 1)
    if not is_new:
        shutil.copytree(trained["2 x 1"][0], pools)
    for error in errors_of(world, pools, lambda rank: world.layout(rank, rules)):
        assert isinstance(error, (LayoutError, RankError))
        assert re.search(words, str(error))
    model, _ = build(world, 0)
    if not is_new:
        with pytest.raises(LayoutError, match=words):
            lightck.recover(pools, model, layout=world.layout(0, rules))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (lambda rank: World(2, 1).layout(rank) if rank else None, "different layouts: no layout and"),
        (lambda rank: World(2, 1).layout(rank, {**RULES, r"proj\.bias": [Replicated(), Shard(0)][rank]}), "different"),
        (lambda rank: World(2, 1).layout(0), "No process has the place 1"),
    ],
)  # fmt: skip
def test_ranks_with_different_layouts_are_refused(pools, layout, words):
    for error in errors_of(World(2, 1), pools, layout):
        assert isinstance(error, RankError)
        assert words in str(error)


def test_ranks_that_recover_with_different_layouts_are_refused(trained):
    def run(rank: int) -> str:
        model, _ = build(World(2, 1), rank)
        with pytest.raises(RankError) as caught:
            lightck.recover(trained["2 x 1"][0], model, layout=World(2, 1).layout(0))
        return str(caught.value)

    assert all("No process has the place 1" in text for text in values(run_ranks(2, run)))


def test_a_rule_for_a_dtensor_is_refused(pools):
    def run(rank: int) -> str:
        model = DTensorNet()
        parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
        optimizer = torch.optim.AdamW(model.parameters())
        layout = Layout({r"first\.weight": Shard(0)}, rank, 2)
        with pytest.raises((LayoutError, RankError)) as caught:
            lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60)
        return str(caught.value)

    assert all("'model/first.weight', which is a DTensor" in text for text in values(run_ranks(2, run)))


def test_a_layout_without_ranks_is_refused(trained, tmp_path):
    model, optimizer = build(World(1, 1), 0)
    layout = World(1, 1).layout(0)
    pool = tmp_path / "pool"
    with pytest.raises(LayoutError, match="there is no group of ranks here"):
        lightck.attach(model, pool, optimizer=optimizer, layout=layout)
    assert not pool.exists()
    lightck.attach(model, pool, optimizer=optimizer).close()
    with pytest.raises(LayoutError, match="there is no group of ranks here"):
        lightck.recover(pool, model, layout=layout)
    with pytest.raises(LayoutError, match="a recover without a model"):
        lightck.recover(trained["2 x 1"][0], layout=layout)
    with pytest.raises(TypeError, match=r"layout is a dict. Pass lightck\.layout\.Layout"):
        lightck.recover(pool, model, layout={})


def test_a_rank_that_is_saved_alone_has_no_layout(pools, tmp_path):
    def run(rank: int) -> str:
        model, optimizer = build(World(2, 1), rank)
        with pytest.raises(LayoutError) as caught:
            layout = World(2, 1).layout(rank)
            lightck.attach(model, tmp_path / f"{rank}", optimizer=optimizer, group=False, layout=layout)
        return str(caught.value)

    assert all("no group of ranks" in text for text in values(run_ranks(2, run)))


def test_another_vocabulary_is_refused(trained, pools):
    shutil.copytree(trained["4 x 1"][0], pools)
    rules = {**RULES, r"embed\.weight": Padded(0, VOCABULARY - 1)}
    for error in errors_of(World(2, 1), pools, lambda rank: World(2, 1).layout(rank, rules)):
        assert isinstance(error, (DriftError, RankError))
        assert "model/embed.weight: [10, 6] saved, [9, 6] live" in str(error)


def test_parts_without_the_layout_that_they_were_saved_with(trained, pools):
    """A plain tensor without a rule counts as whole: its shape says that it is not."""
    shutil.copytree(trained["2 x 1"][0], pools)
    for error in errors_of(World(2, 1), pools, lambda rank: None):
        assert isinstance(error, (DriftError, RankError))
        assert "saved, [8, 6] live" in str(error)


# -- what the ranks write ----------------------------------------------------------------------------------------------


def test_ranks_with_a_layout_divide_nothing(pools):
    """A share would be taken for a part. The rules say that nothing is cut, and DistributedDataParallel is there."""

    def run(rank: int) -> tuple[int, bool]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        layout = Layout({".*": Replicated()}, rank, 2)
        with lightck.attach(wrapped, pools, optimizer=optimizer, layout=layout, timeout=60) as session:
            wrapped(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            session.flush()
        torch.distributed.barrier()  # before it, the other rank may have step 0 only
        return session.step, torch.equal(lightck.recover(pools).model["weight"], model.weight)

    assert values(run_ranks(2, run)) == [(1, True)] * 2
    assert all(one.size == (64, 64) for one in lightck.recover(pools).pieces("model/weight"))


# -- flat tensors ------------------------------------------------------------------------------------------------------

N_FLAT = 23


class FlatNet(nn.Module):
    """Holds a range of one flat parameter, and padding."""

    def __init__(self, ranks: int, rank: int, value: float = 0.0) -> None:
        super().__init__()
        each = -(-N_FLAT // ranks)
        self.start, self.stop = min(rank * each, N_FLAT), min((rank + 1) * each, N_FLAT)
        numbers = torch.arange(self.start, self.start + each) + 1.0
        self.flat = nn.Parameter(numbers if value == 0 else torch.full((each,), value))

    def layout(self, ranks: int, rank: int) -> Layout:
        return Layout({"flat": Flat((N_FLAT,), self.start, self.stop)}, rank, ranks)


@pytest.mark.parametrize("new", every_second([2, 3, 4]))
def test_flat_ranges_go_to_another_number_of_ranks(pools, new):
    def save(rank: int) -> torch.Tensor:
        model = FlatNet(3, rank)
        optimizer = torch.optim.AdamW(model.parameters())
        with lightck.attach(model, pools, optimizer=optimizer, layout=model.layout(3, rank), timeout=60) as session:
            model.flat.pow(2).sum().backward()
            optimizer.step()
            session.flush()
        return torch.cat([model.flat.detach(), optimizer.state[model.flat]["exp_avg"]])

    def load(rank: int) -> list[torch.Tensor]:
        model = FlatNet(new, rank, value=7.0)
        optimizer = torch.optim.AdamW(model.parameters())
        lightck.recover(pools, model, optimizer, layout=model.layout(new, rank))
        return [model.flat.detach(), optimizer.state[model.flat]["exp_avg"]]

    saved = [one.chunk(2) for one in values(run_ranks(3, save))]
    loaded = values(run_ranks(new, load))
    for key in range(2):
        expected = torch.cat([one[key] for one in saved])[:N_FLAT]
        assert torch.equal(torch.cat([one[key] for one in loaded])[:N_FLAT], expected)
    assert torch.equal(lightck.recover(pools).model["flat"], torch.cat([one[0] for one in saved])[:N_FLAT])


def test_flat_ranges_with_a_hole_are_refused(pools):
    def run(rank: int) -> str:
        model = FlatNet(2, rank)
        layout = Layout({"flat": Flat((N_FLAT,), *[(0, 12), (13, 23)][rank])}, rank, 2)
        with pytest.raises(RankError) as caught:
            lightck.attach(model, pools, optimizer=torch.optim.AdamW(model.parameters()), layout=layout, timeout=60)
        return str(caught.value)

    assert all("No rank holds the elements from 12 on of the tensors that match 'flat'" in text
               for text in values(run_ranks(2, run)))  # fmt: skip


WIDE = (5, 3, 4)
"""Neither the number of ranks nor a row divides its elements."""


class FlatWideNet(nn.Module):
    """Holds a range of each of three parameters of several dimensions, as a flat tensor with padding: what ZeRO-3
    keeps. ``large``: also of one with several blocks."""

    def __init__(self, ranks: int, rank: int, seed: int, *, large: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shapes = {"wide": WIDE, "matrix": (7, 2), "scalar": ()} | ({"large": (1100, 700)} if large else {})
        self.ranges = {}
        for name, shape in self.shapes.items():
            n = torch.Size(shape).numel()
            each = -(-n // ranks)
            self.ranges[name] = min(rank * each, n), min((rank + 1) * each, n)
            held = torch.randn(shape).reshape(-1)[slice(*self.ranges[name])]
            padding = torch.full((each + 2 - len(held),), 99.0)  # also in the middle, if all tensors are joined
            self.register_parameter(name, nn.Parameter(torch.cat([held, padding])))

    def layout(self, ranks: int, rank: int) -> Layout:
        return Layout({name: Flat(shape, *self.ranges[name]) for name, shape in self.shapes.items()}, rank, ranks)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        sum(p.pow(3).sum() for p in self.parameters()).backward()
        optimizer.step()


def train_flat(pools: Path, ranks: int, steps: int, seed: int, *, kill: int | None = None, large: bool = False) -> Any:
    def run(rank: int) -> Any:
        model = FlatWideNet(ranks, rank, seed, large=large)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        given = {"optimizer": optimizer, "layout": model.layout(ranks, rank), "resume": True, "timeout": 60}
        with lightck.attach(model, pools, **given) as session:
            began, first = session.step, local_tensors(model, optimizer)
            for step in range(began, steps):
                if kill == step and rank == 0:
                    die()
                model.update(optimizer)
                session.end_step()
            exact = session.recovered.exact if session.recovered is not None else None
        return began, first, local_tensors(model, optimizer), exact

    return run_ranks(ranks, run)


def flat_wholes(locals_: Sequence[dict[Any, torch.Tensor]], shapes: dict[str, Any]) -> dict[Any, torch.Tensor]:
    """By hand, with nothing of lightck."""
    found = {}
    for (name, key), first in locals_[0].items():
        n = torch.Size(shapes[name]).numel()
        each = -(-n // len(locals_))
        joined = torch.cat([one[name, key][:each] for one in locals_]) if first.ndim else first
        found[name, key] = joined[:n].reshape(shapes[name]) if first.ndim else joined
    return found


@pytest.mark.parametrize("new", every_second([1, 2, 3, 4]))
def test_flat_ranges_of_several_dimensions_are_killed_resumed_and_moved(pools, new):
    assert train_flat(pools, 3, 8, 0, kill=4)[0].is_killed
    resumed = values(train_flat(pools, 3, 8, 1))
    assert {one[0] for one in resumed} <= {3, 4}
    alone = values(train_flat(pools.with_name("never-killed"), 3, 8, 0))
    shutil.rmtree(pools.with_name("never-killed"))
    assert all(same(one[2], other[2]) for one, other in zip(resumed, alone, strict=True)), "padding too"
    shapes = FlatWideNet(1, 0, 0).shapes
    expected = flat_wholes([one[2] for one in resumed], shapes)
    whole = lightck.recover(pools)
    for (name, key), value in expected.items():
        assert torch.equal(whole.tensor(f"optimizer/{name}/{key}" if key else f"model/{name}"), value), (name, key)
    with lightck.recover(pools, lazy=True) as lazy:
        box = lazy.read("model/wide", (1, 1, 1), (4, 2, 3))
    assert torch.equal(box, expected["wide", ""][1:5, 1:3, 1:4])
    moved = values(train_flat(pools, new, 8, 2))
    assert {one[0] for one in moved} == {8}
    assert {one[3] for one in moved} == {new == 3}
    assert same(flat_wholes([one[1] for one in moved], shapes), expected)


@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_flat_ranges_that_overlap_must_hold_the_same_there(pools, difference):
    """The elements 6 and 7 of 12; in the middle of a row."""

    def run(rank: int) -> None:
        model = nn.ParameterDict({"flat": torch.arange(12.0)[[slice(0, 8), slice(6, 12)][rank]]})
        with torch.no_grad():
            model["flat"][0] += difference * rank
        layout = Layout({"flat": Flat((4, 3), *[(0, 8), (6, 12)][rank])}, rank, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60).close()

    values(run_ranks(2, run))
    whole = nn.ParameterDict({"flat": torch.zeros(4, 3)})
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    if difference:
        with pytest.raises(RankError, match="model/flat"):
            lightck.attach(whole, pools, optimizer=optimizer, resume=True)
        assert not whole["flat"].any()
    else:
        lightck.attach(whole, pools, optimizer=optimizer, resume=True).close()
        assert torch.equal(whole["flat"], torch.arange(12.0).view(4, 3))


def test_flat_ranges_with_many_blocks_go_to_columns_and_back(pools):
    """A box of a range begins and ends in the middle of a block. As ranks with columns hold them, and flat again."""
    saved = values(train_flat(pools, 3, 1, 0, large=True))
    shapes = FlatWideNet(1, 0, 0, large=True).shapes
    expected = flat_wholes([one[2] for one in saved], shapes)

    def with_columns(rank: int) -> Any:
        model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items() if name != "large"})
        model["large"] = nn.Parameter(torch.zeros(1100, 350))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        layout = Layout({"large": Shard(1)}, rank, 2)
        with lightck.attach(model, pools, optimizer=optimizer, layout=layout, resume=True, timeout=60):
            return local_tensors(model, optimizer)

    columns = values(run_ranks(2, with_columns))
    for key in ("", "exp_avg", "exp_avg_sq"):
        assert torch.equal(torch.cat([one["large", key] for one in columns], 1), expected["large", key])
        assert all(torch.equal(one["wide", key], expected["wide", key]) for one in columns)
    back = values(train_flat(pools, 2, 1, 3, large=True))
    assert same(flat_wholes([one[1] for one in back], shapes), expected)


# -- with DTensors -----------------------------------------------------------------------------------------------------


def test_parts_of_dtensors_and_parts_by_rules_are_the_same(pools):
    """Saved with DTensors, loaded by rules; and a rank that goes on so has a pool that DTensors load."""
    rules = {r"first\..*": Shard(0), r"last\.weight": Shard(1)}

    def with_dtensors(seed: int, steps: int) -> Any:
        torch.manual_seed(seed)
        model = DTensorNet()
        parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
        optimizer = torch.optim.AdamW(model.parameters())
        with lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60) as session:
            for _ in range(steps):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                session.end_step()
        return everything(model, optimizer)

    def with_rules(rank: int) -> Any:
        model = DTensorNet()
        for name, dim in (("first.weight", 0), ("first.bias", 0), ("last.weight", 1)):
            module, _, key = name.partition(".")
            whole = model.get_parameter(name).detach()
            setattr(getattr(model, module), key, nn.Parameter(torch.zeros_like(whole.chunk(2, dim)[rank])))
        optimizer = torch.optim.AdamW(model.parameters())
        layout = Layout(rules, rank, 2)
        options = {"optimizer": optimizer, "resume": True, "layout": layout, "timeout": 60}
        with lightck.attach(model, pools, **options) as session:
            assert session.step == 2
            found = everything(model, optimizer)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            session.end_step()
        return found, everything(model, optimizer)

    saved = values(run_ranks(2, lambda rank: with_dtensors(0, 2)))
    loaded = values(run_ranks(2, with_rules))
    back = values(run_ranks(2, lambda rank: with_dtensors(1, 0)))
    for rank in range(2):
        assert all(map(torch.equal, saved[rank], loaded[rank][0]))
        assert all(map(torch.equal, loaded[rank][1], back[rank]))


def test_a_parameter_without_a_rule_that_differs_is_named(pools):
    def body(rank: int) -> list[str]:
        model = nn.ModuleDict({"up": nn.Linear(3, 2), "down": nn.Linear(2, 3)})
        for p in model["up"].parameters():
            nn.init.ones_(p)
        nn.init.constant_(model["down"].weight, rank)
        nn.init.zeros_(model["down"].bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layout = Layout({r"up\.(weight|bias)": Shard(0)}, rank=rank, size=2)
        with log_lines() as lines:
            lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60).close()
        return lines

    lines = values(run_ranks(2, body))[0]
    assert any("no rule for model/down.weight" in line for line in lines)


def test_a_corrected_rule_names_the_tensors_that_it_moves(pools):
    def body(rank: int, rule: Any) -> tuple[list[str], Any]:
        model = nn.Linear(3, 4)
        nn.init.constant_(model.weight, rank)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layout = Layout({"weight": rule}, rank=rank, size=2)
        with log_lines() as lines:
            session = lightck.attach(model, pools, optimizer=optimizer, layout=layout, resume=True, timeout=60)
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            session.close()
        return lines, session.recovered

    values(run_ranks(2, lambda rank: body(rank, Shard(0))))
    lines, recovered = values(run_ranks(2, lambda rank: body(rank, Fused(0, (4, 4)))))[0]
    assert not recovered.exact
    assert "layout= now gives each rank another part of model/weight" in recovered.reason
    assert any("if the old rule was wrong" in line for line in lines)


def test_a_pattern_that_is_no_regular_expression_is_named():
    with pytest.raises(LayoutError, match=r"The pattern '\(' of layout= is no regular expression"):
        Layout({"(": Shard(0)}, rank=0, size=1)
