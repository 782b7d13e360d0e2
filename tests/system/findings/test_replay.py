"""The replay of a pass after a resume: exact with loaders of others, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loader_host import Host
from resume.harness import Kill
from sampling import every_second
from torch.utils.data import DataLoader

from lightck.dataloader.replay import wants_skip
from lightck.errors import SessionError
from lightck.state import values
from lightck.state.rng import preserved

from .harness import Bench

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "name",
    every_second(
        ["accelerate", "accelerate-workers", "accelerate-seedable", "accelerate-dispatcher", "accelerate-generator"]
    ),
)
def test_loaders_of_accelerate(name: str, bench: Bench) -> None:
    bench.exact(name)


@pytest.mark.parametrize(
    "name", every_second(["accelerate-stateful", "accelerate-stateful-dispatcher", "accelerate-stateful-workers"])
)
def test_stateful_loaders_of_accelerate(name: str, bench: Bench) -> None:
    bench.exact(name)


@pytest.mark.parametrize("name", ["ahead", "ahead-workers"])
def test_loaders_that_fetch_one_batch_ahead(name: str, bench: Bench) -> None:
    bench.exact(name)


def test_a_loader_that_fetches_two_batches_ahead_is_refused(bench: Bench, folder: Path) -> None:
    assert "fetches more than one batch ahead" in refusal(bench, "two-ahead", folder)


def refusal(bench: Bench, name: str, folder: Path, update: int = 6) -> str:
    """The DriftError in which a resume behind this update ends."""
    training, pool = bench.training(name), folder / "refused.pool"
    training.process(pool, Kill("place", "update", update), fresh=True)
    assert training.process(pool, None, fresh=False).status
    found = re.findall(r"^lightck\.errors\.DriftError: (.*)$", training.log.read_text(), re.MULTILINE)
    assert len(found) == 1, training.log.read_text()
    return str(found[0])


def test_a_position_of_an_older_pool_is_read() -> None:
    with preserved():
        host = Host()
        loader = host.loader(DataLoader(range(12), 2, shuffle=True))
        batches = iter(loader)
        seen = [next(batches).tolist() for _ in range(3)]
        host.updates += 1
        host.save()
        rest = [batch.tolist() for batch in batches]
        saved = values.unpack(host.checkpoints[1][1])
        for key in ("version", "r_before_last", "passes", "content"):
            del saved["loaders"]["train"][key]
        again = Host(resumed=values.pack(saved, path="v")).loader(DataLoader(range(12), 2, shuffle=True))
        assert again.start == len(seen) == 3
        assert [batch.tolist() for batch in again] == rest


def test_a_dataset_with_a_generator_of_its_own_is_found_behind_padding(bench: Bench, folder: Path) -> None:
    assert "the dataset has a random generator or a counter of its own" in refusal(bench, "padded", folder, update=9)


@pytest.mark.parametrize("name", every_second(["prefetcher-persistent", "prefetcher-persistent-augmented"]))
def test_persistent_workers_inside_a_wrapper(name: str, bench: Bench) -> None:
    outcomes = bench.exact_or_reported(
        name, "has persistent workers, and the training goes on in a later pass", quiet=True
    )
    if name == "prefetcher-persistent":
        assert all(outcome.difference is None for outcome in outcomes)
    assert not all(outcome.warnings for outcome in outcomes)


@pytest.mark.parametrize("name", every_second(["corrupt-samples", "corrupt-samples-workers"]))
def test_a_loop_that_passes_over_corrupt_samples(name: str, bench: Bench) -> None:
    assert bench.reference(name).saw["corrupt sample"] >= 6
    bench.exact(name)


@pytest.mark.parametrize("name", ["with-state", "with-state-workers", "with-state-ahead"])
def test_a_dataset_and_a_sampler_with_states_of_their_own(name: str, bench: Bench) -> None:
    bench.exact(name)


def test_a_state_that_is_too_large_to_be_kept_with_each_pass_is_named(bench: Bench, folder: Path) -> None:
    training = bench.training("with-huge-state")
    reported = training.process(folder / "huge.pool", Kill("place", "update", 9), fresh=True)
    assert any("This state was not saved, because it has 1" in warning for warning in reported.warnings)


@pytest.mark.parametrize("name", every_second(["skipped", "skipped-workers"]))
def test_batches_that_are_skipped_in_the_sampler(name: str, bench: Bench, folder: Path) -> None:
    bench.exact(name)
    if name == "skipped":
        training = bench.training(name)
        training.process(folder / "skip.pool", Kill("place", "update", 5), fresh=True)
        assert training.process(folder / "skip.pool", None, fresh=False).saw == {"two batches fetched": 1}


def test_skipping_where_a_dataset_has_a_state_is_refused(bench: Bench, folder: Path) -> None:
    assert "replay='skip'" in refusal(bench, "skipped-own-generator", folder, update=5)


def test_skipping_needs_a_plain_loader() -> None:
    with pytest.raises(SessionError, match="map-style"):
        wants_skip([1, 2], "skip")
    with pytest.raises(ValueError, match="replay='no'"):
        wants_skip(DataLoader(range(3)), "no")
