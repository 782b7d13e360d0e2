"""Whether anything is being saved, and what the loop moves before the point at which it goes on."""

from __future__ import annotations

import copy
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import BIG, adam, crashed, everything, forward, in_child, is_step, net, same, settled, train, weights

import lightck
from lightck.errors import LateError, NothingSavedError

from .harness import Bench, Kill


@pytest.mark.parametrize("name", ["by-hand-through-data", "optimizer-of-its-own-kind", "by-hand-at-an-interval"])
def test_without_an_optimizer_end_step_is_the_update(name: str, bench: Bench) -> None:
    bench.exact(name)


def test_a_model_without_parameters_is_reported(pool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its layers lie in a plain list: nothing finds them."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(2, 2)]

    model = Hidden()
    optimizer = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
    session = lightck.attach(model, pool)
    assert "Hidden) has no parameters" in caplog.text
    session.abandon()
    caplog.clear()
    lightck.attach(model, pool, optimizer=optimizer).abandon()
    assert not caplog.records, "an optimizer that is passed is saved with its parameters"


# -- A12: no optimizer is followed -----------------------------------------------------------------------------------


def by_hand(model: nn.Module, number: int = 0) -> None:
    """One update without an optimizer."""
    forward(model, number).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.01)
        p.grad = None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_updates_by_hand_without_end_step_are_warned_of_and_closing_is_an_error(pool, caplog):
    model = net()
    session = lightck.attach(model, pool, resume=True)
    by_hand(model)
    assert not warnings(caplog)
    for number in range(1, 20):
        by_hand(model, number)
    (said,) = warnings(caplog)
    assert re.search(r"'0\.weight'.*no optimizer is followed.*attach\(\.\.\., optimizer=opt\).*end_step\(\)", said)
    with pytest.raises(NothingSavedError, match=r"no optimizer is followed.*end_step\(\)"):
        session.close()
    assert not session.is_open
    session.close()
    lightck.attach(model, pool).close()  # everything was released


def test_an_exception_in_such_a_loop_stays_the_one_that_it_is(pool):
    model = net()
    with pytest.raises(KeyError), lightck.attach(model, pool):
        for number in range(3):
            by_hand(model, number)
        raise KeyError("mine")


def test_optimizer_of_another_model_is_reported(pool, caplog):
    """``deepcopy`` and the like: the loop calls this model and steps another one."""
    model = net()
    optimizer = adam(copy.deepcopy(model))
    session = lightck.attach(model, pool)
    train(model, optimizer, 5)
    assert re.search("no optimizer is followed", warnings(caplog)[0])
    with pytest.raises(NothingSavedError):
        session.close()


@pytest.mark.parametrize("keeps_optimizer", [True, False], ids=["optimizer", "by hand"])
def test_model_that_is_built_again(pool, caplog, keeps_optimizer):
    model = net()
    optimizer = adam(model) if keeps_optimizer else None
    session = lightck.attach(model, pool)
    model = net(seed=1)
    optimizer = adam(model)
    train(model, optimizer, 30)
    (said,) = warnings(caplog)
    assert re.search(r"AdamW made 10 updates.*built again.*attach to the new model", said)
    with pytest.raises(NothingSavedError, match="another model"):
        session.close()


def test_several_models_with_a_session_each(folder, caplog):
    models = [net(seed=seed) for seed in range(2)]
    optimizers = list(map(adam, models))
    sessions = [lightck.attach(model, folder / f"{i}.pool") for i, model in enumerate(models)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 30)
    for session in sessions:
        session.close()
    assert not warnings(caplog)


def test_model_that_is_only_called(pool, caplog):
    model = net()
    with lightck.attach(model, pool):
        for number in range(20):
            forward(model, number)
    assert not warnings(caplog)


def test_accumulation_by_hand_is_reported_that_gradients_are_not_saved(pool, caplog):
    model = net()
    with lightck.attach(model, pool) as session:
        for number in range(8):
            forward(model, number).backward()
            if number % 4 == 3:
                for p in model.parameters():
                    p.data.add_(p.grad, alpha=-0.01)
                    p.grad = None
            session.end_step()
    (said,) = warnings(caplog)
    assert re.search(r"end_step\(\) was called although.*no\s+gradients", said)


def test_optimizer_that_appears_later_makes_it_an_ordinary_session(pool):
    model = net()
    with lightck.attach(model, pool) as session:
        for number in range(3):
            by_hand(model, number)
            session.end_step()
            assert (session.step, session.iteration) == (number + 1, number + 1)
        optimizer = adam(model)
        for number in range(3, 6):
            train(model, optimizer, 1, number)
            assert session.step == number + 1
            session.end_step()
            assert session.step == number + 1
            session.end_step()  # an iteration without an update
            assert session.step == number + 1
        seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)


def test_optimizer_that_was_made_after_attach_and_accumulates_first(pool):
    """It is there and has not stepped: no end_step() before that is an update."""
    model = net()
    with lightck.attach(model, pool) as session:
        optimizer = adam(model)
        for number in range(8):
            forward(model, number).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            session.end_step()
        assert session.step == 2


def test_end_step_inside_paused_is_no_update(pool):
    model = net()
    with lightck.attach(model, pool) as session:
        by_hand(model)
        session.end_step()
        with session.paused():
            session.end_step()
        assert (session.step, session.committed) == (1, 1)


@pytest.mark.parametrize("width", [8, BIG], ids=["small", "large"])
def test_checkpoint_holds_what_was_there_at_end_step(pool, width):
    """No hook comes before the next update, so every copy has ended, and with two slots the checkpoint is committed,
    when end_step() returns."""
    model = net(width)
    with lightck.attach(model, pool) as session:
        for number in range(4):
            by_hand(model, number)
            session.end_step()
            assert session.committed == number + 1
            seen = weights(model)
            for p in model.parameters():
                p.data.fill_(7.0)
            session.flush()
            assert same(dict(lightck.recover(pool).model), seen)
            for name, p in model.named_parameters():
                p.data.copy_(seen[name])


def test_optimizer_that_never_steps_beside_updates_by_hand(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool) as session:
        for number in range(120):
            by_hand(model, number)
            session.end_step()
    (said,) = warnings(caplog)
    assert re.search(r"100 iterations.*AdamW.*optimizer=\[\]", said)
    del optimizer


def test_long_accumulation_is_no_alarm(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool):
        for number in range(260):
            forward(model, number).backward()
            if number % 130 == 129:
                optimizer.step()
                optimizer.zero_grad()
    assert not warnings(caplog)


# -- A4: what the loop moves at its top ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("batches-from-an-object", r"state\['data'\]"),
        ("scheduler-at-the-top", r"state\['scheduler'\], the options of SGD"),
        ("weight-decay-at-the-top", r"0\.weight"),
        ("rate-at-the-top", "the options of SGD"),
        ("meter-before-the-step", r"state\['meter'\]"),
        ("meter-before-the-steps-of-two", r"state\['meter'\]"),
        ("pseudo-labels-at-the-top", r"1\.running_mean"),
    ],
)
def test_what_a_resumed_loop_changes_once_more_is_named(name: str, names: str, bench: Bench) -> None:
    bench.exact_or_reported(name, rf"{names}.* changed between the restore and .*end_step\(\)")


@pytest.mark.parametrize(
    "name",
    [
        "batches-from-an-object-with-end-step",
        "scheduler-at-the-end",
        "rate-by-step-at-the-top",
        "meter-behind-the-step",
        "meter-behind-the-steps-of-two",
    ],
)
def test_what_belongs_to_the_end_of_an_iteration_is_not(name: str, bench: Bench) -> None:
    bench.exact(name)


class Counter:
    """For ``state=``. ``clock``: it answers otherwise each time that it is asked."""

    def __init__(self, clock: bool = False) -> None:
        self.n, self.asked, self.clock = 0, 0, clock

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"n": self.n, "now": time.perf_counter() if self.clock else 0.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def at_top(model: nn.Module, optimizer: Any, counter: Any, steps: int, *, by: int = 1, behind: int = 0) -> None:
    for number in range(steps):
        counter.n += by
        train(model, optimizer, 1, number)
        counter.n += behind


def test_first_run_names_what_the_loop_moves_at_its_top(pool, caplog):
    model, counter = net(), Counter()
    optimizer = adam(model)
    with lightck.attach(model, pool, state={"n": counter}):
        at_top(model, optimizer, counter, 3)
        asked = counter.asked
        (said,) = warnings(caplog)
        assert re.search(
            r"the loop changed state\['n'\] before .*forward, in each of its first two iterations\. .*end_step\(\)",
            said,
        )
        at_top(model, optimizer, counter, 5)
        assert counter.asked == asked + 5, "later it is asked once for each checkpoint, as ever"
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("use", ["end_step", "loader", "behind", "once before", "paused"])
def test_first_run_is_not_warned_where_nothing_moves_at_the_top(use, pool, caplog):
    model, counter = net(), Counter()
    optimizer = adam(model)
    with lightck.attach(model, pool, state={"n": counter}) as session:
        if use == "end_step":
            for _ in range(4):
                at_top(model, optimizer, counter, 1)
                session.end_step()
        elif use == "loader":
            for (x,) in session.loader(DataLoader(TensorDataset(torch.randn(8, 4)), 2)):
                counter.n += 1
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
        elif use == "paused":
            with session.paused():
                at_top(model, optimizer, counter, 1)
            at_top(model, optimizer, counter, 4, by=0)
        else:
            at_top(model, optimizer, counter, 1, by=int(use == "once before"))
            at_top(model, optimizer, counter, 4, by=0, behind=int(use == "behind"))
    assert not warnings(caplog)


def test_rate_that_is_set_by_the_step_is_no_alarm(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool):
        for number in range(4):
            optimizer.param_groups[0]["lr"] = 0.01 * (number + 1)
            train(model, optimizer, 1, number)
    assert not warnings(caplog)


def test_weights_that_are_swapped_and_put_back_do_not_count(pool, caplog):
    """Version counters move, and the bytes are the same."""
    model = net()
    optimizer = adam(model)

    def evaluate() -> None:
        before = weights(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        model.load_state_dict(before)

    with lightck.attach(model, pool):
        for number in range(4):
            evaluate()
            train(model, optimizer, 1, number)
    assert not warnings(caplog)


def resumed(
    pool: Path,
    counter: Any,
    use: Callable[[nn.Module, Any], None],
    caplog: pytest.LogCaptureFixture,
    ends: Callable[[Any], None] = lambda session: None,
) -> list[str]:
    """What is warned of in a run that continues from a kill, and changes something before its first forward."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, state={"n": counter})
    for number in range(3):
        train(model, optimizer, 1, number)
        ends(session)
    forward(model, 3)
    settled(session, 3)
    image = crashed(pool)
    session.close()
    model = net(seed=1)
    optimizer = adam(model)
    caplog.clear()
    with lightck.attach(model, image, optimizer=optimizer, state={"n": counter}, resume=True) as session:
        assert session.step == 3
        use(model, optimizer)
        train(model, optimizer, 3, 3)
    return warnings(caplog)


def count(counter: Any) -> None:
    counter.n += 1


@pytest.mark.usefixtures("commits_early")
def test_what_moved_since_the_restore_is_named(pool, caplog):
    counter = Counter()
    (said,) = resumed(pool, counter, lambda model, optimizer: count(counter), caplog)
    assert re.search(r"state\['n'\] changed between the restore.*Step 3 was closed at that point.*end_step\(\)", said)


@pytest.mark.usefixtures("commits_early")
def test_what_comes_after_end_step_is_rightly_done_again(pool, caplog):
    counter = Counter()
    assert not resumed(pool, counter, lambda *_: count(counter), caplog, ends=lambda session: session.end_step())


@pytest.mark.usefixtures("commits_early")
def test_object_that_answers_otherwise_each_time_is_passed_over(pool, caplog):
    assert not resumed(pool, Counter(clock=True), lambda *_: None, caplog)


class Draws(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"n": int(torch.randint(1, (1,)))}


@pytest.mark.usefixtures("commits_early")
def test_objects_are_asked_with_the_random_states_held(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={"n": Draws()}):
        before = torch.get_rng_state()
        forward(model)
        assert torch.equal(torch.get_rng_state(), before)


class Refuses(Counter):
    """Answers at attach and at checkpoints, and not in between."""

    answers = True

    def state_dict(self) -> dict[str, Any]:
        if not self.answers:
            raise RuntimeError("not now")
        return super().state_dict()


@pytest.mark.usefixtures("commits_early")
def test_object_that_refuses_to_answer_stops_nothing(pool, caplog):
    model, counter = net(), Refuses()
    optimizer = adam(model)
    with lightck.attach(model, pool, state={"n": counter}):
        counter.answers = False
        at_top(model, optimizer, counter, 1)
        counter.answers = True
        at_top(model, optimizer, counter, 2)
    assert not warnings(caplog)


# -- A13: an optimizer that never steps ------------------------------------------------------------------------------


def test_optimizer_that_never_steps_is_named(bench: Bench, pool: Path) -> None:
    """The process is killed, with nothing saved: it was warned before."""
    reported = bench.training("optimizer-that-never-steps").process(pool, Kill("place", "update", 105), fresh=True)
    assert reported.updates == 105
    (said,) = reported.warnings
    assert re.search(r"\(Adam of 'body.0.weight' and 5 more\) made 100 updates", said)
    assert "(SGD of 'extra.weight' and 1 more) made none" in said


def two(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return adam(model[0]), torch.optim.SGD(model[2].parameters(), lr=0.01)


def steps(model: nn.Module, number: int, *optimizers: torch.optim.Optimizer) -> None:
    forward(model, number).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_phases_of_several_optimizers_are_reported_once(pool, caplog):
    """Both step for a while, then one alone."""
    model = net()
    one, other = two(model)
    with lightck.attach(model, pool):
        for number in range(10):
            steps(model, number, one, other)
        for number in range(101):
            assert not warnings(caplog), number
            steps(model, number, one)
        for number in range(120):
            steps(model, number, other)
    (said,) = warnings(caplog)
    assert re.search(
        r"optimizer 1 \(AdamW of '0.weight' and 1 more\) made 100 updates.*"
        r"optimizer 2 \(SGD of '2.weight' and 1 more\) made none.*optimizer=\[\.\.\.\].*end_step\(\)",
        said,
    )


@pytest.mark.parametrize("cure", ["end_step", "optimizer", "paused", "critic", "interval"])
def test_several_optimizers_without_an_alarm(cure, pool, caplog):
    model = net()
    one, other = two(model)
    options = {"optimizer": {"optimizer": one}, "interval": {"interval": 1000}}.get(cure, {})
    with lightck.attach(model, pool, **options) as session:
        for number in range(210):
            if cure == "paused":
                with session.paused():
                    steps(model, number, one)
            elif cure == "critic":  # a hundred of one, and then one of the other
                steps(model, number, *((other,) if number % 101 == 100 else (one,)))
            else:
                steps(model, number, one, *((other,) if cure == "interval" else ()))
            if cure == "end_step":
                session.end_step()
    assert not warnings(caplog)


def test_run_that_does_not_call_end_step_as_the_one_before_it_did(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool) as session:
        train(model, optimizer, 1)
        session.end_step()
    with lightck.attach(model, pool, resume=True) as session:
        train(model, optimizer, 1002)
        assert session.committed == 1
    assert any(
        re.search(r"1000 updates.*interrupted run called session.end_step\(\)", said) for said in warnings(caplog)
    )


def test_dozens_of_skipped_steps_are_no_alarm(pool, caplog):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    with lightck.attach(model, pool) as session:
        for number in range(150):
            optimizer.zero_grad()
            loss = forward(model, number) * (float("inf") if number < 80 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert session.step > 0
    assert not warnings(caplog)


# -- C5: post-step hooks of the user's -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["post-step-hook-that-raises", "post-step-hook-that-draws"])
def test_post_step_hooks_are_part_of_the_update(name: str, bench: Bench) -> None:
    bench.exact(name)


# -- B2: an optimizer that is made after attach ----------------------------------------------------------------------


def test_optimizer_made_after_attach_is_reported_in_the_first_run(pool, caplog):
    model = net()
    with lightck.attach(model, pool, resume=True):
        optimizer = adam(model)
        assert not warnings(caplog)
        train(model, optimizer, 3)
    (said,) = warnings(caplog)
    assert re.search("AdamW was made after attach.*restart.*Build it before attach", said)


# -- a model that is built again, or whose parameters are replaced, after some updates --------------------------------


@pytest.mark.parametrize("n_updates", [3, 130])
def test_a_model_built_again_after_saved_updates_is_reported(n_updates: int, pool: Path, caplog: Any) -> None:
    """A notebook cell that builds model and optimizer runs again after ``attach`` and some updates."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool)
    train(model, optimizer, 2)
    rebuilt = net()
    train(rebuilt, adam(rebuilt), n_updates)
    session.close(done=True)
    assert session.committed == 2
    assert (
        f"AdamW made {n_updates} updates of another model, whose parameters have the same shapes"
        in warnings(caplog)[-1]
    )
    assert "since update 2. The updates of the other model are not saved" in warnings(caplog)[-1]


def test_models_of_the_same_shapes_that_are_trained_in_turn_are_not_reported(pool: Path, caplog: Any) -> None:
    model, other = net(), net(seed=1)
    optimizer, theirs = adam(model), adam(other)
    with lightck.attach(model, pool, optimizer=optimizer):
        for step in range(30):
            train(other, theirs, 4, start=step)
            train(model, optimizer, 1, start=step)
    assert not warnings(caplog)


def test_long_turns_of_two_models_of_the_same_shapes_are_reported_three_times(pool: Path, caplog: Any) -> None:
    model, other = net(), net(seed=1)
    optimizer, theirs = adam(model), adam(other)
    with lightck.attach(model, pool, optimizer=optimizer):
        for step in range(5):
            train(model, optimizer, 1, start=step)
            train(other, theirs, 130, start=step)
    found = [each for each in warnings(caplog) if "updates of another model" in each]
    assert ["since update 1." in found[0], "since update 3." in found[-1], len(found)] == [True, True, 3]


@pytest.mark.parametrize("n_updates", [0, 3])
def test_an_optimizer_of_parameters_that_replaced_followed_ones_is_refused(n_updates: int, pool: Path) -> None:
    """The state of both optimizers would be saved under the same names."""
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, n_updates)
    seen = everything(model, optimizer)
    session.flush()
    model.load_state_dict(net(seed=1).state_dict(), assign=True)
    with pytest.raises(LateError, match=r"'0\.weight' was replaced in the model after attach .*close the session"):
        train(model, adam(model), 1, start=n_updates)
    session.abandon()
    if n_updates:
        checkpoint = lightck.recover(pool)
        assert checkpoint.step == n_updates
        assert is_step(checkpoint, seen)


def test_clients_whose_weights_are_averaged_into_the_model_are_not_reported(pool: Path, caplog: Any) -> None:
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        for number in range(4):
            train(model, optimizer, 1, start=number)
            client = copy.deepcopy(model)
            train(client, adam(client), 20)
            model.load_state_dict(client.state_dict())
    assert not [text for text in warnings(caplog) if "another model" in text]


def test_inner_optimizers_of_a_loop_that_updates_by_hand_are_not_followed(pool: Path, caplog: Any) -> None:
    """Reptile, with ``optimizer=[]`` as docs/start.md says."""
    model = net()
    with lightck.attach(model, pool, optimizer=[]) as session:
        for number in range(4):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            train(model, adam(model), 3, start=number)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.lerp_(before[name], 0.7)
            session.end_step()
            assert session.step == number + 1
        seen = weights(model)
    assert not warnings(caplog)
    assert same(dict(lightck.recover(pool).model), seen)


def test_an_optimizer_that_lives_on_beside_optimizer_none_is_reported(pool: Path, caplog: Any) -> None:
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=[]) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            session.end_step()
    (said,) = warnings(caplog)
    assert "optimizer=[] was passed, and AdamW steps parameters of this model in several iterations" in said


def test_an_optimizer_of_an_input_of_a_frozen_model_is_not_reported(pool: Path, caplog: Any) -> None:
    model = net().requires_grad_(False)
    image = nn.Parameter(torch.rand(2, 4))
    optimizer = torch.optim.Adam([image], lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in range(8):
            optimizer.zero_grad()
            model(image).sum().backward()
            optimizer.step()
            session.end_step()
    assert not warnings(caplog)


def test_a_forked_child_that_trains_says_that_nothing_is_saved(pool: Path) -> None:
    model = net()
    optimizer = adam(model)

    def trains() -> list[str]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightck").addHandler(handler)
        train(model, optimizer, 3)
        return said

    with lightck.attach(model, pool, optimizer=optimizer):
        (said,) = in_child(trains)
    assert "trained in a process that was forked after attach(). These updates are not saved" in said
