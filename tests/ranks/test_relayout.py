"""Ranks whose pools get new files while training runs: nobody loses what another rank needs, whenever they are killed.

Each training here is compared, to the bit, with one that never imported lightck.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import SECONDS_MAX, die, everything, log_lines, run_ranks, values
from sampling import every_second
from torch import nn

import lightck
from lightck.errors import BackgroundError, CorruptPoolError, RankError, SessionError
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.ranks.directory import pools_in
from lightck.restore import directory

from .kills import RELAYOUT_POINTS, Kill
from .test_attach import damage
from .trainings import TOPOLOGIES, Grown, Net, Run, Topology, batch, fsdp, is_equal

UPDATES, LATE = 11, 4
"""Number of updates, and the step after which a parameter group is added."""


class Wide(Net):
    """Has a layer that is trained from step ``LATE`` on: its optimizer state does not fit into the pool of before."""

    def __init__(self) -> None:
        super().__init__(width=1000)
        self.late = nn.Linear(1000, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.late(torch.tanh(self.first(x * self.scale)))))


GROUPS = {
    "ddp": Topology(2, wrap=TOPOLOGIES["ddp"].wrap, model=Wide),
    "fsdp": Topology(2, fsdp, model=Wide),
}
GROWS_AT = {0: {3: 700_000}, 1: {5: 800_000, 6: 3_000_000}}
"""Rank -> step -> numbers that its object gets: each time more than the pool has space for."""


def training(
    name: str,
    pools: Path | None,
    *,
    adds_group: bool = False,
    grows_at: dict[int, dict[int, int]] | None = None,
    kills: dict[int, Kill] | None = None,
    on_step: Callable[[int, int, Any], Any] = lambda rank, step, session: None,
    updates: int = UPDATES,
    **options: Any,
) -> Callable[[int], Run]:
    """The body of a rank. ``kills``: how each of these ranks dies. ``on_step``: called with rank, step and session
    after attach, and after each update."""
    topology = GROUPS[name]

    def run(rank: int) -> Run:
        torch.manual_seed(0)
        model = topology.model()
        topology.shard(model)
        late = list(model.late.parameters())
        early = [p for p in model.parameters() if all(p is not other for other in late)]
        optimizer = torch.optim.AdamW(early if adds_group else model.parameters(), lr=1e-2)
        torch.manual_seed(100 + rank)
        grown, session = Grown(), None
        if pools is not None:
            if adds_group and pools.exists() and lightck.recover(pools).step >= LATE:
                optimizer.add_param_group({"params": late})
            for kill in [kills[rank]] if kills and rank in kills else []:
                kill.arm()
            state = {"grown": grown} if grows_at else None
            session = lightck.attach(
                model, pools, optimizer=optimizer, state=state, **{"resume": True, "timeout": 60} | options
            )
        began = 0 if session is None else session.step
        on_step(rank, began, session)
        called = topology.wrap(model)
        for step in range(began, updates):
            if adds_group and step == LATE and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": late})
            called(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
            model.zero_grad()  # also what no optimizer updates yet
            grown.updated(step + 1, (grows_at or {}).get(rank, {}))
            on_step(rank, step + 1, session)
            if kills and rank in kills:
                kills[rank].after_update(step + 1 - began)
        if session is not None:
            session.close()
        state = [*everything(model, optimizer), *([grown.value] if grows_at else [])]
        return Run(began, state, session and session.stats())

    return run


def uuids(pools: Path) -> list[bytes]:
    """The identity of the present file of each rank's pool."""
    found = []
    for path in pools_in(pools):
        reader = open_pool(str(path))
        found.append(reader.superblock.uuid)
        reader.close()
    return found


def steps_in(path: Path) -> list[tuple[int, int]]:
    """(incarnation, step) of each intact checkpoint in a pool."""
    reader = open_pool(str(path))
    try:
        held = [one for one in reader.checkpoints() if isinstance(one, StoredCheckpoint)]
        for one in held:
            one.verify()
        return sorted((one.header.incarnation, one.step) for one in held)
    finally:
        reader.close()


CHANGES: dict[str, dict[str, Any]] = {
    "all in the same step": {"adds_group": True},
    "each in a step of its own": {"grows_at": GROWS_AT},
}
BOTH = every_second(GROUPS, CHANGES)


@pytest.mark.parametrize(("name", "change"), BOTH)
def test_ranks_whose_pools_get_new_files_go_on_together(pools, name, change):
    options, first = CHANGES[change], []

    def on_step(rank: int, step: int, session: Any) -> None:
        if step == 1 and not first:
            first.extend(uuids(pools))

    def body(rank: int) -> tuple[Run, list[bytes]]:
        return training(name, pools, on_step=on_step, **options)(rank), first

    ended = values(run_ranks(2, body))
    runs = [run for run, _ in ended]
    assert is_equal(runs, values(run_ranks(2, training(name, None, **options))))
    assert [run.stats.committed for run in runs] == [UPDATES] * 2
    assert [run.stats.skipped for run in runs] == [0] * 2
    assert all(before != after for before, after in zip(ended[0][1], uuids(pools), strict=True)), "both have new files"
    again = values(run_ranks(2, training(name, pools, updates=UPDATES + 3, **options)))
    assert [run.began for run in again] == [UPDATES] * 2
    assert is_equal(again, values(run_ranks(2, training(name, None, updates=UPDATES + 3, **options))))


@pytest.mark.parametrize("point", RELAYOUT_POINTS)
@pytest.mark.parametrize(
    ("name", "change", "victims"),
    [
        pytest.param("ddp", "all in the same step", (0,), marks=pytest.mark.campaign),
        ("ddp", "all in the same step", (0, 1)),
        pytest.param("ddp", "each in a step of its own", (0,), marks=pytest.mark.campaign),
        pytest.param("ddp", "each in a step of its own", (1,), marks=pytest.mark.campaign),
        ("fsdp", "all in the same step", (1,)),
        pytest.param("fsdp", "all in the same step", (0, 1), marks=pytest.mark.campaign),
    ],
)
def test_ranks_that_are_killed_in_a_relayout_come_back_together(pools, name, change, point, victims):
    options = CHANGES[change]
    kills = {rank: Kill("point", point) for rank in victims}
    ended = run_ranks(2, training(name, pools, kills=kills, **options), ends_others_after=0.3)
    assert any(ended[rank].is_killed for rank in victims)
    relaid = LATE + 1 if change == "all in the same step" else min(min(GROWS_AT[rank]) for rank in victims)
    runs = values(run_ranks(2, training(name, pools, **options)))
    assert is_equal(runs, values(run_ranks(2, training(name, None, **options))))
    assert runs[0].began == runs[1].began
    assert relaid - 1 <= runs[0].began <= relaid + 2
    assert not list(pools.glob(".lightck-*")), "what the killed ranks had begun is removed"


def test_a_relayout_in_the_first_step_after_a_resume_keeps_the_adopted_checkpoint(pools):
    """Rank 1 never commits anything after the resume: all come back to the checkpoint that they had adopted."""
    grows_at = {0: {4: 700_000}, 1: {}}
    values(run_ranks(2, training("ddp", pools, grows_at=grows_at, updates=3)))
    before = uuids(pools)

    def on_step(rank: int, step: int, session: Any) -> None:
        if rank == 0 and step == 4:
            session.flush()

    kills = {1: Kill("step", nth=1), 0: Kill("point", "after rename")}
    ended = run_ranks(2, training("ddp", pools, grows_at=grows_at, kills=kills, on_step=on_step), ends_others_after=9.0)
    assert all(one.is_killed for one in ended)
    after = uuids(pools)
    assert (after[0] == before[0], after[1] == before[1]) == (False, True)
    assert steps_in(pools_in(pools)[0])[:1] == [(1, 3)], "its name is that of its bytes"
    runs = values(run_ranks(2, training("ddp", pools, grows_at=grows_at)))
    assert [run.began for run in runs] == [3, 3]
    assert is_equal(runs, values(run_ranks(2, training("ddp", None, grows_at=grows_at))))


def test_a_rank_waits_before_a_relayout_that_would_drop_what_another_needs(pools):
    """Rank 1 stands still at step 2. Rank 0 goes on without collectives: its pool is full of what must stay, and then
    it must grow."""
    marker = pools.parent / "rank 0 waits"

    def body(rank: int) -> None:
        model, grown = nn.Linear(3, 2), Grown()
        optimizer = torch.optim.AdamW(model.parameters())
        session = lightck.attach(model, pools, optimizer=optimizer, state={"grown": grown}, timeout=3)
        for step in range(2 if rank else 5):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            grown.updated(step + 1, {5: 700_000})
            if step < 4:
                session.flush()
        try:
            if rank == 0:
                with pytest.raises(RankError, match=r"(?i)rank 1 .* whose newest checkpoint is that of step 2"):
                    session.flush()
        finally:
            marker.touch() if rank == 0 else None
        while not marker.exists():
            time.sleep(0.01)
        if rank:
            die()

    first, _ = run_ranks(2, body, ends_others_after=SECONDS_MAX)
    assert first.error is None, first.text
    first, second = map(steps_in, pools_in(pools))
    assert first == [(1, 2), (1, 3), (1, 4)]
    assert second == [(1, 0), (1, 1), (1, 2)]


def test_a_damaged_checkpoint_that_others_may_need_is_not_carried_over(pools):
    """The relayout is refused by name, and both pools stay as they are: all ranks come back to the one before."""
    grows_at = {0: {}, 1: {5: 800_000}}
    before: list[bytes] = []

    def on_step(rank: int, step: int, session: Any) -> None:
        if rank == 1 and step == 5:
            before.extend(uuids(pools))
            damage(pools_in(pools)[1], session.committed)

    def body(rank: int) -> None:
        try:
            training("ddp", pools, grows_at=grows_at, on_step=on_step)(rank)
        except CorruptPoolError as err:
            (pools.parent / "error").write_text(str(err))
            (pools.parent / "uuids").write_bytes(b"".join(before))
            die()

    run_ranks(2, body, ends_others_after=0.3)
    assert "cannot be copied to the new file" in (message := (pools.parent / "error").read_text())
    assert "Other ranks may need it" in message
    assert (pools.parent / "uuids").read_bytes() == b"".join(uuids(pools)), "no pool has a new file"
    assert not list(pools.glob(".lightck-*"))
    runs = values(run_ranks(2, training("ddp", pools, grows_at=grows_at)))
    assert runs[0].began == runs[1].began in (3, 4)
    assert is_equal(runs, values(run_ranks(2, training("ddp", None, grows_at=grows_at))))


@pytest.mark.parametrize("slots", [4, 3])
def test_a_resume_with_another_number_of_slots_gives_the_pools_that_many(pools, slots):
    values(run_ranks(2, training("ddp", pools, updates=5, slots=7 - slots)))
    runs = values(run_ranks(2, training("ddp", pools, slots=slots)))
    assert [run.began for run in runs] == [5, 5]
    assert is_equal(runs, values(run_ranks(2, training("ddp", None))))
    for path in pools_in(pools):
        reader = open_pool(str(path))
        assert len(reader.superblock.slots) == slots
        reader.close()


@pytest.mark.parametrize("replacement", ["an older copy", "another rank", "another training"])
def test_another_file_at_the_path_of_a_rank_does_not_count(pools, replacement):
    other = pools.parent / "other"
    if replacement == "another training":
        values(run_ranks(2, training("ddp", other, updates=20)))

    def on_step(rank: int, step: int, session: Any) -> None:
        dist.barrier()  # both have committed the step
        path = pools / "rank-00001-of-00002.pool"
        if rank == 0 and step == 2:
            shutil.copy2(path, pools.parent / "copy")
        if rank == 0 and step == 5:
            source = {
                "an older copy": pools.parent / "copy",
                "another rank": pools / "rank-00000-of-00002.pool",
                "another training": other / path.name,
            }[replacement]
            shutil.copy2(source, pools.parent / "new")
            (pools.parent / "new").rename(path)
        dist.barrier()

    def body(rank: int) -> tuple[str, list[str]]:
        with log_lines() as lines:
            model, optimizer = nn.Linear(3, 2), None
            optimizer = torch.optim.AdamW(model.parameters())
            session = lightck.attach(model, pools, optimizer=optimizer, timeout=2)
            try:
                for step in range(5):
                    model(torch.ones(3)).sum().backward()
                    optimizer.step()
                    session.flush()
                    on_step(rank, step + 1, session)
                for _ in range(20):
                    model(torch.ones(3)).sum().backward()
                    optimizer.step()
                    session.flush()
            except (RankError, BackgroundError) as err:
                return f"{type(err).__name__}: {err}", lines
            return "", lines

    (first, lines), (second, _) = values(run_ranks(2, body))
    assert first.startswith("RankError: ")
    assert "rank 1 (" in first.lower()
    assert second.startswith("BackgroundError: ")
    assert "was removed, moved, replaced" in second
    assert any("was replaced by the pool of another rank or training, or by an older copy" in line for line in lines)


def test_recover_reads_new_files_that_appear_while_it_reads(pools, monkeypatch):
    """It has opened the old file of rank 0; rank 1 has gone on meanwhile, and has nothing that is in that file."""
    values(run_ranks(2, training("ddp", pools, grows_at=GROWS_AT, updates=2)))
    old, new = pools_in(pools)[0], pools.parent / "new"
    early = old.read_bytes()
    values(run_ranks(2, training("ddp", pools, grows_at=GROWS_AT)))
    old.rename(new)
    old.write_bytes(early)
    old.chmod(0o600)
    opened = directory.open_worlds

    @contextmanager
    def open_worlds(path: str) -> Iterator[Any]:
        with opened(path) as worlds:
            if new.exists():
                new.rename(old)
            yield worlds

    monkeypatch.setattr(directory, "open_worlds", open_worlds)
    checkpoint = lightck.recover(pools)
    assert checkpoint.step == UPDATES
    assert len(checkpoint.state["grown"]["value"]) == 10 + sum(GROWS_AT[0].values()), "the object of rank 0"


# -- pins --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_pinned_step_stays_until_it_is_released(pools, name):
    seen: dict[int, list[torch.Tensor]] = {}

    def on_step(rank: int, step: int, session: Any) -> None:
        if step == 3:
            seen[rank] = session.pin()
        if step == 9:
            dist.barrier()
            assert lightck.recover(pools, step=3).step == 3
            dist.barrier()
            seen[rank].release()

    runs = values(run_ranks(2, training(name, pools, on_step=on_step, updates=15)))
    assert is_equal(runs, values(run_ranks(2, training(name, None, updates=15))))
    assert all(3 not in {step for _, step in steps_in(path)} for path in pools_in(pools)), "its slot was used again"


@pytest.mark.parametrize("name", GROUPS)
def test_pinned_step_is_recovered_after_a_kill(pools, name):
    def on_step(rank: int, step: int, session: Any) -> None:
        if step == 3:
            session.pin()

    kills = {0: Kill("step", nth=9)}
    run_ranks(2, training(name, pools, on_step=on_step, kills=kills))
    expected = values(run_ranks(2, training(name, pools.parent / "three", updates=3)))
    assert expected[0].began == 0
    pinned, three = lightck.recover(pools, step=3), lightck.recover(pools.parent / "three")
    assert three.step == 3
    assert all(torch.equal(value, three.model[key]) for key, value in pinned.model.items())
    runs = values(run_ranks(2, training(name, pools)))
    assert runs[0].began == runs[1].began in (8, 9)
    assert is_equal(runs, values(run_ranks(2, training(name, None))))


def test_a_pin_of_one_rank_alone_harms_nobody(pools):
    def on_step(rank: int, step: int, session: Any) -> None:
        if rank == 1 and step in (3, 5):
            session.pin()

    kills = {0: Kill("step", nth=9)}
    run_ranks(2, training("ddp", pools, on_step=on_step, kills=kills))
    first, second = map(steps_in, pools_in(pools))
    assert {(1, 3), (1, 5)} <= set(second)
    assert len(first) <= 3
    runs = values(run_ranks(2, training("ddp", pools)))
    assert runs[0].began == runs[1].began in (8, 9)
    assert is_equal(runs, values(run_ranks(2, training("ddp", None))))


def test_a_pin_right_after_a_resume_holds_the_adopted_step(pools):
    """The new file holds only checkpoints of earlier incarnations; what is written next gets a newer one than they."""
    values(run_ranks(2, training("ddp", pools, updates=4)))

    def on_step(rank: int, step: int, session: Any) -> None:
        if step == 4:
            assert session.pin().step == 4
            dist.barrier()
            die()

    run_ranks(2, training("ddp", pools, on_step=on_step), ends_others_after=1.0)
    of_second_session = set()
    for path in pools_in(pools):
        reader = open_pool(str(path))
        of_second_session.add(reader.commit_log().incarnation)
        reader.close()
        assert (1, 4) in steps_in(path)
    runs = values(run_ranks(2, training("ddp", pools)))
    assert [run.began for run in runs] == [4, 4]
    assert is_equal(runs, values(run_ranks(2, training("ddp", None))))
    of_third_session = {number for path in pools_in(pools) for number, step in steps_in(path) if step > 4}
    assert len(of_second_session) == len(of_third_session) == 1
    assert 1 < min(of_second_session) < min(of_third_session)


def test_pins_of_a_group_are_bounded(pools):
    def on_step(rank: int, step: int, session: Any) -> None:
        if step == 2:
            for _ in range(5):
                session.pin()
            with pytest.raises(SessionError, match="5 are pinned"):
                session.pin()

    runs = values(run_ranks(2, training("ddp", pools, on_step=on_step)))
    assert is_equal(runs, values(run_ranks(2, training("ddp", None))))
