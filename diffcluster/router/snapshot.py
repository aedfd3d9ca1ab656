"""What other threads may see of the router: an immutable picture of one moment, and running totals."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from diffcluster.ids import Incarnation, RequestId, Role
from diffcluster.messages import ModelFacts
from diffcluster.router.actions import StageRecord
from diffcluster.router.state import ROUTES, Instance, Request

__all__ = ["BUCKETS", "Ended", "Histogram", "Snapshot", "Totals"]

BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
"""Upper bounds of the histograms, seconds."""


class Ended(Struct, frozen=True):
    """How a request ended: `finished`, or the code of its error."""

    outcome: str
    message: str
    stages: tuple[StageRecord, ...]
    total_s: float


@dataclass(slots=True)
class Histogram:
    """Counts by bucket (the last is above all bounds), and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count `value`."""
        self.counts[next((i for i, bound in enumerate(BUCKETS) if value <= bound), len(BUCKETS))] += 1
        self.total += value


@dataclass(slots=True)
class Totals:
    """Everything that has been counted since the router started."""

    ended: Counter[str] = field(default_factory=Counter)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad_frames: int = 0
    requests: Histogram = field(default_factory=Histogram)
    stages: dict[Role, Histogram] = field(default_factory=dict)
    transfers: Counter[tuple[str, str]] = field(default_factory=Counter)
    transferred: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Transfers and their bytes, by receiving role and engine."""

    def finished(self, stages: tuple[StageRecord, ...], total_s: float) -> None:
        """Count a finished request."""
        self.ended["finished"] += 1
        self.requests.observe(total_s)
        for stage in stages:
            self.stages.setdefault(stage.role, Histogram()).observe(stage.computed_s)
            if stage.engine is not None:
                self.transfers[stage.role, stage.engine] += 1
                self.transferred[stage.role, stage.engine] += stage.transferred

    def copy(self) -> Totals:
        """As it is now."""
        return copy.deepcopy(self)


class Snapshot(Struct, frozen=True):
    """The router at `now`, seconds of its own clock."""

    now: float
    instances: Mapping[Incarnation, Instance]
    requests: Mapping[RequestId, Request]
    models: Mapping[str, ModelFacts]
    queues: Mapping[Role, int]
    ended: Mapping[RequestId, Ended]
    totals: Totals

    def missing(self) -> list[Role]:
        """Pools without an instance, on the route that lacks the fewest; empty if requests can be served."""
        there = {instance.role for instance in self.instances.values() if not instance.draining}
        return min(([role for role in route if role not in there] for route in ROUTES), key=len)
