"""Pipeline stages: killed, resumed, and moved to other stages, to none, and back."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ranked import run_ranks, values
from sampling import every_second
from torch import nn

import lightck
from lightck.cli import main
from lightck.errors import DriftError, LayoutError, LightckError, RankError
from lightck.layout import Layout, Rename, Shard, rename

from .stages import LAYERS, Run, Stage, World, body, local_tensors, run_world, train, wholes_by_hand

STEPS = 3
SOURCES = {
    "1": World((5,)),
    "2": World((2, 5)),
    "3": World((1, 4, 5)),
    "2, with 2 tensor parallel": World((3, 5), tp=2),
}
TARGETS = {**SOURCES, "2, cut elsewhere": World((4, 5)), "2, with 2 data parallel": World((2, 5), dp=2)}


def same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.fixture(scope="module")
def trained() -> Iterator[dict[str, tuple[Path, list[Run]]]]:
    """World -> its pools, and what each of its ranks held at the end."""
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    found = {}
    for number, (name, world) in enumerate(SOURCES.items()):
        pools = folder / str(number)
        if world.n_ranks == 1:
            pools.mkdir()
            found[name] = pools, train(world, pools / "rank-00000-of-00001.pool", STEPS)
        else:
            found[name] = pools, train(world, pools, STEPS)
    yield found
    shutil.rmtree(folder)


@pytest.mark.parametrize("world", [World((2, 5)), World((1, 4, 5)), World((3, 5), tp=2), World((2, 5), dp=2)], ids=str)
def test_killed_stages_go_on_bit_identically(pools, world):
    last = world.n_ranks - 1
    for kill in ((0, 3), (last, 6)):
        assert run_world(world, body(world, pools, 9, kill=kill))[kill[0]].is_killed
    runs, never_killed = train(world, pools, 9, seed=1), train(world, None, 9)
    assert all(run.began in (4, 5, 6) and run.exact for run in runs)
    assert all(same(run.last, other.last) for run, other in zip(runs, never_killed, strict=True))


@pytest.mark.parametrize(("old", "new"), every_second(SOURCES, TARGETS))
def test_other_stages_hold_the_same_model(trained, pools, old, new):
    source, target = SOURCES[old], TARGETS[new]
    shutil.copytree(trained[old][0], pools)
    expected = wholes_by_hand(source, [run.last for run in trained[old][1]])
    runs = train(target, pools, STEPS + 2, seed=1)
    assert {run.began for run in runs} == {STEPS}
    assert {run.exact for run in runs} == {old == new and target.n_ranks > 1}
    assert same(wholes_by_hand(target, [run.first for run in runs]), expected)
    again = train(target, pools, STEPS + 2, seed=2)  # the pools of the new world
    assert all(run.exact for run in again)
    assert all(same(a.last, b.first) for a, b in zip(runs, again, strict=True))


def test_a_new_world_that_was_killed_at_once_is_loaded_again(trained, pools):
    """Its pools hold nothing but the copy, in which both names of the tied tensor are."""
    shutil.copytree(trained["2"][0], pools)
    first = train(TARGETS["1"], pools, STEPS, seed=1)
    second = train(TARGETS["1"], pools, STEPS, seed=2)
    assert same(first[0].last, second[0].first)
    third = train(TARGETS["3"], pools, STEPS, seed=3)
    expected = wholes_by_hand(SOURCES["2"], [run.last for run in trained["2"][1]])
    assert same(wholes_by_hand(TARGETS["3"], [run.first for run in third]), expected)


@pytest.mark.parametrize(("old", "new"), every_second(SOURCES, TARGETS))
def test_recover_fills_the_stages_of_a_model(trained, old, new):
    pools, runs = trained[old]
    target = TARGETS[new]

    def run(rank: int) -> Any:
        model, optimizer = target.build(rank, seed=1)
        lightck.recover(pools, model, optimizer, layout=target.layout(rank, model))
        return local_tensors(model, optimizer)

    expected = wholes_by_hand(SOURCES[old], [one.last for one in runs])
    together = values(run_world(target, run))
    assert same(wholes_by_hand(target, together), expected)
    alone = [run(rank) for rank in range(target.n_ranks)]  # a process alone, one rank after the other
    assert same(wholes_by_hand(target, alone), expected)


def test_what_reads_a_directory_reads_all_stages(trained, pools, tmp_path):
    shutil.copytree(trained["3"][0], pools)
    expected = wholes_by_hand(SOURCES["3"], [run.last for run in trained["3"][1]])
    params = {name: value for (name, key), value in expected.items() if not key and "calls" not in name}
    whole = dict(lightck.recover(pools).model)
    assert [whole.pop(f"layers.{number}._extra_state") for number in range(LAYERS)] == [STEPS] * LAYERS
    assert same(whole, params)
    with lightck.recover(pools, lazy=True) as lazy:
        rows = lazy.read("model/layers.4.linear.weight", (2, 1), (3, 2))
    assert torch.equal(rows, params["layers.4.linear.weight"][2:5, 1:3])
    run = CliRunner().invoke
    assert run(main, ["verify", str(pools)]).exit_code == 0
    shown = run(main, ["inspect", "--pieces", str(pools)]).output
    assert re.search(r"layers\.3\.linear\.weight +6x6 +rank 1", shown), shown
    assert re.search(r"model/embed\.weight +11x6 +ranks 0, 2", shown), shown
    assert run(main, ["export", str(pools), str(tmp_path / "it.pt")]).exit_code == 0
    exported = torch.load(tmp_path / "it.pt", weights_only=True)
    assert same({name: exported[name] for name in params}, params)
    assert run(main, ["reshard", str(pools), str(tmp_path / "new"), "--world", "2"]).exit_code == 0
    model, optimizer = World((5,)).build(0, seed=1)
    lightck.recover(tmp_path / "new", model, optimizer)
    assert same(local_tensors(model, optimizer), expected)
    moved = train(TARGETS["2"], tmp_path / "new", STEPS, seed=1)
    assert same(wholes_by_hand(TARGETS["2"], [one.first for one in moved]), expected)


# -- names -------------------------------------------------------------------------------------------------------------


def without_offset(model: Stage) -> list[Rename]:
    return model.renames()[1:]


def test_layers_without_an_offset_are_no_model(pools):
    """Joined by their local names, two stages would be one layer: the tensors have one name and other bytes."""
    runs = train(World((3, 5)), pools, 2, renames=without_offset)
    assert any("layers.0.linear.weight" in line and "rename" in line for line in runs[0].lines)
    assert train(World((3, 5)), pools, 2, seed=1, renames=without_offset)[0].exact
    model, optimizer = World((5,)).build(0)
    before = local_tensors(model, optimizer)
    with pytest.raises(RankError, match=r"layers\.0\.linear\.weight"):
        lightck.attach(model, pools, optimizer=optimizer, resume=True)
    assert same(local_tensors(model, optimizer), before)


def test_a_tied_tensor_that_differs_is_named(pools):
    def change(model: Stage, rank: int) -> None:
        if rank == 2:
            with torch.no_grad():
                model.head.weight[3, 2] += 1

    runs = train(World((1, 4, 5)), pools, 2, change=change)
    assert any("model/embed.weight" in line for line in runs[0].lines)
    assert all(run.exact for run in train(World((1, 4, 5)), pools, 2, seed=1)), "each stage has its own back"
    for ended in run_world(World((2, 5)), body(World((2, 5)), pools, 2)):
        assert isinstance(ended.error, RankError)
        assert "model/embed.weight" in str(ended.error)


def two_for_one(model: Stage) -> list[Rename]:
    return [rename(r"layers\.\d\.", "layers.0.")]


def nothing(model: Stage) -> list[Rename]:
    return [*model.renames(), rename("decoder", "encoder")]


def twice(model: Stage) -> list[Rename]:
    return [*model.renames(), rename("linear.weight", "fc.weight")]


REFUSED: list[tuple[Callable[[Stage], list[Rename]], str]] = [
    (two_for_one, r"the tensors 'layers\.0\.\S+' and 'layers\.1\.\S+' of this rank one name, 'layers\.0\."),
    (nothing, r"rename\('decoder', ...\) of layout= matches no tensor of this rank"),
    (twice, r"Two renames of layout= match the tensor 'layers\.0\.linear\.weight'"),
]


@pytest.mark.parametrize(("renames", "words"), REFUSED)
@pytest.mark.parametrize("is_new", [True, False])
def test_names_that_are_wrong_are_refused_on_all_ranks(trained, pools, renames, words, is_new):
    if not is_new:
        shutil.copytree(trained["2"][0], pools)
    world = World((2, 5))
    for ended in run_world(world, body(world, pools, 3, renames=renames)):
        assert isinstance(ended.error, (LayoutError, RankError)), ended.text
        assert re.search(words, str(ended.error)), ended.error
    model, optimizer = world.build(1)
    if not is_new:
        with pytest.raises(LayoutError, match=words):
            lightck.recover(pools, model, optimizer, layout=world.layout(1, model, renames(model)))


def test_tensors_that_no_rank_builds_are_named(trained, pools):
    """Nothing is changed: neither the live models nor the pools."""
    shutil.copytree(trained["3"][0], pools)
    held = {path.name: path.read_bytes() for path in pools.glob("*.pool")}

    def run(rank: int, recovers: bool) -> str:
        model = Stage(0, 2) if rank == 0 else Stage(3, LAYERS)  # nobody has layer 2
        optimizer = torch.optim.AdamW(model.parameters())
        before = local_tensors(model, optimizer)
        layout = Layout({}, 0, 1, stage=rank, stages=2, rename=model.renames())
        with pytest.raises(LightckError) as caught:
            if recovers:
                lightck.recover(pools, model, layout=layout)
            else:
                lightck.attach(model, pools, optimizer=optimizer, resume=True, layout=layout, timeout=60)
        assert same(before, local_tensors(model, optimizer))
        return str(caught.value)

    for recovers in (False, True):
        for text in values(run_ranks(2, lambda rank, recovers=recovers: run(rank, recovers))):
            assert "model/layers.2.linear.bias" in text
            assert "no rank builds them" in text
    assert held == {path.name: path.read_bytes() for path in pools.glob("*.pool")}


def test_a_whole_model_without_a_saved_layer_is_refused(trained, pools):
    shutil.copytree(trained["2"][0], pools)
    model = Stage(0, LAYERS)
    model.layers.append(nn.Linear(2, 2))
    with pytest.raises(DriftError, match=r"only in the model: model/layers\.5\.weight"):
        lightck.recover(pools, model)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stage_without_a_pool_is_named(trained, pools, lost):
    """What is left holds each tensor that it knows, so that nothing else would tell."""
    shutil.copytree(trained["2"][0], pools)
    (pools / f"rank-0000{lost}-of-00002.pool").unlink()
    with pytest.raises(RankError, match=rf"no pool holds the tensors of stage {lost}"):
        lightck.recover(pools)
    for world in (World((2, 5)), World((1, 4, 5))):
        for ended in run_world(world, body(world, pools, 3)):
            assert isinstance(ended.error, RankError)
    shown = CliRunner().invoke(main, ["inspect", str(pools)])
    assert shown.exit_code == 1
    assert "hold the whole of each tensor" not in shown.output


def test_a_stage_that_no_rank_has_is_named(pools):
    def run(rank: int) -> str:
        model, optimizer = World((2, 5)).build(0)
        layout = Layout({}, 0, 1, stage=0, stages=2, rename=model.renames())
        with pytest.raises(RankError) as caught:
            lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60)
        return str(caught.value)

    assert all("No process is stage 1 of 2" in text for text in values(run_ranks(2, run)))


def test_stages_without_a_layout_are_refused_with_the_cure(pools):
    def run(rank: int) -> str:
        model, optimizer = World((2, 5)).build(rank)
        with pytest.raises(RankError) as caught:
            lightck.attach(model, pools, optimizer=optimizer, timeout=60)
        return str(caught.value)

    assert all("layout=Layout(..., stage=..., stages=...)" in text for text in values(run_ranks(2, run)))


def test_one_name_for_tensors_of_two_shapes_is_refused(pools):
    def run(rank: int) -> str:
        model = nn.Linear(2, 3 + rank)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(RankError) as caught:
            layout = Layout({}, 0, 1, stage=rank, stages=2)
            lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60)
        return str(caught.value)

    assert all("'model/weight' is float32 [3, 2] on" in text for text in values(run_ranks(2, run)))


def test_a_rule_may_be_for_another_stage_but_not_for_none(pools):
    def run(rank: int, pattern: str) -> str:
        model = nn.ModuleDict({f"part{rank}": nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(model.parameters())
        layout = Layout({pattern: Shard(0)}, 0, 1, stage=rank, stages=2)
        try:
            lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60).close()
        except LightckError as err:
            return str(err)
        return ""

    wrong = values(run_ranks(2, lambda rank: run(rank, r"part2\.weight")))
    assert all(r"part2" in text and "on any stage" in text for text in wrong)
    assert values(run_ranks(2, lambda rank: run(rank, r"part1\.weight"))) == ["", ""]


def test_a_function_names_interleaved_stages(pools):
    """Two chunks on each rank, as Megatron's virtual stages have them: rank 0 has the layers 0 and 2, rank 1 the layers
    1 and 3."""

    def run(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(rank)
        model = nn.ModuleList(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])}) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters())
        names = rename(r"^(\d)\.layers\.(\d)", lambda match: f"layers.{2 * int(match[1]) + rank + int(match[2])}")
        layout = Layout({}, 0, 1, stage=rank, stages=2, rename=[names])
        lightck.attach(model, pools, optimizer=optimizer, layout=layout, timeout=60).close()
        return {key: value.clone() for key, value in model.state_dict().items()}

    first, second = values(run_ranks(2, run))
    whole = lightck.recover(pools).model
    for number, (of_rank, chunk) in enumerate(((first, 0), (second, 0), (first, 1), (second, 1))):
        assert torch.equal(whole[f"layers.{number}.weight"], of_rank[f"{chunk}.layers.0.weight"])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: rename("a"), TypeError, "pass either"),
        (lambda: rename("a", "b", offset=1), TypeError, "pass either"),
        (lambda: rename("(", "a"), LayoutError, "no regular expression"),
        (lambda: rename("layers", offset=1), LayoutError, "first group"),
        (lambda: rename(r"(\d)", offset=True), LayoutError, "first group"),
        (lambda: Layout({}, 0, 1, rename=["a"]), TypeError, "rename="),
        (lambda: Layout({}, 0, 1, stage=2, stages=2), ValueError, "number of stages"),
        (lambda: Layout({}, 0, 1, rename=[rename("a", r"\2")]).name_of("a"), LayoutError, "cannot be used"),
        (lambda: Layout({}, 0, 1, rename=[rename("a", lambda _: 3)]).name_of("a"), LayoutError, "cannot be used"),
        (lambda: Layout({}, 0, 1, rename=[rename("(.)", offset=1)]).name_of("a"), LayoutError, "cannot be used"),
        (lambda: Layout({}, 0, 1, rename=[rename(r"(\d)", offset=-2)]).name_of("1"), LayoutError, "below 0"),
        (lambda: Layout({}, 0, 1, rename=[rename(".*", "")]).name_of("a"), LayoutError, "empty"),
    ],
)
def test_renames_that_cannot_be(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_an_offset_changes_only_the_number():
    layout = Layout({}, 0, 1, rename=[rename(r"decoder\.layers\.(\d+)\.", offset=8)])
    assert layout.name_of("decoder.layers.3.mlp.layers.3.weight") == "decoder.layers.11.mlp.layers.3.weight"
    assert layout.name_of("decoder.final.weight") == "decoder.final.weight"
