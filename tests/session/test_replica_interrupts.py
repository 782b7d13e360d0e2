"""``strategy=Replica()``: a signal's handler that raises finds the session whole."""

from __future__ import annotations

import signal

import torch
from toys import adam, everything, is_step, net, train

import lightck
from lightck.session.replica_worker import ReplicaWorker


class Stop(Exception):
    pass


def test_a_handler_that_raises_does_not_lose_an_update_of_the_replica(pool, monkeypatch):
    """The signal comes right before the thread gets the update: the handler has to wait until it has it."""
    submit = ReplicaWorker.submit
    order: list[str] = []

    def interrupted(self, works):
        try:
            if not order:
                signal.raise_signal(signal.SIGALRM)
        finally:
            submit(self, works)
            order.append("submitted")

    def raise_stop(*_: object) -> None:
        order.append("handler")
        raise Stop

    monkeypatch.setattr(ReplicaWorker, "submit", interrupted)
    before = signal.signal(signal.SIGALRM, raise_stop)
    try:
        model = net()
        optimizer: torch.optim.Optimizer = adam(model)
        n_stops = 0
        with lightck.attach(model, pool, optimizer=optimizer, strategy=lightck.Replica()) as session:
            for number in range(6):
                try:
                    train(model, optimizer, 1, number)
                except Stop:
                    n_stops += 1
            assert n_stops == 1
            assert order[:3] == ["submitted", "handler", "submitted"]
            session.flush()
            assert session.stats().replica_renewed == 0
        assert is_step(lightck.recover(pool), everything(model, optimizer))
    finally:
        signal.signal(signal.SIGALRM, before)
