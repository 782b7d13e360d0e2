"""Loaders: a batch that is taken before the loop, a position that nobody takes, a pass that is not begun anew."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume.harness import Kill
from sampling import every_second
from torch.utils.data import DataLoader

import lightck
from lightck.errors import PoolLockedError, SessionError

from .harness import Bench

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "name",
    every_second(
        [
            "probe-before-the-loop",
            "preview-before-the-loop",
            "preview-with-a-generator-and-workers",
            "preview-of-a-stateful-loader",
            "preview-and-flush-between-passes",
            "previews-of-two-loaders",
            "preview-in-each-epoch",
            "left-with-a-batch-that-is-not-used",
        ]
    ),
)
def test_what_is_fetched_before_the_loop_does_not_use_up_the_position(name: str, bench: Bench) -> None:
    bench.exact(name)


def test_what_lightning_asks_changes_nothing_and_what_it_counts_wrongly_is_said(bench: Bench) -> None:
    """In mid-pass: this loop itself is exact, and Lightning's would skip its validation."""
    outcomes = bench.exact("asked-by-lightning", quiet=False)
    reported = ["Lightning's Trainer counts" in " ".join(outcome.warnings) for outcome in outcomes]
    assert any(reported)
    assert all(len(outcome.warnings) == is_reported for outcome, is_reported in zip(outcomes, reported, strict=True))


def test_a_probe_of_persistent_workers(bench: Bench) -> None:
    """The pass that trains is the second one of its workers, which is said: they may augment."""
    outcomes = bench.exact("probe-with-persistent-workers", quiet=False)
    assert all(
        sum("has persistent workers, and the training goes on in a later pass" in said for said in o.warnings) <= 1
        for o in outcomes
    )


def test_a_renamed_loader_is_refused(bench: Bench, folder: Path) -> None:
    training, pool = bench.training("renamed"), folder / "renamed.pool"
    training.process(pool, Kill("place", "update", 3), fresh=True)
    reported = training.process(pool, None, fresh=False)
    assert reported.status
    assert reported.updates == reported.start, "no update is made on other batches"
    error = training.log.read_text()
    assert re.search(r"DriftError: .* in the middle of a pass over loader 'a' \(epoch 0, \d batch", error)
    assert re.search(r"loader 'b' began a new pass instead.*anew=True", error)


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("dropped", r"position of loader 'a' \(epoch \d, \d batches given\).*does not continue from that position"),
        ("cycle", r"an update was made after the pass over it ended|using batches of a pass again after the pass"),
        ("stateful-iterable-dataset", r"batch \d of the pass is not that of the interrupted run"),
    ],
)
def test_exact_or_reported(name: str, warning: str, bench: Bench) -> None:
    bench.exact_or_reported(name, warning)


@pytest.mark.parametrize("name", ["evaluation-wrapped-late", "two-phases-and-left-over-gradients"])
def test_right_loops(name: str, bench: Bench) -> None:
    bench.exact(name)


def test_loaders_wrapped_in_each_epoch_find_their_position_or_are_refused(bench: Bench, folder: Path) -> None:
    training, pool = bench.training("wrapped-anew-in-each-epoch"), folder / "anew.pool"
    training.process(pool, Kill("place", "update", 8), fresh=True)
    reported = training.process(pool, None, fresh=False)
    assert reported.status
    assert reported.updates == reported.start
    assert "pass over loader 'epoch 1'" in training.log.read_text()


@pytest.mark.parametrize("name", ["persistent-evaluation-wrapped", "persistent-evaluation-with-a-generator"])
def test_persistent_workers_that_are_restored_or_draw_nothing(name: str, bench: Bench) -> None:
    bench.exact(name)


def test_persistent_workers_outside_the_session_are_reported_once_they_had_started(bench: Bench) -> None:
    warning = r"DataLoader with persistent workers \(over a Augmented, batch size 15\).*Pass the DataLoader to"
    before, *_, after = bench.exact_or_reported(
        "persistent-evaluation-outside",
        warning,
        quiet=True,
        kills=[
            Kill("place", "update", 2),
            Kill("place", "update", 8),
            Kill("place", "update", 12),
        ],
    )
    assert not before.warnings, "no evaluation had come, so the resumed run draws where the run before would have"
    assert after.difference is not None


def test_a_training_that_has_finished_is_started_again(bench: Bench, folder: Path) -> None:
    training, pool = bench.training("done-at-its-end"), folder / "done.pool"
    bench.exact("done-at-its-end", kills=[Kill("place", "in evaluation", 3)])
    first = training.process(pool, None, fresh=True)
    again = training.process(pool, None, fresh=False)
    assert (again.status, again.start, again.updates) == (0, 15, 15)
    assert again.digests == first.digests


def test_done_is_kept_until_the_training_goes_on(pool: Path) -> None:
    def attach() -> tuple[Any, Callable[[], None]]:
        model = torch.nn.Linear(4, 2)
        opt = torch.optim.Adam(model.parameters())

        def update() -> None:
            model(torch.ones(4)).sum().backward()
            opt.step()

        return lightck.attach(model, pool, optimizer=opt, resume=True), update

    session, update = attach()
    assert not session.done
    update()
    session.flush()
    assert not session.done
    session.close(done=True)  # the step was committed before
    assert session.done

    session, update = attach()
    assert session.done
    session.close()  # says nothing of it

    session, update = attach()
    assert session.done
    update()
    assert not session.done
    session.close()

    session, update = attach()
    assert (session.step, session.done) == (2, False)
    update()
    session.close(done=True)
    assert attach()[0].done


def test_a_session_loader_has_the_attributes_of_the_loader(pool: Path) -> None:
    class Epochs(DataLoader):
        at = 0

        def set_epoch(self, epoch: int) -> None:
            self.at = epoch

    model = torch.nn.Linear(4, 2)
    plain = Epochs(range(10), 4, drop_last=True, shuffle=True)
    with lightck.attach(model, pool, optimizer=torch.optim.SGD(model.parameters(), 0.1)) as session:
        loader = session.loader(plain, name="train")
        for name in ("dataset", "sampler", "batch_sampler", "batch_size", "num_workers", "collate_fn", "drop_last"):
            assert getattr(loader, name) is getattr(plain, name)
        loader.set_epoch(3)
        assert plain.at == 3
        assert (loader.name, loader.epoch, loader.start, loader.loader) == ("train", 0, 0, plain)
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = loader.no_such_thing
        with pytest.raises(AttributeError, match="part of every checkpoint"):
            loader.state_dict()
        assert not hasattr(loader, "_iterator")
        with pytest.raises(SessionError, match=r"returned by session\.loader\(\) already"):
            session.loader(loader)


def test_a_session_that_only_a_traceback_holds_can_be_ended(pool: Path) -> None:
    def cell(fails: bool) -> int:
        model = torch.nn.Linear(4, 2)
        opt = torch.optim.Adam(model.parameters())
        session = lightck.attach(model, pool, optimizer=opt, resume=True)
        begun = session.step
        model(torch.ones(4)).sum().backward()
        opt.step()
        session.flush()
        opt.zero_grad()
        model(torch.ones(4)).sum().backward()
        opt.step()
        if fails:
            raise ValueError("a mistake in the cell")
        session.close()
        return begun

    with pytest.raises(ValueError, match="a mistake") as held:
        cell(fails=True)
    with pytest.raises(PoolLockedError, match=r"lightck\.sessions\.open_sessions\(\).*abandon"):
        cell(fails=False)
    (left,) = lightck.sessions.open_sessions()
    assert left.path == str(pool)
    left.abandon()
    assert lightck.sessions.open_sessions() == []
    assert cell(fails=False) == 1, "the step that was committed"
    del held
