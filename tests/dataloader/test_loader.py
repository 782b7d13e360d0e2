"""Session loaders: a run that is killed at a boundary and resumed equals one that was not, to the bit.

A run is a program over a fake session. It logs what it sees: every batch, what each global generator gives after it,
and what runs behind the loop. The fake session keeps a checkpoint at each boundary after an update. A kill is an
exception raised there. The resumed run builds everything again with other seeds, and must log the rest.
"""

from __future__ import annotations

import itertools
import logging
import random
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loader_host import Host, Killed, plain
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from lightck.dataloader.loader import SessionLoader
from lightck.errors import CorruptPoolError, DriftError, SessionError, UnsupportedError
from lightck.state import rng, values

EPOCHS, ITEMS, BATCH = 3, 11, 2
PASS = 6  # batches in a pass


class Noisy(Dataset):
    """Augments with every global generator, in whichever process it runs."""

    def __init__(self, items: int = ITEMS, noise: bool = True) -> None:
        self.items, self.noise = items, noise

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.noise:
            return torch.tensor([float(index)], dtype=torch.float64)
        noise = [torch.rand(1).item(), random.random(), np.random.rand()]
        return torch.tensor([index, *noise], dtype=torch.float64)


class Stream(IterableDataset):
    """Draws nothing in the main process, noise in workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id if info else 0, ITEMS, info.num_workers if info else 1):
            yield torch.tensor([index, torch.rand(1).item() if info else 0.0], dtype=torch.float64)


def collate(items: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(items) + torch.rand(1, dtype=torch.float64)


Program = Callable[[Host], None]


def train(
    build: Callable[[], Any], leave_at: int | None = None, behind: Callable[[Host], None] | None = None
) -> Program:
    """The usual loop. ``leave_at``: numbers of batches after which a pass is left by break."""

    def program(host: Host) -> None:
        loader = host.loader(build())
        scramble()
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.start):
                host.step(epoch, i, batch)
                if leave_at is not None and i + 1 >= leave_at:
                    break
            host.see("behind", epoch)
            if behind is not None:
                behind(host)

    return program


def scramble() -> None:
    """Draw random numbers as a program may between attach and the loop: they must not matter, resumed or not."""
    for _ in range(3):
        random.random(), np.random.rand(), torch.rand(2)


def run(program: Program, seed: int, kill: int | None = None, resumed: bytes | None = None) -> Host:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    host = Host(kill, resumed)
    host.proxy = weakref.proxy(host)  # no cycle: workers that only the garbage collector ends take five seconds
    if host.once is not None:
        host.once.state.restore()
    try:
        program(host)
        assert kill is None, "the program ended before the kill"
    except Killed:
        pass
    return host


def check(program: Program, kills: list[list[int]] | None = None) -> Host:
    """Compare resumed runs with an uninterrupted one. ``kills``: lists of checkpoints, each a chain of kills; by
    default a chain for each checkpoint, and one through all of them."""
    reference = run(program, seed=1)
    if kills is None:
        kills = [[step] for step in reference.checkpoints] + [list(reference.checkpoints)[::4]]
    for chain in kills:
        resumed = None
        for number, step in enumerate([*chain, None]):
            host = run(program, seed=1 if number == 0 else 50 + number, kill=step, resumed=resumed)
            if step is not None:
                resumed = host.checkpoints[step][1]
        assert host.log == reference.log[reference.checkpoints[chain[-1]][0] :], f"resumed at {chain}"
        assert host.updates == reference.updates
        assert host.loaders["train"].epoch == reference.loaders["train"].epoch
    return reference


@pytest.fixture(autouse=True)
def _leave_no_trace():
    with rng.preserved():
        yield


# ------------------------------------------------------------------------------------------------ no workers


def shared_generator() -> DataLoader:
    return DataLoader(Noisy(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(random.randrange(99)))


def replacement() -> DataLoader:
    dataset = Noisy()
    sampler = RandomSampler(dataset, replacement=True, num_samples=70, generator=torch.Generator().manual_seed(7))
    return DataLoader(dataset, 12, sampler=sampler)


class Shard(BatchSampler):
    """Every second batch of another batch sampler, like those that Accelerate makes for each rank."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batch_sampler, self.batch_size, self.drop_last = batches, batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        return -(-len(self.batch_sampler) // 2)

    def __iter__(self) -> Iterator[list[int]]:
        yield from itertools.islice(self.batch_sampler, 0, None, 2)


def generator_in_a_shard() -> DataLoader:
    sampler = RandomSampler(Noisy(2 * ITEMS), generator=torch.Generator().manual_seed(random.randrange(99)))
    return DataLoader(Noisy(2 * ITEMS), batch_sampler=Shard(BatchSampler(sampler, BATCH, drop_last=False)))


class Halves(Sampler[int]):
    """A sampler over samplers, whose generator has a name of its own."""

    def __init__(self) -> None:
        self._draws = torch.Generator().manual_seed(random.randrange(99))
        self.halves = [RandomSampler(range(6), generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        for one in torch.randperm(2, generator=self._draws).tolist():
            yield from (index + 6 * one for index in self.halves[one] if index + 6 * one < ITEMS)


class Middle(Sampler[int]):
    """Draws the order of all items but the first and the last ones, which show nothing of the order."""

    def __init__(self, rng: Any, draw: Callable[[Any, int], Any]) -> None:
        self.draws, self.draw = {"train": rng}, draw

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        middle = ITEMS - 2 * BATCH
        yield from (*range(BATCH), *(BATCH + int(i) for i in self.draw(self.draws["train"], middle)))
        yield from range(ITEMS - BATCH, ITEMS)


class Slotted(Sampler[int]):
    __slots__ = ("draws", "not_set")

    def __init__(self) -> None:
        self.draws = np.random.RandomState(random.randrange(99))

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        self.draws.standard_normal()  # the second one of a pair is kept for the next pass
        return iter(self.draws.permutation(ITEMS).tolist())


class Fetched(Sampler[int]):
    """Takes the order from a loader with a generator."""

    def __init__(self) -> None:
        self.orders = DataLoader(
            range(ITEMS), shuffle=True, generator=torch.Generator().manual_seed(random.randrange(9))
        )

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        return (int(index) for index in self.orders)


def shuffled_by(rng: random.Random, n: int) -> list[int]:
    items = list(range(n))
    rng.gauss(0, 1)
    rng.shuffle(items)
    return items


SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "torch": lambda: Middle(torch.Generator().manual_seed(3), lambda rng, n: torch.randperm(n, generator=rng)),
    "PCG64": lambda: Middle(np.random.default_rng(3), np.random.Generator.permutation),
    "Philox": lambda: Middle(np.random.Generator(np.random.Philox(3)), np.random.Generator.permutation),
    "SFC64": lambda: Middle(np.random.Generator(np.random.SFC64(3)), np.random.Generator.permutation),
    "MT19937": lambda: Middle(np.random.Generator(np.random.MT19937(3)), np.random.Generator.permutation),
    "RandomState": lambda: Middle(np.random.RandomState(3), np.random.RandomState.permutation),
    "Random": lambda: Middle(random.Random(3), shuffled_by),
    "in a slot": Slotted,
    "in a loader": Fetched,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_generators_of_samplers_come_back_where_the_batches_around_do_not_show_them(name):
    check(train(lambda: DataLoader(Noisy(), BATCH, sampler=SAMPLERS[name]())))


@pytest.mark.parametrize("moment", ["before the pass", "after the pass"])
def test_generators_that_the_loop_exchanges_come_back(moment):
    def program(host: Host) -> None:
        sampler = RandomSampler(range(ITEMS), generator=torch.Generator().manual_seed(9))
        loader = host.loader(DataLoader(Noisy(), BATCH, sampler=sampler))
        for epoch in range(loader.epoch, EPOCHS):
            if moment == "before the pass" and loader.start == 0:
                sampler.generator = torch.Generator().manual_seed(epoch)
            for i, batch in enumerate(loader, loader.start):
                host.step(epoch, i, batch)
            if moment == "after the pass":
                sampler.generator = torch.Generator().manual_seed(epoch)

    check(program)


def test_a_state_of_another_generator_is_refused():
    saved = run(train(lambda: DataLoader(Noisy(), BATCH, sampler=SAMPLERS["PCG64"]())), seed=1).checkpoints[8][1]
    for other in ("Philox", "MT19937", "RandomState", "Random", "torch"):
        with pytest.raises(CorruptPoolError, match="a generator refuses its state"):
            Host(resumed=saved).loader(DataLoader(Noisy(), BATCH, sampler=SAMPLERS[other]()))


def test_more_generators_than_a_position_can_hold_are_refused():
    several = Halves()
    several.halves = [RandomSampler(range(6), generator=torch.Generator()) for _ in range(64)]
    with pytest.raises(UnsupportedError, match=r"65 random generators.*share a generator"):
        Host().loader(DataLoader(Noisy(), BATCH, sampler=several))


def epoch_numbers() -> list[Any]:
    return [(i, "text", {"a": np.arange(i), "b": [0.5, True]}) for i in range(5)]


class Shuffled:
    """An iterable that is no DataLoader, and draws when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        items = list(range(7))
        random.shuffle(items)
        return iter(items)


IN_PROCESS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Noisy(), BATCH),
    "shuffled": lambda: DataLoader(Noisy(), BATCH, shuffle=True, collate_fn=collate),
    "generator": shared_generator,
    "generator in a shard": generator_in_a_shard,
    "generators of samplers": lambda: DataLoader(Noisy(), BATCH, sampler=Halves()),
    "replacement": replacement,
    "weighted": lambda: DataLoader(Noisy(), BATCH, sampler=WeightedRandomSampler([1.0, 2.0] * 5 + [1.0], ITEMS)),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "list": epoch_numbers,
    "another kind": Shuffled,
}


@pytest.mark.parametrize("name", IN_PROCESS)
def test_every_position(name):
    check(train(IN_PROCESS[name]))


@pytest.mark.parametrize("name", ["shuffled", "generator"])
def test_passes_left_by_break(name):
    reference = check(train(IN_PROCESS[name], leave_at=4))
    assert reference.updates == EPOCHS * 4


class Buckets:
    """Batches whose size, and so whose number, depends on the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return -(-ITEMS // (2 + self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch))
        yield from (chunk.tolist() for chunk in order.split(2 + self.epoch))


def test_a_length_that_depends_on_the_epoch():
    """The loop can set the epoch only after it has read it from the session's loader."""

    def program(host: Host) -> None:
        buckets = Buckets()
        loader = host.loader(DataLoader(Noisy(), batch_sampler=buckets))
        for buckets.epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.start):
                host.step(buckets.epoch, i, batch)

    check(program)


def test_epoch_start_and_length():
    reference = run(train(IN_PROCESS["shuffled"]), seed=1)
    assert reference.ended == EPOCHS
    loader = reference.loaders["train"]
    assert (loader.epoch, loader.start, len(loader)) == (EPOCHS, 0, PASS)
    assert isinstance(loader.loader, DataLoader)
    host = Host(resumed=reference.checkpoints[PASS + 4][1])
    loader = host.loader(IN_PROCESS["shuffled"]())
    assert (loader.epoch, loader.start) == (1, 4)
    assert len(list(loader)) == PASS - 4
    assert (loader.epoch, loader.start) == (2, 0)
    with pytest.raises(TypeError):
        len(host.loader(DataLoader(Stream()), "stream"))


def test_the_end_of_a_pass_is_not_counted_in_its_last_checkpoint():
    reference = run(train(IN_PROCESS["shuffled"]), seed=1)
    host = Host(resumed=reference.checkpoints[PASS][1])
    loader = host.loader(IN_PROCESS["shuffled"]())
    assert (loader.epoch, loader.start) == (0, PASS)
    assert list(loader) == []
    assert (loader.epoch, loader.start) == (1, 0)
    assert len(list(loader)) == PASS


def numbers(count: int = 30) -> Iterator[int]:
    yield from range(count)


def test_an_iterator_has_one_pass(caplog):
    """It is replayed as any other iterable; a loop may also ask for a second pass, which is empty."""
    for build in (numbers, lambda: iter(list(range(9))), lambda: iter(DataLoader(Noisy(), BATCH, shuffle=True))):
        check(train(build), [[1], [5], [2, 4]])
    assert not caplog.records


def test_an_iterator_that_is_left_and_iterated_again_is_reported_and_not_resumed(caplog):
    reference = run(train(numbers, leave_at=4), seed=1)
    assert caplog.text.count("Pass the iterable that makes the iterator") == 1
    assert Host(resumed=reference.checkpoints[3][1]).loader(numbers()).start == 3
    for number in (4, 5, 8, 9):  # from the next() of a later pass on
        with pytest.raises(DriftError, match=r"the number of batches taken before this pass was [48] and is None"):
            Host(resumed=reference.checkpoints[number][1]).loader(numbers())


class Rewinding:
    """An iterator that begins again with each ``iter()``."""

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


def test_an_iterator_that_begins_anew_is_replayed(caplog):
    check(train(Rewinding, leave_at=4))
    assert not caplog.records


@pytest.mark.parametrize("name", ["shuffled", "generator", "list"])
def test_checkpoints_before_between_and_after_passes(name):
    def program(host: Host) -> None:
        loader = host.loader(IN_PROCESS[name]())
        if host.checkpoint is None:
            host.updates += 1
            host.save()
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.start):
                host.step(epoch, i, batch)
            host.see("behind")
            host.save()  # flush() by the user

    check(program)


def test_a_pass_is_counted_where_it_trained():
    host = Host()
    loader = host.loader(IN_PROCESS["in order"]())
    next(iter(loader))
    assert loader.epoch == 0
    batches = iter(loader)
    next(batches)
    host.updates += 1
    assert loader.epoch == 0
    batches = iter(loader)
    next(batches)
    assert loader.epoch == 1
    del batches
    host.updates += 1  # an update after the pass was left is none of its own
    iter(loader)
    assert loader.epoch == 1


def test_a_second_iter_after_a_restore_begins_a_new_pass():
    reference = run(train(IN_PROCESS["in order"]), seed=1)
    loader = Host(resumed=reference.checkpoints[3][1]).loader(IN_PROCESS["in order"]())
    assert next(iter(loader))[0, 0] == 6
    assert next(iter(loader))[0, 0] == 0
    assert loader.epoch == 1


def test_one_pass_at_a_time():
    loader = Host().loader(IN_PROCESS["in order"]())
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(SessionError, match="iterated again"):
        next(first)
    assert len(list(second)) == PASS
    assert list(second) == []


# --------------------------------------------------------------------------------------------- several loaders


def zipped(host: Host) -> None:
    shared = torch.Generator().manual_seed(3)
    one = host.loader(DataLoader(Noisy(), BATCH, shuffle=True, generator=shared))
    two = host.loader(DataLoader(Noisy(7), BATCH, shuffle=True, generator=shared), "two")
    scramble()
    for epoch in range(two.epoch, EPOCHS):
        for left, right in zip(one, two, strict=False):
            host.step(epoch, left, right)


def test_two_session_loaders():
    check(zipped)


def evaluate_plainly(host: Host) -> None:
    for batch in DataLoader(Noisy(5), BATCH, shuffle=True):
        host.see("evaluation", batch)


def evaluate_in_session(host: Host, batches: int | None = None) -> None:
    loader = host.loaders.get("val") or host.loader(DataLoader(Noisy(5), BATCH, shuffle=True), "val")
    for batch in itertools.islice(loader, batches):
        host.see("evaluation", batch)


@pytest.mark.parametrize("batches", [None, 2])
def test_evaluation_after_the_pass(batches):
    check(train(IN_PROCESS["shuffled"], behind=evaluate_plainly))
    check(train(IN_PROCESS["shuffled"], behind=lambda host: evaluate_in_session(host, batches)))


@pytest.mark.parametrize("where", ["plain", "session", "session, left"])
def test_evaluation_inside_the_pass(where):
    """The session closes the checkpoint before the evaluation, which a resume does not repeat (session/loaders.py)."""

    def program(host: Host) -> None:
        loader = host.loader(IN_PROCESS["generator"]())
        quiet = DataLoader(Noisy(5, noise=False), BATCH)
        val = quiet if where == "plain" else host.loader(quiet, "val")
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.start):
                host.step(epoch, i, batch)
                if i % 2:
                    for _ in itertools.islice(val, 2 if "left" in where else None):
                        pass

    check(program)


# -------------------------------------------------------------------------------------------------- workers


def workers(**more: Any) -> Callable[[], DataLoader]:
    return lambda: DataLoader(Noisy(), BATCH, num_workers=2, **more)


def test_workers_shuffled_with_noise():
    check(train(workers(shuffle=True)), [[3], [6], [8, 9]])


def test_workers_with_generator_left_by_break():
    def build() -> DataLoader:
        return workers(shuffle=True, generator=torch.Generator().manual_seed(5), prefetch_factor=3)()

    check(train(build, leave_at=4), [[2], [5, 8]])


def test_workers_and_a_stream():
    check(train(lambda: DataLoader(Stream(), BATCH, num_workers=2)), [[5]])


def test_persistent_workers(caplog):
    caplog.set_level(logging.WARNING, "lightck")
    noisy = train(workers(shuffle=True, persistent_workers=True))
    check(noisy, [[4]])  # in the first pass noise is exact too
    assert not caplog.records

    def quiet() -> DataLoader:
        return DataLoader(Noisy(noise=False), BATCH, shuffle=True, num_workers=2, persistent_workers=True)

    check(train(quiet), [[9], [12, 14]])
    assert "random augmentation and other state in the workers" in caplog.text


def test_persistent_workers_between_passes():
    def program(host: Host) -> None:
        dataset = Noisy(noise=False)
        loader = host.loader(DataLoader(dataset, BATCH, shuffle=True, num_workers=2, persistent_workers=True))
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.start):
                host.step(epoch, i, batch)
            host.save()

    check(program, [[7], [9]])


# ------------------------------------------------------------------------------------------------- stateful

stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.parametrize("kind", ["shuffled", "generator", "in order", "torch sampler"])
def test_stateful(kind):
    def build() -> Any:
        if kind == "generator":
            return stateful(Noisy(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(random.randrange(99)))
        if kind == "torch sampler":
            return stateful(Noisy(), BATCH, sampler=RandomSampler(Noisy()))
        return stateful(Noisy(), BATCH, shuffle=kind == "shuffled")

    check(train(build))


def test_stateful_between_passes_and_workers():
    def program(host: Host) -> None:
        loader = host.loader(stateful(Noisy(noise=False), BATCH, shuffle=True, num_workers=2))
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.start):
                host.step(epoch, i, batch)
            host.save()

    check(program, [[4], [7]])


class Queue:
    """A loader that has a state and is no subclass of torch's loaders."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 100:
            self.at += 1
            yield self.at
            if self.at % 5 == 0:
                return

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_of_another_class_with_state_dict():
    reference = run(train(Queue), seed=1)
    host = run(train(Queue), seed=2, resumed=reference.checkpoints[7][1])
    assert host.log == reference.log[reference.checkpoints[7][0] :]


def test_a_state_that_the_loader_refuses():
    reference = run(train(Queue), seed=1)
    checkpoint = values.unpack(reference.checkpoints[7][1])
    checkpoint["loaders"]["train"]["inner"] = {"other": 1}
    loader = Host(resumed=values.pack(checkpoint, path="v")).loader(Queue())
    with pytest.raises(DriftError, match="refuses"):
        iter(loader)


# ----------------------------------------------------------------------------------------- drift and damage


@pytest.fixture(scope="module")
def checkpoint() -> bytes:
    with rng.preserved():
        return run(train(IN_PROCESS["generator"]), seed=1).checkpoints[8][1]


def drifted(checkpoint: bytes, dl: Any) -> str:
    with pytest.raises(DriftError) as caught:
        Host(resumed=checkpoint).loader(dl)
    assert "anew=True" in str(caught.value)
    return str(caught.value)


def test_a_loader_that_was_built_differently_is_refused(checkpoint):
    generator = torch.Generator()
    assert "batch_size was 2 and is 3" in drifted(checkpoint, DataLoader(Noisy(), 3, shuffle=True, generator=generator))
    longer = Host(resumed=checkpoint).loader(DataLoader(Noisy(13), BATCH, shuffle=True, generator=generator))
    with pytest.raises(DriftError, match=r"length was 6 and is 7.*anew=True"):
        iter(longer)
    text = drifted(checkpoint, DataLoader(Noisy(), BATCH, num_workers=2, persistent_workers=True, generator=generator))
    for name in ("workers was 0 and is 2", "SequentialSampler", "persistent_workers was", "prefetch_factor was None"):
        assert name in text
    assert "the number of its random generators was 1 and is 0" in drifted(
        checkpoint, DataLoader(Noisy(), BATCH, shuffle=True)
    )
    assert "class was" in drifted(checkpoint, [1, 2])
    assert "kind of loader was 'plain'" in drifted(checkpoint, stateful(Noisy(), BATCH))


def test_a_loader_may_change_between_passes(caplog):
    def save(dl: Any) -> bytes:
        host = Host()
        list(host.loader(dl))
        host.save()
        return host.checkpoints[1][1]

    saved = save(IN_PROCESS["generator"]())
    loader = Host(resumed=saved).loader(DataLoader(Noisy(), 3, shuffle=True))
    assert len(list(loader)) == 4
    assert "The checkpoint was saved between two passes, so the next pass uses the loader as it is" in caplog.text
    assert "batch_size was 2 and is 3" in caplog.text
    assert len(list(Host(resumed=saved).loader(stateful(Noisy(), 3)))) == 4


@pytest.mark.parametrize(
    ("other", "fact", "length"),
    [
        (lambda: DataLoader(Noisy(), 3, shuffle=True, generator=torch.Generator()), "batch_size was 2 and is 3", 4),
        (lambda: DataLoader(Noisy(), BATCH, shuffle=True), "the number of its random generators was 1 and is 0", 6),
        (lambda: DataLoader(Noisy(15), BATCH, shuffle=True, generator=torch.Generator()), "length was 6 and is 8", 8),
        (lambda: stateful(Noisy(), BATCH), "the kind of loader was 'plain' and is 'stateful'", 6),
        (lambda: [1, 2], "class was", 2),
    ],
)
def test_a_loader_may_change_after_the_last_batch_of_a_pass(other, fact, length, caplog):
    """No batch of the pass is left that the other loader would give differently."""
    saved = run(train(IN_PROCESS["generator"]), seed=1).checkpoints[2 * PASS][1]
    for at_once in (True, False):
        host = Host(resumed=saved)
        loader = host.loader(other())
        assert (loader.epoch, loader.start) == (1, PASS)
        then = values.unpack(saved)["loaders"]["train"]
        now, then = values.pack(loader.position(), path="x"), values.pack(then, path="x")
        assert now == then, "a checkpoint that is saved now says the same"
        if not at_once:
            next(iter(loader), None)  # a look before the loop
            assert loader.epoch == 2
        else:
            assert list(enumerate(loader, loader.start)) == []
            assert (loader.epoch, loader.start) == (2, 0)
        assert len(list(loader)) == length
        assert loader.epoch == 3
    assert f"{fact}" in caplog.text
    assert "The checkpoint was saved after the last batch of a pass, so the next pass uses" in caplog.text


def test_a_dataset_that_changed():
    class Shifted(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            return super().__getitem__(index) + (index == 7)

    saved = run(train(lambda: DataLoader(Noisy(), BATCH)), seed=1).checkpoints
    changed = Host(resumed=saved[4][1]).loader(DataLoader(Shifted(), BATCH))
    before = rng.capture().to_value()
    with pytest.raises(DriftError, match="dataset changed"):
        iter(changed)
    assert values.pack(rng.capture().to_value(), path="x") == values.pack(before, path="x")
    assert changed.start == 4
    iter(Host(resumed=saved[3][1]).loader(DataLoader(Shifted(), BATCH)))  # only the last batch is compared

    saved = run(train(lambda: iter(range(9)) and Short(9)), seed=1).checkpoints
    with pytest.raises(DriftError, match="ended after 3 of the 5"):
        iter(Host(resumed=saved[5][1]).loader(Short(3)))

    class Ending(torch.utils.data.SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            return itertools.islice(super().__iter__(), BATCH)

    Ending.__module__, Ending.__qualname__ = torch.utils.data.SequentialSampler.__module__, "SequentialSampler"
    saved = run(train(lambda: DataLoader(Noisy(), BATCH)), seed=1).checkpoints
    shorter = DataLoader(Noisy(), BATCH, sampler=Ending(Noisy()))
    with pytest.raises(DriftError, match="ended after some of the 4"):
        iter(Host(resumed=saved[4][1]).loader(shorter, skips=True))


class Short:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Pair(NamedTuple):
    x: torch.Tensor
    note: bytes | None = None


@pytest.mark.parametrize(
    "hold",
    [Pair, lambda x: Pair(x, b"a"), lambda x: OrderedDict(x=x), lambda x: UserDict(x=x), lambda x: [{"x": (x, None)}]],
    ids=["named tuple", "bytes", "ordered dict", "user dict", "nested"],
)
def test_batches_in_other_containers_are_compared(hold):
    saved = run(train(lambda: [hold(torch.full((2,), i)) for i in range(4)]), seed=1).checkpoints
    again = Host(resumed=saved[3][1]).loader([hold(torch.full((2,), i)) for i in range(4)])
    assert len(list(again)) == 1
    changed = Host(resumed=saved[3][1]).loader([hold(torch.full((2,), i + (i == 2))) for i in range(4)])
    with pytest.raises(DriftError, match="batch 2 of the pass is not that of the interrupted run"):
        iter(changed)


def test_batches_that_are_not_compared():
    class Text(str):
        pass

    saved = run(train(lambda: [Text("a"), Text("b"), Text("c")]), seed=1).checkpoints
    assert values.unpack(saved[2][1])["loaders"]["train"]["content"] is None
    assert values.unpack(saved[2][1])["loaders"]["train"]["r_last"] is None
    assert list(Host(resumed=saved[2][1]).loader([Text("x"), Text("y"), Text("z")])) == ["z"]


@pytest.mark.parametrize("name", ["sparse", "cyclic", "wide", "long", "empty", "one", "scalar"])
def test_odd_batches_do_no_harm(name):
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    batch = {
        "sparse": torch.eye(3).to_sparse(),
        "cyclic": cyclic,
        "wide": torch.rand(70, 4000).t(),
        "long": list(range(100_000)),
        "empty": torch.empty(0, 3),
        "one": torch.arange(8.0)[5::7],
        "scalar": (torch.tensor(1.5), torch.tensor(2, dtype=torch.bfloat16), np.float32(1), None),
    }[name]
    assert list(Host().loader([batch])) == [batch] or name == "cyclic"


def test_warnings_say_what_is_not_exact(caplog):
    caplog.set_level(logging.INFO, "lightck")
    Host().loader(DataLoader(Stream(), BATCH))
    Host().loader(DataLoader(Noisy(), BATCH, num_workers=2, in_order=False))
    Host().loader(DataLoader(Noisy(), BATCH))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "iterable dataset" in caplog.text
    assert "in_order=True" in caplog.text


class DrawingSampler:
    """Draws from the global generator for each item."""

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        for _ in range(ITEMS):
            yield int(torch.randint(ITEMS, ()))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_sampler_that_draws_between_draws_of_the_loop_is_reported_once(caplog, workers):
    loader = Host().loader(DataLoader(Noisy(40), 1, sampler=DrawingSampler(), num_workers=workers))
    for _ in range(2):
        for _ in itertools.islice(loader, 6):
            torch.rand(1)
    assert caplog.text.count("the loader's sampler draws") == 1


class Chunks:
    """A permutation for each chunk. ``generator``: the sampler's own, or None for the global one."""

    def __init__(self, own: bool) -> None:
        self.generator = torch.Generator().manual_seed(5) if own else None

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, ITEMS, 5):
            for index in torch.randperm(min(5, ITEMS - begin), generator=self.generator).tolist():
                yield begin + index


@pytest.mark.parametrize(("own", "draws"), [(False, False), (True, True)])
def test_a_sampler_that_draws_for_each_chunk_is_replayed_where_it_draws_alone(caplog, own, draws):
    def program(host: Host) -> None:
        loader = host.loader(DataLoader(Noisy(), BATCH, sampler=Chunks(own)))
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.start):
                host.log.append((epoch, i, plain(batch), torch.rand(1).item() if draws else None))
                host.updates += 1

    check(program)
    assert not caplog.records


def test_a_sampler_that_draws_for_each_chunk_between_draws_of_the_loop_is_reported(caplog):
    class Opaque:
        def __init__(self, items: list[torch.Tensor]) -> None:
            self.items = items

    def build(collate: Any = None) -> DataLoader:
        return DataLoader(Noisy(), BATCH, sampler=Chunks(own=False), collate_fn=collate)

    saved = run(train(build), seed=1).checkpoints
    assert caplog.text.count("the loader's sampler draws from torch's global random generator at next()") == 1
    with pytest.raises(DriftError, match=r"sampler and the loop draw.*give the sampler a generator of its own"):
        iter(Host(resumed=saved[5][1]).loader(build()))
    caplog.clear()
    run(train(lambda: build(Opaque)), seed=1)  # its batches cannot be compared after a resume
    assert caplog.text.count("the loader's sampler draws") == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_samplers_of_torch_are_not_reported(caplog, workers):
    weighted = WeightedRandomSampler([1.0] * ITEMS, ITEMS)
    for sampler in (None, weighted, RandomSampler(Noisy(), num_samples=40), RandomSampler(Noisy(), replacement=True)):
        loader = Host().loader(DataLoader(Noisy(), 1, sampler=sampler, shuffle=sampler is None, num_workers=workers))
        for _ in itertools.islice(loader, 6):
            torch.rand(1)
    assert not caplog.records


DAMAGE = [
    ("kind", "other"),
    ("kind", None),
    ("epoch", -1),
    ("epoch", True),
    ("epoch", 2**70),
    ("given", None),
    ("live", 1),
    ("live", False),
    ("trained", "yes"),
    ("identity", []),
    ("identity", {"length": [1]}),
    ("generators", None),
    ("generators", []),
    ("generators", [b""]),
    ("generators", [b"x"]),
    ("generators", [b"x"] * 65),
    ("r_iter", None),
    ("r_iter", {}),
    ("r_first", None),
    ("r_first", {"rng": {}, "generators": []}),
    ("r_base", 3),
    ("r_last", []),
    ("checksum", "x"),
    ("checksum", -1),
    ("content", "x"),
    ("content", -1),
    ("surplus", 1),
]


@pytest.mark.parametrize(("key", "value"), DAMAGE)
def test_damage(checkpoint, key, value):
    position = values.unpack(checkpoint)["loaders"]["train"]
    position[key] = value
    with pytest.raises(CorruptPoolError, match="Continue from an older step"):
        SessionLoader(IN_PROCESS["generator"](), Host(), "train", position)


def test_damage_deep_inside(checkpoint):
    position = values.unpack(checkpoint)["loaders"]["train"]
    position["r_iter"]["generators"] = [b"\xff" * 5056]
    with pytest.raises(CorruptPoolError, match="refuses its state"):
        SessionLoader(IN_PROCESS["generator"](), Host(), "train", position)
    position["r_iter"]["generators"] *= 2
    with pytest.raises(CorruptPoolError, match="number of generators"):
        SessionLoader(IN_PROCESS["generator"](), Host(), "train", position)


class Kept:
    """Returns the same torch iterator in each pass, which continues from pass to pass."""

    def __init__(self) -> None:
        self.batches = iter(DataLoader(range(10_000), batch_size=2))

    def __iter__(self) -> Any:
        return self.batches


def test_an_iterator_that_is_used_in_many_passes_is_watched_once():
    loader = Host().loader(Kept())
    for _ in range(1200):  # more than Python's frames
        for _ in loader:
            break
    assert next(iter(loader)).tolist() == [2400, 2401]
