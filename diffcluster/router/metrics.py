"""Prometheus metrics, read from a snapshot at scrape: the router's own code counts nothing for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from diffcluster import __version__
from diffcluster.ids import ROLES
from diffcluster.router.snapshot import BUCKETS, Histogram, Snapshot

__all__ = ["exposition"]


def exposition(snapshot: Snapshot) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(snapshot))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from _requests(self._snapshot)
        yield from _instances(self._snapshot)
        yield from _batches(self._snapshot)
        yield from _transfers(self._snapshot)
        build = GaugeMetricFamily("diffcluster_build_info", "Version of the router.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build


def _counter(name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label, value in values:
        family.add_metric(list(label), value)
    return family


def _gauge(name: str, text: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label, value in values:
        family.add_metric(list(label), value)
    return family


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    buckets, sum_ = [], 0
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), histogram.counts, strict=True):
        sum_ += count
        buckets.append((bound, float(sum_)))
    family.add_metric(labels, buckets, histogram.total)


def _requests(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.totals
    ended = (((outcome,), float(count)) for outcome, count in totals.ended.items())
    yield _counter("diffcluster_requests", "Requests that have ended, by outcome.", ["outcome"], ended)
    phases = [request.phase for request in snapshot.requests.values()]
    now = (
        ((phase,), float(phases.count(phase))) for phase in ("queued", "running", "waiting", "allocating", "pushing")
    )
    yield _gauge("diffcluster_requests_in_progress", "Requests now, by phase.", ["phase"], now)
    waiting = (((role,), float(count)) for role, count in snapshot.queues.items())
    yield _gauge("diffcluster_queue_length", "Requests that wait for an instance of a role.", ["role"], waiting)
    whole = HistogramMetricFamily(
        "diffcluster_request_duration_seconds", "Time of finished requests, queueing included."
    )
    _add(whole, [], totals.requests)
    yield whole
    stages = HistogramMetricFamily("diffcluster_stage_compute_seconds", "Time that a stage computed.", labels=["role"])
    for role, histogram in totals.stages.items():
        _add(stages, [role], histogram)
    yield stages


def _instances(snapshot: Snapshot) -> Iterator[Metric]:
    instances = list(snapshot.instances.values())
    counts = (((role,), float(sum(i.role == role for i in instances))) for role in ROLES)
    yield _gauge("diffcluster_instances", "Registered instances.", ["role"], counts)
    busy = (((i.role, i.name), float(len(i.busy))) for i in instances)
    yield _gauge("diffcluster_instance_requests", "Requests in an instance's hands.", ["role", "instance"], busy)
    beats = [(i, i.heartbeat) for i in instances if i.heartbeat is not None]
    resident = (((i.role, i.name), float(beat.resident_bytes)) for i, beat in beats)
    yield _gauge(
        "diffcluster_instance_resident_bytes", "Resident memory of an instance.", ["role", "instance"], resident
    )
    free = [((i.role, i.name, "receive"), float(beat.receive_free)) for i, beat in beats]
    free += [((i.role, i.name, "send"), float(beat.send_free)) for i, beat in beats]
    yield _gauge("diffcluster_slot_free_bytes", "Free bytes of a region.", ["role", "instance", "region"], free)
    quarantined = (((i.role, i.name), float(beat.receive_quarantined)) for i, beat in beats)
    text = "Bytes of slots that someone may still write."
    yield _gauge("diffcluster_slot_quarantined_bytes", text, ["role", "instance"], quarantined)
    largest = (((i.role, i.name), float(beat.receive_largest)) for i, beat in beats)
    text = "Largest free range of the receive region: with the free bytes, how fragmented it is."
    yield _gauge("diffcluster_slot_largest_free_bytes", text, ["role", "instance"], largest)
    granted = (((i.role, i.name), float(beat.granted)) for i, beat in beats)
    yield _gauge("diffcluster_slots_granted", "Slots leased ahead and not used yet.", ["role", "instance"], granted)
    happened = (((what, detail), float(count)) for (what, detail), count in snapshot.totals.counts.items())
    yield _counter("diffcluster_events", "What has happened in the control plane.", ["event", "detail"], happened)
    bad = [((), float(snapshot.totals.bad_frames))]
    yield _counter(
        "diffcluster_bad_frames", "Frames on the control or bulk port that are no messages of ours.", [], bad
    )


def _batches(snapshot: Snapshot) -> Iterator[Metric]:
    """How well requests compute together, counted by the instances."""
    beats = [(i, i.heartbeat.computed) for i in snapshot.instances.values() if i.heartbeat is not None]
    labels = ["role", "instance"]
    calls = [((i.role, i.name), float(computed.get("calls", 0))) for i, computed in beats]
    yield _counter("diffcluster_module_calls", "Calls of the model's modules.", labels, calls)
    requests = [((i.role, i.name), float(computed.get("requests", 0))) for i, computed in beats]
    text = "Requests in those calls: divided by the calls, how many compute together."
    yield _counter("diffcluster_module_call_requests", text, labels, requests)
    reasons = [
        ((i.role, i.name, key.removeprefix("reason:")), float(count))
        for i, computed in beats
        for key, count in computed.items()
        if key.startswith("reason:")
    ]
    text = "Why no more requests were in a call, by reason."
    yield _counter("diffcluster_batch_decisions", text, [*labels, "reason"], reasons)


def _transfers(snapshot: Snapshot) -> Iterator[Metric]:
    totals = snapshot.totals
    names = {incarnation: instance.name for incarnation, instance in snapshot.instances.items()}
    links = [
        ((instance.name, names[receiver], engine or "none"), 1.0)
        for instance in snapshot.instances.values()
        for receiver, engine in instance.links.items()
        if receiver in names
    ]
    text = "How a sender writes to a receiver; `none` if it has tried and cannot."
    yield _gauge("diffcluster_link_info", text, ["sender", "receiver", "engine"], links)
    labels = ["role", "engine"]
    count = ((key, float(value)) for key, value in totals.transfers.items())
    yield _counter("diffcluster_transfers", "Hand-offs of finished requests, by receiver and engine.", labels, count)
    nbytes = ((key, float(value)) for key, value in totals.transferred.items())
    yield _counter("diffcluster_transfer_bytes", "Bytes of those hand-offs.", labels, nbytes)
