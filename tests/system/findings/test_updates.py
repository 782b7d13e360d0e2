"""The first update after a resume: what it is made of is compared with what followed the checkpoint."""

from __future__ import annotations

import pytest
import torch
from sampling import every_second

from lightck.state.numbers import ModuleNumbers

from .harness import Bench
from .programs.updates import Longest, Queue

pytestmark = pytest.mark.long

GRADIENT = (
    r"What differs: the gradient of '.*The batch of this update is the same, so something else that the loss depends on"
)


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("top-steps-scheduler", r"state\['scheduler'\] changed between the restore and the first next\(\) of loader"),
        (
            "top-halves-lr",
            r"What differs: an option of 'SGD' \(for example its lr\)\. Likely causes: the loop changed options",
        ),
        ("top-clears-optimizer-state", r"the state of AdamW changed between the restore and the first next"),
        ("top-clears-the-state-of-one-of-two", r"the state of SGD changed between the restore and the first next"),
        ("top-resets-head", r"4\.weight changed between the restore and the first next\(\) of loader 'loader\.0'"),
        ("top-resets-average", r"state\['average'\] changed between the restore and the first next\(\) of loader"),
    ],
)
def test_what_an_epochs_top_does_twice_is_named(name: str, warning: str, bench: Bench) -> None:
    bench.exact_or_reported(name, warning, quiet=True, shown_by="the first update's gradients, only those of")


@pytest.mark.parametrize(
    "name",
    every_second(
        [
            "teacher-outside",
            "number-of-a-module",
            "number-behind-an-embedding",
            "generator-of-the-loss",
            "target-of-one-side",
            "gradients-that-are-never-cleared",
        ]
    ),
)
def test_what_the_loss_depends_on_and_no_checkpoint_holds_is_reported(name: str, bench: Bench) -> None:
    bench.exact_or_reported(name, GRADIENT, quiet=True, shown_by="the first update's gradients, only those of")


@pytest.mark.parametrize(
    "name",
    every_second(
        [
            "top-steps-scheduler-at-begin-only",
            "top-sets-lr-by-epoch",
            "teacher-in-state",
            "zeroed-gradients",
            "two-optimizers",
            "closures-of-lbfgs",
            "clipped-and-accumulated",
            "pointer-that-the-loop-sets",
            "logged-forward",
            "evaluated-on-fake-tensors",
            "channels-last-behind-attach",
            "scheduler-set-to-the-epoch-at-top",
            "experts-and-zeroed-gradients",
            "while-step-is-below",
            "steps-over-an-endless-loader",
        ]
    ),
)
def test_right_loops_are_exact_and_nothing_is_said(name: str, bench: Bench) -> None:
    bench.exact(name)


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("pointer-of-a-queue", r"some of them differ from step \d+: pointer is 0 and was [1-4]\. If the training"),
        ("epochs-from-nothing", r"continues from step \d+ in pass [23] over loader .*, and the loop has read neither"),
        (
            "epochs-from-nothing-with-its-step-printed",
            r"in pass [23] over loader .*, and _ was 0 in the restored pass and is [12] now\. Such a loop",
        ),
        (
            "epochs-from-nothing-with-its-steps-logged",
            r"in pass [23] over loader .*, and epoch was 0 in the restored pass and is [12] now\. Such a loop",
        ),
        ("steps-from-nothing", r"continues from step \d+, and the loop has read neither session.step nor loader.epoch"),
    ],
)
def test_what_is_seen_by_its_first_update_only_is_reported(name: str, warning: str, bench: Bench) -> None:
    bench.exact_or_reported(name, warning, quiet=True)


def test_numbers_that_change_now_and_then_are_not_kept() -> None:
    model = torch.nn.ModuleList([Queue(), Longest()])
    numbers = ModuleNumbers(model)
    assert numbers.values_at_checkpoint() == {}, "as attach asks"
    for n in range(1, 9):
        model[0].push(torch.ones(4))
        model[1](torch.ones(6, 8))
        kept = numbers.values_at_checkpoint()
        assert kept["0.pointer"] == n % 5
        assert ("1.longest" in kept) == (n == 1), "once it is the longest for good"
