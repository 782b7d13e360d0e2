"""What lightck says and makes of what it is given: errors, names of files."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from toys import adam, forward, net, pool_with, same

import lightck
from lightck import errors
from lightck.cli import main


def test_a_pool_without_a_checkpoint_is_an_error_of_the_pool(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model)), pytest.raises(errors.PoolError) as caught:
        lightck.recover(pool)
    assert type(caught.value) is errors.NoCheckpointError
    assert isinstance(caught.value, LookupError)


NAMED = ["it.pt", "it.PTH", "it.bin", "it.ckpt", "it.safetensors"]


@pytest.mark.parametrize(
    ("name", "said"),
    [(name, said) for said in (None, "safetensors", "torch") for name in [*NAMED, "it"][: 5 + bool(said)]],
)
def test_the_name_of_an_export_says_its_format(pool, folder, name, said):
    pool_with(pool)
    options = ["--format", said] if said else []
    done = CliRunner().invoke(main, ["export", str(pool), str(folder / name), *options])
    assert done.exit_code == 0, done.output
    is_torch = said == "torch" if said else name != "it.safetensors"
    with (folder / name).open("rb") as file:  # torch looks at the name of a path
        loaded = torch.load(file, weights_only=True) if is_torch else load_file(folder / name)
    assert same(dict(loaded), dict(lightck.recover(pool).model))


def test_the_error_for_an_open_session_says_whose_it_is(pool):
    inner = net()
    outer = torch.nn.ModuleDict({"encoder": inner})
    other = pool.with_name("other.pool")
    with lightck.attach(inner, pool, optimizer=adam(inner)):
        with pytest.raises(errors.SessionError, match=r"^This model has an open session already, on .*run\.pool"):
            lightck.attach(inner, other)
        with pytest.raises(errors.SessionError, match=r"A part of this model \(encoder, a Sequential\) has.*run\.pool"):
            lightck.attach(outer, other)
    with (
        lightck.attach(outer, pool, optimizer=adam(outer), overwrite=True),
        pytest.raises(errors.SessionError, match=r"is a part \(encoder\) of another model, a ModuleDict, which has"),
    ):
        lightck.attach(inner, other)
    assert not other.exists()
    forward(inner)


def test_the_suite_meets_the_signal_of_a_closed_terminal_under_nohup():
    tests = Path(__file__).parents[2]
    script = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        f"sys.path.insert(0, {str(tests)!r}); import conftest; "
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        (None, TypeError, "The pool's path is None"),
        (5, TypeError, "of type int"),
        (b"run.pool", TypeError, "of type bytes"),
        ("", errors.PoolPathError, "is empty"),
        ("~/run.pool", errors.PoolPathError, "os.path.expanduser"),
    ],
)
def test_a_path_that_names_no_file(path: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        lightck.attach(torch.nn.Linear(2, 2), path)


@pytest.mark.parametrize("thing", [5, None])
def test_what_cannot_be_iterated_is_no_loader(thing: Any, pool: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with lightck.attach(model, pool) as session, pytest.raises(TypeError, match="cannot be iterated"):
        session.loader(thing)


@pytest.mark.parametrize("copies", [False, True])
def test_an_optimizer_of_another_model_is_named(copies: bool, pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """But not one of masters, which the loop copies into the model."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, "lightck"), lightck.attach(model, pool, optimizer=optimizer):
        for _ in range(10):
            other(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if copies:
                model.load_state_dict(other.state_dict())
    said = [r.getMessage() for r in caplog.records]
    assert [s for s in said if "no parameter of this model changed" in s] == ([] if copies else said)


def test_a_finished_training_with_another_loader_says_that_its_pass_is_at_its_end(pool: Path, caplog: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))

    def attached(batch_size: int, **said: Any) -> Any:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
        loader = session.loader(torch.utils.data.DataLoader(data, batch_size))
        for _ in range(loader.epoch, 1):
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
        session.close(**said)
        return session

    attached(2)
    assert attached(4).step == 4, "no batch of the pass is left"
    assert "batch_size was 2 and is 4. The checkpoint was saved after the last batch of a pass" in caplog.text
    assert attached(2, done=True).step == 4
    assert attached(4).done
