"""The state of optimizers, options, flags and objects: an attach changes none of it, and a resume brings back all."""

from __future__ import annotations

import pytest

from .harness import Bench
from .programs.attach_changes_nothing import ALL

# -- A14: attaching changes nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_attach_changes_no_bit_of_a_training(name: str, bench: Bench) -> None:
    is_quiet = name != "EightBit"  # it keeps a table outside its state, which is said
    bench.exact(f"attach-{name}", kills=[], quiet=is_quiet)


# -- A15, A17: flags and options that moved are restored without a word, and what was edited is named ----------------


@pytest.mark.parametrize(
    "name", ["unfreezes-at-a-step", "unfreezes-from-a-step-on", "options-set-by-hand-and-by-a-scheduler"]
)
def test_what_moves_during_a_training_goes_on(name: str, bench: Bench) -> None:
    bench.exact(name)
