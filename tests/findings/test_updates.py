"""The first update after a resume: what it is made of is compared with what followed the checkpoint."""

from __future__ import annotations

import pytest

from .harness import Bench

GRADIENT = r"Not as then: the gradient of '.*Its batch is the same, so something else that the loss depends on"


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("top-steps-scheduler", r"state\['scheduler'\] changed between the restore and the first next\(\) of loader"),
        ("top-halves-lr", r"Not as then: an option of 'SGD' \(as its lr\)\. The loop has changed options"),
        ("top-clears-optimizer-state", r"Not as then: the optimizer's state of '4\.bias'\. The loop has changed"),
        ("top-resets-head", r"4\.weight changed between the restore and the first next\(\) of loader 'loader\.0'"),
        ("top-resets-average", r"state\['average'\] changed between the restore and the first next\(\) of loader"),
    ],
)
def test_what_an_epochs_top_does_twice_is_named(name: str, warning: str, bench: Bench) -> None:
    bench.exact_or_told(name, warning, quiet=True, shown_by="the gradients of the first update")


@pytest.mark.parametrize(
    "name", ["teacher-outside", "number-of-a-module", "generator-of-the-loss", "gradients-that-are-never-cleared"]
)
def test_what_the_loss_depends_on_and_no_checkpoint_holds_is_told(name: str, bench: Bench) -> None:
    bench.exact_or_told(name, GRADIENT, quiet=True, shown_by="the gradients of the first update")


@pytest.mark.parametrize(
    "name",
    ["top-steps-scheduler-at-begin-only", "top-sets-lr-by-epoch", "teacher-in-state", "zeroed-gradients",
     "two-optimizers", "closures-of-lbfgs", "clipped-and-accumulated"],
)  # fmt: skip
def test_right_loops_are_exact_and_nothing_is_said(name: str, bench: Bench) -> None:
    bench.exact(name)
