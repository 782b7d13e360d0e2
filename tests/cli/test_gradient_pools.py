"""The commands on pools with gradient records: what they show and verify is what a recovery gives."""

from __future__ import annotations

import importlib
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, call_json
from gradient_damage import (
    base_of,
    flip_gradient,
    flip_manifest,
    flip_oldest_base,
    newest,
    older_base_of,
    recorded_in,
)
from toys import adam, crashed, flip, kill_at, killed_child, net, poke, pool_with, running_child, same, train

import lightck
from lightck.cli import stored_checkpoints
from lightck.cli.base import BAD, FAILED, OK
from lightck.errors import LightckError, NoCheckpointError
from lightck.pool.commit_log import CommitLog
from lightck.pool.format.structures import pack_slot_header
from lightck.strategy.gradients import Gradients

COMMANDS = ("inspect", "verify", "verify --deep", "verify --replay", "diff", "export", "compact")


def words(command: str, pool: Path, out: Path) -> list[str]:
    more = {"diff": ["--steps", "6", "7"], "export": [str(out)], "compact": [str(out)]}
    return [*command.split(), str(pool), *more.get(command, [])]


def recoverable(pool: Path, steps: range) -> list[int]:
    """The steps that ``recover(step=)`` gives, newest first."""
    found = []
    for step in reversed(steps):
        try:
            found.append(lightck.recover(pool, step=step).step)
        except LightckError:
            continue
    return found


# -- inspect ---------------------------------------------------------------------------------------------------------


def test_bases_and_records_are_those_of_the_pool(gradients):
    status, facts = call_json("inspect", gradients)
    assert status == OK
    assert (facts["pool"]["slots"], facts["pool"]["homes"]) == (5, 2)
    shown = facts["shown"]
    bases = shown["gradients"]["bases"]
    assert [(row["step"], row["updates"]) for row in bases] == [(7, 0), (6, 1), (5, 2)]
    assert sum(row["nbytes"] for row in bases) == shown["nbytes"]
    assert sum(row["tensors"] for row in bases) == shown["tensors"] == 16
    assert sum(row["units"] for row in bases) == 4
    records = shown["gradients"]["records"]
    assert [(row["step"], row["needed"]) for row in records] == [
        (7, True),
        (6, True),
        (5, False),
        (4, False),
        (3, False),
    ]
    for row in records:
        held = recorded_in(gradients, row["step"])
        assert row["gradients"] == 4
        assert row["gradient_nbytes"] + row["other_nbytes"] == sum(one.entry.nbytes for one in held.values())
    assert [row["updates"] for row in facts["checkpoints"]] == [2, 2, 2, 2]


def test_text_says_how_much_is_made_again(gradients):
    text = call("inspect", gradients).stdout
    assert "gradient records, 5 slots of 2.1 MB, 2 homes of 2.1 MB" in text
    assert "Each unit (a parameter and its optimizer state) is written once in 3 steps (base_every)." in text
    assert "To recover step 7, at most 2 updates of" in text
    assert "attach(..., resume=True) with the strategy Gradients resumes from step 7" in text


@pytest.mark.parametrize(("steps", "n", "records"), [(1, 2, None), (5, 2, None), (9, 3, 3), (12, 3, None), (11, 4, 5)])
def test_listed_checkpoints_are_those_that_can_be_recovered(pool, steps, n, records):
    pool_with(pool, steps, strategy=Gradients(base_every=n, log_records=records))
    _, facts = call_json("inspect", pool)
    listed = [row["step"] for row in facts["checkpoints"]]
    assert listed == recoverable(pool, range(steps + 1))
    status, facts = call_json("verify", "--deep", "--replay", pool)
    assert status == OK
    assert [(row["step"], row["replayed"]) for row in facts["checkpoints"]] == [(step, True) for step in listed]


def test_shown_step_has_its_own_bases(gradients):
    _, facts = call_json("inspect", gradients, "--step", 5)
    assert facts["shown"]["step"] == 5
    assert {row["step"] for row in facts["shown"]["gradients"]["bases"]} == {3, 4, 5}


def test_full_checkpoint_is_said_to_be_full(pool):
    pool_with(pool, 1, strategy=Gradients(base_every=3))
    assert "Step 1 is full: no update is replayed to recover it." in call("inspect", pool).stdout


def test_record_that_is_damaged_is_named(gradients):
    flip_manifest(gradients, 6)
    result = call("inspect", gradients)
    assert result.exit_code == OK
    assert "needed, damaged: its manifest does not match" in result.stdout


def test_pieces_are_refused_by_name(gradients):
    result = call("inspect", "--pieces", gradients)
    assert result.exit_code == FAILED
    assert "pool with gradient records" in result.stderr
    assert "newer lightck" not in result.stderr


def test_lazy_recovery_is_refused_with_the_cure(gradients):
    with pytest.raises(LightckError, match=r"must be made again .* lightck.recover\(path\)"):
        lightck.recover(gradients, lazy=True)


# -- verify ----------------------------------------------------------------------------------------------------------


def test_damaged_base_is_named_and_the_older_one_stands_in(gradients):
    flip(gradients, base_of(gradients, "model/0.weight").offset)
    status, facts = call_json("verify", gradients)
    row = facts["checkpoints"][0]
    assert (status, row["blocks"], row["recoverable"]) == (BAD, "damaged", True)
    assert [one["tensor"] for one in row["damage"]] == ["model/0.weight"]
    assert facts["recoverable_step"] == 7 == lightck.recover(gradients).step
    assert "another copy stands in for what is damaged" in call("verify", gradients).stdout


def test_damaged_older_base_is_damage_and_harms_no_step(gradients):
    flip(gradients, older_base_of(gradients, "optimizer/0.bias/exp_avg").offset)
    status, facts = call_json("verify", gradients)
    row = facts["checkpoints"][0]
    assert (status, row["blocks"], row["spare"], row["recoverable"]) == (BAD, "verified", "damaged", True)
    assert row["damage"][0]["reason"].startswith("older base of step")


@pytest.mark.parametrize("step", [3, 4, 5, 6, 7])
def test_damaged_gradient_is_named_and_only_a_needed_one_costs_the_step(gradients, step):
    name = flip_gradient(gradients, step).entry.name
    status, facts = call_json("verify", gradients)
    assert status == BAD
    assert [one["tensor"] for one in facts["checkpoints"][0]["damage"]] == [name]
    assert facts["recoverable_step"] == lightck.recover(gradients).step


@pytest.mark.parametrize("step", [3, 4, 5, 6, 7])
def test_damaged_manifest_of_a_record_is_named(gradients, step):
    flip_manifest(gradients, step)
    status, facts = call_json("verify", gradients)
    assert status == BAD
    assert facts["recoverable_step"] == lightck.recover(gradients).step == (7 if step < 6 else step - 1)


def test_damage_to_both_copies_of_a_unit_ends_its_recovery(gradients):
    flip(gradients, base_of(gradients, "model/0.weight").offset)
    flip(gradients, older_base_of(gradients, "model/0.weight").offset)
    _, facts = call_json("verify", gradients)
    assert not facts["checkpoints"][0]["recoverable"]
    try:
        step = lightck.recover(gradients).step
    except LightckError:
        step = None
    assert facts["recoverable_step"] == step


@pytest.mark.parametrize("seed", range(25))
def test_verify_agrees_with_recovery_whatever_bytes_are_damaged(gradients, seed):
    """Some bytes of what the newest checkpoint names are flipped."""
    chance = random.Random(seed)
    with newest(gradients) as checkpoint:
        places = [*checkpoint.bases(), *checkpoint.older_bases()]
    for step in range(3, 8):
        places += recorded_in(gradients, step).values()
    for place in chance.sample(places, chance.choice((1, 1, 2, 3))):
        flip(gradients, place.offset + chance.randrange(place.entry.nbytes))
    status, facts = call_json("verify", gradients, "--deep")
    assert status == BAD
    assert facts["recoverable_step"] == (recovered := recoverable_newest(gradients))
    assert [row["step"] for row in facts["checkpoints"] if row["recoverable"]] == recoverable(gradients, range(8))
    assert call_json("verify", gradients, "--replay")[1]["recoverable_step"] == recovered


def recoverable_newest(pool: Path) -> int | None:
    try:
        return lightck.recover(pool).step
    except LightckError:
        return None


def test_replay_that_differs_is_damage(gradients, monkeypatch):
    """As on a machine that computes other bits."""
    module = importlib.import_module("torch.optim.adam")
    real = module.adam

    def other_bits(*args: Any, lr: Any, **options: Any) -> None:
        real(*args, lr=lr * 1.001, **options)

    monkeypatch.setattr(module, "adam", other_bits)
    assert call("verify", gradients).exit_code == OK
    status, facts = call_json("verify", "--replay", gradients)
    row = facts["checkpoints"][0]
    assert (status, row["blocks"], row["replayed"], row["recoverable"]) == (BAD, "verified", False, False)
    assert "differs from the training after the update of step" in row["damage"][0]["reason"]


def test_replay_is_refused_where_nothing_can_be_made_again(good, folder):
    result = call("verify", "--replay", good)
    assert result.exit_code == FAILED
    assert "its checkpoints are complete. Leave out --replay." in result.stderr
    result = call("verify", "--replay", folder)
    assert result.exit_code == FAILED
    assert "holds no pool of a rank" in result.stderr


def unfinished(pool: Path) -> int:
    """A record was begun in the slot of step 3, and a kill ended it. Returns its slot."""
    with newest(pool) as checkpoint:
        slot, uuid = checkpoint.part.chain[0].slot, checkpoint.reader.superblock.uuid
        poke(pool, checkpoint.reader.superblock.slots[slot][0], pack_slot_header(77, slot, uuid))
    return slot


def test_what_a_kill_leaves_is_no_damage(gradients):
    """The bases of a step that is not the newest are overwritten by the record that was begun."""
    with newest(gradients) as checkpoint:
        of_newest = {(one.entry.name, one.generation) for one in checkpoint.bases()}
        older = [one for one in checkpoint.older_bases() if (one.entry.name, one.generation) not in of_newest]
    slot = unfinished(gradients)
    for one in older:
        flip(gradients, one.offset)
    status, facts = call_json("verify", "--deep", gradients)
    assert status == OK
    assert facts["recoverable_step"] == 7
    assert facts["checkpoints"][0]["spare"] == "not read"
    assert "overwritten" in [row["blocks"] for row in facts["checkpoints"][1:]]
    assert (
        "newer checkpoints have overwritten it, or a part of what it needs"
        in call("verify", "--deep", gradients).stdout
    )
    assert call_json("inspect", gradients)[1]["unfinished"] == [{"slot": slot, "generation": 77}]


def test_a_base_of_the_newest_step_is_damage_also_after_a_kill(gradients):
    unfinished(gradients)
    flip_oldest_base(gradients)
    status, facts = call_json("verify", "--deep", gradients)
    assert (status, facts["checkpoints"][0]["blocks"]) == (BAD, "damaged")


def test_a_step_that_a_resume_left_behind_is_dead_and_harms_nothing(gradients):
    """The record of step 7 is damaged, so a resume adopts step 6."""
    flip_manifest(gradients, 7)
    model = net()
    strategy = Gradients(base_every=3)
    lightck.attach(model, gradients, optimizer=adam(model), resume=True, strategy=strategy).close()
    _, facts = call_json("inspect", gradients)
    assert facts["shown"]["step"] == 6
    status, facts = call_json("verify", "--deep", "--replay", gradients)
    assert facts["recoverable_step"] == 6 == lightck.recover(gradients).step
    assert [row["step"] for row in facts["checkpoints"] if row["damage"]] == [7]
    assert status == BAD
    assert [row["step"] for row in facts["checkpoints"] if row["recoverable"]] == recoverable(gradients, range(8))
    flip_oldest_base(gradients)
    assert call_json("verify", gradients)[1]["checkpoints"][0]["blocks"] == "damaged"


# -- diff and export -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [4, 5, 6, 7])
def test_diff_finds_the_tensors_of_a_pool_without_gradient_records(gradients, folder, step):
    whole = folder / "whole.pool"
    pool_with(whole, step)
    _, facts = call_json("diff", gradients, whole, "--steps", step, step)
    assert facts["tensors"] == []
    assert facts["compared_tensors"] == 16
    assert call_json("diff", whole, gradients, "--steps", step, 6 if step != 6 else 7)[1]["tensors"]


@pytest.mark.parametrize("step", [5, 7])
def test_export_writes_the_state_of_the_step(gradients, folder, step):
    whole = folder / "whole.pool"
    pool_with(whole, step)
    files = folder / "a.pt", folder / "b.pt"
    for pool, file in zip((gradients, whole), files, strict=True):
        assert call("export", pool, file, "--what", "all", "--step", step).exit_code == OK
    one, other = (torch.load(file, weights_only=True) for file in files)
    for part in ("model", "optimizer"):
        assert same(one[part], other[part])


class Own(torch.optim.SGD):
    """An optimizer that only the user has: momentum, written by hand."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["m"] = state.get("m", torch.zeros_like(p)).mul_(0.5).add_(p.grad)
                p.sub_(state["m"], alpha=group["lr"])


def test_class_of_the_user_is_inspected_and_verified_and_is_named_where_it_is_needed(pool, folder):
    model = net()
    optimizer = Own(model.parameters(), lr=0.1)
    strategy = Gradients(base_every=3, own_optimizers=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy):
        train(model, optimizer, 7)
    file = folder / "model.safetensors"
    assert [call(*words(command, pool, file)).exit_code for command in COMMANDS[:3]] == [OK, OK, OK]
    for command in COMMANDS[3:]:
        result = call(*words(command, pool, file))
        assert result.exit_code == FAILED
        assert "an optimizer of class Own" in result.stderr
        assert "lightck.recover(path, model, optimizer)" in result.stderr
    other = net()
    checkpoint = lightck.recover(pool, other, Own(other.parameters(), lr=0.1))
    assert lightck.export_checkpoint(checkpoint, file).tensors == 4


# -- inject ----------------------------------------------------------------------------------------------------------


PLACES = ("model/0.weight", "gradient/0.weight", "payload", "manifest", "superblock")


@pytest.mark.parametrize(
    ("option", "where"), [*(("--flip", one) for one in (*PLACES, "line")), ("--zero-page", "payload")]
)
def test_injected_damage_is_found(gradients, folder, where, option):
    copy = folder / "hurt.pool"
    status, facts = call_json("inject", gradients, copy, option, where, "--seed", 3)
    assert status == OK
    assert facts["damage"]["step"] == (None if where == "superblock" else 7)
    assert call("verify", copy).exit_code == BAD
    assert call("verify", gradients).exit_code == OK
    assert lightck.recover(copy).step in (6, 7)


def test_injected_damage_to_a_base_is_named_by_its_tensor(gradients, folder):
    text = call("inject", gradients, folder / "hurt.pool", "--flip", "model/0.weight").stdout
    assert "base of step" in text
    assert "of tensor 'model/0.weight'" in text


def test_a_name_that_is_not_there_is_refused_with_those_of_gradients(gradients, folder):
    result = call("inject", gradients, folder / "hurt.pool", "--flip", "gradient/9")
    assert result.exit_code == FAILED
    assert (
        "or the name of a gradient (gradient/0.bias, gradient/0.weight, gradient/2.bias, gradient/2.weight)"
        in result.stderr
    )


def test_two_checkpoints_of_one_step_differ_by_their_generation(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model)), strategy=Gradients(3)) as session:
        train(model, optimizer, 4)
        session.flush()
        session.close(done=True)
    rows = call_json("verify", "--deep", pool)[1]["checkpoints"]
    generations = [row["generation"] for row in rows if row["step"] == 4]
    assert len(generations) == 2
    text = call("verify", "--deep", pool).stdout
    assert all(f"step 4, generation {one} " in text for one in generations)


def test_torn_slot_is_refused_by_name(gradients, folder):
    result = call("inject", gradients, folder / "hurt.pool", "--torn-slot")
    assert result.exit_code == FAILED
    assert "the slots of this pool hold gradient records" in result.stderr
    assert not (folder / "hurt.pool").exists()


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_calls_the_pool_no_problem(gradients):
    [line] = [one for one in call_json("doctor", gradients)[1]["lines"] if one["topic"] == str(gradients.parent)]
    assert line["level"] != "problem"


# -- in use ----------------------------------------------------------------------------------------------------------


def test_each_command_on_a_pool_that_is_written_all_the_time(pool, tmp_path):
    stop = tmp_path / "stop"

    def work() -> None:
        model = net()
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)):
            train(model, optimizer, 7)
            (tmp_path / "ready").touch()
            while not stop.exists():
                train(model, optimizer, 1)
                time.sleep(0.02)

    with running_child(work):
        try:
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            for number in range(4):
                for command in COMMANDS:
                    line = words(command, pool, tmp_path / f"{command}-{number}.safetensors")
                    if command == "diff":
                        line = ["diff", str(pool), str(pool)]  # may be two checkpoints
                    result = call(*line)
                    assert result.exit_code in ((OK, BAD) if command == "diff" else (OK,)), (command, result.output)
        finally:
            stop.touch()


@pytest.mark.parametrize("after", range(10))
def test_each_command_on_what_a_kill_leaves(pool, after, tmp_path):
    """A copy of the pool at some moment of a step."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)):
        train(model, optimizer, after)
        path = crashed(pool)
    shutil.copyfile(path, before := path.with_suffix(".before"))
    for command in ("inspect", "verify", "verify --deep", "verify --replay"):
        result = call(*words(command, path, tmp_path / "out.safetensors"))
        assert result.exit_code == OK, result.output
    assert path.read_bytes() == before.read_bytes()


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed", "body", "word", "ack"])
def test_a_kill_at_a_store_is_no_damage(gradients, site, nth):
    def die() -> None:
        model = net()
        optimizer = adam(model)
        strategy = Gradients(base_every=3)
        with lightck.attach(model, gradients, optimizer=optimizer, resume=True, strategy=strategy):
            train(model, optimizer, 2)
            kill_at(site, nth)
            train(model, optimizer, 6)

    killed_child(die)
    status, facts = call_json("verify", gradients, "--deep", "--replay")
    assert status == OK, facts
    assert facts["recoverable_step"] == lightck.recover(gradients).step >= 8
    listed = [row["step"] for row in facts["checkpoints"] if row["recoverable"]]
    assert listed == recoverable(gradients, range(20))
    assert call("inspect", gradients).exit_code == OK


def test_step_that_was_overwritten_is_named_with_those_that_are_there(gradients):
    result = call("verify", "--step", 1, gradients)
    assert result.exit_code == FAILED
    assert "It holds 4, 5, 6, 7" in result.stderr
    with pytest.raises(NoCheckpointError):
        lightck.recover(gradients, step=99)


def test_pool_without_a_checkpoint_is_named_as_such(pool):
    pool_with(pool, 0, strategy=Gradients(base_every=3))
    assert "Nothing to recover yet" in call("inspect", pool).stdout
    assert "no checkpoint was committed yet" in call("verify", "--replay", pool).stdout
    with pytest.raises(NoCheckpointError, match="holds no checkpoint yet"):
        lightck.recover(pool)


def test_records_that_no_commit_followed_are_no_checkpoints(pool: Path) -> None:
    """As a kill leaves them between two commits."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(6), interval=3)
    train(model, optimizer, 14)
    session.end_step()
    session._pipeline.finish()
    image = crashed(pool)
    session.abandon()
    status, facts = call_json("inspect", image)
    assert status == OK
    assert [(one["step"], one["state"]) for one in facts["checkpoints"]][:2] == [(12, "committed"), (9, "committed")]
    records = facts["shown"]["gradients"]["records"]
    assert [one["step"] for one in records if one["committed"]] == [12, 9, 6, 3]
    assert len(facts["unfinished"]) == 2
    assert "the gradient record of generation 11 is newer than the newest checkpoint" in call("inspect", image).stdout
    done = call("verify", "--deep", "--replay", image)
    assert (done.exit_code, "step 12" in done.stdout, "step 14" in done.stdout) == (OK, True, False)
    assert call("inspect", "--step", "14", image).exit_code == FAILED


def test_checkpoints_that_are_committed_while_the_pool_is_read_count_as_committed(gradients, monkeypatch):
    """Reading all checkpoints takes longer than a step of a small training. Once none of them counted then."""
    with stored_checkpoints.open_reader(str(gradients)) as reader:
        expected = [(one.step, one.state) for one in stored_checkpoints.find_checkpoints(reader)]
        logs, now = [CommitLog({}, ())], reader.commit_log
        monkeypatch.setattr(reader, "commit_log", lambda: logs.pop() if logs else now())
        found = [(one.step, one.state) for one in stored_checkpoints.find_checkpoints(reader)]
    assert (7, stored_checkpoints.COMMITTED) in found
    assert found == expected
