"""``lightck list``: what lies in a tier."""

from __future__ import annotations

import time

from calls import call, call_json
from toys import adam, net, pool_with, train

import lightck
from lightck.cli.base import FAILED, OK
from lightck.tiers.folder import FolderStore


def test_it_lists_checkpoints_newest_first_with_age_size_and_metrics(tmp_path):
    model = net()
    tiers = [lightck.Tier(tmp_path / "tier", every="1h", keep_last=2, keep_best=("loss", 2, "min"))]
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), tiers=tiers) as session:
        train(model, optimizer, 2)
        session.log(loss=0.5)
        train(model, optimizer, 1, start=2)
    status, found = call_json("list", tmp_path / "tier")
    assert status == OK
    (tier,) = found["tiers"]
    assert [each["step"] for each in tier["checkpoints"]] == [3, 2, 1], "the first one is sent at once"
    assert tier["checkpoints"][1]["metrics"] == {"loss": 0.5}
    assert all(each["nbytes"] > 0 and abs(each["sent_at"] - time.time()) < 60 for each in tier["checkpoints"])
    assert len(tier["run"]) == 32
    text = call("list", tmp_path / "tier")
    assert text.exit_code == OK
    assert "3 checkpoints of the run" in text.stdout
    assert "loss 0.5" in text.stdout
    assert "s ago" in text.stdout


def test_it_names_what_cannot_be_read(tmp_path):
    model = net()
    tiers = [lightck.Tier(tmp_path / "tier", every=1)]
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), tiers=tiers):
        train(model, optimizer, 1)
    (manifest,) = FolderStore(str(tmp_path / "tier")).listing().manifests
    (tmp_path / "tier" / str(manifest)).write_text("{}")
    text = call("list", tmp_path / "tier")
    assert "step 1" in text.stdout
    assert "cannot be read: it is no manifest of a tier" in text.stdout


def test_what_is_no_tier_is_named_with_a_cure(tmp_path):
    pool_with(tmp_path / "run.pool")
    missing = call("list", tmp_path / "missing")
    assert missing.exit_code == FAILED
    assert "There is nothing at" in missing.stderr
    for path in (tmp_path / "run.pool", tmp_path):
        result = call("list", path)
        assert result.exit_code == FAILED
        assert "is no tier" in result.stderr
        assert "lightck inspect" in result.stderr
