"""An optimizer's small state is packed again whenever an option may differ from the last checkpoint."""

import pytest
import torch

import lightck
from lightck.errors import StateValueError
from lightck.state.options_watch import OptionsWatch


def groups(**options: object) -> list[dict]:
    return [{"params": [torch.zeros(1)], "lr": 0.1, "betas": (0.9, 0.99), 1: 0.5, **options}]


def test_the_same_options_have_not_changed():
    watch, given = OptionsWatch(), groups()
    assert watch.may_have_changed(given)
    assert not watch.may_have_changed(given)


@pytest.mark.parametrize(
    "change",
    [
        lambda gs: gs[0].update(lr=0.2),
        lambda gs: gs[0].update(extra=None),
        lambda gs: gs[0].pop("betas"),
        lambda gs: gs[0].update(momentum=gs[0].pop("betas")),
        lambda gs: gs.append(dict(gs[0])),
        lambda gs: gs[0].update({True: gs[0].pop(1)}),
    ],
    ids=["another value", "a new key", "a key less", "the value under another key", "a new group", "an equal key"],
)
def test_changed_options_are_noticed_once(change):
    watch, given = OptionsWatch(), groups()
    watch.may_have_changed(given)
    change(given)
    assert watch.may_have_changed(given)
    assert not watch.may_have_changed(given)


@pytest.mark.parametrize(
    "mutable", [[0.1], torch.tensor(0.1), ([0.1],), {"a": 1}], ids=["list", "tensor", "in a tuple", "dict"]
)
def test_mutable_options_may_always_have_changed(mutable):
    watch, given = OptionsWatch(), groups(own=mutable)
    for _ in range(3):
        assert watch.may_have_changed(given)


def _trained_with(tmp_path, change):
    """Train four steps with ``change(optimizer, step)`` before each, and return the recovered checkpoint's options."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    pool = tmp_path / "run.pool"
    with lightck.attach(model, str(pool), optimizer=optimizer):
        for step in range(4):
            change(optimizer, step)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    other = torch.nn.Linear(4, 4)
    resumed = torch.optim.SGD(other.parameters(), lr=9.0)
    lightck.recover(str(pool)).restore(other, resumed)
    return optimizer, resumed


@pytest.mark.parametrize(
    "change",
    [
        lambda o, step: o.param_groups[0].update(lr=0.1 / (step + 1)),
        lambda o, step: o.param_groups[0].update(note=step) if step == 3 else None,
        lambda o, step: o.param_groups[0].setdefault("seen", []).append(step),
        lambda o, step: o.state.update(counter=step) if step else None,
        lambda o, step: o.state["history"].append(step) if "history" in o.state else o.state.update(history=[step]),
    ],
    ids=["lr", "new option", "list in place", "state that is no tensor", "state changed in place"],
)
def test_what_changes_between_checkpoints_is_in_the_last_one(tmp_path, change):
    trained, resumed = _trained_with(tmp_path, change)
    trained_groups, resumed_groups = trained.state_dict()["param_groups"], resumed.state_dict()["param_groups"]
    assert resumed_groups == trained_groups
    extra = lambda o: {k: v for k, v in o.state.items() if not isinstance(k, torch.Tensor)}  # noqa: E731
    assert extra(resumed) == extra(trained)


def test_an_option_that_moves_to_the_next_group_has_changed():
    first, second = {"params": [], "lr": 0.1, "x": 5}, {"params": [], "lr": 0.2}
    watch = OptionsWatch()
    watch.may_have_changed([first, second])
    assert watch.may_have_changed([first, {"x": first.pop("x"), **second}])


def test_an_option_that_cannot_be_stored_is_an_error_at_every_step(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = lightck.attach(model, str(tmp_path / "run.pool"), optimizer=optimizer)
    for step in range(1, 6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 2:
            optimizer.param_groups[0].update(note="\ud800", lr=5e-4)
        if step == 1:
            session.end_step()
        else:
            with pytest.raises(StateValueError):
                session.end_step()
    session.abandon()
    assert lightck.recover(str(tmp_path / "run.pool")).step == 1


def test_a_huge_whole_number_among_the_options_is_saved(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with lightck.attach(model, str(tmp_path / "run.pool"), optimizer=optimizer) as session:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            session.end_step()
            optimizer.param_groups[0]["big"] = 1 << 2000
    assert lightck.recover(str(tmp_path / "run.pool")).optimizer["param_groups"][0]["big"] == 1 << 2000
