"""The root's hooks with torch.compile: they neither break the graph nor need to fire."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from toys import adam, everything, is_step, same

import lightck


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def learn(call: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    call(torch.randn(6, 4, generator=torch.Generator().manual_seed(number))).square().sum().backward()
    optimizer.step()


def test_hooks_do_not_break_the_graph_of_a_model_compiled_whole(pool, caplog):
    caplog.set_level("INFO")
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Net()
    optimizer = adam(model)
    held = {}
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        compiled = torch.compile(model, fullgraph=True, backend=count)
        for number in range(4):
            learn(compiled, optimizer, number)
            held[session.step] = everything(model, optimizer)
            assert session.iteration == number  # the pre-step hook closes: buffers are those of the update
    assert len(graphs) == 1
    assert "forward hook does not fire" in caplog.text
    for step in (3, 4):
        assert is_step(lightck.recover(pool, step=step), held[step])


def test_compiled_model_that_is_attached_itself_closes_at_its_forward(pool):
    model = Net()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    optimizer = adam(model)
    with lightck.attach(compiled, pool, optimizer=optimizer) as session:
        for number in range(3):
            learn(compiled, optimizer, number)
        seen = everything(model, optimizer)
        compiled(torch.zeros(6, 4))
        assert session.iteration == 3
        buffers = {k: v.clone() for k, v in seen["model"].items() if "running" in k or "tracked" in k}
        session.flush()
    checkpoint = lightck.recover(pool)
    assert "_orig_mod" not in str(list(checkpoint.model)), "names do not depend on wrappers"
    assert same({k: checkpoint.model[k] for k in buffers}, buffers)
    assert is_step(checkpoint, seen)
    plain = Net()
    lightck.recover(pool, plain)
    assert same(dict(plain.state_dict()), seen["model"])
