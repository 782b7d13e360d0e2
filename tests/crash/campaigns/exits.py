"""A training that ends in the midst of things: by Ctrl-C, an exception, SIGTERM, os._exit, or the interpreter's end.

At the k-th call of a hook of the user's (or of a function of lightck's, for Ctrl-C) of a short training: the training
sees what was raised and can go on, no checkpoint is half committed, and a process that is gone, whichever way, leaves a
pool from which the training goes on, exact.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crash.campaign import Campaign, Order, Tally
from crash.stage import Stage, clear, staged

if TYPE_CHECKING:
    from crash.life import Life, Training

_HERE = "crash.campaigns.exits"
PLACES = ("forward", "forward of a part", "pre-step", "post-step", "backward")
"""Hooks of a user's, each called once per step."""
RAISED = {"interrupt": KeyboardInterrupt, "exception": ZeroDivisionError}
ENDS = ("os._exit", "exit", "exit with a daemon", "sys.exit", "SIGTERM", "uncaught")
_CODES = {"os._exit": 7, "exit": 0, "exit with a daemon": 0, "sys.exit": 3, "SIGTERM": -signal.SIGTERM, "uncaught": 1}
_STEPS = 6


def run(order: Order, stage: Stage | None = None) -> Tally:
    tally = Tally()
    with staged(stage) as stage:
        for trial in order.trials:
            rng = order.rng(trial)
            methods = (*RAISED, "ctrl-c", *ENDS)
            method = methods[trial % len(methods)]
            k = rng.randrange(400) if method == "ctrl-c" else rng.randrange(_STEPS)
            _trial(stage, order, tally, trial, method, rng.choice(PLACES), k)
    return tally


def _trial(stage: Stage, order: Order, tally: Tally, trial: int, method: str, place: str, k: int) -> None:
    folder = os.path.join(order.folder, f"trial-{trial}")
    where = f"{method} at call {k} of {place}"
    scene = "ended" if method in ENDS else "raised"
    ending = stage.play(f"{_HERE}:{scene}", folder, order.backend, method, place, k)
    tally.counts[f"ends: {method}"] += 1
    if scene == "ended" and (ending.hung or ending.status != _CODES[method]):
        tally.found(trial, f"{where}: it ended with {ending.status} ({'hung' if ending.hung else ''}): {ending.text}")
    elif scene == "raised":
        _report(tally, trial, where, ending)
    after = stage.play(f"{_HERE}:went_on", folder, order.backend)
    _report(tally, trial, f"after {where}", after)
    clear(folder)


def _report(tally: Tally, trial: int, where: str, ending: Any) -> None:
    trouble = ending.trouble()
    for reason in [trouble] if trouble else ending.result:
        tally.found(trial, f"{where}: {reason}")


# -- scenes ----------------------------------------------------------------------------------------------------------


def went_on(folder: str, backend: str) -> list[str]:
    """The pool after a process: recovered, and trained on to the end."""
    from crash.life import Life

    life = Life(folder, backend)
    life.aftermath()
    return life.broken


def raised(folder: str, backend: str, method: str, place: str, k: int) -> list[str]:
    """Raise an exception in the loop, which catches it and goes on, or attaches again."""
    from crash.life import Life, Training

    life, training = Life(folder, backend), Training()
    session = _attached(life, training)
    strike = _at(training, place, k, RAISED[method]) if method in RAISED else _interrupt(k)
    kinds = (KeyboardInterrupt, ZeroDivisionError)
    caught = 0
    for _ in range(3 * _STEPS):
        try:
            while session.step < _STEPS:
                training.update(session.step)
                life.acknowledge(session)
            session.close()
            break
        except kinds:
            caught += 1
            training.box.set_step(session.step)  # the loop's own part of an update, where that was made
    strike()
    life.broken += [f"training ended at step {session.step}"] * (session.step != _STEPS)
    if method in RAISED and caught != 1:
        life.broken.append(f"the training saw what was raised {caught} times")
    session.close()
    life.acknowledge(session)
    if session.committed != _STEPS:
        life.broken.append(f"step {session.committed} is committed after close, not {_STEPS}")
    if training.digest() != life.truth_at(_STEPS):
        life.broken.append("the training itself came out differently")
    return life.broken


def ended(folder: str, backend: str, method: str, place: str, k: int) -> Any:
    """End the process there, with an in-flight checkpoint."""
    from crash.life import Life, Training

    life, training = Life(folder, backend), Training()
    session = _attached(life, training)

    def work(say: Callable[[Any], None]) -> None:
        say("begun")
        _at(training, place, k, None, lambda: _leave(method))
        try:
            while session.step < _STEPS:
                training.update(session.step)
                life.acknowledge(session)
        except _EndedError:
            pass  # the interpreter ends now, by itself, with a session that is open
        globals()["_kept"] = session, training

    return work


class _EndedError(Exception):
    """The training loop is left, and nobody closes anything."""


def _leave(method: str) -> None:
    if method == "os._exit":
        os._exit(_CODES[method])
    if method == "SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    if method == "sys.exit":
        sys.exit(_CODES[method])
    if method == "uncaught":
        raise ZeroDivisionError("nobody catches this")
    if method == "exit with a daemon":
        threading.Thread(target=_spin, daemon=True).start()
    raise _EndedError


def _spin() -> None:
    """A thread that is in the midst of things when the interpreter ends."""
    while True:
        sum(range(1000))


def _attached(life: Life, training: Training) -> Any:
    import lightck

    return lightck.attach(
        training.model, life.pool, optimizer=training.optimizer, state={"box": training.box}, backend=life.backend
    )


def _at(
    training: Training, place: str, k: int, error: type[BaseException] | None, work: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Raise, or do the work, once, at this call of a hook of the user's. Returns what takes the hook away."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == k + 1:
            if work is not None:
                work()
            elif error is not None:
                raise error(f"in a hook, {place}")

    model, optimizer = training.model, training.optimizer
    handle = {
        "forward": lambda: model.register_forward_pre_hook(hook),
        "forward of a part": lambda: model[1].register_forward_hook(hook),
        "pre-step": lambda: optimizer.register_step_pre_hook(hook),
        "post-step": lambda: optimizer.register_step_post_hook(hook),
        "backward": lambda: model.register_full_backward_hook(hook),
    }[place]()
    return handle.remove


def _interrupt(k: int) -> Callable[[], None]:
    """Ctrl-C at the k-th call of a function of lightck's, as a signal: so it comes where signals come."""
    calls = 0
    inside = f"{os.sep}lightck{os.sep}"

    def trace(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        if event == "call" and inside in frame.f_code.co_filename and "testing" not in frame.f_code.co_filename:
            calls += 1
            if calls == k + 1:
                os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.setprofile(trace)
    return lambda: sys.setprofile(None)


CAMPAIGN = Campaign(
    name="exits",
    summary="Ctrl-C, exceptions in hooks, SIGTERM, os._exit and the interpreter's end: nothing half committed, no hang",
    small=18,
    long=1000,
    run=run,
)
