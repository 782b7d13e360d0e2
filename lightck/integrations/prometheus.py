"""A session's counters for Prometheus: ``SessionCollector`` is a collector of ``prometheus_client``.

Each scrape reads ``session.stats()`` on its own thread: it waits for nothing, and the training does not wait for it.
Nothing listens on a port unless the program starts it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import lightck


class _Metric(NamedTuple):
    """A metric whose value is an attribute of ``Stats``, or of the stats of a tier."""

    attribute: str
    name: str
    """Without the prefix ``lightck_``, and without the suffix ``_total`` of a counter."""
    help: str


_COUNTERS = (
    _Metric("checkpoints", "commits", "Checkpoints that were committed to the pool."),
    _Metric("bytes_written", "written_bytes", "Bytes of checkpoints and gradient records written to the pool."),
    _Metric("stall_seconds", "stall_seconds", "Time that lightck spent on the training thread."),
    _Metric(
        "wait_seconds",
        "wait_seconds",
        "The part of the stall in which the training thread waited for copies and commits, or helped to copy.",
    ),
    _Metric("rank_wait_seconds", "rank_wait_seconds", "The part of the wait in which this rank waited for others."),
    _Metric("slowdown_seconds", "slowdown_seconds", "Estimate of how much longer the loop's own operations took."),
    _Metric("cpu_seconds", "cpu_seconds", "CPU time of all threads and hooks of lightck."),
    _Metric("skipped", "skipped", "Checkpoints and updates that were skipped; see Stats.skipped."),
    _Metric("kept", "exports", "Checkpoints that were exported as files."),
    _Metric("holds_honored", "holds_honored", "Slots that were skipped because a reader held them."),
    _Metric("holds_overrun", "holds_overrun", "Held slots that were overwritten because the training needed them."),
    _Metric("pool_rounds", "pool_reread_rounds", "How often everything in the pool was read again."),
    _Metric("pool_bytes_reread", "pool_reread_bytes", "Bytes of the pool that were read again."),
    _Metric("pool_damaged", "pool_damaged", "Checkpoints of the pool that were found damaged."),
)
_GAUGES = (
    _Metric("step", "step", "Updates since the beginning of the training."),
    _Metric("committed", "committed_step", "Step of the newest committed checkpoint."),
    _Metric("committed_at", "committed_timestamp_seconds", "When the newest commit was reported, in Unix time."),
    _Metric("in_flight", "in_flight_checkpoints", "Checkpoints of finished steps that are not committed yet."),
    _Metric("interval", "interval_steps", "Updates from one checkpoint to the next."),
)
_TIER_COUNTERS = (
    _Metric("checkpoints", "tier_checkpoints", "Checkpoints that were sent to the tier."),
    _Metric("bytes_sent", "tier_sent_bytes", "Bytes that were written to the tier."),
    _Metric("failures", "tier_failures", "How often sending to the tier has begun to fail."),
    _Metric("rounds", "tier_reread_rounds", "How often everything in the tier was read again."),
    _Metric("bytes_reread", "tier_reread_bytes", "Bytes of the tier that were read again."),
    _Metric("damaged", "tier_damaged", "Files of the tier that were found damaged."),
    _Metric("mended", "tier_mended", "Damaged files of the tier that were written anew."),
)
_TIER_GAUGES = (
    _Metric("step", "tier_step", "Step of the newest checkpoint in the tier."),
    _Metric("sent_at", "tier_sent_timestamp_seconds", "When the newest checkpoint was sent, in Unix time."),
    _Metric("seconds", "tier_send_seconds", "How long the newest checkpoint took to send."),
    _Metric("waiting", "tier_waiting_checkpoints", "Checkpoints that are held in the pool until they are sent."),
)


class SessionCollector(Collector):
    """The counters of one session as metrics: ``REGISTRY.register(SessionCollector(session))``.

    After ``session.close()`` it gives the last values. It does not keep the session alive. Each metric has the label
    ``rank``, and those of tiers ``tier`` too. A second session of the process needs a registry of its own.
    """

    def __init__(self, session: lightck.Session) -> None:
        self._session, self._rank = weakref.ref(session), str(session.rank)
        self._stats = session.stats()
        self._highest: dict[tuple[str, ...], float] = {}
        """Name and labels of a counter -> its highest value. (A scrape in the middle of a hook may find less CPU time
        than before; Prometheus would take a counter that falls for one that began anew.)"""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks for it at each scrape."""
        session = self._session()
        if session is not None:
            self._stats = session.stats()
        stats = self._stats
        yield from self._metrics(_COUNTERS, _GAUGES, ("rank",), [((self._rank,), stats)])
        lag = GaugeMetricFamily("lightck_lag_steps", "Updates that are not committed yet.", labels=["rank"])
        lag.add_metric([self._rank], max(0, stats.step - (stats.committed or 0)))
        yield lag
        if stats.tiers:
            tiers = [((self._rank, tier.root), tier) for tier in stats.tiers]
            yield from self._metrics(_TIER_COUNTERS, _TIER_GAUGES, ("rank", "tier"), tiers)
            failing = GaugeMetricFamily(
                "lightck_tier_failing", "1 while nothing can be sent to the tier, else 0.", labels=["rank", "tier"]
            )
            for values, tier in tiers:
                failing.add_metric(values, tier.failing_since is not None)
            yield failing

    def _metrics(
        self,
        counters: tuple[_Metric, ...],
        gauges: tuple[_Metric, ...],
        labels: tuple[str, ...],
        found: Sequence[tuple[tuple[str, ...], object]],
    ) -> Iterator[Metric]:
        for each in counters:
            counter = CounterMetricFamily(f"lightck_{each.name}", each.help, labels=labels)
            for values, source in found:
                counter.add_metric(values, self._risen((each.name, *values), getattr(source, each.attribute)))
            yield counter
        for each in gauges:
            gauge = GaugeMetricFamily(f"lightck_{each.name}", each.help, labels=labels)
            for values, source in found:
                value = getattr(source, each.attribute)
                if value is not None:
                    gauge.add_metric(values, value)
            yield gauge

    def _risen(self, key: tuple[str, ...], value: float) -> float:
        self._highest[key] = highest = max(value, self._highest.get(key, 0.0))
        return highest
