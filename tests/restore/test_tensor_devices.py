"""Which device tensors inside values come back to. ``meta`` stands for a device here; ``tests/gpu`` has a real one."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque

import torch
from toys import same

import lightck
from lightck.restore.optimizer import device_of
from lightck.restore.tensor_devices import MovedTensors, like_live

META = torch.device("meta")


def test_tensors_in_all_containers_move_and_a_shared_one_moves_once():
    shared, alone = torch.ones(2), torch.zeros(3)
    restored = {"in optimizer/p/a/0": shared}
    value = {"a": [shared, 5], "b": (alone, [shared]), "c": deque([alone], 4), "d": OrderedDict(x=shared), "e": None}
    asked = []

    def device_for(name):
        asked.append(name)
        return META

    found = MovedTensors(restored).moved(value, device_for)
    assert {found["a"][0].device, found["b"][0].device, found["c"][0].device} == {META}
    assert found["a"][0] is found["b"][1][0] is found["d"]["x"] is restored["in optimizer/p/a/0"]
    assert found["b"][0] is found["c"][0]
    assert found["c"].maxlen == 4
    assert (found["a"][1], found["e"]) == (5, None)
    assert asked == ["in optimizer/p/a/0", None], "the second has no entry"


def test_counters_keep_their_counts():
    """``Counter.update`` adds."""
    assert like_live({"c": Counter(a=2)}, {"c": Counter(a=5)}) == {"c": Counter(a=2)}
    value = {"c": Counter(a=2), "t": torch.ones(1)}
    assert MovedTensors({}).moved(value, lambda name: META)["c"] == Counter(a=2)


def test_state_that_has_no_place_in_the_live_object_stays_on_the_cpu():
    saved = {"a": torch.ones(2), "b": [torch.ones(1), torch.ones(1)], "c": (torch.ones(3),)}
    found = like_live(saved, {"b": [torch.ones(1)], "c": None})
    assert found is saved
    assert all(tensor.is_cpu for tensor in (found["a"], *found["b"], *found["c"]))


def test_a_live_tensor_without_bytes_does_not_take_the_saved_bytes():
    saved = {"a": torch.ones(2)}
    assert like_live(saved, {"a": torch.ones(2, device="meta")})["a"].tolist() == [1.0, 1.0]


def test_the_history_of_lbfgs_comes_back(pool):
    """Its state has lists of tensors, large and small."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3)
    x = torch.randn(9, 40)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with lightck.attach(model, pool):
        for _ in range(3):
            optimizer.step(closure)
    expected = copy.deepcopy(optimizer.state_dict())
    for state in optimizer.state.values():
        state.clear()
    lightck.recover(pool, model, optimizer)
    assert same(optimizer.state_dict(), expected)


def test_the_state_of_a_parameter_outside_the_model_goes_to_the_device_of_the_parameter(pool):
    """A temperature of the loss, which no module has. ``AdamW.step`` refuses state on another device."""
    model, temperature = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature])
    with lightck.attach(model, pool, optimizer=optimizer):
        (model(torch.ones(3)).sum() * temperature.sum()).backward()
        optimizer.step()
    contents = lightck.recover(pool).contents
    for name, p in {"weight": model.weight, "outside/0/0/2": temperature}.items():
        entry = contents.entries[f"optimizer/{name}/exp_avg"]
        assert device_of(entry, contents, name, p.detach().to(META), is_cpu_count=False) == META
