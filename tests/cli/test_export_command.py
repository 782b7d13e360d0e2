"""``lightck export`` writes what ``recover`` returns."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from calls import call, call_json
from safetensors.torch import load_file
from toys import damage, same

import lightck
from lightck import export
from lightck.cli.base import INTERRUPTED
from lightck.failure_recording import FailureRecordingFile


@pytest.mark.parametrize("step", [None, 3])
def test_safetensors_hold_the_model_of_the_step(good, tmp_path, step):
    out = tmp_path / "model.safetensors"
    status, facts = call_json("export", good, out, *(["--step", step] if step else []))
    assert (status, facts["step"], facts["nbytes"]) == (0, step or 4, out.stat().st_size)
    assert same(load_file(out), dict(lightck.recover(good, step=step).model))


@pytest.mark.parametrize("what", ["model", "all"])
def test_a_torch_file_is_loaded_without_pickled_code(good, tmp_path, what):
    out = tmp_path / "it.pt"
    assert call("export", good, out, "--format", "torch", "--what", what).exit_code == 0
    loaded = torch.load(out, weights_only=True)
    assert same(dict(loaded if what == "model" else loaded["model"]), dict(lightck.recover(good).model))


def test_a_folder_for_dcp(good, tmp_path):
    out = tmp_path / "it"
    status, facts = call_json("export", good, out, "--format", "dcp", "--what", "all")
    assert (status, facts["step"], facts["path"]) == (0, 4, str(out))
    model = lightck.recover(good).model
    value = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.items()}, "step": 0}
    dcp.load(value, checkpoint_id=str(out))
    assert same(value["model"], dict(model))
    assert value["step"] == 4
    assert call("export", good, out, "--format", "dcp").exit_code == 2
    assert call("export", good, out, "--format", "dcp", "--overwrite").exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp"])
def test_a_signal_leaves_nothing(number, kind, good, tmp_path, monkeypatch):
    seen: list[Path] = []

    def interrupted(*_: object, **__: object) -> None:
        seen.extend(tmp_path.iterdir())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(export, "write_tensors", interrupted)
    monkeypatch.setattr(torch, "save", interrupted)
    monkeypatch.setattr(dcp, "save", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    result = call("export", good, tmp_path / "it", "--format", kind)
    assert result.exit_code == INTERRUPTED
    assert seen, "it was being written"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_within_a_write_of_torch_leaves_nothing(good, tmp_path, monkeypatch):
    """torch raises an error of its own, whose context is the interrupt."""

    def interrupted(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(FailureRecordingFile, "write", interrupted)
    big = {"it": torch.zeros(1 << 20)}
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda _, file: save(big, file))
    assert call("export", good, tmp_path / "it.pt").exit_code == INTERRUPTED
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["it.onnx", "it"])
def test_a_name_that_says_no_format_is_refused(good, tmp_path, name):
    result = call("export", good, tmp_path / name)
    assert result.exit_code == 2
    assert "does not say which format to write. Name the file *.safetensors or *.pt" in result.stderr
    assert not (tmp_path / name).exists()
    assert call("export", good, tmp_path / name, "--format", "safetensors").exit_code == 0
    assert load_file(tmp_path / name)


def test_a_file_that_is_there_is_kept_unless_asked(good, tmp_path):
    out = tmp_path / "it.safetensors"
    out.write_bytes(b"precious")
    result = call("export", good, out)
    assert (result.exit_code, out.read_bytes()) == (2, b"precious")
    assert "--overwrite" in result.stderr
    assert call("export", good, out, "--overwrite").exit_code == 0
    assert load_file(out)


@pytest.mark.parametrize("name", ["good.pool", "other.pool"])
def test_a_pool_is_never_replaced(good, folder, name):
    shutil.copyfile(good, folder / "other.pool")
    before = (folder / name).read_bytes()
    for options in (["safetensors"], ["safetensors", "--overwrite"], ["torch", "--overwrite"]):
        status, facts = call_json("export", good, folder / name, "--format", *options)
        assert (status, facts["error"]["class"]) == (2, "ExportExistsError")
        assert "is a pool. It may hold the only copy" in facts["error"]["message"]
    assert (folder / name).read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["good.pool", "other.pool"]


def test_what_only_looks_like_a_pool_is_replaced_when_asked(good, folder):
    """A pool file that was truncated to nothing is no pool."""
    empty = folder / "empty.pool"
    empty.touch()
    assert call("export", good, empty, "--overwrite", "--format", "safetensors").exit_code == 0
    assert load_file(empty)


def test_neither_a_link_to_a_pool_nor_the_pool_is_replaced(good, folder):
    link = folder / "link"
    link.symlink_to(good)
    before = good.read_bytes()
    result = call("export", good, link, "--overwrite", "--format", "torch")
    assert result.exit_code == 2
    assert "is a symbolic link" in result.stderr
    assert link.is_symlink()
    assert good.read_bytes() == before


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_place_that_is_no_file(good, tmp_path, kind):
    place = tmp_path / "place"
    place.mkdir() if kind == "folder" else os.mkfifo(place)
    assert call("export", good, place).exit_code == 2
    assert call("export", good, place, "--overwrite").exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["place"]


def test_what_the_system_refuses_is_an_object_too(good, tmp_path):
    for place in (tmp_path / ("x" * 300), tmp_path / "no" / "it"):
        status, facts = call_json("export", good, place, "--format", "torch")
        assert (status, facts["error"]["class"], facts["error"]["reasons"]) == (2, "ExportError", [])
        assert str(place) in facts["error"]["message"]
    status, facts = call_json("trace", tmp_path / "missing")
    assert (status, facts["error"]["class"]) == (2, "FileNotFoundError")


def test_a_folder_that_is_missing_is_an_error(good, tmp_path):
    result = call("export", good, tmp_path / "no" / "it.safetensors")
    assert (result.exit_code, result.stdout) == (2, "")


def test_what_was_passed_over_is_said(good, tmp_path):
    damage(good, "model/0.weight", [4])
    result = call("export", good, tmp_path / "it.safetensors")
    assert result.exit_code == 0
    assert "skipped: step 4" in result.stdout
    assert "step 3: " in result.stdout
    assert call("export", good, tmp_path / "other.safetensors", "--step", 4).exit_code == 1
