"""Every rival saves and loads exactly, through the interface that the bench uses."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from bench import rivals, subject

pytestmark = pytest.mark.long

STEPS = 4


def run(name: str, folder: str, options: dict[str, object]) -> tuple[int, int, list[str], str, str]:
    """Train, save at each step, load into new objects: (reported, loaded step, digests, loaded digest, live digest)."""
    torch.set_num_threads(1)
    model, optimizer = subject.build()
    rival = rivals.named(name, **options)
    rival.start(model, optimizer, folder)
    digests = [subject.digest(subject.parts(model, optimizer))]
    for step in range(1, STEPS + 1):
        subject.update(model, optimizer, step)
        digests.append(subject.digest(subject.parts(model, optimizer)))
        rival.save(step)
    rival.finish()
    fresh, its = subject.build(seed=1)
    step = rivals.named(name, **options).load(fresh, its, folder)
    return (
        rival.saved,
        step,
        digests,
        subject.digest(subject.parts(fresh, its)),
        subject.digest(subject.parts(model, optimizer)),
    )


@pytest.mark.parametrize("name", rivals.TABLE)
def test_what_was_saved_at_the_last_step_loads_back_exactly(name, folder):
    if why := rivals.why_not(name):
        pytest.skip(why)
    options = {"interval": 1} if name == "CheckFreq" else {}
    # A process of its own: some start threads, processes and a process group, which no other test should meet. It is
    # forked from one that has imported what takes seconds, and runs no thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    with ProcessPoolExecutor(1, context) as pool:
        reported, step, digests, loaded, live = pool.submit(run, name, str(folder), options).result()
    assert (reported, step) == (STEPS, STEPS)
    assert loaded == digests[step] == live


def test_checkfreq_finds_its_interval_and_backs_off():
    from bench.rivals.checkfreq import CheckFreq

    rival = CheckFreq(interval=3)
    rival.follows_rule, rival.iteration_seconds = True, 1.0
    rival.iterations = [1.0, 1.0, 1.1]  # 3.3 % over: within the bound
    rival._tune()
    assert rival.interval == 3
    rival.iterations = [1.0, 1.0, 1.2]
    rival._tune()
    assert rival.interval == 5


def test_checkfreq_by_its_own_rule_saves_and_loads_exactly(folder):
    from bench.rivals.checkfreq import WARM_UP

    torch.set_num_threads(1)
    model, optimizer = subject.build()
    rival = rivals.named("CheckFreq", profiled=3)
    rival.start(model, optimizer, str(folder))
    digests = {}
    for step in range(1, WARM_UP + 3 + 6):
        subject.update(model, optimizer, step)
        digests[step] = subject.digest(subject.parts(model, optimizer))
        rival.save(step)
    rival.finish()
    fresh, its = subject.build(seed=1)
    step = rival.load(fresh, its, str(folder))
    assert step == rival.saved >= WARM_UP + 3
    assert subject.digest(subject.parts(fresh, its)) == digests[step]


class _OnDevice(torch.Tensor):
    """A CPU tensor that pretends to be on a CUDA device."""

    is_cuda = True


def test_checkfreq_copies_out_of_a_device_beside_the_training(monkeypatch):
    """The snapshot uses its own stream, starts after the mark, reuses its buffers, and waits once."""
    from bench.rivals import checkfreq

    calls: list[str] = []

    class Stream:
        def __init__(self, device: object) -> None: ...

        def wait_event(self, event: object) -> None:
            calls.append("after the mark")

        def synchronize(self) -> None:
            calls.append("wait")

    class Event:
        def record(self, stream: object) -> None:
            calls.append(f"mark {stream}")

    def copy(into: torch.Tensor, tensor: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        calls.append("sent" if non_blocking else "copied")
        return into.set_(tensor.as_subclass(torch.Tensor).clone())  # type: ignore[call-overload]

    def pinned(like: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        calls.append("pinned" if pin_memory else "not pinned")
        return torch.empty(like.shape, dtype=like.dtype, device=device)

    @contextlib.contextmanager
    def beside(stream: object) -> Iterator[None]:
        calls.append("beside")
        yield
        calls.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the training's")
    monkeypatch.setattr(torch, "empty_like", pinned)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    one, two, count = torch.ones(3).as_subclass(_OnDevice), torch.zeros(2).as_subclass(_OnDevice), torch.tensor(7)
    stage = checkfreq.Stage(torch.device("cuda"))
    for fresh in (["pinned", "sent"] * 2, ["sent"] * 2):
        calls.clear()
        stage.mark()
        found = stage.copied({"model": [one, two], "step": count})
        assert calls == ["mark the training's", "beside", "after the mark", *fresh, "back", "wait"]
        assert torch.equal(found["model"][0], torch.ones(3))
        assert found["step"] is not count
    assert checkfreq.stage_of(torch.nn.Linear(1, 1)) is None


def test_the_table_and_the_adapters_agree():
    for name in rivals.TABLE:
        if not rivals.why_not(name):
            rival = rivals.named(name)
            assert rival.name == name
            assert rival.use
