"""A session whose model is gone is gone too, whatever its strategy: its pool can be attached to again."""

from __future__ import annotations

import gc
import weakref

import pytest
from toys import adam, net, train

import lightck

STRATEGIES = {
    "FullState": lightck.FullState(),
    "Gradients": lightck.Gradients(base_every=3),
    "Gradients, tuned": lightck.Gradients(base_every="auto", mtbf=100.0),
    "TopK": lightck.Gradients(base_every=3, compress=lightck.TopK(0.5, error_feedback=True)),
    "Replica": lightck.Replica(),
    "auto": "auto",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_dropped_session_releases_its_pool(name, pool):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=STRATEGIES[name])
    train(model, optimizer, 12)
    dropped = weakref.ref(session), weakref.ref(model)
    del session, model, optimizer
    gc.collect()
    assert [one() for one in dropped] == [None, None]
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=STRATEGIES[name], resume=True) as session:
        assert session.step >= 11  # the update after the last boundary was not closed
        train(model, optimizer, 1, session.step)
