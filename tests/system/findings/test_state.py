"""The state of optimizers, options, flags and objects: an attach changes none of it, and a resume brings back all."""

from __future__ import annotations

import pytest
from sampling import every_second

from .harness import Bench
from .programs.attach_changes_nothing import ALL

pytestmark = pytest.mark.long

# -- A14: attaching changes nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every_second(ALL))
def test_attach_changes_no_bit_of_a_training(name: str, bench: Bench) -> None:
    is_quiet = name != "EightBit"  # it keeps a table outside its state, which is said
    bench.exact(f"attach-{name}", kills=[], quiet=is_quiet)


# -- A15, A17: flags and options that moved are restored without a word, and what was edited is named ----------------


@pytest.mark.parametrize(
    "name", ["unfreezes-at-a-step", "unfreezes-from-a-step-on", "options-set-by-hand-and-by-a-scheduler"]
)
def test_what_moves_during_a_training_goes_on(name: str, bench: Bench) -> None:
    bench.exact(name)


# -- A18: random numbers beside the loop's own -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "draws-at-the-top-of-an-epoch",
        "draws-at-the-top-of-an-epoch-and-evaluates",
        *(f"forked-{where}{how}" for where in ("session-loader", "end_step") for how in ("", "-seeded")),
        "seeds-each-iteration",
        "seeds-each-iteration-anew",
    ],
)
def test_random_numbers_go_on(name: str, bench: Bench) -> None:
    bench.exact(name)


@pytest.mark.parametrize("name", ["forked-by-hand", "forked-by-hand-seeded"])
def test_an_update_within_fork_rng_that_a_forward_closes_is_named(name: str, bench: Bench) -> None:
    bench.exact_or_reported(name, r"inside a block of torch\.random\.fork_rng\(\).*session\.end_step\(\)")


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="docs/guarantees.md, What is not protected")
def test_what_is_drawn_at_the_top_of_an_epoch_and_used_in_all_of_it(bench: Bench) -> None:
    bench.exact("uses-what-it-drew-at-the-top-of-an-epoch")
