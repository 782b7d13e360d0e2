"""The measurement of the slowdown leaves the process as it was, and its result is counted per step."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import lightck
from lightck.hooks.hook_cost import counted
from lightck.session.slowdown import _measured_slowdown, slowdown
from lightck.stats import Meter, Slowdown


@pytest.fixture
def unmeasured():
    _measured_slowdown.cache_clear()
    yield
    _measured_slowdown.cache_clear()


def test_each_step_adds_its_slowdown():
    meter = Meter(Slowdown(unsaved=1.0, saved=10.0))
    for is_saved in (True, False, False):
        meter.count_step(is_saved)
    stats = meter.snapshot(engine_cpu_seconds=0.0, committed=None, interval=1, step=0, in_flight=0)
    assert stats.slowdown_seconds == 12.0
    assert stats.added_seconds == stats.stall_seconds + 12.0
    assert meter.unsaved_slowdown_seconds == 3.0


def test_work_of_the_loop_is_left_out_of_all_counters(monkeypatch):
    now, waited = [0.0], [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0] + waited[0])
    monkeypatch.setattr("time.thread_time", lambda: now[0])

    class Hook:
        meter, seconds_per_hook = Meter(), 0.5

        @counted
        def run(self) -> None:
            now[0] += 1.0
            with self.meter.stall():
                now[0] += 2.0
                with self.meter.wait():
                    waited[0] += 4.0
                    with self.meter.work_of_loop():
                        now[0] += 64.0
            with self.meter.work_of_loop():
                now[0] += 128.0

    Hook().run()
    stats = Hook.meter.snapshot(engine_cpu_seconds=0.0, committed=None, interval=1, step=0, in_flight=0)
    assert (stats.stall_seconds, stats.wait_seconds) == (7.5, 4.0)
    assert stats.cpu_seconds == 3.5  # the wait took no processor


@pytest.mark.parametrize(
    "register",
    [
        lambda calls: register_optimizer_step_pre_hook(lambda *a: calls.append(a)),
        lambda calls: register_optimizer_step_post_hook(lambda *a: calls.append(a)),
        lambda calls: register_module_forward_pre_hook(lambda *a: calls.append(a)),
    ],
    ids=["optimizer pre", "optimizer post", "module"],
)
def test_global_hooks_of_the_user_do_not_run(unmeasured, register):
    calls: list[object] = []
    handle = register(calls)
    try:
        assert slowdown() == Slowdown()
    finally:
        handle.remove()
    assert not calls


def test_nothing_is_measured_and_nothing_stays_locked_when_no_thread_starts(tmp_path, unmeasured, monkeypatch):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        with lightck.attach(model, str(tmp_path / "a.pool"), optimizer=optimizer) as session:
            assert session.stats().slowdown_seconds == 0.0
    assert not _measured_slowdown.cache_info().currsize
    with lightck.attach(model, str(tmp_path / "a.pool"), optimizer=optimizer, resume=True):
        assert _measured_slowdown.cache_info().currsize == 1


def test_an_attach_beside_an_open_session_uses_what_the_first_measured(tmp_path, unmeasured):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, str(tmp_path / "a.pool"), optimizer=optimizer):
        assert _measured_slowdown.cache_info().currsize == 1
        assert slowdown() is _measured_slowdown()


SCRIPT = """
    import random, threading
    import numpy as np, torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    before, threads = states(), threading.active_count()
    from lightck.session.slowdown import _measured_slowdown, slowdown
    torch.set_default_dtype(torch.float64)
    with torch.inference_mode(), torch.device("meta"):
        found = slowdown()
    assert _measured_slowdown.cache_info().currsize == 1
    assert 0 <= found.unsaved < 1 and 0 <= found.saved < 1, found
    assert states() == before and threading.active_count() == threads
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
"""


def test_the_measurement_changes_nothing_in_the_process():
    if torch.accelerator.is_available():
        pytest.skip("nothing is measured on a machine with an accelerator")
    subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], check=True, timeout=300)


def test_a_process_without_an_optimizer_loads_no_further_part_of_torch():
    code = (
        "import sys, torch\nfrom lightck.session.slowdown import slowdown\nfrom lightck.stats import Slowdown\n"
        "assert slowdown() == Slowdown()\nassert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
