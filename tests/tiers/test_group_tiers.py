"""Groups of ranks whose checkpoints go to a tier: real processes, killed, their pools lost, and compared with a run
that never imported lightck."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import log_lines, run_ranks, values
from ranks.trainings import TOPOLOGIES, Run, body, is_equal
from toys import adam, net, train

import lightck
from lightck.errors import RankError, TierClaimedError, UnsupportedError
from lightck.pool.format.saved_by import saved_by
from lightck.pool.reader import RejectedCheckpoint, open_pool
from lightck.pool.storage.backends import backend_for
from lightck.ranks.directory import existing_pools
from lightck.restore.usable import checkpoints_of
from lightck.session.group import HOST_VARIABLE
from lightck.tiers.decisions import complete, manifests_of, newest_complete
from lightck.tiers.folder import FolderStore
from lightck.tiers.tier_manifest import read_manifest
from tiers.kills import children_of, is_running

UPDATES, KILLED_AT = 120, 100


def store_of(tier: Path) -> FolderStore:
    return FolderStore(str(tier))


def steps_in(tier: Path) -> list[int]:
    return sorted(each.step for each in complete(store_of(tier).listing()))


def newest_in(tier: Path) -> int:
    newest = newest_complete(store_of(tier).listing())
    assert newest is not None
    return newest.step


def until(is_true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def trained(name: str, pools: Path, tier: Path, updates: int = UPDATES, every: str = "0.1s", **options: Any) -> Any:
    """Run a group with a tier; its steps take a moment, so that the ranks can agree on some of them."""
    topology = TOPOLOGIES[name]
    given = {"tiers": [lightck.Tier(tier, every=every)], "on_step": lambda rank, step: time.sleep(0.02)} | options
    return run_ranks(topology.n_ranks, body(topology, pools, updates, **given))


def command(*words: str | Path) -> str:
    """Run a command of lightck, and return what it prints."""
    return subprocess.run([sys.executable, "-m", "lightck", *map(str, words)], check=True, stdout=-1, text=True).stdout


def drains_have_ended(pools: Path) -> bool:
    return not any(pools.parent.rglob("*.pool.drain"))


@cache
def plain(name: str, updates: int = UPDATES) -> list[Run]:
    topology = TOPOLOGIES[name]
    return values(run_ranks(topology.n_ranks, body(topology, None, updates)))


def lost(pools: Path) -> None:
    """Lose all pools, when the drains that outlive the training have ended."""
    until(lambda: drains_have_ended(pools))
    shutil.rmtree(pools)


# -- what is sent, and from where a group goes on


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ddp split", marks=pytest.mark.campaign),
        "fsdp",
        pytest.param("ddp split, 2 hosts", marks=pytest.mark.long),
    ],
)
def test_a_group_without_its_pools_goes_on_from_the_tier_bit_identically(name, pools, tier):
    last = TOPOLOGIES[name].n_ranks - 1
    ended = trained(name, pools, tier, kill=(last, KILLED_AT))
    assert ended[last].is_killed
    until(lambda: drains_have_ended(pools))
    sent = steps_in(tier)
    assert [each for each in sent if each < KILLED_AT - 1], "some were sent while the training ran"
    assert sent[-1] >= KILLED_AT - 2, "and the newest one after it was killed"
    lost(pools)
    runs = values(trained(name, pools, tier))
    assert {run.began for run in runs} == {sent[-1]}
    assert is_equal(runs, plain(name))
    assert newest_in(tier) == UPDATES, "close() sends the last checkpoint"
    assert len(store_of(tier).listing().claims) == 2


def test_the_tier_counts_if_the_pool_of_one_rank_is_lost_and_holds_what_no_other_has(pools, tier):
    trained("fsdp", pools, tier, kill=(1, KILLED_AT))
    until(lambda: drains_have_ended(pools))
    (pools / "rank-00001-of-00002.pool").unlink()
    runs = values(trained("fsdp", pools, tier))
    assert {run.began for run in runs} == {steps_in_first_claim(tier)[-1]}
    assert is_equal(runs, plain("fsdp"))


def test_hosts_with_one_directory_go_on_from_the_tier(pools, tier):
    def run(rank: int) -> int:
        os.environ[HOST_VARIABLE] = f"host-{rank}"
        model = net()
        optimizer = adam(model)
        tiers = [lightck.Tier(tier, every=5)]
        with lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30, tiers=tiers) as session:
            began = session.step
            train(model, optimizer, 7)
        return began

    assert values(run_ranks(2, run)) == [0, 0]
    lost(pools)
    pools.mkdir()
    assert values(run_ranks(2, run)) == [7, 7]
    assert len(existing_pools(str(pools))) == 2


@pytest.mark.usefixtures("pmdk")
def test_lost_pmdk_pools_are_made_anew_as_such(pools, tier):
    trained("fsdp", pools, tier, updates=20, backend="pmdk")
    lost(pools)
    runs = values(trained("fsdp", pools, tier, backend="pmdk"))
    assert {run.began for run in runs} == {20}
    assert is_equal(runs, plain("fsdp"))
    assert {backend_for(str(path)).name for path in existing_pools(str(pools))} == {"pmdk"}


def steps_in_first_claim(tier: Path) -> list[int]:
    listing = store_of(tier).listing()
    first = min(listing.claims)
    return sorted(each.step for each in complete(listing) if each.claim == first)


def test_pools_that_are_newer_than_the_tier_are_used(pools, tier):
    trained("fsdp", pools, tier, updates=20, every="1h")
    assert steps_in(tier)[-1] == 20
    values(run_ranks(2, body(TOPOLOGIES["fsdp"], pools, 30)))  # without the tier
    runs = values(trained("fsdp", pools, tier))
    assert {run.began for run in runs} == {30}
    assert is_equal(runs, plain("fsdp"))


def test_pools_of_a_machine_that_was_replaced_lose_to_the_tier(pools, tier):
    """Its steps are more, but the training went on elsewhere from an older one."""
    trained("fsdp", pools, tier, updates=20)
    zombie = pools.with_name("zombie")
    shutil.copytree(pools, zombie)
    values(run_ranks(2, body(TOPOLOGIES["fsdp"], zombie, 40)))
    lost(pools)
    values(trained("fsdp", pools, tier, updates=30))
    lost(pools)
    zombie.rename(pools)
    runs = values(trained("fsdp", pools, tier))
    assert {run.began for run in runs} == {30}
    assert is_equal(runs, plain("fsdp"))


def test_two_continuations_of_one_group_in_two_tiers_are_refused_by_name_on_all_ranks(pools, tier):
    """The pools are lost while one tier is out of reach, and the run goes on from the other one alone."""
    one, other = (lightck.Tier(path, every="0.1s") for path in (tier, tier.with_name("other")))
    values(trained("fsdp", pools, tier, updates=10, tiers=[one, other]))
    values(trained("fsdp", pools, tier, updates=15, tiers=[one]))
    lost(pools)
    values(trained("fsdp", pools, tier, updates=30, tiers=[other]))
    until(lambda: drains_have_ended(pools))
    before = {path: path.read_bytes() for path in pools.rglob("*.pool")}
    for tiers in ([one, other], [other, one]):
        for ended in trained("fsdp", pools, tier, tiers=tiers):
            assert "hold two continuations of one run" in str(ended.error)
    assert {path: path.read_bytes() for path in pools.rglob("*.pool")} == before
    runs = values(trained("fsdp", pools, tier, tiers=[other]))
    assert {run.began for run in runs} == {30}
    assert is_equal(runs, plain("fsdp"))


@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_another_number_of_ranks_goes_on_from_the_tier(n_ranks, pools, tier):
    runs = values(trained("fsdp", pools, tier, updates=20))
    lost(pools)
    whole = lightck.recover(tier)

    def run(rank: int) -> tuple[int, bool]:
        topology = TOPOLOGIES["fsdp 3"] if n_ranks == 3 else TOPOLOGIES["fsdp"]
        torch.manual_seed(0)
        model = topology.model()
        topology.shard(model)
        optimizer = topology.optimizer(model.parameters())
        tiers = [lightck.Tier(tier, every="1h")]
        session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60, tiers=tiers)
        full = {
            name: value.full_tensor() for name, value in model.state_dict().items() if hasattr(value, "full_tensor")
        }
        began, is_same = session.step, all(torch.equal(full[name], whole.model[name]) for name in full)
        session.close()
        return began, bool(full) and is_same

    if n_ranks == 1:  # one process is no group, unless it attaches to the directory of one
        command("copy", tier, pools)
    assert values(run_ranks(n_ranks, run)) == [(20, True)] * n_ranks
    assert runs[0].began == 0


def test_recover_puts_the_parts_of_all_ranks_together(pools, tier):
    values(trained("fsdp", pools, tier))
    of_pools, of_tier = lightck.recover(pools), lightck.recover(tier)
    assert of_tier.step == of_pools.step == UPDATES
    assert of_tier.model.keys() == of_pools.model.keys()
    assert all(torch.equal(of_tier.model[name], of_pools.model[name]) for name in of_pools.model)
    older = steps_in(tier)[-2]
    assert lightck.recover(tier, step=older).step == older
    with lightck.recover(tier, lazy=True) as lazy:
        assert torch.equal(lazy.tensor("model/first.weight"), of_pools.model["first.weight"])
    model = TOPOLOGIES["fsdp"].model()
    lightck.recover(tier, model)
    assert all(torch.equal(value, of_pools.model[name]) for name, value in model.state_dict().items())


def test_copy_makes_a_directory_with_the_pools_of_all_ranks(pools, tier):
    values(trained("ddp split", pools, tier, updates=20))
    target = pools.with_name("fetched")
    command("copy", tier, target)
    assert sorted(each.name for each in target.glob("*.pool")) == [
        "rank-00000-of-00002.pool",
        "rank-00001-of-00002.pool",
    ]
    fetched, kept = lightck.recover(target), lightck.recover(pools)
    assert fetched.step == kept.step == 20
    assert all(torch.equal(fetched.model[name], kept.model[name]) for name in kept.model)
    newest = json.loads(command("list", tier, "--json"))["tiers"][0]["checkpoints"][0]
    assert (newest["step"], newest["ranks"]) == (20, 2)


# -- parts that are damaged, or not there


def objects_of(tier: Path, rank: int) -> list[Path]:
    """The objects that only the newest checkpoint of a rank names."""
    store = store_of(tier)
    listing = store.listing()
    newest, *older = sorted(complete(listing), reverse=True)
    name = manifests_of(listing, newest)[rank]
    others = {each.name for other in older for each in read_manifest(store, manifests_of(listing, other)[rank]).objects}
    return [tier / str(each.name) for each in read_manifest(store, name).objects if each.name not in others]


def test_a_damaged_part_of_one_rank_rejects_the_checkpoint_on_all(pools, tier):
    trained("fsdp", pools, tier, kill=(1, KILLED_AT))
    until(lambda: drains_have_ended(pools))
    older = steps_in(tier)[-2]
    for path in objects_of(tier, 1):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    lost(pools)
    with log_lines():
        runs = values(trained("fsdp", pools, tier))
    assert {run.began for run in runs} == {older}
    assert is_equal(runs, plain("fsdp"))


def test_pools_stay_as_they_are_if_a_newer_checkpoint_of_the_tier_cannot_be_fetched_whole(pools, tier):
    trained("fsdp", pools, tier, updates=20, every="1h")
    zombie = pools.with_name("zombie")
    shutil.copytree(pools, zombie)
    values(trained("fsdp", pools, tier, updates=30, every="1h"))
    for path in objects_of(tier, 1):
        path.unlink()
    lost(pools)
    zombie.rename(pools)
    runs = values(trained("fsdp", pools, tier))
    assert {run.began for run in runs} == {20}
    assert is_equal(runs, plain("fsdp"))


def test_a_checkpoint_that_lacks_the_part_of_a_rank_is_not_offered(pools, tier):
    values(trained("fsdp", pools, tier))
    listing = store_of(tier).listing()
    newest = newest_complete(listing)
    older = steps_in(tier)[-2]
    store_of(tier).delete(str(manifests_of(listing, newest)[1]))
    assert lightck.recover(tier).step == older


@pytest.mark.campaign
def test_many_damaged_checkpoints_are_passed_over_for_a_whole_one_in_another_tier(pools, tier):
    """However many they are."""
    other = tier.with_name("other")
    both = [lightck.Tier(tier, every=1), lightck.Tier(other, every="1h")]
    values(trained("fsdp", pools, tier, updates=20, tiers=both))
    for updates in range(21, 31):
        values(trained("fsdp", pools, tier, updates=updates, tiers=both[:1]))
    for path in tier.rglob("rank-00001*/data/*"):
        path.write_bytes(b"damaged")
    lost(pools)
    runs = values(trained("fsdp", pools, tier, updates=40, tiers=both))
    assert {run.began for run in runs} == {20}
    assert is_equal(runs, plain("fsdp", 40))


def test_a_tier_from_which_the_parts_of_a_rank_were_removed_is_no_beginning(pools, tier):
    for updates in range(1, 11):
        values(trained("fsdp", pools, tier, updates=updates, every="1h"))
    for folder in tier.glob("*/rank-00000-of-00002"):
        shutil.rmtree(folder)
    lost(pools)
    ended = trained("fsdp", pools, tier)
    assert "those of rank 0 are missing" in str(ended[0].error)
    assert all(one.error is not None for one in ended)
    assert not list(pools.glob("*.pool"))


@pytest.mark.long
def test_a_group_without_its_pools_goes_on_from_a_compressed_tier_bit_identically(pools, tier):
    tiers = [lightck.Tier(tier, every="0.1s", compress="zstd")]
    trained("fsdp", pools, tier, kill=(1, KILLED_AT), tiers=tiers)
    lost(pools)
    sent, listing = steps_in(tier), store_of(tier).listing()
    assert {"zstd"} == set().union(*(read_manifest(store_of(tier), each).codecs for each in listing.manifests))
    runs = values(trained("fsdp", pools, tier, tiers=tiers))
    assert {run.began for run in runs} == {sent[-1]}
    assert is_equal(runs, plain("fsdp"))


# -- what is read again


@pytest.mark.long
def test_a_damaged_part_of_one_rank_is_written_anew_from_another_tier(pools, tier, tmp_path):
    far = tmp_path / "far"
    tiers = [lightck.Tier(tier, every=10, reread="0.3s"), lightck.Tier(far, every=10)]

    def on_step(rank: int, step: int) -> None:
        time.sleep(0.02)
        if rank == 1 and step == 100:
            until(lambda: set(steps_in(tier)) & set(steps_in(far)))
            common = max(set(steps_in(tier)) & set(steps_in(far)))
            (manifest,) = [
                each for each in store_of(tier).listing().manifests if (each.step, each.writer.rank) == (common, 1)
            ]
            path = tier / str(read_manifest(store_of(tier), manifest).objects[0].name)
            before = path.read_bytes()
            path.write_bytes(bytes([before[0] ^ 1]) + before[1:])
            until(lambda: path.read_bytes() == before)

    runs = values(trained("fsdp", pools, tier, tiers=tiers, on_step=on_step))
    assert is_equal(runs, plain("fsdp"))
    assert [(run.stats.tiers[0].damaged, run.stats.tiers[0].mended) for run in runs] == [(0, 0), (1, 1)]


# -- drains


def test_a_drain_that_was_killed_is_started_again_and_checkpoints_are_complete_again(pools, tier):
    def on_step(rank: int, step: int) -> None:
        time.sleep(0.02)
        if rank == 1 and step == 20:
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: not is_running(pid))

    runs = values(trained("fsdp", pools, tier, updates=100, on_step=on_step))
    assert is_equal(runs, plain("fsdp", 100))
    assert [each for each in steps_in(tier) if 30 < each < 100]


def test_a_rank_that_cannot_write_is_tried_until_it_can(pools, tier):
    """No checkpoint is complete meanwhile, and no rank runs ahead with parts that the others do not send."""

    def on_step(rank: int, step: int) -> None:
        time.sleep(0.02)
        folder = next((each for each in tier.glob("*/") if each.is_dir()), None)
        block = None if folder is None else folder / "rank-00001-of-00002"
        if rank == 1 and step == 0 and block is not None:
            block.write_bytes(b"")
        if rank == 1 and step == 50 and block is not None:
            assert not steps_in(tier)
            block.unlink()
            until(lambda: steps_in(tier))

    runs = values(trained("fsdp", pools, tier, updates=80, on_step=on_step))
    assert is_equal(runs, plain("fsdp", 80))
    first = min(each.step for each in store_of(tier).listing().manifests)
    assert steps_in(tier)[0] == first, "what rank 0 had sent first was completed"


def test_keep_every_keeps_steps_on_which_the_ranks_agree_before(pools, tier):
    tiers = [lightck.Tier(tier, every="1h", keep_last=2, keep_every=25)]
    values(trained("fsdp", pools, tier, updates=80, tiers=tiers))
    assert {25, 50, 75, 80} <= set(steps_in(tier))


def test_the_claim_is_in_the_checkpoints_of_all_ranks(pools, tier):
    values(trained("fsdp", pools, tier, updates=5))
    claims = set()
    for path in pools.glob("*.pool"):
        with closing(open_pool(str(path))) as reader:
            found = [stored for stored in checkpoints_of(reader) if not isinstance(stored, RejectedCheckpoint)]
            claims |= {saved_by(stored.state).claim for stored in found}
    assert claims == {str(max(store_of(tier).listing().claims))}


# -- what is refused


def test_what_a_group_cannot_do_is_refused_by_name(pools, tier, tmp_path):
    best = lightck.Tier(tier, every="1h", keep_last=2, keep_best=("loss", 1, "min"))
    ended = trained("fsdp", pools, tier, tiers=[best])
    assert all(isinstance(one.error, UnsupportedError) for one in ended)
    assert "keep_best" in str(ended[0].error)
    assert not tier.exists()


def test_a_tier_of_a_single_process_is_refused_to_a_group_and_the_other_way_round(pools, tier, tmp_path):
    single = tmp_path / "single"
    model = net(4)
    optimizer = adam(model)
    with lightck.attach(model, tmp_path / "a.pool", optimizer=optimizer, tiers=[lightck.Tier(single, every="1h")]):
        train(model, optimizer, 2)
    ended = trained("fsdp", pools, single)
    assert any(isinstance(one.error, UnsupportedError) and "single process" in str(one.error) for one in ended)
    assert not list(pools.glob("*.pool"))
    values(trained("fsdp", pools, tier, updates=5))
    with pytest.raises(UnsupportedError, match="group of 2 ranks"):
        lightck.attach(net(4), tmp_path / "b.pool", optimizer=[], resume=True, tiers=[lightck.Tier(tier, every="1h")])


def test_a_new_training_does_not_take_a_tier_that_holds_checkpoints(pools, tier):
    values(trained("fsdp", pools, tier, updates=5))
    lost(pools)
    ended = trained("fsdp", pools, tier, resume=False)
    assert any(isinstance(one.error, TierClaimedError) for one in ended)
    assert all(isinstance(one.error, (TierClaimedError, RankError)) for one in ended)
    assert steps_in(tier) == [5]


def test_ranks_that_name_different_tiers_are_refused(pools, tier):
    def run(rank: int) -> None:
        topology = TOPOLOGIES["fsdp"]
        model = topology.model()
        topology.shard(model)
        tiers = [lightck.Tier(f"{tier}-{rank}", every="1h")]
        lightck.attach(model, pools, optimizer=[], timeout=60, tiers=tiers)

    ended = run_ranks(2, run)
    assert all(isinstance(one.error, RankError) and "tiers=" in str(one.error) for one in ended)
