"""A loop that fetches a batch ahead by hand over a session loader is named; loops that only look like it are not."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from toys import adam, net

import lightck


def warnings(caplog: Any) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def loader_of(session: lightck.Session, n: int = 12, name: str | None = None) -> Any:
    return session.loader(DataLoader(TensorDataset(torch.rand(n, 4)), batch_size=2), name=name)


def update(model: Any, optimizer: Any, loss: Any) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Waiting:
    """Holds the batch that waits, as docs/loops.md shows."""

    x: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x = state["x"]


def ahead(session: Any, model: Any, optimizer: Any) -> None:
    """nanoGPT's order: the next batch is fetched while the device computes."""
    batches = iter(loader_of(session))
    batch = next(batches, None)
    while batch is not None:
        loss = model(batch[0]).sum()
        batch = next(batches, None)
        update(model, optimizer, loss)


def ordinary(session: Any, model: Any, optimizer: Any) -> None:
    for (x,) in loader_of(session):
        update(model, optimizer, model(x).sum())


def accumulated(session: Any, model: Any, optimizer: Any) -> None:
    for i, (x,) in enumerate(loader_of(session)):
        model(x).sum().backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def several_updates_on_a_batch(session: Any, model: Any, optimizer: Any) -> None:
    for (x,) in loader_of(session):
        for _ in range(3):
            update(model, optimizer, model(x).sum())
        session.end_step()


def with_labels_from_a_second_loader(session: Any, model: Any, optimizer: Any) -> None:
    labels = iter(loader_of(session, name="labels"))
    for (x,) in loader_of(session):
        prediction = model(x)
        (label,) = next(labels)
        update(model, optimizer, (prediction - label[:, :2]).pow(2).sum())


def two_forwards(session: Any, model: Any, optimizer: Any) -> None:
    """Labelled and unlabelled data in one update."""
    more = iter(loader_of(session, name="unlabelled"))
    for (x,) in loader_of(session):
        loss = model(x).sum()
        update(model, optimizer, loss + model(next(more)[0]).sum())


def logs_with_a_training_forward(session: Any, model: Any, optimizer: Any) -> None:
    for (x,) in loader_of(session):
        update(model, optimizer, model(x).sum())
        model(x)


def once(session: Any, model: Any, optimizer: Any) -> None:
    batches = iter(loader_of(session))
    (x,) = next(batches)
    for step in range(4):
        loss = model(x).sum()
        if step == 2:
            (x,) = next(batches)
        update(model, optimizer, loss)
        session.end_step()
        (x,) = next(batches)


@pytest.mark.parametrize(
    "loop",
    [
        ordinary,
        accumulated,
        several_updates_on_a_batch,
        with_labels_from_a_second_loader,
        two_forwards,
        logs_with_a_training_forward,
        once,
    ],
)
def test_other_loops_are_not_named(pool, caplog, loop):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        loop(session, model, optimizer)
    assert not [text for text in warnings(caplog) if "before the update" in text]


@pytest.mark.parametrize("interval", [1, 50])
def test_a_batch_that_is_fetched_ahead_is_named(pool, caplog, interval):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, interval=interval) as session:
        ahead(session, model, optimizer)
    (said,) = [text for text in warnings(caplog) if "before the update" in text]
    assert "takes the next batch after the model's forward and before the update" in said
    assert "So a resume skips it" in said


def test_a_waiting_batch_that_is_saved_is_not_named(pool, caplog):
    model = net()
    optimizer = adam(model)
    waiting = Waiting()
    with lightck.attach(model, pool, optimizer=optimizer, state={"waiting": waiting}) as session:
        batches = iter(loader_of(session))
        (waiting.x,) = next(batches)
        for _ in range(5):
            loss = model(waiting.x).sum()
            (waiting.x,) = next(batches)
            update(model, optimizer, loss)
            session.end_step()
    assert not [text for text in warnings(caplog) if "before the update" in text]
