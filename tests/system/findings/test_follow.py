"""What a loop keeps to itself is in no checkpoint: a resume that goes on with other data says so, and no other does."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from resume.harness import Kill
from torch import nn
from torch.utils.data import DataLoader
from toys import adam, checkpoints, content, crashed, everything, kill_at, killed_child, net, poke, same, train

import lightck
from lightck.dataloader.batch import checksum_of
from lightck.dataloader.passes import Pass
from lightck.errors import DataMismatchError
from lightck.events import ClosingEvent
from lightck.following.comparison import Comparison, Recorder
from lightck.following.first_batch import RANDOM_STATES
from lightck.pool.format.structures import NEXT_NBYTES, NEXT_OFFSET, NextBatch, next_batch_key
from lightck.pool.reader import open_pool
from lightck.session import capture

from .harness import Bench

Call: TypeAlias = "Callable[[nn.Module, torch.Tensor], torch.Tensor]"
Reported: TypeAlias = "Callable[[], dict[str, list[str]]]"
REPORTED = r"first (batch|update|input of the forward) after the resume is (missing|not the one that followed step \d+)"


@pytest.mark.parametrize(
    "name",
    [
        "drawn-ahead",
        "list-of-a-session-loader",
        "hidden-state",
        "hidden-state-beside-a-session-loader",
        "counter-that-starts-over",
        "walk",
        "unwrapped-data-loader",
        "every-third-step-fetched-ahead",
    ],
)
def test_other_data_after_a_resume_are_reported(name: str, bench: Bench) -> None:
    bench.exact_or_reported(name, REPORTED, quiet=True)


def test_a_batch_fetched_ahead_from_a_session_loader_is_reported(bench: Bench) -> None:
    """Its first run is warned already that checkpoints close within a batch."""
    bench.exact_or_reported("fetched-ahead-from-a-session-loader", REPORTED)


def test_a_loop_without_an_optimizer(bench: Bench) -> None:
    """Its copies end in ``end_step()``, so a kill in that commit comes before the next batch: nothing is compared."""
    bench.exact_or_reported(
        "fetched-ahead-without-an-optimizer",
        REPORTED,
        quiet=True,
        kills=[Kill("place", "update", nth) for nth in (2, 7, 13)],
    )


@pytest.mark.parametrize(
    "name",
    [
        "fetched-at-the-top",
        "fetched-ahead-and-saved",
        "fetched-behind-the-update",
        "carried-hidden-state",
        "walk-in-state",
        "updates-counted",
    ],
)
def test_the_recipes_are_exact(name: str, bench: Bench) -> None:
    bench.exact(name)


@pytest.mark.parametrize(
    "name",
    [
        "two-loaders-accumulation-evaluation",
        "batches-without-tensors",
        "looks-before-the-loop",
        "workers",
        "every-third-step",
    ],
)
def test_right_loops_are_quiet(name: str, bench: Bench) -> None:
    bench.exact(name)


# -- one process after the other, on copies of the pool ------------------------------------------------------------


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(number))


def trained(path: Path, numbers: Iterable[int], *, call: Call = lambda model, x: model(x), **options: Any) -> int:
    """Train on these batches, and abandon the session as a kill would leave it: nothing is closed. The last step."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, path, optimizer=optimizer, **options)
    for number in numbers:
        optimizer.zero_grad()
        call(model, batch(number)).square().sum().backward()
        optimizer.step()
    step = session.step
    session.abandon()
    return step


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Callable[[], dict[str, list[str]]]:
    """What was said of the data since the last call: level -> messages."""
    caplog.set_level(logging.INFO, "lightck")

    def said() -> dict[str, list[str]]:
        records = [
            r
            for r in caplog.records
            if re.search("first (batch|input of the forward) after the resume", r.getMessage())
        ]
        caplog.clear()
        levels = {r.levelname for r in records}
        return {level: [r.getMessage() for r in records if r.levelname == level] for level in levels}

    return said


def test_the_batches_that_followed_are_reported_to_be_the_same(pool: Path, reported: Reported) -> None:
    assert trained(pool, range(4)) == 4
    assert not reported()
    trained(pool, range(3, 6), resume=True)
    (lines,) = reported().values()
    assert len(lines) == 1
    assert "is the one that followed step 3" in lines[0]


def test_other_batches_are_a_warning_with_causes_and_cure(pool: Path, reported: Reported) -> None:
    trained(pool, range(4))
    trained(pool, range(6), resume=True)
    said = reported()
    assert set(said) == {"WARNING"}
    (line,) = said["WARNING"]
    for word in (
        "step 3",
        "fetched ahead by hand",
        "between attach and the loop",
        "session.loader",
        "end_step",
        "lightck docs loops",
        "strict_data=True",
    ):
        assert word in line


def test_strict_data_raises_before_anything_is_changed(pool: Path, reported: Reported) -> None:
    trained(pool, range(4))
    model = net(seed=5)
    optimizer = adam(model)
    with (
        pytest.raises(DataMismatchError, match="not the one that followed step 3"),
        lightck.attach(model, pool, optimizer=optimizer, resume=True, strict_data=True) as session,
    ):
        before = everything(model, optimizer)
        for _ in range(2):
            with pytest.raises(ValueError, match="strict_data"):
                train(model, optimizer, 1)
            assert same(everything(model, optimizer), before)
            assert session.step == 3
        train(model, optimizer, 1)
    assert not reported()
    assert lightck.recover(pool).step == 3
    trained(pool, range(3, 6), resume=True, strict_data=True)
    assert "INFO" in reported()


@pytest.mark.parametrize("anew", [True, False])
def test_a_pass_that_begins_anew_is_not_compared(anew: bool, pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4) / 48)

    def passed(batches: int, **options: bool) -> None:
        model = net()
        optimizer = adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True, strict_data=True)
        for (x,) in itertools.islice(session.loader(DataLoader(rows, 2), **options), batches):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        session.abandon()

    passed(4)
    with caplog.at_level(logging.INFO, "lightck"):
        passed(2, anew=anew)
    said = "\n".join(record.getMessage() for record in caplog.records)
    given_again = re.search(r"3 batches of epoch 0 are given again.*omits its check that the first update", said)
    assert bool(given_again) == anew
    assert ("the first batch after the resume" in said) == (not anew)


def test_another_batch_size_after_a_pass_is_named_and_not_compared(
    pool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4) / 48)
    steps = []
    for epochs, batch_size in ((1, 2), (2, 4), (3, 4)):
        caplog.clear()
        model = net()
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer, resume=True, strict_data=True) as session:
            loader = session.loader(DataLoader(rows, batch_size, shuffle=True))
            for epoch in range(loader.epoch, epochs):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).square().sum().backward()
                    optimizer.step()
                steps.append((epoch, session.step))
        warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warned) == (batch_size == 4 and epochs == 2), warned
        assert all("batch_size was 2 and is 4. The checkpoint was saved after the last batch" in w for w in warned)
    assert steps == [(0, 6), (0, 6), (1, 9), (1, 9), (2, 12)], "the top of a pass that is over runs again"


def test_strict_data_is_a_bool(pool: Path) -> None:
    with pytest.raises(TypeError, match="strict_data"):
        lightck.attach(net(), pool, strict_data=1)  # type: ignore[arg-type]


def test_what_followed_nothing_is_compared_with_nothing(pool: Path, reported: Reported) -> None:
    """Closed in order: there is no next batch."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 3)
    trained(pool, range(9, 12), resume=True)
    (lines,) = reported().values()
    assert "could not be checked" in lines[0]


def test_a_resume_that_ends_without_an_update(pool: Path, reported: Reported) -> None:
    trained(pool, range(4))
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True):
        pass
    assert "no update came" in reported()["WARNING"][0]


Attached: TypeAlias = "tuple[nn.Module, Any, lightck.Session, Any]"


def with_a_loader(path: Path) -> Attached:
    """Model, optimizer, session, and a session loader of three batches."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, path, optimizer=optimizer, resume=True)
    return model, optimizer, session, session.loader(DataLoader(list(torch.arange(12.0).reshape(3, 4)), 1))


def two_passes(attached: Attached, until: int, *, ends_where_empty: bool = False) -> lightck.Session:
    """Up to that many updates. ``ends_where_empty``: the loop ends where a pass has no batch left."""
    model, optimizer, session, loader = attached
    for _ in range(loader.epoch, 2):
        before = session._steps.updates
        for x in loader:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            if session._steps.updates == until:
                return session
        if session._steps.updates == before and ends_where_empty:
            break
    return session


def killed_behind_a_pass(pool: Path) -> Path:
    """The checkpoint closed at the end of a pass, and the run was killed in the first update of the next one."""
    two_passes(with_a_loader(pool), 4).abandon()
    image = crashed(pool)
    assert lightck.recover(image).step == 3
    return image


@pytest.mark.parametrize("ends_where_empty", [True, False])
def test_a_loop_that_ends_where_a_pass_has_no_batch_left(
    ends_where_empty: bool, pool: Path, reported: Reported
) -> None:
    image = killed_behind_a_pass(pool)
    reported()
    two_passes(with_a_loader(image), 6, ends_where_empty=ends_where_empty).close()
    assert [("no update came" in line) for line in reported().get("WARNING", [])] == [True] * ends_where_empty
    assert lightck.recover(image).step == (3 if ends_where_empty else 6)


@pytest.mark.parametrize("how", ["eval", "paused"])
def test_a_pass_that_only_looks_asks_for_no_training_batch(how: str, pool: Path, reported: Reported) -> None:
    """An evaluation over the training loader, in a session that makes no update."""
    image = killed_behind_a_pass(pool)
    reported()
    model, _, session, loader = with_a_loader(image)
    with session.paused() if how == "paused" else contextlib.nullcontext(), torch.no_grad():
        model.train(how == "paused")
        assert [len(model(x)) for x in loader] == []  # the pass stands at its end
    session.close()
    assert "WARNING" not in reported()


@pytest.mark.parametrize("is_known", [True, False])
def test_a_processor_of_another_vendor_is_reported(
    is_known: bool, pool: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws a dropout's mask otherwise. An older pool does not know its own."""
    now = capture.fingerprint()
    then = now | {"vendor": "another"} if is_known else {key: now[key] for key in now if key != "vendor"}
    monkeypatch.setattr(capture, "fingerprint", lambda: then)
    trained(pool, range(3))
    monkeypatch.undo()
    trained(pool, range(2, 4), resume=True)
    lines = [r.getMessage() for r in caplog.records if "other conditions" in r.getMessage()]
    assert [f"vendor another -> {now['vendor']}" in line for line in lines] == [True] * is_known


def test_going_on_from_a_recovered_step(pool: Path, reported: Reported) -> None:
    trained(pool, range(4))
    for numbers, level in ((range(3, 5), "INFO"), (range(2), "WARNING")):
        model = net(seed=3)
        optimizer = adam(model)
        image = crashed(pool)
        lightck.recover(image, model, optimizer)
        session = lightck.attach(model, image, optimizer=optimizer)
        for number in numbers:
            optimizer.zero_grad()
            model(batch(number)).square().sum().backward()
            optimizer.step()
        session.abandon()
        assert set(reported()) == {level}


def test_an_older_step_has_its_own_record(pool: Path, reported: Reported) -> None:
    trained(pool, range(5), slots=3)
    older = sorted(v.step for v in checkpoints(pool))[0]
    for shift, level in ((0, "INFO"), (1, "WARNING")):
        model = net(seed=3)
        optimizer = adam(model)
        image = crashed(pool)
        lightck.recover(image, model, optimizer, step=older)
        session = lightck.attach(model, image, optimizer=optimizer)
        train_on(model, optimizer, range(older + shift, older + 2 + shift))
        session.abandon()
        assert set(reported()) == {level}, older


def train_on(model: nn.Module, optimizer: Any, numbers: Iterable[int]) -> None:
    for number in numbers:
        optimizer.zero_grad()
        model(batch(number)).square().sum().backward()
        optimizer.step()


def test_another_forward_argument_by_name(pool: Path, reported: Reported) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            y: torch.Tensor = self.body(x) * scale
            return y

    def run(numbers: Iterable[int], scale: float, **options: Any) -> None:
        model = Scaled()
        optimizer = adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer, **options)
        for number in numbers:
            optimizer.zero_grad()
            model(batch(number), scale=scale).square().sum().backward()
            optimizer.step()
        session.abandon()

    run(range(4), 0.5)
    image = crashed(pool)
    run(range(3, 5), 0.5, resume=True)
    assert set(reported()) == {"INFO"}
    image.rename(pool)
    run(range(3, 5), 0.25, resume=True)
    assert set(reported()) == {"WARNING"}


def test_a_forward_in_eval_mode_or_without_gradients_is_none(pool: Path, reported: Reported) -> None:
    trained(pool, range(4))
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
    with torch.no_grad():
        model(batch(99))
    model.eval()
    model(batch(98))
    model.train()
    train_on(model, optimizer, range(3, 5))
    session.abandon()
    assert set(reported()) == {"INFO"}


def test_a_pool_of_an_older_lightck_stays_as_it_was(
    pool: Path, reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightck.pool.create.COMPAT_NEXT", 0)
    trained(pool, range(4))
    monkeypatch.undo()
    trained(pool, range(8), resume=True)
    (lines,) = reported().values()
    assert "could not be checked" in lines[0]
    data = content(pool)
    with closing(open_pool(str(pool))) as reader:
        for offset, _ in reader.superblock.slots:
            assert not data[offset + NEXT_OFFSET : offset + NEXT_OFFSET + NEXT_NBYTES].strip(b"\0")


@pytest.mark.parametrize("damage", ["torn", "of another version", "gone"])
def test_a_record_that_does_not_pass_is_none(pool: Path, reported: Reported, damage: str) -> None:
    trained(pool, range(4))
    data = content(pool)
    with closing(open_pool(str(pool))) as reader:
        places = [offset + NEXT_OFFSET for offset, _ in reader.superblock.slots]
    records = [data[at : at + 64] for at in places]
    for at, other in zip(places, reversed(records), strict=True):
        poke(pool, at, {"torn": other[:24], "of another version": other, "gone": bytes(64)}[damage])
    trained(pool, range(8), resume=True)
    assert "could not be checked" in reported()["INFO"][0]


def test_a_record_is_written_into_no_slot_that_moved_on(pool: Path) -> None:
    """A checkpoint that is dropped, or lies in the file that a pool moved away from, gets no record any more."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        writer, slot, generation = session._pipeline._newest
        entry = [NextBatch(bytes(8), 3, 1)]
        assert writer.store_next_batch(slot, generation, entry)
        assert not writer.store_next_batch(slot, generation - 1, entry)
        writer._forget_content(slot)
        assert not writer.store_next_batch(slot, generation, entry)
        session._pipeline.store_next_batch(entry)
        train(model, optimizer, 1)


def test_a_pinned_checkpoint_takes_its_record_along(pool: Path, reported: Reported) -> None:
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train_on(model, optimizer, range(3))
    first = session.pin()
    train_on(model, optimizer, range(3, 6))
    second = session.pin()  # the pool moves, and takes the first pin along
    train_on(model, optimizer, range(6, 8))
    session.abandon()
    assert (first.step, second.step) == (3, 6)
    for step, numbers, level in ((3, range(3, 5), "INFO"), (3, range(2, 4), "WARNING")):
        model = net()
        optimizer = adam(model)
        image = crashed(pool)
        lightck.recover(image, model, optimizer, step=step)
        session = lightck.attach(model, image, optimizer=optimizer)
        train_on(model, optimizer, numbers)
        session.abandon()
        assert set(reported()) == {level}


@pytest.mark.parametrize("site", ["header", "manifest", "sealed", "body", "word", "ack"])
def test_killed_at_each_site_of_a_commit(pool: Path, reported: Reported, site: str) -> None:
    """A right loop is never warned of, wherever it dies; a wrong one is, unless nothing is recorded yet."""

    def victim() -> None:
        model = net()
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer):
            train_on(model, optimizer, range(3))
            kill_at(site)
            train_on(model, optimizer, range(3, 9))

    killed_child(victim)
    step = lightck.recover(pool).step
    for numbers, allowed in ((range(step, step + 2), "INFO"), (range(50, 52), "WARNING")):
        image = crashed(pool)
        trained(image, numbers, resume=True)
        said = reported()
        assert set(said) == {allowed} or "could not be checked" in said["INFO"][0]


def test_a_pmdk_pool(pool: Path, reported: Reported, pmdk: None) -> None:
    trained(pool, range(4), backend="pmdk")
    for numbers, level in ((range(3, 5), "INFO"), (range(5), "WARNING")):
        trained(crashed(pool), numbers, resume=True)
        assert set(reported()) == {level}


# -- session loaders -----------------------------------------------------------------------------------------------


def looped(
    path: Path,
    data: Sequence[torch.Tensor],
    stop: int,
    *,
    before: Callable[[Any, nn.Module], None] | None = None,
    wrap: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    **options: Any,
) -> None:
    """Loop over a session loader until this step, and abandon the session."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, path, optimizer=optimizer, **options)
    loader = session.loader(DataLoader(data, 2), name="train")  # type: ignore[arg-type]
    if before is not None:
        before(loader, model)
    for x in loader:
        optimizer.zero_grad()
        model(wrap(x)).square().sum().backward()
        optimizer.step()
        if session.step == stop:
            break
    session.abandon()


ROWS = [torch.full((4,), float(i)) for i in range(40)]


def test_another_data_set_behind_the_position(pool: Path, reported: Reported) -> None:
    """The replay compares the last batch given: this one is behind it."""
    looped(pool, ROWS, 5)
    changed = [*ROWS[:8], *(row + 1 for row in ROWS[8:])]
    looped(pool, changed, 7, resume=True)
    (line,) = reported()["WARNING"]
    assert "loader 'train' and what the model's forward is called with differ" in line


def test_other_arguments_beside_the_same_batch(pool: Path, reported: Reported) -> None:
    looped(pool, ROWS, 5)
    looped(pool, ROWS, 7, wrap=lambda x: x + 1, resume=True)
    (line,) = reported()["WARNING"]
    assert "The batches of its loaders are the same" in line


def test_looks_at_a_session_loader_in_eval_mode_or_through_the_loader_count_for_nothing(
    pool: Path, reported: Reported
) -> None:
    def look(loader: Any, model: nn.Module) -> None:
        next(iter(loader.loader))
        model(torch.zeros(1, 4))  # a training forward, with what is no batch

    looped(pool, ROWS, 5)
    looped(pool, ROWS, 7, before=look, resume=True)
    assert set(reported()) == {"INFO"}


def test_batches_on_a_device_are_compared_by_their_shapes(pool: Path, reported: Reported) -> None:
    """Nothing is read from them, so nothing is said to be the same."""
    recorder: list[Any] = []
    following = Recorder(recorder.append)
    following.closed(ClosingEvent.END_STEP)
    following.forward(((torch.empty(2, 3, device="meta"),), {}), False)
    (entries,) = recorder
    for shape, word in (((2, 3), "INFO"), ((2, 4), "WARNING")):
        comparison = Comparison(7, entries, is_strict=False)
        comparison.forward(((torch.empty(*shape, device="meta"),), {}))
        comparison.before_update()
        (lines,) = reported().values()
        assert ("could not be checked" in lines[0]) == (word == "INFO")


def test_a_checkpoint_that_the_pre_step_hook_closes(reported: Reported) -> None:
    """Its forward came before it was closed."""
    stored: list[Any] = []
    recorder = Recorder(stored.append)
    recorder.forward("first", True)
    recorder.forward("second", True)
    recorder.closed(ClosingEvent.PRE_STEP)
    recorder.before_update()
    comparison = Comparison(1, stored[-1], is_strict=True)
    comparison.forward("first")
    comparison.before_update()
    assert set(reported()) == {"INFO"}


def test_a_checkpoint_that_is_closed_and_not_saved_leaves_nothing_to_the_next_one() -> None:
    stored: list[Any] = []
    recorder = Recorder(stored.append)
    recorder.forward("of a checkpoint that is not saved", True)
    recorder.closed_unsaved()
    recorder.before_update()
    assert not stored
    recorder.forward("of this one", True)
    recorder.closed(ClosingEvent.FORWARD)
    recorder.before_update()
    (entry,) = (each for each in stored[-1] if each.kind not in RANDOM_STATES)
    assert entry.checksum == checksum_of("of this one")


def test_a_loader_that_gives_later_is_compared_later(reported: Reported) -> None:
    stored: list[Any] = []
    recorder = Recorder(stored.append)
    recorder.closed(ClosingEvent.NEXT)
    recorder.batch_given("early", a_pass(), "a", None)
    recorder.forward("a", False)
    recorder.before_update()
    recorder.batch_given("late", a_pass(), "b", None)
    recorder.before_update()
    for late, level in (("b", "INFO"), ("c", "WARNING")):
        comparison = Comparison(1, stored[-1], is_strict=False)
        comparison.batch_given("early", a_pass(), "a", None)
        comparison.forward("a")
        comparison.before_update()
        assert set(reported()) == {"INFO"}
        assert not comparison.is_over
        comparison.before_update()
        comparison.batch_given("late", a_pass(), late, None)
        comparison.before_update()
        assert comparison.is_over
        assert set(reported()) == ({"WARNING"} if level == "WARNING" else set())


def test_a_pass_that_only_looks_gives_way_to_the_next_one(reported: Reported) -> None:
    stored: list[Any] = []
    recorder = Recorder(stored.append)
    recorder.closed(ClosingEvent.NEXT)
    recorder.batch_given("x", a_pass(), "looked at", None)
    recorder.batch_given("x", of := a_pass(), "trained on", None)
    recorder.batch_given("x", of, "second", None)
    assert not stored, "which of them is trained on is not known yet"
    recorder.before_update()
    recorder.batch_given("x", a_pass(), "next pass", None)
    recorder.before_update()
    (entries,) = stored
    data = [(e.key, e.kind, e.checksum) for e in entries if e.kind not in RANDOM_STATES]
    assert data == [(next_batch_key("x"), 1, checksum_of("trained on"))]


def a_pass() -> Pass:
    return Pass(0, 0)
