"""Every measure at a small size: its result is complete, and a state that does not load back right is an error."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any

import pytest
import torch
from toys import child_that_holds

import lightck
from bench import rivals
from bench.measures import loop, measure, savers
from bench.measures import memory as memory_module
from bench.measures import recovery as recovery_module
from bench.measures.copies import shared_out
from bench.measures.loop import check, run
from bench.measures.savers import Lightck, make
from bench.measures.training import Training
from bench.rivals.torch_save import InPlace
from bench.running.machine import PeakMemory, cpu_seconds, descendants
from bench.tables import views
from bench.workloads import workload
from lightck.errors import BenchError

TINY: dict[str, Any] = {"workload": "vgg16", "size": "small"}


def numbers(found: Any) -> list[float]:
    if isinstance(found, dict):
        return [n for value in found.values() for n in numbers(value)]
    if isinstance(found, list):
        return [n for value in found for n in numbers(value)]
    return [found] if isinstance(found, (int, float)) else []


@pytest.mark.parametrize("saver", ["lightck", "torch.save"])
def test_steps(saver, folder):
    found = measure("steps", {**TINY, "saver": saver, "pairs": 3}, str(folder))
    assert all(map(math.isfinite, numbers(found)))
    assert (found["pairs"], found["batch"]) == (3, 2)
    assert found["stall"]["n"] == 3
    assert found["stall"]["median"] > 0
    assert found["own_cpu_seconds"] > 0
    assert (found["helped_share"] is None) == (saver != "lightck")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("span", [1, 2])
def test_windows_take_turns_and_each_saves_what_it_says(span, folder):
    training, saver = Training(workload("vgg16", "small")), Lightck()
    found = run(training, saver, str(folder), 2, span)
    assert [w.saved for w in found.all] == [False, True, False, True, False]
    assert all((w.costs.written_bytes > 0) == w.saved for w in found.all), "a checkpoint ends in its window"
    check(training, saver, str(folder))


def test_a_rival_saves_in_the_windows_that_say_so(folder):
    steps: list[tuple[int, str]] = []

    class Noted(InPlace):
        def save(self, step: int) -> None:
            steps.append((step, "save"))
            super().save(step)

        def finish(self) -> None:
            steps.append((steps[-1][0], "finish"))  # the end: not before the last step

    training = Training(workload("vgg16", "small"))
    found = run(training, savers.Driven(Noted), str(folder), 1)
    assert [w.saved for w in found.all] == [False, True, False]
    assert steps == [(step, "save") for step in range(2, 2 * loop.WARM_UP + 3, 2)]


def test_what_a_saver_tries_out_is_over_before_windows_count(folder):
    """The trial ends in the 7th pair; a counted window that begins another one is reported."""
    windows: list[bool] = []

    class Saver(savers.Driven):
        def window_ends(self, saved: bool) -> None:
            super().window_ends(saved)
            windows.append(saved)

        @property
        def is_settled(self) -> bool:
            return len(windows) >= 15 and len(windows) != 17

    found = run(Training(workload("vgg16", "small")), Saver(InPlace), str(folder), 2)
    assert windows == [False, *[False, True] * 9, False]
    assert [w.saved for w in found.all] == [False, True, False, True, False]
    assert found.unsettled == 1


def test_a_saver_that_never_settles_is_measured_all_the_same(folder, monkeypatch):
    monkeypatch.setattr(loop, "SETTLED_WITHIN", 6)

    class Saver(savers.Driven):
        is_settled = False

    found = run(Training(workload("vgg16", "small")), Saver(InPlace), str(folder), 1)
    assert found.unsettled == 3


def test_a_window_ends_when_its_checkpoint_is_saved(folder):
    class Later(InPlace):
        thread: threading.Thread | None = None

        def save(self, step: int) -> None:
            assert self.thread is None or not self.thread.is_alive(), "the one before is over"
            self.thread = threading.Thread(target=self._later, args=(step,))
            self.thread.start()

        def _later(self, step: int) -> None:
            time.sleep(0.3)
            super().save(step)

        def finish(self) -> None:
            assert self.thread is not None
            self.thread.join()

    training, saver = Training(workload("vgg16", "small")), savers.Driven(Later)
    found = run(training, saver, str(folder), 2)
    assert all((w.costs.end_seconds > 0) == w.saved for w in found.all)
    assert all((w.seconds > 0.3) or not w.saved for w in found.all)
    check(training, saver, str(folder))


def test_a_rival_that_never_says_that_it_saved_is_an_error(folder, monkeypatch):
    class Silent(InPlace):
        def save(self, step: int) -> None: ...

    monkeypatch.setattr(savers, "_SAVED_SECONDS_MAX", 0.01)
    with pytest.raises(BenchError, match="was not reported as saved"):
        run(Training(workload("vgg16", "small")), savers.Driven(Silent), str(folder), 1)


def test_what_a_rival_does_in_a_hook_is_stall(folder):
    class Holds(InPlace):
        def start(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
            super().start(model, optimizer, folder)
            optimizer.register_step_pre_hook(lambda *_: time.sleep(0.02))
            model.register_forward_pre_hook(lambda *_: time.sleep(0.02))

    found = run(Training(workload("vgg16", "small")), savers.Driven(Holds), str(folder), 1)
    assert all(w.costs.stall_seconds >= 0.04 for w in found.all)


def test_what_does_not_load_back_right_is_no_result(folder):
    class Forgets(InPlace):
        def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> int:
            step = super().load(model, optimizer, folder)
            optimizer.state[next(model.parameters())]["momentum_buffer"].view(-1)[0] += 1
            return step

    training, saver = Training(workload("vgg16", "small")), savers.Driven(Forgets)
    run(training, saver, str(folder), 1)
    with pytest.raises(BenchError, match=r"1 tensors differ \(0\.weight\.momentum_buffer\)"):
        check(training, saver, str(folder))


def test_a_checkpoint_that_is_older_than_what_was_saved_is_no_result(folder):
    class Late(InPlace):
        def load(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> int:
            return super().load(model, optimizer, folder) - 1

    training, saver = Training(workload("vgg16", "small")), savers.Driven(Late)
    run(training, saver, str(folder), 1)
    with pytest.raises(BenchError, match="came back"):
        check(training, saver, str(folder))


def test_recovery(folder):
    found = measure("recovery", {**TINY, "rounds": 2}, str(folder))
    assert found["of_memcpy"] > 0
    assert set(found["faster_than"]) == {"torch.load", "torch.load mmap"}
    for name in ("lightck", "torch.load", "torch.load mmap"):
        assert found[name]["to_next_step"]["median"] >= found[name]["load"]["low"] > 0
    assert found["of_memcpy_on_threads"] > 0
    assert found["memcpy_on_threads"]["threads"] == min(8, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_bytes_are_shared_out_among_threads_evenly_and_once(parts):
    buffers = [(1000, 10), (5000, 0), (2000, 1), (3000, 100), (4000, 7)]
    found = shared_out(buffers, parts)
    sizes = [sum(nbytes for _, nbytes, _ in part) for part in found]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    pieces = [piece for part in found for piece in part]
    assert [at for *_, at in pieces] == [sum(n for _, n, _ in pieces[:i]) for i in range(len(pieces))]
    assert [byte for address, n, _ in pieces for byte in range(address, address + n)] == [
        byte for address, n in buffers for byte in range(address, address + n)
    ]


def test_a_memcpy_on_threads_is_shown_where_a_row_has_it():
    load = {"to_next_step": {"median": 1.0}, "load": {"median": 1.0}}
    old = {
        "nbytes": 1,
        "lightck": load,
        "torch.load": load,
        "torch.load mmap": load,
        "of_memcpy": 0.9,
        "faster_than": {"torch.load": 5.0, "torch.load mmap": 4.0},
    }
    new = {**old, "of_memcpy_on_threads": 0.4, "memcpy_on_threads": {"threads": 2}}
    assert "on threads" not in views.recovery({"old": {"result": old}})
    both = views.recovery({"old": {"result": old}, "new": {"result": new}})
    assert "on threads" in both
    assert "0.40 x (2)" in both


def test_a_load_that_leaves_a_tensor_out_is_no_recovery(folder, monkeypatch):
    monkeypatch.setattr(recovery_module, "_recovered", lambda training, pool: None)
    with pytest.raises(BenchError, match="lightck does not load what was saved"):
        measure("recovery", {**TINY, "rounds": 1}, str(folder))


@pytest.mark.parametrize("backend", ["file", "pmdk"])
def test_bandwidth(backend, folder, request):
    if backend == "pmdk":
        request.getfixturevalue("pmdk")
    found = measure("bandwidth", {**TINY, "rounds": 2, "backend": backend}, str(folder))
    assert {"memcpy", "non-temporal", "lightck"} <= found["write"].keys()
    assert {"memcpy", "pread", "lightck"} <= found["read"].keys()
    assert ("libpmem" in found["write"]) == found["libpmem"]
    assert found["write_of_nt"] > 0


@pytest.mark.parametrize("saver", ["nothing", "lightck", "torch.save"])
def test_memory(saver, folder):
    found = measure("memory", {**TINY, "saver": saver, "steps": 4}, str(folder))
    slack = 1 << 20  # they are read one after the other
    assert found["peak_bytes"] + slack > found["settled_bytes"] > 10**7
    files = found["peak_with_files_bytes"] - found["peak_bytes"]
    assert files > -slack
    assert (files > found["nbytes"] / 2) == (saver != "nothing")
    assert ("attach_seconds" in found) == (saver == "lightck")


def test_memory_is_sampled_while_a_checkpoint_is_in_flight(folder, monkeypatch):
    """Memory that is used only from the boundary to the update is in none of the samples after the update."""

    class Holds(InPlace):
        held = b""

        def start(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
            super().start(model, optimizer, folder)
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "held", b""))

        def save(self, step: int) -> None:
            super().save(step)
            self.held = b"x" * (64 << 20)

    plain = measure("memory", {**TINY, "saver": "nothing", "steps": 4}, str(folder))
    monkeypatch.setattr(memory_module, "make", lambda *_: savers.Driven(Holds))
    found = measure("memory", {**TINY, "saver": "holds", "steps": 4}, str(folder))
    rows = {"vgg16 nothing": plain, "vgg16 holds": found}
    kept = {key: {"options": {"saver": key.split()[1]}, "result": result} for key, result in rows.items()}
    more, flying = views.beyond(kept, "vgg16 holds"), views.beyond_in_flight(kept, "vgg16 holds")
    assert more is not None
    assert flying is not None
    assert flying > more + (48 << 20)
    assert "in flight" in views.memory(kept)
    assert views.beyond_in_flight(kept, "vgg16 nothing") is None


def test_peak_memory_sees_what_was_freed_again(folder):
    with PeakMemory(str(folder)) as peak:
        peak._look()
        before = peak.anonymous
        kept = bytearray(b"x" * (64 << 20))
        peak._look()
        del kept
        (folder / "file").write_bytes(b"x" * (8 << 20))
        peak._look()
    assert peak.anonymous >= before + (60 << 20)
    assert peak.with_files >= before + (8 << 20)


@pytest.mark.parametrize(("saver", "strategy"), [("nothing", "full"), ("lightck", "full"), ("lightck", "gradients 2")])
def test_flat(saver, strategy, folder):
    options = {"workload": "vgg16", "saver": saver, "strategy": strategy, "steps": 40}
    found = measure("flat", options, str(folder))
    assert found["steps"] == 40
    assert all(len(values) == 20 for values in found["parts"].values())
    assert (found["descriptor_growth"], found["thread_growth"]) == (0, 0)


def test_many(folder):
    found = measure("many", {"tensors": 40, "steps": 6, "layers": 5}, str(folder))
    assert 0 < found["seconds_per_tensor"] <= found["seconds_per_tensor_p99"]


def test_short(folder):
    found = measure("short", {"batch": 2, "steps": 40, "turns": 2}, str(folder))
    assert 0 < found["idle"]["stall"] < found["every"]["stall"]
    assert (found["idle"]["interval"], found["every"]["interval"]) == (1_000_000, 1)
    assert not list(folder.glob("*.pool"))


def test_a_small_model_that_does_not_come_back_is_no_result(folder, monkeypatch):
    recover = lightck.recover
    monkeypatch.setattr(lightck, "recover", lambda pool, *_: recover(pool))
    with pytest.raises(BenchError, match="small model does not load back right"):
        measure("short", {"batch": 2, "steps": 8, "turns": 1}, str(folder))


@pytest.mark.parametrize("left_out", ["all", "optimizer"])
def test_layers_that_do_not_come_back_are_no_result(left_out, folder, monkeypatch):
    recover = lightck.recover

    def lazy(pool: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> lightck.Checkpoint:
        is_layers = isinstance(model, torch.nn.Sequential)
        return recover(pool, *([] if left_out == "all" else [model])) if is_layers else recover(pool, model, optimizer)

    monkeypatch.setattr(lightck, "recover", lazy)
    with pytest.raises(BenchError, match="5 layers does not load back right"):
        measure("many", {"tensors": 40, "steps": 6, "layers": 5}, str(folder))


def test_calibrate_goes_on_until_a_step_is_too_slow(monkeypatch, folder):
    from bench.measures import calibrate

    seconds = iter([1.0, 1.0, 20.0, 20.0])
    monkeypatch.setattr(calibrate, "_step", lambda training: next(seconds))
    found = measure("calibrate", {**TINY, "steps": 2}, str(folder))
    assert found == {"seconds": {"8": 1.0, "16": 20.0}, "batch": 8}


def test_cpu_of_processes_below_this_one_counts():
    def burn() -> None:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass

    before = cpu_seconds() - time.process_time()
    with child_that_holds(burn) as pid:
        assert pid in descendants(os.getpid())
        assert cpu_seconds() - time.process_time() - before >= 0.15, "what the child used, in ticks of 10 ms"


def test_a_rival_that_is_not_there_is_named():
    with pytest.raises(BenchError, match=r"no rival 'nobody'; there are lightck, torch\.save"):
        make("nobody")


def test_a_rival_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(rivals, "why_not", lambda name: "dcp is not installed" if name == "dcp.save" else "")
    with pytest.raises(BenchError, match=r"'dcp\.save' cannot be used here: dcp is not installed"):
        make("dcp.save")


def test_a_rival_saves_at_every_call_whatever_its_own_rule_is(folder):
    """By its own rule CheckFreq would choose how often it saves."""
    training, saver = Training(workload("vgg16", "small")), make("CheckFreq")
    run(training, saver, str(folder), 1)
    check(training, saver, str(folder))
