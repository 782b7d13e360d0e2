"""The collector for prometheus_client: what a scrape gets, read by prometheus_client's own parser."""

from __future__ import annotations

import gc
import os
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from ranked import run_ranks
from torch.nn.parallel import DistributedDataParallel
from toys import adam, net, train

import lightck
from lightck.integrations.prometheus import SessionCollector
from lightck.tiers.drain_link import DrainLink

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "watching.md"


def scraped(registry: CollectorRegistry) -> Samples:
    return samples_of(generate_latest(registry).decode())


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def plain(samples: Samples) -> dict[str, float]:
    return {name: value for (name, labels), value in samples.items() if dict(labels).keys() == {"rank"}}


def of_tier(samples: Samples, tier: Path) -> dict[str, float]:
    return {name: value for (name, labels), value in samples.items() if dict(labels).get("tier") == str(tier)}


def watched(pool: Path, **options: Any) -> tuple[Any, Any, lightck.Session, CollectorRegistry]:
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, **options)
    registry = CollectorRegistry()
    registry.register(SessionCollector(session))
    return model, optimizer, session, registry


def test_a_scrape_has_the_values_of_stats(pool):
    model, optimizer, session, registry = watched(pool, slots=3)
    train(model, optimizer, 5)
    session.flush()
    train(model, optimizer, 2, start=5)
    found, stats = plain(scraped(registry)), session.stats()
    assert found["lightck_commits_total"] == stats.checkpoints >= 5
    assert found["lightck_step"] == 7
    assert found["lightck_committed_step"] == stats.committed
    assert found["lightck_lag_steps"] == 7 - stats.committed
    assert found["lightck_written_bytes_total"] == stats.bytes_written
    assert found["lightck_in_flight_checkpoints"] == stats.in_flight
    assert found["lightck_committed_timestamp_seconds"] == pytest.approx(stats.committed_at)
    assert 0 < found["lightck_stall_seconds_total"] <= stats.stall_seconds
    assert found["lightck_holds_honored_total"] == found["lightck_holds_overrun_total"] == 0
    session.close()


def test_before_the_first_commit_there_is_no_step_and_no_time_of_it(pool):
    _, _, session, registry = watched(pool)
    found = plain(scraped(registry))
    assert found["lightck_commits_total"] == found["lightck_lag_steps"] == 0
    assert "lightck_committed_step" not in found
    assert "lightck_committed_timestamp_seconds" not in found
    session.close()


def test_names_follow_the_conventions(pool, tmp_path):
    model, optimizer, session, registry = watched(pool, tiers=[lightck.Tier(tmp_path / "tier", every="1h")])
    train(model, optimizer, 2)
    session.close()
    families = list(parse_openmetrics(generate_openmetrics(registry).decode()))  # its parser is the strict one
    assert {each.type for each in families} == {"counter", "gauge"}
    for each in families:
        assert each.name.startswith("lightck_")
        assert each.documentation.endswith(".")
        assert each.documentation[0].isupper() or each.documentation[0] == "1"
        for sample in each.samples:
            assert sample.name.endswith("_total") == (each.type == "counter")
            assert sample.labels["rank"] == "0"


def test_the_page_lists_every_metric_and_no_other(pool, tmp_path):
    model, optimizer, session, registry = watched(pool, tiers=[lightck.Tier(tmp_path / "tier", every="1h")])
    train(model, optimizer, 2)
    session.close()
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `lightck_")]
    listed = {row.split("`")[1] for row in rows}
    assert listed == {name for name, _ in scraped(registry)}


def test_a_tier_has_its_step_its_time_and_its_bytes(pool, tmp_path):
    tier = tmp_path / "tier"
    model, optimizer, session, registry = watched(pool, tiers=[lightck.Tier(tier, every="1h")])
    train(model, optimizer, 3)
    session.close()
    found, (stats,) = of_tier(scraped(registry), tier), session.stats().tiers
    assert found["lightck_tier_step"] == 3
    assert found["lightck_tier_checkpoints_total"] == stats.checkpoints >= 1
    assert found["lightck_tier_sent_bytes_total"] == stats.bytes_sent > 0
    assert found["lightck_tier_sent_timestamp_seconds"] == pytest.approx(stats.sent_at)
    assert found["lightck_tier_failures_total"] == found["lightck_tier_failing"] == 0
    assert found["lightck_tier_waiting_checkpoints"] == 0


def test_a_tier_that_fails_is_counted_once_for_each_time_it_began(pool, tmp_path):
    tier = tmp_path / "tier"
    model, optimizer, session, registry = watched(pool, tiers=[lightck.Tier(tier, every=1)])
    train(model, optimizer, 1)
    wait = threading.Event().wait

    def train_until(is_true: Any) -> None:
        for _ in range(3000):
            train(model, optimizer, 1, start=session.step)
            if is_true(of_tier(scraped(registry), tier)):
                return
            wait(0.01)
        pytest.fail("it did not happen in time")

    train_until(lambda found: found["lightck_tier_checkpoints_total"] >= 1)
    away = tier.rename(tmp_path / "away")
    tier.write_text("no folder")
    train_until(lambda found: found["lightck_tier_failing"] == 1)
    assert of_tier(scraped(registry), tier)["lightck_tier_failures_total"] == 1
    tier.unlink()
    away.rename(tier)
    train_until(lambda found: found["lightck_tier_failing"] == 0)
    assert of_tier(scraped(registry), tier)["lightck_tier_failures_total"] == 1
    session.close()


def test_a_scrape_from_another_thread_disturbs_nothing_and_counters_never_fall(pool, tmp_path):
    """The drain is asked only when no other thread is inside the session, so it is started once."""
    tiers = [lightck.Tier(tmp_path / "tier", every=2)]
    model, optimizer, session, registry = watched(pool, tiers=tiers, slots=4)
    done, errors, falls = threading.Event(), [], []

    def scrape() -> None:
        before: Samples = {}
        try:
            while not done.is_set():
                now = scraped(registry)
                falls.extend(
                    key for key, value in before.items() if key[0].endswith("_total") and now.get(key, value) < value
                )
                before = now
        except Exception as err:
            errors.append(err)

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    for each in threads:
        each.start()
    try:
        train(model, optimizer, 150)
        session.close()
    finally:
        done.set()
        for each in threads:
            each.join()
    assert (errors, falls) == ([], [])
    assert lightck.recover(pool).step == lightck.recover(tmp_path / "tier").step == 150
    assert session._steps.commits.participants.tiers._links[0]._n_restarts == 0


def test_the_drain_is_asked_by_one_thread_at_a_time_and_not_after_close(pool, tmp_path, monkeypatch):
    asked: list[int] = []
    read = DrainLink.read

    def reads(link: DrainLink, **options: bool) -> None:
        asked.append(threading.get_ident())
        read(link, **options)

    monkeypatch.setattr(DrainLink, "read", reads)
    model, optimizer, session, registry = watched(pool, tiers=[lightck.Tier(tmp_path / "tier", every="1h")])

    def scrape_elsewhere(_: int) -> None:
        thread = threading.Thread(target=lambda: scraped(registry))
        thread.start()
        thread.join()  # the training is inside the session meanwhile, and the scrape does not wait for it

    session.on_commit(scrape_elsewhere)
    train(model, optimizer, 3)
    assert set(asked) == {threading.get_ident()}
    session.close()
    asked.clear()
    session.stats()
    assert asked == []


def test_a_scrape_starts_no_drain_and_the_training_does(pool, tmp_path):
    model, optimizer, session, registry = watched(pool, tiers=[lightck.Tier(tmp_path / "tier", every=1)])
    train(model, optimizer, 2)
    link = session._steps.commits.participants.tiers._links[0]
    handle = link._handle
    os.kill(handle._process.pid, signal.SIGKILL)
    while not handle.has_ended(1.0):
        pass
    thread = threading.Thread(target=lambda: scraped(registry))
    thread.start()
    thread.join()
    assert link._handle is handle
    train(model, optimizer, 1, start=2)
    session.close()
    assert link._n_restarts == 1
    assert lightck.recover(tmp_path / "tier").step == 3


def test_after_close_it_gives_the_last_values_and_does_not_keep_the_session(pool):
    model, optimizer, session, registry = watched(pool)
    train(model, optimizer, 4)
    session.close()
    last = scraped(registry)
    assert plain(last)["lightck_committed_step"] == 4
    assert plain(last)["lightck_lag_steps"] == 0
    assert plain(last)["lightck_commits_total"] == 4
    del session, model, optimizer
    gc.collect()
    assert scraped(registry) == last


def test_two_sessions_in_one_registry_are_refused_by_prometheus_client(pool):
    *_, session, _ = watched(pool)
    registry = CollectorRegistry(auto_describe=True)  # as the default registry is
    registry.register(SessionCollector(session))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(SessionCollector(session))
    session.close()


def test_over_a_port_that_the_program_opens(pool):
    model, optimizer, session, registry = watched(pool)
    train(model, optimizer, 2)
    session.close()
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(address) as answer:
            found = samples_of(answer.read().decode())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert plain(found)["lightck_committed_step"] == 2


def test_each_rank_names_itself(pool):
    pools = pool.with_name("pools")

    def body(rank: int) -> list[tuple[str, float]]:
        model = net()
        wrapped = DistributedDataParallel(model)
        optimizer = adam(model)
        registry = CollectorRegistry()
        with lightck.attach(wrapped, pools, optimizer=optimizer) as session:
            registry.register(SessionCollector(session))
            train(wrapped, optimizer, 3)
        return [
            (dict(labels)["rank"], value)
            for (name, labels), value in scraped(registry).items()
            if name == "lightck_committed_step"
        ]

    ended = run_ranks(2, body)
    assert [one.text for one in ended] == ["", ""]
    assert [one.value for one in ended] == [[("0", 3.0)], [("1", 3.0)]]
