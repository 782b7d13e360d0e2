"""``lightck compact``: one checkpoint in a new pool, in which a training goes on with the same bits."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, call_json
from gradient_damage import flip_oldest_base
from noisy_training import trained
from ranked import run_ranks
from toys import crashed, damage, in_child, kill_at, killed_child, net, pool_with, same

import lightck
from lightck.cli.base import BAD, FAILED, INTERRUPTED, OK
from lightck.pool.commit_log import candidates
from lightck.pool.reader import open_pool
from lightck.pool.storage import pmemobj
from lightck.restore import compact, gradient_state
from lightck.state.fingerprint import fingerprint
from lightck.strategy.gradients import Gradients

STEPS, MORE = 7, 5
STRATEGIES = {"full": None, "gradients": Gradients(base_every=3)}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_training_goes_on_in_the_new_pool_with_the_same_bits(kind, pool):
    expected = trained(pool.with_name("whole.pool"), STEPS + MORE)
    trained(pool, STEPS, STRATEGIES[kind])
    before, new = pool.read_bytes(), pool.with_name("new.pool")
    result = call("compact", pool, new)
    assert result.exit_code == OK, result.output
    assert pool.read_bytes() == before
    assert call("verify", new).exit_code == OK
    end = trained(new, STEPS + MORE, lightck.FullState(), resume=True)
    assert all(same(one, other) for one, other in zip(end, expected, strict=True))


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_new_pool_holds_what_a_recovery_gives(kind, pool):
    pool_with(pool, STEPS, strategy=STRATEGIES[kind])
    new = pool.with_name("new.pool")
    status, facts = call_json("compact", pool, new)
    old, copy = lightck.recover(pool), lightck.recover(new)
    assert status == OK
    assert (facts["step"], facts["path"], facts["tensors"], facts["rejected"]) == (STEPS, str(new), 16, [])
    assert (facts["nbytes"], facts["old_nbytes"]) == (new.stat().st_size, pool.stat().st_size)
    assert facts["updates"] == (2 if kind == "gradients" else 0)
    assert (copy.step, copy.iteration) == (old.step, old.iteration)
    assert same(dict(copy.model), dict(old.model))
    assert same(copy.optimizer, old.optimizer)
    assert len(lightck.recover(new).rejected) == 0


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_batch_that_follows_is_known_in_the_new_pool(kind, pool):
    model, image, new = net(), pool.with_name("crashed.pool"), pool.with_name("new.pool")
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), 1)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=STRATEGIES[kind]) as session:
        for number, x in enumerate(session.loader(loader)):
            loss = model(x).sum()
            if number == 5:
                crashed(pool)
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert call("compact", image, new).exit_code == OK
    followed, copied = (following(path) for path in (image, new))
    assert followed == copied
    assert followed


def following(path: Path) -> Any:
    """What the pool knows of the batch after its newest checkpoint."""
    with closing(open_pool(str(path), gradients=True)) as reader:
        return reader.next_batches(candidates(reader.commit_log())[0])


def test_a_pool_with_gradient_records_becomes_smaller(pool):
    pool_with(pool, STEPS, strategy=Gradients(base_every=6))
    new = pool.with_name("new.pool")
    text = call("compact", pool, new).stdout
    assert new.stat().st_size < pool.stat().st_size / 4
    assert "updates replayed" in text


def test_the_new_pool_is_made_by_the_backend_that_attach_would_take(gradients, folder, monkeypatch):
    monkeypatch.setenv("LIGHTCK_BACKEND", "pmdk")
    if not pmemobj.is_available():
        pytest.skip("PMDK is not installed")
    new = folder / "new.pool"
    assert call("compact", gradients, new).exit_code == OK
    assert call_json("inspect", new)[1]["pool"]["backend"] == "pmdk"
    assert same(dict(lightck.recover(new).model), dict(lightck.recover(gradients).model))


def test_an_older_step(gradients, folder):
    new = folder / "new.pool"
    assert call("compact", gradients, new, "--step", 5).exit_code == OK
    assert lightck.recover(new).step == 5
    assert same(dict(lightck.recover(new).model), dict(lightck.recover(gradients, step=5).model))


def test_the_new_pool_says_if_its_updates_were_made_again_by_another_torch(gradients, folder, monkeypatch):
    new = folder / "new.pool"
    with monkeypatch.context() as patched:
        patched.setattr(gradient_state, "fingerprint", lambda: fingerprint() | {"torch": "9.9"})
        assert not lightck.recover(gradients).exact
        assert call("compact", gradients, new).exit_code == OK
    assert lightck.recover(gradients).exact
    assert not lightck.recover(new).exact
    assert "-> 9.9" in lightck.recover(new).reason


def test_a_checkpoint_that_is_damaged_is_passed_over(good, folder):
    damage(good, "model/0.weight", [4])
    result = call("compact", good, folder / "new.pool")
    assert result.exit_code == OK
    assert result.stdout.startswith("skipped: step 4 ")
    assert lightck.recover(folder / "new.pool").step == 3


def test_a_damaged_base_is_replaced_by_the_older_one(gradients, folder):
    flip_oldest_base(gradients)
    assert call("compact", gradients, folder / "new.pool").exit_code == OK
    assert lightck.recover(folder / "new.pool").step == 7


def test_nothing_is_left_where_no_checkpoint_is_intact(good, folder):
    damage(good, "model/0.weight")
    result = call("compact", good, folder / "new.pool")
    assert result.exit_code == BAD
    assert not (folder / "new.pool").exists()
    assert not list(folder.glob(".lightck-*"))


@pytest.mark.parametrize("kind", ["file", "pool", "folder", "link to nothing", "the pool itself"])
def test_nothing_that_exists_is_replaced(kind, good, folder):
    new = folder / "new.pool"
    if kind == "file":
        new.write_text("mine")
    elif kind == "pool":
        pool_with(new, 2)
    elif kind == "folder":
        new.mkdir()
    elif kind == "link to nothing":
        new.symlink_to(folder / "nothing")
    else:
        new = good
    before = new.read_bytes() if new.is_file() else None
    result = call("compact", good, new)
    assert result.exit_code == FAILED
    assert "exists, and compact replaces nothing" in result.stderr
    assert (new.read_bytes() if new.is_file() else None) == before


def test_what_appears_meanwhile_is_not_replaced(good, folder, monkeypatch):
    new, inner = folder / "new.pool", compact._verify

    def verify(*args: Any) -> None:
        inner(*args)
        new.write_text("mine")

    monkeypatch.setattr(compact, "_verify", verify)
    assert call("compact", good, new).exit_code == FAILED
    assert new.read_text() == "mine"
    assert not list(folder.glob(".lightck-*"))


def test_a_pool_that_a_training_is_making_is_refused(good, folder):
    new = folder / "new.pool"
    model = net()
    with lightck.attach(model, new, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)):
        new.unlink()  # only its lock is left
        result = call("compact", good, new)
    assert result.exit_code == FAILED
    assert "open in another session" in result.stderr


def test_a_missing_folder_is_named(good, folder):
    result = call("compact", good, folder / "missing" / "new.pool")
    assert result.exit_code == FAILED
    assert "missing" in result.stderr


class Own(torch.optim.AdamW):
    """A class that a command cannot run."""


def test_an_optimizer_of_another_class_is_refused_by_name(pool):
    model = net()
    optimizer = Own(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3, own_optimizers=True)):
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    new = pool.with_name("new.pool")
    result = call("compact", pool, new)
    assert result.exit_code == FAILED
    assert "class Own" in result.stderr
    assert not new.exists()


def test_ranks_are_refused_by_name(folder):
    def body(rank: int) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (folder / "pools").mkdir(exist_ok=True)
        with lightck.attach(model, folder / "pools", optimizer=optimizer):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

    run_ranks(2, body)
    result = call("compact", folder / "pools", folder / "new.pool")
    assert result.exit_code == FAILED
    assert "lightck reshard DIR OUT" in result.stderr
    one = next((folder / "pools").glob("*.pool"))
    result = call("compact", one, folder / "new.pool")
    assert result.exit_code == FAILED
    assert "holds the state of rank" in result.stderr
    assert not (folder / "new.pool").exists()


@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed", "verified"])
def test_a_kill_leaves_no_file_under_the_name_and_the_next_attempt_succeeds(site, gradients, folder, monkeypatch):
    new, before = folder / "new.pool", gradients.read_bytes()

    def killed() -> None:
        if site == "verified":
            monkeypatch.setattr(compact, "_verify", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        else:
            kill_at(site)
        call("compact", gradients, new)

    killed_child(killed)
    assert not new.exists()
    assert gradients.read_bytes() == before
    assert call("compact", gradients, new).exit_code == OK
    assert lightck.recover(new).step == 7
    assert not list(folder.glob(".lightck-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number, gradients, folder, monkeypatch):
    monkeypatch.setattr(compact, "_verify", lambda *_: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGTERM)
    result = call("compact", gradients, folder / "new.pool")
    assert result.exit_code == INTERRUPTED
    assert not (folder / "new.pool").exists()
    assert not list(folder.glob(".lightck-*"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_medium_without_space_is_named(good, folder):
    """The system refuses files of that length."""

    def limited() -> tuple[int, str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
        result = call("compact", good, folder / "new.pool")
        return result.exit_code, result.stderr

    status, text = in_child(limited)
    assert status == FAILED
    assert str(folder / "new.pool") in text
    assert not (folder / "new.pool").exists()
    assert not list(folder.glob(".lightck-*"))


def test_a_medium_that_loses_bytes_is_named(good, folder, monkeypatch):
    new, inner = folder / "new.pool", compact._verify

    def verify(reader: Any, *args: Any) -> None:
        copy = next(reader.checkpoints())
        begin, _ = copy.range_of("model/0.weight", 0, 4)
        byte = reader.read(begin, 1)[0]
        os.pwrite(reader.container.fd, bytes([byte ^ 1]), begin)
        inner(reader, *args)

    monkeypatch.setattr(compact, "_verify", verify)
    result = call("compact", good, new)
    assert result.exit_code == FAILED
    assert "does not hold what was written" in result.stderr
    assert not new.exists()
