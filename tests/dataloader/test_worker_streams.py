"""A loader that goes on by its own state: a resume warns if the random streams of its workers do not continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from toys import adam, net

import lightck

stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Items with noise, which is drawn in the process that fetches them."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(4)


def train(pool: Path, loader: Any, until: int) -> list[torch.Tensor]:
    """Train up to a step, in passes of 8 batches, and leave the pass there. Returns the batches."""
    model = net()
    optimizer = adam(model)
    seen: list[torch.Tensor] = []
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        followed = session.loader(loader)
        while session.step < until:
            for x in followed:
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
                seen.append(x)
                if session.step == until:
                    break
    return seen


def warnings_about_workers(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    return [one for one in said if "holds no random states of workers" in one]


def test_a_stateful_loader_with_workers_that_goes_on_in_mid_pass_gives_a_warning(pool, caplog):
    torch.manual_seed(1)
    whole = train(pool.with_name("whole.pool"), stateful(Augmented(), 2, shuffle=True, num_workers=1), until=8)
    torch.manual_seed(1)
    train(pool, stateful(Augmented(), 2, shuffle=True, num_workers=1), until=3)
    assert not warnings_about_workers(caplog)
    rest = train(pool, stateful(Augmented(), 2, shuffle=True, num_workers=1), until=8)
    assert torch.equal(torch.cat(rest).floor(), torch.cat(whole[3:]).floor()), "the order is exact"
    assert not torch.equal(torch.cat(rest), torch.cat(whole[3:])), "the noise is not: or the warning can go"
    (warning,) = warnings_about_workers(caplog)
    assert "The order of the samples is exact, but random augmentation in the workers is not" in warning


@pytest.mark.parametrize(
    ("make", "options", "until"),
    [
        (stateful, {}, 3),
        (DataLoader, {"num_workers": 1}, 3),
        (stateful, {"num_workers": 1}, 8),
    ],
    ids=["without workers", "a plain loader", "after the last batch of a pass"],
)
def test_no_other_resume_gives_this_warning(make, options, until, pool, caplog):
    torch.manual_seed(1)
    whole = train(pool.with_name("whole.pool"), make(Augmented(), 2, shuffle=True, **options), until=12)
    torch.manual_seed(1)
    train(pool, make(Augmented(), 2, shuffle=True, **options), until)
    rest = train(pool, make(Augmented(), 2, shuffle=True, **options), until=12)
    assert torch.equal(torch.cat(rest), torch.cat(whole[until:]))
    assert not warnings_about_workers(caplog)
