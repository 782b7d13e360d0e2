"""torchtitan's trainer: killed and started again, it ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranked import Ended, run_ranks, values
from toys import in_child, killed_child, same

import lightck
from lightck.errors import CheckpointExistsError, UnsupportedError

pytestmark = pytest.mark.frameworks
pytest.importorskip("torchtitan")

from . import titan  # noqa: E402

OF_TWO_RANKS = ("fully_shard", "tensor parallel")
IN_CI = ("evaluation and folders",)
PLAIN = "accumulation, cosine"
ALONE = [name for name in titan.PROGRAMS if name not in OF_TWO_RANKS]


def alone(program: str, folder: Path, pool: Path | None, kill_at: int | None = None, **options: Any) -> dict[str, Any]:
    as_rank(0, 1, free_port())
    return titan.run(program, folder, pool, kill_at, **options)


def as_rank(rank: int, n_ranks: int, port: int) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if name != "events" and not same(one[name], other[name])]


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in ALONE]
)
def test_a_killed_training_ends_like_one_that_was_not(program, folder):
    expected = in_child(lambda: alone(program, folder / "plain", None))
    assert expected["folders"]
    assert difference(in_child(lambda: alone(program, folder / "whole", folder / "whole.pool")), expected) == []
    chosen = random.Random(program)
    kills = sorted(chosen.sample(range(1, expected["events"] // 2), 2 if program in IN_CI else 8))
    kills = [max(1, after - before) for before, after in zip([0, *kills], kills, strict=False)]
    print("kills at the events", kills)
    left, pool = folder / "killed", folder / "killed.pool"
    for kill_at in kills:
        killed_child(lambda kill_at=kill_at: alone(program, left, pool, kill_at))
    assert difference(in_child(lambda: alone(program, left, pool)), expected) == []


@pytest.mark.long
@pytest.mark.parametrize("program", OF_TWO_RANKS)
def test_two_ranks_go_on(program, folder):
    """One of them is killed at a time."""

    def ranks(name: str, pools: Path | None, killed: dict[int, int] | None = None) -> list[Ended]:
        port = free_port()

        def body(rank: int) -> dict[str, Any]:
            as_rank(rank, 2, port)
            return titan.run(program, folder / name, pools, (killed or {}).get(rank))

        return run_ranks(2, body, has_group=False)

    def differences(found: list[dict[str, Any]]) -> list[list[str]]:
        return [difference(*pair) for pair in zip(found, expected, strict=True)]

    expected = values(ranks("plain", None))
    assert differences(values(ranks("whole", folder / "whole-pools"))) == [[], []]
    for rank, kill_at in ((1, 30), (0, 21), (1, 12)):
        ended = ranks("killed", folder / "killed-pools", {rank: kill_at})
        assert ended[rank].is_killed
    assert differences(values(ranks("killed", folder / "killed-pools"))) == [[], []]


# -- the end of a training ---------------------------------------------------------------------------------------------


def test_a_finished_training_is_not_trained_again(folder):
    first = in_child(lambda: alone(PLAIN, folder / "one", folder / "run.pool"))
    again = in_child(lambda: alone(PLAIN, folder / "two", folder / "run.pool"))
    assert again["events"] == 0
    assert [name for name in difference(again, first) if name not in ("log", "folders")] == []


def test_an_error_in_a_step_leaves_the_steps_before(folder):
    def failing() -> int:
        as_rank(0, 1, free_port())
        trainer, _ = titan.prepared(titan.config_of(PLAIN, folder / "out"), folder / "run.pool", None)
        step = trainer.forward_backward_step

        def fails(**batch: Any) -> Any:
            if trainer.step == 6:
                raise ZeroDivisionError
            return step(**batch)

        trainer.forward_backward_step = fails
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        trainer.close()
        return trainer.checkpointer.session.committed

    assert in_child(failing) == 5
    assert lightck.recover(folder / "run.pool").state["train_state"]["step"] == 5


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(change: Callable[[Any], None], folder: Path, error: type[Exception], text: str) -> None:
    """``change``: of the prepared trainer."""

    def body() -> None:
        as_rank(0, 1, free_port())
        trainer, _ = titan.prepared(titan.config_of(PLAIN, folder / "out"), folder / "run.pool", None)
        change(trainer)
        with pytest.raises(error, match=text):
            trainer.train()
        assert trainer.step in (0, titan.STEPS)
        trainer.close()

    in_child(body)


def test_a_loop_of_its_own_is_refused(folder):
    class Own(titan.Trainer):
        def train(self) -> None:
            self.checkpointer.load()

    def another_class(trainer: Any) -> None:
        trainer.__class__ = Own

    refused(another_class, folder, UnsupportedError, "Own has a loop of its own")


@pytest.mark.parametrize("missing", ["", "_save", "should_continue_training"])
def test_other_releases_are_refused_while_the_trainer_is_built(folder, missing):
    def build() -> None:
        as_rank(0, 1, free_port())
        if missing:
            owner = titan.Trainer if missing.startswith("should") else titan.integration.CheckpointManager
            delattr(owner, missing)
            if hasattr(owner, missing):  # the abstract one
                delattr(owner.__mro__[1], missing)
            text = f"has no {missing}"
        else:
            titan.integration.torchtitan.__version__ = "0.9.0"
            text = r"torchtitan 0\.9\.0 is not supported: lightck knows 0\.3\.x"
        with pytest.raises(UnsupportedError, match=text):
            titan.prepared(titan.config_of(PLAIN, folder / "out"), folder / "run.pool", None)

    in_child(build)
    assert not (folder / "run.pool").exists()


def test_a_folder_is_not_loaded_beside_a_pool_that_is_ahead(folder):
    in_child(lambda: alone("evaluation and folders", folder / "out", folder / "run.pool"))

    def asks_for_a_folder(trainer: Any) -> None:
        trainer.config.checkpoint.load_step = 5

    refused(asks_for_a_folder, folder, CheckpointExistsError, "holds step 12 of a training, and checkpoint.load_step=5")
    (folder / "out" / "checkpoint" / "step-10").rename(folder / "out" / "checkpoint" / "step-90")
    refused(lambda trainer: None, folder, CheckpointExistsError, "of torchtitan holds step 90")


@pytest.mark.long
def test_a_training_without_a_pool_goes_on_from_torchtitans_folder(folder):
    """Then the pool takes over: a kill costs nothing of what was trained since."""
    program = "evaluation and folders"
    in_child(lambda: alone(program, folder / "out", None))
    shutil.rmtree(folder / "out" / "checkpoint" / "step-12")
    pool = folder / "run.pool"
    killed_child(lambda: alone(program, folder / "out", pool, 18))
    assert lightck.recover(pool).state["train_state"]["step"] == 11
    in_child(lambda: alone(program, folder / "out", pool))
    assert lightck.recover(pool).state["train_state"]["step"] == 12


def test_stages_of_a_pipeline_are_refused(folder):
    port = free_port()

    def body(rank: int) -> None:
        as_rank(rank, 2, port)
        config = titan.config_of(PLAIN, folder / "out")
        config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule = 2, "1F1B"
        trainer, _ = titan.prepared(config, folder / "pools", None)
        with pytest.raises(UnsupportedError, match="a stage of torchtitan's pipeline"):
            trainer.train()

    values(run_ranks(2, body, has_group=False))


def test_without_torchtitan_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.delitem(sys.modules, "lightck.integrations.torchtitan")
    with pytest.raises(ImportError, match=r"pip install 'lightck\[torchtitan\]'"):
        __import__("lightck.integrations.torchtitan")
