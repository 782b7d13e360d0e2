"""A script that was edited between two runs: the checkpoint's options and flags go on, and what was edited is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import net, train

import lightck
from lightck.errors import CorruptPoolError, DriftError
from lightck.pool.reader import open_pool
from lightck.restore.contents import Contents
from lightck.state import values


class Script:
    """Builds a training; ``edits`` are what its second run builds otherwise."""

    def __init__(
        self,
        *,
        scheduler: dict[str, Any] | None = None,
        kind: Any = torch.optim.lr_scheduler.CosineAnnealingLR,
        frozen: tuple[int, ...] = (),
        groups: int = 1,
        **options: Any,
    ) -> None:
        self.model = net()
        for i in frozen:
            self.model[i].requires_grad_(False)
        parts = [self.model[:2], self.model[2:]] if groups == 2 else [self.model]
        self.opt = torch.optim.AdamW([{"params": part.parameters()} for part in parts], **{"lr": 0.01, **options})
        self.state = {}
        if scheduler is not None:
            self.state = {"scheduler": kind(self.opt, **scheduler)}

    def attach(self, pool: Path) -> lightck.Session:
        return lightck.attach(self.model, pool, optimizer=self.opt, state=self.state, resume=True)

    def train(self, session: lightck.Session) -> None:
        for step in range(session.step, session.step + 2):
            train(self.model, self.opt, 1, start=step)
            for scheduler in self.state.values():
                scheduler.step()

    def run(self, pool: Path) -> Script:
        with self.attach(pool) as session:
            self.train(session)
        return self


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    return lambda: [r.getMessage() for r in caplog.records if r.name == "lightck" and r.levelname == "WARNING"]


def test_an_edited_option_is_named_with_all_its_values(pool, said):
    Script(lr=0.01).run(pool)
    script = Script(lr=0.001, weight_decay=0.5)
    with script.attach(pool):
        (warning,) = said()
        assert "AdamW's lr (0.001 in this run, 0.01 at the start of the training, 0.01 in the checkpoint)" in warning
        assert (
            "AdamW's weight_decay (0.5 in this run, 0.01 at the start of the training, 0.01 in the checkpoint)"
            in warning
        )
        assert "set them after attach" in warning
        assert script.opt.param_groups[0]["lr"] == 0.01


def test_it_is_said_once_for_each_edit(pool, said):
    Script(lr=0.01).run(pool)
    Script(lr=0.001).run(pool)
    assert len(said()) == 1
    Script(lr=0.001).run(pool)
    assert len(said()) == 1
    Script(lr=0.003).run(pool)
    assert len(said()) == 2
    assert "lr (0.003 in this run, 0.001 at the start of the training, 0.01 in the checkpoint)" in said()[-1]


def test_a_scheduled_lr_is_no_edit_and_an_edited_schedule_is(pool, said):
    Script(scheduler={"T_max": 9}).run(pool)
    Script(scheduler={"T_max": 9}).run(pool)
    assert said() == []
    script = Script(scheduler={"T_max": 20}).run(pool)
    (warning,) = said()
    assert "CosineAnnealingLR's T_max (20 in this run, 9 at the start of the training, 9 in the checkpoint)" in warning
    assert script.state["scheduler"].T_max == 9


def test_a_private_attribute_that_follows_from_an_option_is_not_named_beside_it(pool, said):
    one_cycle = torch.optim.lr_scheduler.OneCycleLR
    Script(kind=one_cycle, scheduler={"max_lr": 0.1, "total_steps": 20}).run(pool)
    Script(kind=one_cycle, scheduler={"max_lr": 0.1, "total_steps": 30}).run(pool)
    (warning,) = said()
    assert (
        "OneCycleLR's total_steps (30 in this run, 20 at the start of the training, 20 in the checkpoint). The"
        in warning
    )
    assert "_schedule_phases" not in warning


def test_the_group_is_named_where_there_are_several(pool, said):
    Script(groups=2).run(pool)
    script = Script(groups=2)
    script.opt.param_groups[1]["betas"] = (0.5, 0.9)
    script.run(pool)
    assert "AdamW's betas of group 1 ((0.5, 0.9) in this run, (0.9, 0.999) at the start" in said()[0]


def test_an_edit_to_what_the_checkpoint_holds_is_nothing(pool, said):
    script = Script()
    with script.attach(pool) as session:
        script.opt.param_groups[0]["lr"] = 0.5
        script.train(session)
    Script(lr=0.5).run(pool)
    assert said() == []


def test_the_same_objects_attached_again_were_not_edited(pool, said):
    script = Script(scheduler={"T_max": 9})
    script.run(pool).run(pool)
    assert said() == []


def test_a_recover_before_attach_says_it_too_and_the_next_one_knows(pool, said):
    Script().run(pool)
    script = Script(lr=0.5)
    lightck.recover(pool, script.model, script.opt)
    assert len(said()) == 1
    with lightck.attach(script.model, pool, optimizer=script.opt) as session:
        script.train(session)
    Script().run(pool)
    assert len(said()) == 1, "the script is as it was when the training began"


def test_flags_that_the_script_builds_otherwise_are_set_and_named(pool, said):
    Script(frozen=(0,)).run(pool)
    script = Script()
    with script.attach(pool) as session:
        (warning,) = said()
        assert "for 0.weight (False), 0.bias (False). To change it, set it after attach" in warning
        assert not script.model[0].weight.requires_grad
        script.model[0].requires_grad_(True)  # as the warning says
        script.train(session)
    script = Script()
    with script.attach(pool):
        assert script.model[0].weight.requires_grad
    assert len(said()) == 1


def test_recover_alone_leaves_flags_as_they_are(pool, said):
    Script().run(pool)
    model = net().requires_grad_(False)
    lightck.recover(pool, model)
    assert not any(p.requires_grad for p in model.parameters())
    assert said() == []


def test_a_group_that_was_added_on_the_way_is_named(pool):
    model = net()
    opt = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    with lightck.attach(model, pool, optimizer=opt):
        train(model, opt, 1)
        opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})
        train(model, opt, 2, start=1)
    model = net()
    opt = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    with pytest.raises(
        DriftError, match=r"1 parameter group, and the checkpoint has 2.*0\.weight, 0\.bias.*add_param_group"
    ):
        lightck.attach(model, pool, optimizer=opt, resume=True)
    opt.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})
    with lightck.attach(model, pool, optimizer=opt, resume=True) as session:
        assert session.step == 3


def test_parameters_that_can_have_no_gradient_are_let_be(pool, said):
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(4), requires_grad=False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.table

    for _ in range(2):
        model = Quantized()
        with lightck.attach(model, pool, optimizer=torch.optim.SGD(model.linear.parameters(), lr=0.1), resume=True):
            train(model, torch.optim.SGD(model.linear.parameters(), lr=0.1), 0)
    assert said() == []


def test_what_was_built_is_untrusted_and_optional(pool):
    """In a pool of an older lightck it is missing; a damaged one is damage, whatever stands in its place."""
    Script(scheduler={"T_max": 9}).run(pool)
    reader = open_pool(str(pool))
    try:
        checkpoint = next(iter(reader.checkpoints()))
        raw = values.unpack(checkpoint.state)
        built = values.unpack(raw["built"])

        def parse(state: dict[str, Any]) -> Contents:
            return Contents.parse(
                values.pack(state, path=""), checkpoint.step, checkpoint.iteration, checkpoint.entries
            )

        older = parse({key: value for key, value in raw.items() if key not in ("built", "frozen", "classes")})
        assert (older.built, older.without_grad, older.classes) == (None, None, {})
        assert parse(raw).built is not None
        changed = [{"states": []}, {"groups": [[1]]}, {"frozen": [3]}, {"schedulers": {"a": 1}}, {"other": 1}]
        wrong = [values.pack({**built, **change}, path="") for change in changed]
        wrong += [5, b"", values.pack([], path=""), raw["built"][:-1]]
        hostile = [("built", value) for value in wrong]
        hostile += [("frozen", 3), ("frozen", [3]), ("classes", []), ("classes", {"a": 1}), ("classes", {1: "a"})]
        for key, value in hostile:
            with pytest.raises(CorruptPoolError):
                parse({**raw, key: value})
    finally:
        reader.close()
