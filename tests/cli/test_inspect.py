"""``lightck inspect`` shows the facts of a pool, and nothing that a terminal would act on."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest
import torch
from calls import call, call_json, overwrite
from torch import nn
from toys import adam, checkpoints, damage, flip, net, pool_with, train

import lightck
from lightck.pool.format.structures import SUPERBLOCK_OFFSETS, crc64, pack_slot_header
from lightck.pool.storage.backends import backend_for


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.extra = nn.Linear(4, 8, bias=False)
        self.extra.weight = self.inner[0].weight

    def forward(self, x):
        return self.inner(x) + self.extra(x).sum()


def test_checkpoints_sizes_and_parts_are_those_of_the_pool(pool):
    model = Tied()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with lightck.attach(model, pool, optimizer=optimizer, state={"schedule": schedule}, slots=3):
        train(model, optimizer, 3)
    status, facts = call_json("inspect", pool, "--tensors")
    assert status == 0
    assert facts["pool"]["file_nbytes"] == pool.stat().st_size
    assert facts["pool"]["backend"] == backend_for(str(pool)).name
    assert (facts["pool"]["slots"], facts["holder"]) == (3, None)
    assert [v["step"] for v in facts["checkpoints"]] == [3, 2, 1]
    assert [v["newest"] for v in facts["checkpoints"]] == [True, False, False]
    shown = facts["shown"]
    assert shown["tied"] == {"model/extra.weight": "model/inner.0.weight"}
    assert sum(row["elements"] for row in shown["layers"]) == sum(p.numel() for p in model.parameters())
    tensors = {t["name"]: t for t in shown["all_tensors"]}
    assert sum(t["nbytes"] for t in tensors.values()) == shown["nbytes"]
    weight = tensors["model/inner.0.weight"]
    assert (weight["shape"], weight["dtype"], weight["role"]) == ([8, 4], "float32", "param")
    [saved] = shown["optimizers"]
    assert (saved["class"], saved["params"], saved["tensors"]) == ("AdamW", 4, 12)
    assert list(shown["state"]) == ["schedule"]
    assert shown["rng"] == ["python", "numpy", "torch"]


def test_json_has_the_keys_that_the_page_names(good, gradients):
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    of_gradients = ["inspect", gradients, "--tensors"], ["verify", gradients, "--replay"]
    plain = ["inspect", good, "--tensors"], ["verify", good], ["diff", good, "--steps", 3, 4], ["doctor"]
    for command in (*plain, *of_gradients):
        _, facts = call_json(*command)
        for key in keys_of(facts):
            assert f"`{key}`" in page, f"{command[0]}: {key} is not in docs/json.md"


def keys_of(facts):
    """The keys of all maps, also of those in lists, except for maps whose keys are names of the user."""
    for key, value in facts.items():
        yield key
        if key in ("tied", "state", "made_with"):
            continue
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                yield from keys_of(inner)


def test_a_step_is_shown_by_its_number(good):
    _, facts = call_json("inspect", good, "--step", 2)
    assert facts["shown"]["step"] == 2
    result = call("inspect", good, "--step", 9)
    assert result.exit_code == 2
    assert "holds 2, 3, 4" in result.stderr


def test_a_damaged_manifest_is_rejected_with_its_reason(good):
    newest = checkpoints(good)[0]
    sb = newest.reader.superblock
    flip(
        good,
        sb.slots[newest.record.slot][0] + sb.manifest_offset + newest.record.manifest_index * sb.manifest_nbytes + 8,
    )
    result = call("inspect", good)
    assert "rejected: its manifest does not match the commit record" in result.stdout
    assert "resumes from step 3" in result.stdout


def test_a_checkpoint_newer_than_the_step_resumed_from_is_dead(good):
    damage(good, "model/0.weight", [4])
    model = net()
    optimizer = adam(model)
    lightck.attach(model, good, optimizer=optimizer, resume=True).close()
    _, facts = call_json("inspect", good)
    assert {v["step"]: v["state"] for v in facts["checkpoints"]} == {3: "committed", 2: "committed", 4: "dead"}
    assert facts["shown"]["step"] == 3
    assert "dead: training resumed from an older step" in call("inspect", good).stdout


def test_a_checkpoint_that_was_begun_is_named(good):
    """As after a kill right after the slot header of the next checkpoint was written."""
    oldest = checkpoints(good)[-1]
    sb, slot = oldest.reader.superblock, oldest.record.slot
    overwrite(good, sb.slots[slot][0], pack_slot_header(77, slot, sb.uuid))
    _, facts = call_json("inspect", good)
    assert facts["unfinished"] == [{"slot": slot, "generation": 77}]
    assert [v["step"] for v in facts["checkpoints"]] == [4, 3]
    assert (
        "the checkpoint of generation 77 was not finished: a kill cut it off, or lightck dropped it"
        in call("inspect", good).stdout
    )


def test_names_from_a_pool_cannot_move_the_cursor_or_fake_a_line(pool):
    evil = "a\x1b[2J\x07\r\nOK\u202e[red]b[_red]"
    model = nn.Sequential()
    model.add_module(evil, nn.Linear(4, 2))
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={evil: optimizer_like(evil)}, slots=3):
        train(model, optimizer, 2)
    damage(pool, f"model/{evil}.weight", [2])
    diff = ["diff", pool, "--steps", 1, 2]
    for words in (["inspect", pool], ["inspect", pool, "--tensors"], ["verify", pool], diff):
        result = call(*words)  # checks every character
        said = result.stdout + result.stderr
        assert "x1b[2J" in said, words
        assert "[red]b[_red]" in said, "no markup is interpreted"
    _, facts = call_json("inspect", pool)
    assert evil in facts["shown"]["state"], "JSON loses nothing"


def optimizer_like(text):
    class Holder:
        def state_dict(self):
            return {text: text}

        def load_state_dict(self, state):
            pass

    return Holder()


def test_many_modules_are_folded_to_a_page(pool):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))) for _ in range(30)])
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    result = call("inspect", pool)
    assert len(result.stdout.splitlines()) < 60
    assert "60 modules in 30 rows" in result.stdout


def test_folding_keeps_the_sums():
    inspect = importlib.import_module("lightck.cli.inspect")
    layers = [
        {"module": f"h.{i}.{part}", "tensors": 1, "elements": i, "model_nbytes": 2 * i, "optimizer_nbytes": 3}
        for i in range(5)
        for part in ("a.x", "a.y", "b")
    ]
    for most in (100, 10, 5, 1):
        rows = inspect.folded(layers, most)
        assert len(rows) <= most
        for key in ("tensors", "elements", "model_nbytes", "optimizer_nbytes"):
            assert sum(row[key] for row in rows) == sum(layer[key] for layer in layers)


def folded_one_by_one(layers, most):
    """The rows by trying each depth from the largest to the first that fits."""
    deepest = max(layer["module"].count(".") + 1 for layer in layers)
    for depth in range(deepest, 0, -1):
        names = list(dict.fromkeys(".".join(layer["module"].split(".")[:depth]) for layer in layers))
        if len(names) <= most or depth == 1:
            return names
    raise AssertionError


@pytest.mark.parametrize("seed", range(20))
def test_modules_are_folded_as_little_as_fits(seed):
    rng = random.Random(seed)
    names = {".".join(rng.choices("abc", k=rng.randrange(1, 7))) for _ in range(60)} | {""}
    layers = [{"module": name, "tensors": 1} for name in names]
    for most in (1, 3, 4, 10, 20, 40, 100):
        rows = importlib.import_module("lightck.cli.inspect").folded(layers, most)
        assert [row["module"] for row in rows] == folded_one_by_one(layers, most)
        assert sum(row["tensors"] for row in rows) == len(layers)


class Name(str):
    """Counts how often it is split."""

    taken = 0

    def split(self, *args):
        Name.taken += 1
        return super().split(*args)


def test_deep_names_are_split_once():
    layers = [{"module": Name("x." * 300 + str(i)), "tensors": 1} for i in range(50)]
    assert len(importlib.import_module("lightck.cli.inspect").folded(layers)) == 1
    assert Name.taken <= len(layers)


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_a_path_with_blanks_is_quoted_in_what_to_do_next(flag, folder):
    path = folder / "my pool"
    pool_with(path)
    result = call("inspect", path, *flag)
    assert flag or f"lightck verify '{path}'" in result.stdout


def test_a_format_of_a_newer_minor_number_is_shown_as_the_pool_has_it(good):
    body = bytearray(checkpoints(good)[0].reader.superblock.pack()[:-8])
    body[14:16] = (7).to_bytes(2, "little")
    for offset in SUPERBLOCK_OFFSETS:
        overwrite(good, offset, bytes(body) + crc64(bytes(body)).to_bytes(8, "little"))
    assert call_json("inspect", good)[1]["pool"]["format"] == "1.7"


def test_a_step_that_is_rejected_is_reported_as_unusable(good):
    newest = checkpoints(good)[0]
    sb, record = newest.reader.superblock, newest.record
    flip(good, sb.slots[record.slot][0] + sb.manifest_offset + record.manifest_index * sb.manifest_nbytes + 8)
    result = call("inspect", good, "--step", 4)
    assert result.exit_code == 1
    assert "No checkpoint of step 4 can be used." in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_old_name_of_checkpoints_in_json_has_the_same_value(good, command):
    facts = call_json(command, good)[1]
    assert facts["versions"] == facts["checkpoints"]
