"""``inspect``, ``verify``, ``diff`` and ``export`` of tiers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from calls import call, call_json, run
from safetensors.torch import load_file
from tiers.small_tiers import claims_of, orphan, session_until, store_of, tree
from toys import adam, net, same, train

import lightck
from lightck.cli.base import BAD, FAILED, OK
from lightck.pool.format.structures import DamagedError
from lightck.tiers.candidates import Candidate
from lightck.tiers.claiming import ClaimFile
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, ManifestName, claim_name
from lightck.tiers.pool_sender import PoolSender
from lightck.tiers.tier_manifest import SentObject, read_manifest


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    for until in (3, 5):
        session_until(folder, until)
    return folder


@pytest.fixture
def tier(original: Path, tmp_path: Path) -> Path:
    """A tier with the steps 1 to 3 of a training below one claim, and 4 to 5 below a second one; the training's pool
    lies beside it."""
    shutil.copytree(original, tmp_path / "it")
    return tmp_path / "it" / "tier"


def manifest_of(tier: Path, step: int) -> ManifestName:
    (found,) = (each for each in store_of(tier).listing().manifests if each.step == step)
    return found


def objects_of(tier: Path, step: int, *, tensors: bool) -> list[SentObject]:
    """The objects of a checkpoint that no other one names: those with tensors, or the others."""
    store = store_of(tier)
    older = [name for name in store.listing().manifests if name.step != step]
    others = {each.name for name in older for each in read_manifest(store, name).objects}
    found = read_manifest(store, manifest_of(tier, step)).objects
    return [each for each in found if each.name not in others and bool(each.key) == tensors]


def tensors_of(tier: Path, step: int) -> Path:
    (found,) = objects_of(tier, step, tensors=True)
    return tier / str(found.name)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# -- verify


def test_verify_reads_the_newest_checkpoint_and_looks_at_all(tier):
    before = {name: (tier / name).lstat().st_mtime_ns for name in tree(tier)}
    status, found = call_json("verify", tier)
    assert (status, found["ok"], found["recoverable_step"]) == (OK, True, 5)
    assert [(row["step"], row["blocks"]) for row in found["checkpoints"]] == [
        (5, "verified"),
        *((step, "not read") for step in (4, 3, 2, 1)),
    ]
    assert [each["name"] for each in found["structures"]] == [f"claim {each}" for each in reversed(claims_of(tier))]
    status, found = call_json("verify", tier, "--deep")
    assert {row["blocks"] for row in found["checkpoints"]} == {"verified"}
    status, found = call_json("verify", tier, "--step", 2)
    assert [(row["step"], row["blocks"]) for row in found["checkpoints"]] == [(2, "verified")]
    assert {name: (tier / name).lstat().st_mtime_ns for name in tree(tier)} == before, "verify wrote something"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (flip, "its bytes do not match its name, which is their SHA-256"),
    "gone": (Path.unlink, "it is gone, or no file"),
    "truncated": (truncate, "bytes, not"),
    "a link": (replace_by_link, "it is gone, or no file"),
    "a fifo": (replace_by_fifo, "it is gone, or no file"),
    "a folder": (replace_by_folder, "it is gone, or no file"),
}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("tensors", [True, False])
def test_verify_names_a_damaged_object_of_the_newest_checkpoint(tier, kind, deep, tensors):
    work, reason = DAMAGE[kind]
    victim = objects_of(tier, 5, tensors=tensors)[0].name
    work(tier / str(victim))
    status, found = call_json("verify", tier, *["--deep"] * deep)
    assert (status, found["ok"], found["recoverable_step"]) == (BAD, False, 4)
    assert lightck.recover(tier).step == 4
    newest, *others = found["checkpoints"]
    assert newest["blocks"] == "damaged"
    (damage,) = newest["damage"]
    assert damage["object"] == str(victim)
    assert reason in damage["reason"]
    assert not [each["damage"] for each in others if each["damage"]]
    assert others[0]["blocks"] == "verified"
    text = call("verify", tier, *["--deep"] * deep)
    assert f"object {victim}: {damage['reason']}" in text.stdout
    assert "Step 4 is whole" in text.stdout


@pytest.mark.parametrize(("kind", "is_found"), [("flipped", False), ("gone", True), ("truncated", True)])
def test_verify_looks_at_the_length_of_older_objects_and_reads_them_with_deep(tier, kind, is_found):
    DAMAGE[kind][0](tensors_of(tier, 2))
    status, found = call_json("verify", tier)
    assert (status, found["recoverable_step"]) == (BAD if is_found else OK, 5)
    status, found = call_json("verify", tier, "--deep")
    assert (status, found["recoverable_step"]) == (BAD, 5)
    assert [row["step"] for row in found["checkpoints"] if row["damage"]] == [2]


def test_verify_finds_that_the_pool_of_a_checkpoint_was_damaged_although_each_object_matches_its_name(tier):
    store = store_of(tier)
    name, victim = manifest_of(tier, 5), objects_of(tier, 5, tensors=True)[0]
    other = objects_of(tier, 4, tensors=True)[0]  # whole, and of the same length
    text = (tier / str(name)).read_text()
    old, new = (f"{each.name.content}-{each.name.nonce}" for each in (victim, other))
    (tier / str(name)).write_text(text.replace(old, new))
    assert read_manifest(store, name)
    status, found = call_json("verify", tier)
    assert (status, found["recoverable_step"]) == (BAD, 4)
    (damage,) = found["checkpoints"][0]["damage"]
    assert damage["object"] is None
    assert "does not match its checksum" in damage["reason"]


def test_verify_names_a_manifest_that_cannot_be_read(tier):
    (tier / str(manifest_of(tier, 4))).write_text("{}")
    status, found = call_json("verify", tier)
    assert (status, found["recoverable_step"]) == (BAD, 5)
    assert found["checkpoints"][1]["step"] == 4
    assert "it is no manifest of a tier" in found["checkpoints"][1]["damage"][0]["reason"]


def test_verify_names_a_claim_that_cannot_be_read(tier):
    victim = claims_of(tier)[0]
    (tier / claim_name(victim)).write_text("{}")
    status, found = call_json("verify", tier)
    assert (status, found["ok"], found["recoverable_step"]) == (BAD, False, None)
    assert [each["name"] for each in found["structures"] if each["damaged"]] == [f"claim {victim}"]
    assert "Nothing is recovered from this tier" in call("verify", tier).stdout
    with pytest.raises(lightck.errors.TierError):
        lightck.recover(tier)


def test_verify_of_a_tier_in_which_nothing_is_whole(tier):
    for step in range(1, 6):
        tensors_of(tier, step).unlink()
    status, found = call_json("verify", tier)
    assert (status, found["recoverable_step"]) == (BAD, None)
    assert "no checkpoint that was checked can be recovered" in call("verify", tier).stdout


def test_verify_of_an_empty_tier(tmp_path):
    store_of(tmp_path / "tier").put(claim_name(Claim(1, "0" * 8)), ClaimFile("1.0", "1" * 32).packed())
    assert call_json("verify", tmp_path / "tier") == (
        OK,
        call_json("verify", tmp_path / "tier")[1] | {"ok": True, "checkpoints": [], "recoverable_step": None},
    )
    assert "OK, and empty" in call("verify", tmp_path / "tier").stdout


def test_a_checkpoint_that_a_drain_removes_meanwhile_is_no_damage(tier, monkeypatch):
    real = FolderStore.nbytes_of
    gone = manifest_of(tier, 2), tensors_of(tier, 2)

    def nbytes_of(self: FolderStore, name: str) -> int | None:
        (tier / str(gone[0])).unlink(missing_ok=True)
        gone[1].unlink(missing_ok=True)
        return real(self, name)

    monkeypatch.setattr(FolderStore, "nbytes_of", nbytes_of)
    status, found = call_json("verify", tier)
    assert status == OK
    assert [row["step"] for row in found["checkpoints"]] == [5, 4, 3, 1]


def test_a_stale_checkpoint_is_named_and_not_offered(tier, monkeypatch):
    def refuse_stale(self: Candidate) -> None:
        if self.checkpoint.step == 5:
            raise DamagedError("stale")

    monkeypatch.setattr(Candidate, "refuse_stale", refuse_stale)
    status, found = call_json("verify", tier)
    assert (status, found["recoverable_step"], found["checkpoints"][0]["stale"]) == (OK, 4, True)
    assert "recovery skips it" in call("verify", tier).stdout
    assert call_json("inspect", tier)[1]["shown"]["step"] == 4


def test_verify_of_a_tier_as_a_process(tier):
    done = run("verify", tier, "--deep")
    assert done.returncode == OK
    assert "every block matches its checksum and every object its SHA-256" in done.stdout
    assert "OK: step 5 can be recovered." in done.stdout
    flip(tensors_of(tier, 5))
    assert run("verify", tier).returncode == BAD


# -- inspect


def test_inspect_shows_claims_checkpoints_and_what_the_newest_one_holds(tier):
    status, found = call_json("inspect", tier)
    first, second = map(str, claims_of(tier))
    assert status == OK
    assert len(found["run"]) == 32
    newest, oldest = found["claims"]
    assert (newest["claim"], newest["checkpoints"], newest["path"]) == (second, 2, [{"claim": first, "step": 3}])
    assert (oldest["claim"], oldest["checkpoints"], oldest["path"]) == (first, 3, [])
    assert (newest["unnamed_objects"], newest["unnamed_nbytes"]) == (0, 0)
    assert [row["step"] for row in found["checkpoints"]] == [5, 4, 3, 2, 1]
    assert all(row["on_path"] for row in found["checkpoints"])
    sizes = [(tier / str(name)).stat().st_size for name in store_of(tier).listing().objects]
    assert found["nbytes"] == sum(each["nbytes"] for each in found["claims"]) == sum(sizes)
    assert sum(row["new_nbytes"] for row in found["checkpoints"]) == found["nbytes"]
    assert (found["shown"]["step"], found["shown"]["tensors"]) == (5, 16)
    assert found["shown"]["optimizers"][0]["class"] == "AdamW"
    text = call("inspect", tier).stdout
    assert f"step 3 of {first}" in text
    assert "step 5 holds 16 tensors" in text
    assert "lightck verify" in text


def test_inspect_shows_one_step_and_lists_its_tensors(tier):
    status, found = call_json("inspect", tier, "--step", 2, "--tensors")
    assert (status, found["shown"]["step"]) == (OK, 2)
    assert {"model/0.weight", "model/0.bias"} <= {each["name"] for each in found["shown"]["all_tensors"]}
    assert "model/0.weight" in call("inspect", tier, "--step", 2, "--tensors").stdout
    result = call("inspect", tier, "--step", 9)
    assert result.exit_code == FAILED
    assert "does not hold step 9" in result.stderr
    assert call("inspect", tier, "--pieces").exit_code == FAILED


def test_inspect_reads_no_tensor(tier):
    tensors_of(tier, 5).unlink()
    assert call_json("inspect", tier)[1]["shown"]["step"] == 5


def test_inspect_shows_what_checkpoints_share(tmp_path):
    model = net(64)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    model.register_buffer("frozen", torch.ones(1 << 16))
    optimizer = adam(model)
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
        train(model, optimizer, 1)
        session.flush()
        drain = PoolSender(tmp_path / "run.pool", store_of(tmp_path / "tier"), "1.0")
        drain.send()
        train(model, optimizer, 1, start=1)
        session.flush()
        drain.send()
    newer, older = call_json("inspect", tmp_path / "tier")[1]["checkpoints"]
    assert older["new_nbytes"] > (1 << 18)
    assert newer["new_nbytes"] < (1 << 17), "the frozen tensor was sent once"
    assert newer["nbytes"] == older["nbytes"] > (1 << 18)


def test_inspect_names_what_is_left_over_damaged_or_not_on_the_path(tier):
    orphan(tier, claims_of(tier)[0])
    for each in objects_of(tier, 5, tensors=False):
        flip(tier / str(each.name))
    (tier / str(manifest_of(tier, 4))).write_text("{}")
    status, found = call_json("inspect", tier)
    assert (status, found["shown"]["step"]) == (OK, 3)
    assert found["claims"][1]["unnamed_objects"] == 1
    assert {(each["step"]) for each in found["unreadable"]} == {4, 5}
    text = call("inspect", tier).stdout
    assert "that no readable manifest names" in text, "those of step 4 are needed, perhaps"
    assert "step 4 (claim" in text
    assert "it is no manifest of a tier" in text


def test_inspect_counts_what_no_manifest_names(tier):
    orphan(tier, claims_of(tier)[0])
    assert "1 object that no manifest names, 6 B" in call("inspect", tier).stdout
    assert call_json("inspect", tier)[1]["claims"][1]["unnamed_nbytes"] == 6


def test_inspect_says_which_checkpoints_are_not_in_the_history_of_the_newest_claim(tier):
    file = ClaimFile("1.0", call_json("inspect", tier)[1]["run"])
    store_of(tier).put(claim_name(Claim(3, "0" * 8)), file.packed())  # it began anew
    found = call_json("inspect", tier)[1]
    assert not any(row["on_path"] for row in found["checkpoints"])
    assert (
        "the newest training did not go on from it, nor from a later checkpoint of its claim"
        in call("inspect", tier).stdout
    )


def test_inspect_of_a_tier_without_a_usable_checkpoint(tier):
    for name in store_of(tier).listing().manifests:
        (tier / str(name)).write_text("{}")
    status, found = call_json("inspect", tier)
    assert (status, found["shown"], len(found["unreadable"])) == (BAD, None, 5)
    assert "No checkpoint can be used" in call("inspect", tier).stdout


def test_two_runs_are_refused(tier):
    store_of(tier).put(claim_name(Claim(3, "0" * 8)), ClaimFile("1.0", "1" * 32).packed())
    for words in (("inspect", tier), ("verify", tier), ("diff", tier, tier.parent / "run.pool")):
        result = call(*words)
        assert result.exit_code == FAILED
        assert "claims of 2 runs" in result.stderr


# -- diff


def test_diff_compares_a_tier_with_its_pool_bit_for_bit(tier):
    status, found = call_json("diff", tier, tier.parent / "run.pool")
    assert (status, found["equal"], found["compared_tensors"]) == (OK, True, 16)
    assert (found["a"]["pool"], found["a"]["step"]) == (str(tier), 5)
    assert call("diff", tier.parent / "run.pool", tier).exit_code == OK


def test_diff_compares_two_steps_of_a_tier_and_steps_of_two_tiers(tier, tmp_path):
    status, found = call_json("diff", tier, "--steps", 2, 4)
    assert (status, found["a"]["step"], found["b"]["step"]) == (BAD, 2, 4)
    assert "step: 2 -> 4" in call("diff", tier, "--steps", 2, 4).stdout
    shutil.copytree(tier, tmp_path / "other")
    assert call("diff", tier, tmp_path / "other", "--steps", 3, 3).exit_code == OK
    assert call("diff", tier, tmp_path / "other").exit_code == OK


def test_diff_of_a_tier_with_a_directory_of_pools(tier, tmp_path):
    (tmp_path / "pools").mkdir()
    shutil.copy(tier.parent / "run.pool", tmp_path / "pools" / "rank-00000-of-00001.pool")
    assert call("diff", tier, tmp_path / "pools").exit_code == OK
    assert call("diff", tmp_path / "pools", tier).exit_code == OK


def test_diff_takes_the_newest_that_is_whole_and_names_a_tier_without_one(tier):
    flip(tensors_of(tier, 5))
    found = call_json("diff", tier, tier.parent / "run.pool")[1]
    assert found["a"]["step"] == 4
    result = call("diff", tier, tier.parent / "run.pool", "--steps", 5, 5)
    assert result.exit_code == FAILED
    assert "does not match its checksum" in result.stderr
    result = call("diff", tier, tier.parent / "run.pool", "--steps", 9, 5)
    assert result.exit_code == FAILED
    assert "does not hold step 9" in result.stderr


def test_diff_of_a_tier_alone_asks_for_steps(tier):
    assert call("diff", tier).exit_code == FAILED


# -- export


@pytest.mark.parametrize("step", [None, 2])
def test_export_writes_what_recover_returns(tier, tmp_path, step):
    out = tmp_path / "model.safetensors"
    status, facts = call_json("export", tier, out, *(["--step", step] if step else []))
    assert (status, facts["step"]) == (OK, step or 5)
    model = lightck.recover(tier, step=step).model
    assert same(load_file(out), dict(model))
    whole = tmp_path / "whole.pt"
    assert call("export", tier, whole, "--what", "all", *(["--step", step] if step else [])).exit_code == OK
    assert same(dict(torch.load(whole, weights_only=True)["model"]), dict(model))
    folder = tmp_path / "dcp"
    assert call("export", tier, folder, "--format", "dcp", *(["--step", step] if step else [])).exit_code == OK
    value = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    dcp.load({"model": value}, checkpoint_id=str(folder))
    assert same(value, dict(model))


def test_export_passes_over_a_damaged_checkpoint_and_says_so(tier, tmp_path):
    flip(tensors_of(tier, 5))
    result = call("export", tier, tmp_path / "model.safetensors")
    assert result.exit_code == OK
    assert "skipped: step 5" in result.stdout
    assert "step 4: 4 tensors" in result.stdout


@pytest.mark.parametrize("command", ["inspect", "verify", "list", "gc", "export", "copy", "watch"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_tier_whose_claim_files_are_missing_is_named_as_that(command, is_folder, tmp_path):
    tier = tmp_path / "tier"
    (tier / "000001-0123abcd").mkdir(parents=True)
    if is_folder:
        (tier / "000001-0123abcd" / "claim.json").mkdir()
    more = {"export": [tmp_path / "out.safetensors"], "copy": [tmp_path / "new.pool"], "watch": ["--count", 1]}
    result = call(command, tier, *more.get(command, []))
    assert result.exit_code != 0
    assert "It looks like a tier whose claim files are missing: 000001-0123abcd/claim.json is no file" in result.stderr
