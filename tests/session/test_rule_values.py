"""Rule 11: what ``state`` may hold, and that it comes back with its types."""

from __future__ import annotations

import os
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toys import adam, crashed, in_child, kill_at, killed_child, net, same, settled, train

import lightck
from lightck.errors import StateValueError
from lightck.pool.reader import open_pool
from lightck.pool.storage import temporary


class Box:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def counting_up() -> Any:
    made: defaultdict[Any, Any] = defaultdict(None)
    made["a"] = 1
    return made


VALUES = {
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "int": -5,
    "huge": -(1 << 200),
    "float": 0.1,
    "minus zero": -0.0,
    "infinity": float("inf"),
    "text": "ß\n\0",
    "bytes": b"\x00\xff",
    "list": [1, [2]],
    "tuple": (1, (2,)),
    "dict": {"a": 1, 2: "b", (1, "x"): None, 3.5: True},
    "ordered": OrderedDict(b=1, a=2),
    "counter": Counter("hello"),
    "default": counting_up(),
    "set": {1, "a", (2, 3)},
    "frozen": frozenset({1}),
    "deque": deque([1, 2, 3], maxlen=4),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "scalar": np.float32(0.1),
    "numpy int": np.int64(7),
    "numpy bool": np.bool_(True),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "tensor": torch.tensor([1.5, -0.0]),
    "bf16": torch.ones(3).bfloat16(),
    "empty tensor": torch.zeros(0, 3),
    "large": torch.rand(5000),
    "large bools": torch.rand(5000) > 0.5,
    "large array": np.random.rand(3000),
}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, float):
        return type(other) is float and struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, (set, frozenset, deque, defaultdict, Counter)):
        attributes = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return type(one) is type(other) and one == other and attributes
    return same(one, other)


def test_every_listed_value_round_trips_with_its_type(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": Box(VALUES)}):
        train(model, optimizer, 2)
    for found in (lightck.recover(pool).state["box"]["value"], resumed(pool)):
        assert list(found) == list(VALUES), "the order of keys is kept"
        for name, value in VALUES.items():
            assert equal(value, found[name]), name
            assert type(found[name]) is type(value), name


def resumed(pool: Any) -> Any:
    model = net(seed=1)
    box = Box()
    with lightck.attach(model, pool, optimizer=adam(model), state={"box": box}, resume=True):
        return box.value


def test_large_tensors_in_state_become_extents(pool):
    model = net()
    optimizer = adam(model)
    box = Box({"table": torch.rand(5000), "rows": [torch.rand(3), torch.rand(2000, 2)]})
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": box}):
        train(model, optimizer, 2)
    reader = open_pool(str(pool))
    extents = {e.name: e.nbytes for e in reader.entries if e.role == "state"}
    reader.close()
    assert extents == {"state/box/value/table": 20000, "state/box/value/rows/1": 16000}


def test_large_tensors_of_the_same_object_are_of_one_moment(pool):
    """They are copied under the same gate as the parameters."""
    model = net()
    optimizer = adam(model)
    box = Box(torch.zeros(1 << 20))
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": box}) as session:
        for number in range(5):
            train(model, optimizer, 1, start=number)
            box.value += 1  # once per iteration, after the update
            if number:
                held = lightck.recover(pool)
                assert (held.state["box"]["value"] == held.step).all()
        assert session.stats().skipped == 0


def test_value_that_appears_later_and_cannot_be_stored_is_an_error_by_path(pool):
    model = net()
    optimizer = adam(model)
    box = Box({"a": 1})
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": box}) as session:
        train(model, optimizer, 1)
        session.flush()
        box.value["bad"] = object()
        train(model, optimizer, 1, start=1)
        with pytest.raises(StateValueError, match="state/box/value/bad"):
            session.flush()
        del box.value["bad"]
        train(model, optimizer, 1, start=2)
        assert session.flush() == 3
    assert lightck.recover(pool).state == {"box": {"value": {"a": 1}}}


# -- growth ----------------------------------------------------------------------------------------------------------


def test_replay_buffer_that_grows_at_each_step(pool):
    model = net()
    optimizer = adam(model)
    box = Box(torch.zeros(0, 64))
    inodes = set()
    with lightck.attach(model, pool, optimizer=optimizer, state={"replay": box}) as session:
        for number in range(30):
            train(model, optimizer, 1, start=number)
            box.value = torch.cat([box.value, torch.full((200, 64), float(number))])
            session.flush()
            inodes.add(pool.stat().st_ino)
            held = lightck.recover(crashed(pool)).state["replay"]["value"]
            assert same(held, box.value)
        assert session.stats().skipped == 0
    assert 1 < len(inodes) < 30, "it grows into the reserve, and sometimes into a new file"
    model = net(seed=1)
    other = Box()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, state={"replay": other}, resume=True) as session:
        assert session.step == 30
        assert same(other.value, box.value)
        other.value = torch.cat([other.value, torch.ones(200, 64)])
        train(model, optimizer, 1)
        session.flush()
        assert same(lightck.recover(pool).state["replay"]["value"], other.value)


def test_many_tensors_that_appear_one_by_one(pool):
    model = net()
    optimizer = adam(model)
    box = Box({})
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": box}) as session:
        for number in range(25):
            train(model, optimizer, 1, start=number)
            box.value[f"part {number}"] = torch.full((6000,), float(number))
            session.flush()
            assert same(lightck.recover(pool).state["box"]["value"], box.value)
        box.value.clear()
        train(model, optimizer, 1)
        session.flush()
        assert lightck.recover(pool).state["box"]["value"] == {}


def test_model_that_grows_is_followed(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        model.append(nn.Linear(2, 3000))
        optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.5})
        train(model, optimizer, 2, start=2)
        session.flush()
        seen = {k: v.clone() for k, v in model.state_dict().items()}
        assert same(dict(lightck.recover(pool).model), seen)
        tied = nn.Linear(2, 3000)
        tied.weight = model[3].weight
        model.tied = tied
        model.forward = lambda x: model[3](model[2](model[1](model[0](x)))) + model.tied(torch.ones(2))
        train(model, optimizer, 2, start=4)
        session.flush()
        checkpoint = lightck.recover(pool)
        assert checkpoint.model["tied.weight"] is checkpoint.model["3.weight"]
        assert same(dict(checkpoint.model), {k: v.clone() for k, v in model.state_dict().items()})


def test_tensor_that_changes_its_shape_between_boundary_and_forward(pool):
    model = net()
    optimizer = adam(model)
    model.register_buffer("seen", torch.zeros(3000))
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            session.end_step()
            model.seen = torch.ones(3000 + number)
        train(model, optimizer, 1)
        session.flush()
        assert same(lightck.recover(pool).model["seen"], model.seen)


@pytest.mark.parametrize("change", ["resize_", "t_", "data"])
def test_tensor_that_changes_its_shape_in_place(pool, change):
    """Same object, same address: only shape and stride tell."""
    model = net()
    optimizer = adam(model)
    model.register_buffer("seen", torch.arange(6000.0).reshape(2, 3000))
    model.register_buffer("small", torch.arange(6.0).reshape(2, 3))
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        for tensor, rows in ((model.seen, 1500), (model.small, 2)):
            if change == "resize_":
                tensor.resize_(rows, 2)
            elif change == "t_":
                tensor.t_()
            else:
                tensor.data = tensor.data.view(-1, 2)
        train(model, optimizer, 2, start=2)
        session.flush()
        held = lightck.recover(pool).model
        for name in ("seen", "small"):
            assert same(held[name], model.get_buffer(name))
            assert held[name].stride() == model.get_buffer(name).stride()


def grown(session: Any, model: Any, optimizer: Any, box: Box) -> None:
    train(model, optimizer, 1, start=session.step)
    box.value = torch.rand(1 << 20)
    session.flush()


@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed", "body", "word", "ack"])
def test_kill_while_the_pool_moves_to_a_new_file_leaves_the_old_checkpoint(folder, pool, site):
    model = net()
    optimizer = adam(model)

    def work() -> None:
        box = Box()
        session = lightck.attach(model, pool, optimizer=optimizer, state={"box": box})
        train(model, optimizer, 2)
        session.flush()
        kill_at(site)
        grown(session, model, optimizer, box)

    killed_child(work)
    assert lightck.recover(pool).step == 2
    again = net(seed=3)
    with lightck.attach(again, pool, optimizer=adam(again), state={"box": Box()}, resume=True) as session:
        assert session.step == 2
    assert not os.path.exists(temporary.path_of(str(pool)))


def test_new_pool_file_is_used_by_the_next_run(pool):
    model = net()
    optimizer = adam(model)

    def work() -> Any:
        box = Box()
        with lightck.attach(model, pool, optimizer=optimizer, state={"box": box}) as session:
            train(model, optimizer, 2)
            settled(session, 1)
            grown(session, model, optimizer, box)
            train(model, optimizer, 2, start=3)
            return box.value.sum().item()

    total = in_child(work)
    box = Box()
    other = net(seed=3)
    with lightck.attach(other, pool, optimizer=adam(other), state={"box": box}, resume=True) as session:
        assert session.step == 5
        assert box.value.sum().item() == total
    assert lightck.recover(pool, step=4).step == 4
