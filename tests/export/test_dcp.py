"""``export --format dcp``: folders that ``torch.distributed.checkpoint`` loads, in one process and in several ranks."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranked import run_ranks, values
from ranks.test_recover import train as train_ranks
from ranks.test_recover import whole
from ranks.trainings import TOPOLOGIES, build
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from toys import adam, in_child, net, pool_with, same, train

import lightck
from lightck.errors import ExportError, ExportExistsError, StateValueError


@pytest.fixture
def pools(folder: Path) -> Path:
    return folder / "pools"


def loaded(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a folder into model and optimizer as torch's tutorial does. Returns the step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    value = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(value, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=value["model"], optim_state_dict=value["optimizer"])
    return value["step"]


def test_a_single_process_loads_the_folder(pool, tmp_path):
    model, optimizer = pool_with(pool)
    done = lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp", what="all")
    assert done.nbytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert done.tensors == 16
    other = net(seed=9)
    optimizer_of_other = adam(other)
    assert loaded(tmp_path / "out", other, optimizer_of_other) == 3
    assert same(other.state_dict(), model.state_dict())
    assert same(optimizer_of_other.state_dict()["state"], optimizer.state_dict()["state"])
    train(model, optimizer, 2, start=3)
    train(other, optimizer_of_other, 2, start=3)
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(("saved", "loads"), [("fsdp 3", "fsdp"), ("ddp", "tp"), ("tp", "fsdp 3")])
def test_any_number_of_ranks_loads_the_pools_of_any_other(pools, tmp_path, saved, loads):
    model, optimizer = train_ranks(saved, pools, 2)
    with lightck.recover(pools, lazy=True) as checkpoint:
        lightck.export_checkpoint(checkpoint, tmp_path / "out", format="dcp", what="all")

    def body(rank):
        live, live_optimizer = build(TOPOLOGIES[loads])
        step = loaded(tmp_path / "out", live, live_optimizer)
        names = {p: name for name, p in live.named_parameters()}
        states = {f"{names[p]}/{k}": whole(v) for p, held in live_optimizer.state.items() for k, v in held.items()}
        return step, {name: whole(v) for name, v in live.state_dict().items()}, states

    for step, tensors, states in values(run_ranks(TOPOLOGIES[loads].n_ranks, body)):
        assert step == 2
        assert same(tensors, model)
        assert same(states, optimizer)


def test_the_model_alone(pool, tmp_path):
    model, _ = pool_with(pool)
    lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp")
    value = {"model": net(seed=9).state_dict()}
    dcp.load(value, checkpoint_id=str(tmp_path / "out"))
    assert same(dict(value["model"]), dict(model.state_dict()))
    assert not any(
        "optimizer" in key for key in dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    )


def test_two_optimizers_become_one_as_torch_has_it(pool, tmp_path):
    model = net()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), adam(model[2])]
    with lightck.attach(model, pool, optimizer=optimizers):
        model(torch.ones(2, 4)).sum().backward()
        for one in optimizers:
            one.step()
    lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp", what="all")
    keys = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {"optimizer.state.0.weight.momentum_buffer", "optimizer.state.2.bias.exp_avg"} <= set(keys)


def test_a_folder_is_replaced_only_if_asked_and_if_it_is_one_of_torchs(pool, tmp_path):
    pool_with(pool)
    checkpoint, out = lightck.recover(pool), tmp_path / "out"
    out.mkdir()
    (out / "precious").write_bytes(b"mine")
    for overwrite in (False, True):
        with pytest.raises(ExportExistsError, match=r"exists.*Nothing was written"):
            lightck.export_checkpoint(checkpoint, out, format="dcp", overwrite=overwrite)
    assert [path.name for path in out.iterdir()] == ["precious"]
    shutil.rmtree(out)
    lightck.export_checkpoint(checkpoint, out, format="dcp")
    with pytest.raises(ExportExistsError, match="overwrite=True, or --overwrite of lightck export, replaces it"):
        lightck.export_checkpoint(checkpoint, out, format="dcp")
    for path in (out, f"{out}/"):
        before = (out / ".metadata").stat().st_ino
        lightck.export_checkpoint(checkpoint, path, format="dcp", overwrite=True)
        assert (out / ".metadata").stat().st_ino != before
    (out / "run.pool").write_bytes(pool.read_bytes())
    with pytest.raises(ExportExistsError, match=r"holds run\.pool, so it is never replaced"):
        lightck.export_checkpoint(checkpoint, out, format="dcp", overwrite=True)
    assert (out / "run.pool").exists()
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(ExportExistsError, match="is a symbolic link"):
        lightck.export_checkpoint(checkpoint, tmp_path / "link", format="dcp", overwrite=True)
    with pytest.raises(TypeError, match="overwrite='no' is a str"):
        lightck.export_checkpoint(checkpoint, out, format="dcp", overwrite="no")
    (tmp_path / "empty").mkdir()
    lightck.export_checkpoint(checkpoint, tmp_path / "empty", format="dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "out"]


def test_a_folder_that_cannot_be_listed_is_named(pool, tmp_path, monkeypatch):
    folder = tmp_path / "exported"
    folder.mkdir()

    def denied(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    pool_with(pool)
    checkpoint = lightck.recover(pool)
    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(ExportError, match="cannot be listed: Permission denied"):
        lightck.export_checkpoint(checkpoint, folder, format="dcp")


def test_nothing_is_printed(pool, tmp_path, recwarn):
    pool_with(pool)
    lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp")
    assert not [one for one in recwarn if "torch.distributed is disabled" in str(one.message)]


def test_a_full_disk_is_an_error_of_ours(pool, tmp_path, monkeypatch):
    """torch's own error is no ``Exception``."""
    pool_with(pool)
    checkpoint = lightck.recover(pool)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fails(*args, **options):
        raise CheckpointException("write", {0: (full, traceback.StackSummary())})

    monkeypatch.setattr(dcp, "save", fails)
    with pytest.raises(ExportError, match="No space left on device") as found:
        lightck.export_checkpoint(checkpoint, tmp_path / "out", format="dcp")
    assert found.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def limited_to(nbytes, work):
    """Call ``work`` in a child whose files get no longer than this: it stands for a full disk."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        with pytest.raises(ExportError) as found:
            work()
        return str(found.value), found.value.errno

    return in_child(limited)


def test_a_disk_that_becomes_full_within_a_tensor_is_named(pool, tmp_path):
    """torch's writer of zip files raises a RuntimeError, whose context is the error of the system."""
    model = net(20_000)
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        train(model, optimizer, 1)
    checkpoint, out = lightck.recover(pool), tmp_path / "out"
    text, number = limited_to(64 << 10, lambda: lightck.export_checkpoint(checkpoint, out, format="dcp", what="all"))
    assert number == errno.EFBIG
    assert text.startswith(f"The folder {str(out)!r} could not be written: {os.strerror(errno.EFBIG)}. ")
    assert not list(tmp_path.iterdir())


def test_an_error_of_torch_is_named_without_a_traceback(pool, tmp_path, monkeypatch):
    pool_with(pool)
    checkpoint = lightck.recover(pool)

    def text_for(error):
        summary = traceback.extract_stack()

        def fails(*args, **options):
            raise CheckpointException("write", {0: (error, summary)})

        monkeypatch.setattr(dcp, "save", fails)
        try:
            raise OSError(errno.EACCES, "of the caller, who handles it")
        except OSError:
            with pytest.raises(ExportError) as found:
                lightck.export_checkpoint(checkpoint, tmp_path / "out", format="dcp")
        assert "Traceback" not in str(found.value)
        assert "of the caller" not in str(found.value)
        return str(found.value)

    short = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nframe #0: c10::throw")
    assert "could not be written whole" in text_for(short)
    assert text_for(short).endswith("Check the folder around it (space, limits), or choose another one.")
    assert "raised ValueError: planted. Nothing was left there." in text_for(ValueError("planted."))


def test_ctrl_c_within_torch_ends_the_export_and_leaves_nothing(pool, tmp_path, monkeypatch):
    """torch makes an error of its own of it."""
    pool_with(pool)
    checkpoint = lightck.recover(pool)

    def interrupted(*args, **options):
        raise CheckpointException("write", {0: (KeyboardInterrupt(), traceback.StackSummary())})

    monkeypatch.setattr(dcp, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lightck.export_checkpoint(checkpoint, tmp_path / "out", format="dcp")
    assert not list(tmp_path.iterdir())


def test_state_with_lists_is_refused(pool, tmp_path):
    """torch cannot load it."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    with lightck.attach(model, pool, optimizer=optimizer):
        optimizer.step(closure)
    with pytest.raises(StateValueError, match=r"The state of LBFGS has lists \('.*', .*does not load"):
        lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp", what="all")


def test_a_failed_export_leaves_nothing(pool, tmp_path, monkeypatch):
    pool_with(pool)
    checkpoint = lightck.recover(pool)

    def fails(*args, **options):
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", fails)
        with pytest.raises(ExportError, match=r"RuntimeError: planted\. Nothing was left"):
            lightck.export_checkpoint(checkpoint, tmp_path / "out", format="dcp")
    with pytest.raises(ExportError, match="No such file or directory"):
        lightck.export_checkpoint(checkpoint, tmp_path / "missing" / "out", format="dcp")
    assert not list(tmp_path.iterdir())


def test_state_that_is_of_no_parameter_is_refused(pool, tmp_path):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state["count"] = self.state.get("count", 0) + 1

    model = net()
    optimizer = Counting(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 1)
    with pytest.raises(StateValueError, match=r"Counting keeps state under 'count', which is no parameter"):
        lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp", what="all")
    lightck.export_checkpoint(lightck.recover(pool), tmp_path / "out", format="dcp")
