"""What lightck says and makes of what it is given: errors, names of files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("name", ["it.pt", "it.PTH", "it.bin", "it.ckpt", "it.safetensors", "it"])
@pytest.mark.parametrize("said", [None, "safetensors", "torch"])
def test_the_name_of_an_export_says_its_format(pool, folder, name, said):
    pool_with(pool)
    options = ["--format", said] if said else []
    done = CliRunner().invoke(main, ["export", str(pool), str(folder / name), *options])
    assert done.exit_code == 0, done.output
    is_torch = said == "torch" if said else name not in ("it.safetensors", "it")
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
    tests = Path(__file__).parents[1]
    script = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        f"sys.path.insert(0, {str(tests)!r}); import conftest; "
        "assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
