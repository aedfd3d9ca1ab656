"""All that the router knows: instances, requests, and who waits for what."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct, field

from diffcluster.ids import PIPELINE_ROUTE, Incarnation, InstanceName, LeaseId, RequestId, Role
from diffcluster.messages import (
    EngineKind,
    GenerationParameters,
    ModelFacts,
    Register,
    RoleHeartbeat,
    SlotAddress,
    Staged,
)
from diffcluster.router.actions import StageRecord

__all__ = ["ROUTES", "Cluster", "Instance", "Key", "Limits", "Phase", "Request"]

Key = tuple[RequestId, int]
"""A request and which attempt at it."""

Phase = Literal["queued", "running", "waiting", "allocating", "pushing"]
"""
queued       for an instance of the first pool
running      `holder` computes stage `stage`; `upstream` still keeps that stage's input
waiting      `holder` has staged the output of `stage`; no receiver of the next pool has room
allocating   `receiver` was asked for a slot
pushing      `holder` writes into `slot` of `receiver`
"""

ROUTES: Final[tuple[tuple[Role, ...], ...]] = (PIPELINE_ROUTE, ("monolithic",))
"""The ways through the pools. A request takes one whose pools all have an instance."""


class Limits(Struct, frozen=True):
    """Settings of the machine; see `RouterConfig`."""

    heartbeat_s: float
    max_losses: int
    bulk_port: int


class Instance(Struct, frozen=True):
    """A registered role process. `busy`: what it was given and has not answered. `retained`: what it keeps staged."""

    register: Register
    registered_at: float
    last_seen: float
    busy: frozenset[Key] = frozenset()
    retained: frozenset[Key] = frozenset()
    given: int = 0
    said: int = 0
    heard: int = 0
    """Messages to and from it since it registered, heartbeats and registration apart."""
    draining: bool = False
    full: bool = False
    """It refused a slot; ask no more until it reports that something became free."""
    grants: tuple[SlotAddress, ...] = ()
    """Slots that it leased ahead, and that no request uses yet."""
    links: dict[Incarnation, EngineKind | None] = {}
    """How it reaches the receivers that it has met; None: not at all."""
    heartbeat: RoleHeartbeat | None = None

    @property
    def role(self) -> Role:
        """Its pool."""
        return self.register.role

    @property
    def name(self) -> InstanceName:
        """What people call it."""
        return self.register.name


class Request(Struct, frozen=True):
    """One picture on its way."""

    id: RequestId
    parameters: GenerationParameters
    submitted_at: float
    deadline: float
    route: tuple[Role, ...] = ()
    stage: int = 0
    phase: Phase = "queued"
    attempt: int = 1
    holder: Incarnation | None = None
    upstream: Incarnation | None = None
    receiver: Incarnation | None = None
    slot: SlotAddress | None = None
    staged: Staged | None = None
    losses: int = 0
    push_failures: int = 0
    failed_at: tuple[Incarnation, ...] = ()
    """Receivers to which pushes of this attempt failed, once for each time."""
    step: int = 0
    stages: tuple[StageRecord, ...] = ()

    @property
    def key(self) -> Key:
        """The request and its attempt."""
        return (self.id, self.attempt)


class Cluster(Struct):
    """The whole state. Values are frozen and replaced, so a shallow copy is a snapshot."""

    instances: dict[Incarnation, Instance] = field(default_factory=dict)
    names: dict[InstanceName, Incarnation] = field(default_factory=dict)
    retired: dict[Incarnation, str] = field(default_factory=dict)
    """Incarnations that must not come back, and why; the oldest are forgotten."""
    models: dict[str, ModelFacts] = field(default_factory=dict)
    requests: dict[RequestId, Request] = field(default_factory=dict)
    queues: dict[Role, dict[RequestId, None]] = field(default_factory=dict)
    """Requests that wait for an instance of a pool, oldest first. Those new to the cluster wait at `encoder`."""
    deadlines: list[tuple[float, RequestId]] = field(default_factory=list)
    """A heap."""
    closing: dict[tuple[Incarnation, LeaseId], Incarnation] = field(default_factory=dict)
    """Slots of receivers whose request has ended while a sender may still write, and that sender: when it says that it
    is over, they hear."""

    def pool(self, role: Role) -> list[tuple[Incarnation, Instance]]:
        """All instances of a role."""
        return [(incarnation, instance) for incarnation, instance in self.instances.items() if instance.role == role]
