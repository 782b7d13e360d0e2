"""Tiers in an object store, on good and on bad days: a proxy in front of a server of S3's protocol makes the faults."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from toys import everything, in_child, same, train

import lightck
from lightck.cli import main
from lightck.cli.base import FAILED, OK
from lightck.errors import CorruptPoolError, NoCheckpointError, TierClaimedError, TierError
from lightck.pool.format.structures import BLOCK_MAX
from lightck.tiers import drain_process, sending
from lightck.tiers.decisions import complete
from lightck.tiers.names import Claim, ManifestName, ObjectName, Writer, parse
from lightck.tiers.object_store import ObjectStore
from lightck.tiers.open_store import open_store
from lightck.tiers.tier_manifest import read_manifest
from tiers.conftest import KEY_ID, SECRET, Bucket
from tiers.fault_proxy import Fault, Request
from tiers.test_attached_tiers import attached, drains, is_ready, lightck_step, trained, until

CLAIM = Claim(1, "0123abcd")
OBJECT = str(ObjectName(Writer(CLAIM, 0, 1), "0" * 64, "89abcdef"))


needs_encryption = pytest.mark.skipif("LIGHTCK_TEST_S3" in os.environ, reason="another store may have no encryption")


@pytest.fixture(autouse=True)
def _no_drain_is_left() -> Iterator[None]:
    yield
    until(lambda: not drains())


def tier_in(bucket: Bucket, **options: Any) -> lightck.Tier:
    """A tier in the bucket, whose store answers soon or not at all."""
    return lightck.Tier(bucket.url, **{"every": 1, **options}, options={**bucket.options, "timeout": "2s"})


def steps_in(bucket: Bucket) -> list[int]:
    return sorted(each.step for each in complete(bucket.store.listing()))


def manifests_of(bucket: Bucket) -> list[ManifestName]:
    return sorted(bucket.store.listing().manifests, key=lambda each: each.step)


def names_of(bucket: Bucket, kind: type) -> list[str]:
    """The names of objects of a kind, the oldest first."""
    library = bucket.store._library
    found = [each for page in library.list() for each in page if isinstance(parse(each["path"]), kind)]
    return [each["path"] for each in sorted(found, key=lambda each: (each["last_modified"], each["path"]))]


def overwrite(bucket: Bucket, name: str, data: bytes) -> None:
    bucket.store._library.put(name, data)


def call(*arguments: object) -> Result:
    """Run a command in this process."""
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# -- errors

PUT_FAULTS = {
    "500": (Fault(status=500), "the store answers 500 InternalError"),
    "503": (Fault(status=503, code="SlowDown"), "the store answers 503 SlowDown"),
    "403": (Fault(status=403, code="InvalidAccessKeyId"), "the store answers 403 InvalidAccessKeyId"),
    "401": (Fault(status=401, code="AccessDenied"), "the store answers 401 AccessDenied"),
    "slow": (Fault(seconds=3.0), "it did not answer in time"),
    "lost": (Fault(is_lost=True), "the connection broke"),
}


@pytest.mark.parametrize("fault", PUT_FAULTS)
def test_an_error_names_the_status_and_no_text_of_the_store(bucket, fault):
    store = ObjectStore(bucket.url, {**bucket.options, "timeout": "300ms"})
    made, text = PUT_FAULTS[fault]
    bucket.proxy.rule = lambda _: made
    for ask in (
        lambda: store.put(OBJECT, b"1"),
        lambda: store.get(OBJECT, 10),
        lambda: store.listing(),
        lambda: store.now(),
        lambda: store.delete(OBJECT),
        lambda: store.refuse_foreign_contents(),
    ):
        with pytest.raises(TierError) as found:
            ask()
        assert text in str(found.value)
        assert repr(bucket.url) in str(found.value)
        assert found.value.__context__ is None
        shown = "".join(traceback.format_exception(found.value)) + repr(found.value.__dict__)
        assert not any(secret in shown for secret in (KEY_ID, SECRET, "Signature", "Credential"))


def test_a_code_that_is_not_known_is_not_named(bucket):
    """A store may write anything there."""
    bucket.proxy.rule = lambda _: Fault(status=400, code="AKIAMARKEDKEYID")
    with pytest.raises(TierError, match=r"the store answers 400\. "):
        bucket.store.put(OBJECT, b"1")


def test_a_store_that_is_not_there_is_named(bucket):
    with pytest.raises(TierError, match="it cannot be reached"):
        ObjectStore(bucket.url, {**bucket.options, "endpoint": "http://127.0.0.1:1"}).put(OBJECT, b"1")
    missing = ObjectStore("s3://no-such-bucket/run7", bucket.options)
    for ask in (lambda: missing.put(OBJECT, b"1"), lambda: missing.get(OBJECT, 10), lambda: missing.listing()):
        with pytest.raises(TierError, match="404 NoSuchBucket"):
            ask()


def test_missing_credentials_are_named(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    options = {**bucket.options, "metadata_endpoint": "http://127.0.0.1:1"}
    with pytest.raises(TierError, match="no credentials were found"):
        ObjectStore(bucket.url, options).put(OBJECT, b"1")


@pytest.mark.parametrize("fault", [Fault(is_truncated=True), Fault(is_reset=True)])
def test_half_a_body_is_no_object(bucket, fault):
    bucket.store.put(OBJECT, b"x" * 100_000)
    bucket.proxy.rule = lambda request: fault if request.method == "GET" else None
    with pytest.raises(TierError, match="the connection broke"):
        bucket.store.get(OBJECT, 100_000)
    bucket.proxy.heal()
    assert bucket.store.get(OBJECT, 100_000) == b"x" * 100_000


def test_a_fault_that_passes_is_not_seen(bucket):
    """The library tries again by itself, a few times."""
    faults = iter([Fault(status=503), Fault(is_lost=True)])
    bucket.proxy.rule = lambda _: next(faults, None)
    bucket.store.put(OBJECT, b"1")
    assert bucket.store.get(OBJECT, 1) == b"1"
    assert len(bucket.proxy.seen) == 4


@pytest.mark.parametrize(("status", "is_refusal"), [(501, True), (400, True), (403, True), (503, False)])
def test_a_store_that_cannot_copy_gets_the_bytes_again(bucket, status, is_refusal):
    bucket.store.put(OBJECT, b"1")
    bucket.proxy.rule = lambda _: Fault(status=status)
    if is_refusal:
        assert not bucket.store.link(OBJECT, OBJECT[:-1] + "0")
    else:
        with pytest.raises(TierError, match=str(status)):
            bucket.store.link(OBJECT, OBJECT[:-1] + "0")


@needs_encryption
def test_encryption_on_the_server_is_asked_for(bucket):
    ObjectStore(bucket.url, {**bucket.options, "server_side_encryption": "AES256"}).put(OBJECT, b"1")
    headers = {name.lower(): value for name, value in bucket.proxy.seen[-1].headers.items()}
    assert headers["x-amz-server-side-encryption"] == "AES256"
    assert "content-encoding" not in headers, "a store need not read bodies in chunks"


# -- what cannot be a tier


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "memory://",
        "file:///tmp/x",
        "https://bucket.s3.amazonaws.com/x",
        "s3://",
        "s3://b/../x",
        "s3://b/a b",
    ],
)
def test_a_url_that_is_no_place_of_an_object_store_is_refused(url):
    with pytest.raises(ValueError, match="is no URL of a tier"):
        lightck.Tier(url, every=1)
    with pytest.raises(ValueError, match="is no URL of a tier"):
        lightck.recover(url)


@pytest.mark.parametrize("url", [f"s3://{KEY_ID}:x@bucket/run7", f"az://container/run7?sig={KEY_ID}"])
def test_a_url_with_a_secret_is_refused_and_not_shown(url):
    with pytest.raises(ValueError) as found:
        lightck.Tier(url, every=1)
    assert KEY_ID not in str(found.value)


@pytest.mark.parametrize("path", [Path("s3://bucket/run7")])
def test_a_url_as_a_path_object_is_refused(path):
    with pytest.raises(ValueError, match="lost a slash"):
        lightck.Tier(path, every=1)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"endpoint": f"host/{KEY_ID}"}, ValueError, "https://"),
        ({"region": None}, TypeError, "mapping"),
        ([KEY_ID], TypeError, "mapping"),
        ({"region": KEY_ID * 10_000}, ValueError, "characters"),
    ],
)
def test_options_that_no_store_takes_are_refused_and_not_shown(options, kind, text):
    with pytest.raises(kind, match=text) as found:
        lightck.Tier("s3://bucket/run7", every=1, options=options)
    assert KEY_ID not in str(found.value)


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("s3://bucket/run7", {"nonsense": KEY_ID}, "'nonsense'"),
        ("s3://bucket/run7", {"timeout": KEY_ID}, "refuses the options .* timeout"),
        ("az://container/run7", {}, "account_name"),
    ],
)
def test_options_that_the_library_refuses_are_named_at_attach(tmp_path, url, options, text):
    with pytest.raises(ValueError, match=text) as found:
        attached(tmp_path / "run.pool", [lightck.Tier(url, every=1, options=options)])
    assert KEY_ID not in "".join(traceback.format_exception(found.value))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["gs://bucket/run7", "az://container/run7"])
def test_other_stores_are_opened_by_the_same_library(url):
    options = {"account_name": "name"} if url.startswith("az") else {}
    assert str(open_store(url, options)) == url


def test_options_of_a_folder_are_refused(tmp_path):
    for refused in (
        lambda: lightck.Tier(tmp_path, every=1, options={"region": "x"}),
        lambda: lightck.recover(tmp_path, options={"region": "x"}),
    ):
        with pytest.raises(TypeError, match="belongs to an object store"):
            refused()


def test_files_for_other_programs_go_into_a_folder():
    with pytest.raises(ValueError, match="writes files into a folder"):
        lightck.Tier("s3://bucket/run7", every=1, format="safetensors")


def test_a_missing_library_is_named_with_its_cure_at_attach(tmp_path, bucket, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(TierError, match=r"pip install 'lightck\[stores\]'"):
        attached(tmp_path / "run.pool", [tier_in(bucket)])
    assert not list(tmp_path.iterdir())


def test_a_store_that_cannot_be_reached_is_an_error_of_attach(tmp_path, bucket):
    bucket.proxy.rule = lambda _: Fault(status=503)
    with pytest.raises(TierError, match="503"):
        attached(tmp_path / "run.pool", [tier_in(bucket)])


# -- several pieces in flight


@pytest.fixture
def pieces(tmp_path, monkeypatch) -> Path:
    """A pool whose checkpoint makes some dozen pieces."""
    monkeypatch.setattr(sending, "OBJECT_NBYTES_MAX", BLOCK_MAX)
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
        model(torch.randn(2, 1024)).sum().backward()
        optimizer.step()
        assert session.flush() == 1
    return tmp_path / "run.pool"


def copied(*arguments: object, bucket: Bucket) -> Any:
    given = [f"--store-option={key}={str(value).lower()}" for key, value in bucket.options.items() if key != "endpoint"]
    return call("copy", *arguments, *given, f"--store-option=endpoint={bucket.proxy.endpoint}")


def test_four_pieces_are_put_at_once_and_the_manifest_last(pieces, bucket):
    """A gate holds each put of a piece back until four of them are there."""
    waiting, numbers = threading.Barrier(4), iter(range(10**6))

    def gate(request: Request) -> None:
        if request.method == "PUT" and "/data/" in request.path and next(numbers) < 4:
            waiting.wait(30)

    bucket.proxy.gate = gate
    assert copied(pieces, bucket.url, bucket=bucket).exit_code == OK
    puts = [each for each in bucket.proxy.seen if each.request.method == "PUT" and "/data/" in each.request.path]
    assert len(puts) >= 8
    assert bucket.proxy.in_flight_max == 4
    (manifest,) = (
        each for each in bucket.proxy.seen if each.request.method == "PUT" and "/steps/" in each.request.path
    )
    assert all(each.ended <= manifest.began for each in puts)


def test_four_objects_are_got_at_once(pieces, bucket, tmp_path):
    assert copied(pieces, bucket.url, bucket=bucket).exit_code == OK
    bucket.proxy.in_flight_max = 0
    bucket.proxy.gate = lambda request: time.sleep(0.05 if "/data/" in request.path else 0.0)
    assert copied(bucket.url, tmp_path / "again.pool", bucket=bucket).exit_code == OK
    assert 2 <= bucket.proxy.in_flight_max <= 4
    assert call("diff", pieces, tmp_path / "again.pool").exit_code == OK


def test_a_store_that_takes_no_deletion_is_not_asked_for_each_piece(pieces, bucket):
    """There may be thousands, and each would wait for a store that is not there."""
    n_puts = iter(range(10**6))

    def rule(request: Request) -> Fault | None:
        if request.method in ("POST", "DELETE") or (is_data_put(request) and next(n_puts) >= 5):
            return Fault(status=403)
        return None

    bucket.proxy.rule = rule
    assert copied(pieces, bucket.url, bucket=bucket).exit_code == FAILED
    assert len([each for each in bucket.proxy.seen if each.request.method in ("POST", "DELETE")]) == 1


def is_data_put(request: Request) -> bool:
    return request.method == "PUT" and "/data/" in request.path


def test_a_piece_that_fails_leaves_no_manifest_and_no_piece(pieces, bucket):
    """Also those that were in flight with it are withdrawn, after they have ended."""
    n_puts = iter(range(10**6))

    def rule(request: Request) -> Fault | None:
        if request.method == "PUT" and "/data/" in request.path:
            return Fault(status=403) if next(n_puts) == 5 else Fault(seconds=0.2)
        return None

    bucket.proxy.rule = rule
    done = copied(pieces, bucket.url, bucket=bucket)
    assert done.exit_code != OK
    assert "the store answers 403" in done.stderr
    assert not names_of(bucket, ManifestName)
    assert not names_of(bucket, ObjectName)


def test_bytes_that_come_twice_in_a_checkpoint_are_put_once(tmp_path, bucket):
    model = torch.nn.ParameterList(torch.zeros(BLOCK_MAX // 8, dtype=torch.float64) for _ in range(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "OBJECT_NBYTES_MAX", BLOCK_MAX)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
            sum(each.sum() for each in model).backward()
            optimizer.step()
            session.flush()
        assert copied(tmp_path / "run.pool", bucket.url, bucket=bucket).exit_code == OK
    puts = [each.request.path for each in bucket.proxy.seen if each.request.method == "PUT"]
    assert len(set(puts)) == len(puts)
    assert same(lightck.recover(bucket.url, options=bucket.options).model, lightck.recover(tmp_path / "run.pool").model)


# -- a training on a bad day

DAY_FAULTS: dict[str, Fault] = {
    "500": Fault(status=500),
    "503": Fault(status=503, code="SlowDown"),
    "no answer": Fault(seconds=2.5),
    "lost": Fault(is_lost=True),
}


@pytest.mark.parametrize("day", DAY_FAULTS)
def test_a_training_goes_on_while_its_store_fails(tmp_path, bucket, caplog, monkeypatch, day):
    """One warning; the state in the statistics; then the newest checkpoint is sent, and one line says so."""
    caplog.set_level(logging.WARNING, "lightck")
    model, optimizer, session = attached(tmp_path / "run.pool", [tier_in(bucket)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 2)
        assert steps_in(bucket) == [1, 2]
        bucket.proxy.rule = lambda _: DAY_FAULTS[day]
        train(model, optimizer, 1, start=session.step)
        session.flush()
        until(lambda: session.stats().tiers[0].error is not None)
        n_seen = len(bucket.proxy.seen)
        for _ in range(20):
            train(model, optimizer, 1, start=session.step)
            assert session.flush() == session.step, "no step waits for the store"
        assert len(bucket.proxy.seen) - n_seen < 15, "it waits between its attempts"
        failed = session.stats().tiers[0]
        assert (failed.root, failed.step) == (bucket.url, 2)
        assert failed.failing_since is not None
        bucket.proxy.heal()
        until(lambda: session.stats().tiers[0].error is None, 60)
        assert session.stats().tiers[0].step >= 3
        train(model, optimizer, 1, start=session.step)
    warnings = [each.getMessage() for each in caplog.records]
    assert len(warnings) == 2, warnings
    assert "Training goes on, and the next attempt follows" in warnings[0]
    assert "are sent to the tier" in warnings[1]
    assert steps_in(bucket)[-1] == 24
    assert same(lightck.recover(bucket.url, options=bucket.options).model, model.state_dict())


def test_close_raises_if_the_store_has_not_got_the_newest_checkpoint(tmp_path, bucket):
    model, optimizer, session = attached(tmp_path / "run.pool", [tier_in(bucket)])
    until(is_ready(session))
    trained(session, model, optimizer, 1)
    bucket.proxy.rule = lambda _: Fault(status=503)
    train(model, optimizer, 1, start=1)
    with pytest.raises(TierError, match=r"Step 2 could not be sent.*503.*Sent last: step 1"):
        session.close()
    bucket.proxy.heal()
    assert steps_in(bucket) == [1]
    assert lightck.recover(tmp_path / "run.pool").step == 2


def test_a_second_training_takes_the_place_over(tmp_path, bucket):
    model, optimizer, session = attached(tmp_path / "run.pool", [tier_in(bucket)])
    until(is_ready(session))
    trained(session, model, optimizer, 2)
    _, _, other = attached(tmp_path / "other.pool", [tier_in(bucket)], resume=True)
    assert other.step == 2
    train(model, optimizer, 1, start=2)
    with pytest.raises(TierClaimedError):
        session.close()
    other.close()
    model, optimizer, mine = attached(tmp_path / "mine.pool", [])
    with mine:
        train(model, optimizer, 1)
    with pytest.raises(TierClaimedError, match="another run"):
        attached(tmp_path / "mine.pool", [tier_in(bucket)], resume=True)


def test_what_need_not_stay_is_removed(tmp_path, bucket, monkeypatch):
    """Also where a copy inside the store has kept an object for the next claim."""
    monkeypatch.setattr("lightck.tiers.drain_link.GRACE_SECONDS", 0.0)
    pool = tmp_path / "run.pool"
    model, optimizer, session = attached(pool, [tier_in(bucket, keep_last=2)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 4)
    model, optimizer, session = attached(pool, [tier_in(bucket, keep_last=2)], resume=True)
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 3)
    assert steps_in(bucket) == [6, 7]
    assert not [name for name in bucket.objects() if ".tmp-" in name]
    for step in (6, 7):
        assert lightck.recover(bucket.url, step=step, options=bucket.options).step == step


# -- what is read


def sent_steps(tmp_path: Path, bucket: Bucket, steps: int) -> dict[int, Any]:
    """Send checkpoints, and return the weights of each."""
    found = {}
    model, optimizer, session = attached(tmp_path / "run.pool", [tier_in(bucket)])
    with session:
        until(is_ready(session))
        for _ in range(steps):
            trained(session, model, optimizer, 1)
            found[session.step] = everything(model)["model"]
    assert steps_in(bucket) == list(found)
    return found


def test_late_listings_never_offer_half_a_checkpoint(tmp_path, bucket):
    """A listing that does not show the newest manifest gives the one before; one that shows a manifest and none of its
    objects gives that checkpoint, because objects are found by their names."""
    weights = sent_steps(tmp_path, bucket, 3)
    newest = f"{3:012d}"
    bucket.proxy.hidden = lambda name: f"/steps/{newest}" in name
    found = lightck.recover(bucket.url, options=bucket.options)
    assert found.step == 2
    assert same(dict(found.model), weights[2])
    bucket.proxy.hidden = lambda name: "/data/" in name
    found = lightck.recover(bucket.url, options=bucket.options)
    assert found.step == 3
    assert same(dict(found.model), weights[3])
    bucket.proxy.hidden = lambda name: "/steps/" in name
    with pytest.raises(NoCheckpointError):
        lightck.recover(bucket.url, options=bucket.options)


def test_a_training_under_late_listings_sends_whole_checkpoints(tmp_path, bucket):
    """Nothing that it has written is listed while it trains."""
    model, optimizer, session = attached(tmp_path / "run.pool", [tier_in(bucket, keep_last=2)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        bucket.proxy.hidden = lambda name: True
        trained(session, model, optimizer, 4)
    bucket.proxy.heal()
    assert steps_in(bucket) == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert lightck.recover(bucket.url, step=step, options=bucket.options).step == step


@pytest.mark.parametrize("kind", [ObjectName, ManifestName])
@pytest.mark.parametrize("how", ["flipped", "truncated", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, bucket, kind, how):
    weights = sent_steps(tmp_path, bucket, 2)
    new = [name for name in names_of(bucket, kind) if name in last_put(bucket, kind)]
    for name in new:
        data = bytearray(bucket.store._library.get(name).bytes())
        data[len(data) // 2] ^= 4
        if how == "gone":
            bucket.store.delete(name)
        else:
            overwrite(bucket, name, bytes(data) if how == "flipped" else bytes(data[:-1]))
    found = lightck.recover(bucket.url, options=bucket.options)
    assert found.step == 1
    assert same(dict(found.model), weights[1])
    is_known = kind is ObjectName or how != "gone"  # a manifest that is gone leaves no trace
    assert [each.step for each in found.rejected] == [2] * is_known


def last_put(bucket: Bucket, kind: type) -> list[str]:
    """The names of a kind that were put after the manifest of step 1."""
    puts = [each.request.path.partition("/run7/")[2] for each in bucket.proxy.seen if each.request.method == "PUT"]
    first = next(number for number, name in enumerate(puts) if f"/steps/{1:012d}" in name)
    return [name for name in puts[first + 1 :] if isinstance(parse(name), kind)]


def test_a_connection_that_breaks_is_no_damage(tmp_path, bucket):
    """The newest checkpoint is whole: an older one in its place would be wrong."""
    sent_steps(tmp_path, bucket, 2)
    bucket.proxy.rule = lambda request: Fault(is_truncated=True) if "/data/" in request.path else None
    with pytest.raises(TierError, match="the connection broke"):
        lightck.recover(bucket.url, options=bucket.options)
    bucket.proxy.heal()
    assert lightck.recover(bucket.url, options=bucket.options).step == 2


def test_a_place_without_a_whole_checkpoint_says_so(tmp_path, bucket):
    with pytest.raises(NoCheckpointError, match="no complete checkpoint"):
        lightck.recover(bucket.url, options=bucket.options)
    sent_steps(tmp_path, bucket, 1)
    for name in names_of(bucket, ObjectName):
        overwrite(bucket, name, b"")
    with pytest.raises(CorruptPoolError):
        lightck.recover(bucket.url, options=bucket.options)


def test_a_checkpoint_is_read_lazily(tmp_path, bucket):
    weights = sent_steps(tmp_path, bucket, 2)
    with lightck.recover(bucket.url, options=bucket.options, lazy=True) as found:
        assert all(same(found.tensor(f"model/{name}"), tensor) for name, tensor in weights[2].items())


# -- the machine is lost

TRAINING = """
import json, sys, time
import torch, lightck
from noisy_training import Noisy
model = Noisy()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
torch.manual_seed(1)
tiers = [lightck.Tier(**{"every": "0.05s", **each}) for each in json.loads(sys.stdin.readline())]
with lightck.attach(model, sys.argv[1], optimizer=optimizer, resume=True, tiers=tiers) as session:
    print(session.step, flush=True)
    while session.step < int(sys.argv[2]):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        time.sleep(0.003)
"""


@contextmanager
def training(
    pool: Path, url: str, n_steps: int, options: dict[str, Any], near: Path | None = None, **of_store: Any
) -> Iterator[subprocess.Popen[str]]:
    """``near``: a folder that is a tier too. ``of_store``: more options of the store's tier."""
    tiers = ([{"root": str(near)}] if near else []) + ([{"root": url, "options": options, **of_store}] if url else [])
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", TRAINING, str(pool), str(n_steps)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    process.stdin.write(json.dumps(tiers) + "\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_step(process: subprocess.Popen[str]) -> int:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return int(line)


def test_a_training_goes_on_from_the_store_exactly_when_its_machine_is_lost(tmp_path, bucket):
    """Pool and process are lost twice, while every tenth request fails; the end is that of a run without
    interruption, bit by bit."""
    whole, pool = tmp_path / "whole.pool", tmp_path / "run.pool"
    with training(whole, "", 120, {}) as process:
        assert process.wait(timeout=120) == 0, process.stderr.read()
    numbers = iter(range(10**9))
    bucket.proxy.rule = lambda _: Fault(status=503) if next(numbers) % 10 == 9 else None
    begun = []
    for _ in range(2):
        with training(pool, bucket.url, 120, bucket.options) as process:
            begun.append(first_step(process))
            until(lambda: lightck_step(pool) > begun[-1] + 20)
            process.kill()
            process.wait()
            until(lambda: not drains())
        pool.unlink()
    with training(pool, bucket.url, 120, bucket.options) as process:
        begun.append(first_step(process))
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert begun == sorted(set(begun))
    assert "was rebuilt from step" in err
    one, other = lightck.recover(pool), lightck.recover(whole)
    assert one.step == other.step == 120
    assert same(one.model, other.model)
    assert same(one.optimizer, other.optimizer)
    assert same(lightck.recover(bucket.url, options=bucket.options).model, one.model)


@pytest.mark.long
def test_lightck_drain_sends_to_a_store_what_a_killed_drain_has_left(tmp_path, bucket):
    pool = tmp_path / "run.pool"
    with training(pool, bucket.url, 10**6, bucket.options) as process:
        first_step(process)
        until(lambda: steps_in(bucket))
        for pid in drains():
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
    until(lambda: not drains())
    newest = lightck.recover(pool).step
    assert steps_in(bucket)[-1] < newest
    numbers = iter(range(10**9))
    bucket.proxy.rule = lambda _: Fault(status=503) if next(numbers) % 10 == 9 else None
    given = [f"--store-option={key}={str(value).lower()}" for key, value in bucket.options.items()]
    done = call("drain", pool, bucket.url, "--rate", "50MB/s", "--compress", "lz4", *given)
    assert done.exit_code == 0, done.stderr
    assert steps_in(bucket)[-1] == newest
    assert same(lightck.recover(bucket.url, options=bucket.options).model, lightck.recover(pool).model)
    again = call("drain", pool, bucket.url, *given)
    assert "already" in again.stdout


def test_a_near_folder_and_a_far_store_have_rates_of_their_own(tmp_path, bucket):
    near = lightck.Tier(tmp_path / "near", every=1)
    model, optimizer, session = attached(tmp_path / "run.pool", [near, tier_in(bucket, every=4)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 9)
    assert steps_in(bucket) == [1, 4, 8, 9]
    stats = session.stats().tiers
    assert [each.root for each in stats] == [str(tmp_path / "near"), bucket.url]
    assert same(lightck.recover(tmp_path / "near").model, lightck.recover(bucket.url, options=bucket.options).model)


# -- the commands


def test_the_commands_take_a_url(tmp_path, bucket):
    sent_steps(tmp_path, bucket, 2)
    given = [f"--store-option={key}={str(value).lower()}" for key, value in bucket.options.items()]
    done = call("list", bucket.url, *given, "--json")
    assert done.exit_code == OK
    (found,) = json.loads(done.stdout)["tiers"]
    assert found["path"] == bucket.url
    assert [each["step"] for each in found["checkpoints"]] == [2, 1]
    bucket.proxy.seen.clear()
    done = call("verify", bucket.url, *given)
    assert "step 1 (claim" in done.stdout
    assert "their bytes were not read" in done.stdout
    one, two = ({each.name for each in read_manifest(bucket.store, name).objects} for name in manifests_of(bucket))
    read = [seen.request.path for seen in bucket.proxy.seen if seen.request.method == "GET"]
    assert any(str(name) in path for name in two for path in read)
    assert not any(str(name) in path for name in one - two for path in read)
    assert copied(bucket.url, tmp_path / "again.pool", "--step", 1, bucket=bucket).exit_code == OK
    assert lightck.recover(tmp_path / "again.pool").step == 1
    done = call("list", "s3://no-such-bucket/run7", *given)
    assert done.exit_code != OK
    assert "404 NoSuchBucket" in done.stderr
    assert call("list", bucket.url + "/elsewhere", *given).exit_code == FAILED


@pytest.mark.parametrize(
    "key", ["aws_secret_access_key", "access_key_id", "AWS_SESSION_TOKEN", "account_key", "sas_key"]
)
def test_a_secret_on_the_command_line_is_refused(key):
    done = call("list", "s3://bucket/run7", f"--store-option={key}={SECRET}")
    assert done.exit_code == FAILED
    assert "environment" in done.stderr
    assert SECRET not in done.stderr + done.stdout


# -- secrets


@needs_encryption
def test_secrets_are_in_no_command_line_log_error_pool_or_object(tmp_path, bucket, caplog):
    """Marked keys in the environment and in the options; then every error that the store can make."""
    caplog.set_level(logging.DEBUG)
    marked = {"aws_session_token": "marked-token-of-the-options", "sse_kms_key_id": "marked-kms-key"}
    secrets = [KEY_ID, SECRET, *marked.values()]
    url, options = bucket.url, {**bucket.options, **marked, "server_side_encryption": "aws:kms", "timeout": "1s"}
    tier = lightck.Tier(url, every=1, options=options)
    model, optimizer, session = attached(tmp_path / "run.pool", [tier])
    texts = [repr(tier), repr([tier]), str(session), repr(session)]
    with suppress(TierError), session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        (pid,) = drains()
        texts.append(Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/comm").read_text())
        assert not any(os.readlink(f"/proc/{pid}/fd/{fd}") not in ("/dev/null",) for fd in (1, 2))
        faults = iter([fault for fault, _ in PUT_FAULTS.values()])
        for fault in faults:
            bucket.proxy.rule = lambda _, fault=fault: fault
            train(model, optimizer, 1, start=session.step)
            session.flush()
            until(lambda: session.stats().tiers[0].error is not None)
            texts.append(repr(session.stats()))
            bucket.proxy.heal()
            until(is_ready(session))
            until(lambda: session.stats().tiers[0].failing_since is None, 60)
            trained(session, model, optimizer, 1)
            assert session.stats().tiers[0].error is None
        texts.append(repr(session._steps.commits.participants.tiers._links[0]._handle.state))
        bucket.proxy.rule = lambda _: Fault(status=403, code="AccessDenied")
        train(model, optimizer, 1, start=session.step)
        for ask in (
            lambda: lightck.recover(url, options=options),
            lambda: attached(tmp_path / "new.pool", [tier], resume=True),
        ):
            with pytest.raises(TierError) as found:
                ask()
            texts.append("".join(traceback.format_exception(found.value)))
        try:
            session.close()
        except TierError as err:
            texts.append("".join(traceback.format_exception(err)))
    bucket.proxy.heal()
    assert any("403 AccessDenied" in text for text in texts), "the errors came"
    texts.append(caplog.text)
    stored = b"".join(
        [*bucket.objects().values(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())]
    )
    names = " ".join(bucket.objects())
    for secret in secrets:
        assert secret.encode() not in stored
        assert secret not in names
        for text in texts:
            assert secret not in text


def test_a_forked_process_refuses_what_would_wait_for_ever(bucket):
    """A worker of a loader, say, which the training has forked after it claimed its tiers."""
    bucket.store.now()

    def ask() -> str:
        with pytest.raises(TierError) as found:
            lightck.recover(bucket.url, options=bucket.options)
        return str(found.value)

    assert "forked process" in in_child(ask)


def test_a_drain_needs_no_torch(bucket):
    program = (
        "import sys; from lightck.tiers import drain_process; from lightck.tiers.open_store import open_store; "
        "open_store('s3://bucket/run7'); print('torch' in sys.modules, 'obstore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split() == ["False", "True"]
    assert drain_process.NICENESS > 0
