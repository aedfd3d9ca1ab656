"""When two worlds of handoffs are the same: what they will do is what counts, not how they came there.

Leases are numbered in the order in which they are met here; times, and counts whose differences alone matter, are left
out. So a world that went round in a circle is where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from diffcluster import messages as m
from diffcluster.ids import Incarnation, LeaseId
from diffcluster.roles.jobs import Job
from diffcluster.router.state import Cluster, Request
from tests.model.handoff_role import Process

if TYPE_CHECKING:
    from tests.model.handoff import Handoff

__all__ = ["key_of", "lost_down", "lost_up"]

_UNCOUNTED = (m.Register, m.RoleHeartbeat, m.Registered, m.Refused, m.RouterHeartbeat, m.Drained, m.Drain)

_Name = Callable[[Incarnation, LeaseId], int]


def _counted(queue: Iterable[Any]) -> int:
    return sum(not isinstance(message, _UNCOUNTED) for message in queue)


def lost_up(world: Handoff, process: Process) -> int:
    """How many messages of a process did not reach the router, as far as its next heartbeat will show."""
    known = world.cluster.instances.get(process.incarnation)
    if known is None or not process.control._registered:
        return 0
    return process.control._said - known.heard - _counted(world.up[process.incarnation])


def lost_down(world: Handoff, process: Process) -> int:
    """The same in the other direction."""
    known = world.cluster.instances.get(process.incarnation)
    if known is None:
        return 0
    got, coming = process.control._got, list(world.down[process.incarnation])
    for place, message in enumerate(coming):
        if isinstance(message, m.Registered) and message.fresh:
            got, coming = 0, coming[place + 1 :]
            break
    return known.said - got - _counted(coming)


def key_of(world: Handoff) -> object:
    """Equal for worlds with the same future."""
    names: dict[tuple[Incarnation, LeaseId], int] = {}

    def name(where: Incarnation, lease: LeaseId) -> int:
        return names.setdefault((where, lease), len(names))

    processes = tuple(_process(world, process, name) for process in world.processes.values())
    cluster = world.cluster
    return (
        processes,
        _router(cluster, name),
        tuple(tuple(_up(world, i, queue, name)) for i, queue in world.up.items()),
        tuple(tuple(_down(world, i, queue, name)) for i, queue in world.down.items()),
        tuple(sorted(
            (w.sender, w.request_id, w.attempt, w.receiver, name(w.receiver, w.lease), w.offset, w.phase)
            for w in world.writes
        )),
        frozenset((*owed[:-1], name(owed[2], owed[3])) if owed[0] == "push" else owed for owed in world.owed),
        world.answers, world.budget,
    )  # fmt: skip


def _process(world: Handoff, process: Process, name: _Name) -> object:
    if not process.alive:
        return process.crashed
    me, machine, control = process.incarnation, process.machine, process.control
    leases = sorted(machine.receive._leases.values(), key=lambda lease: lease.offset)
    outputs = {lease.id: lease.offset for lease in machine.send._leases.values()}
    return (
        control._registered, control._cut, lost_up(world, process), lost_down(world, process),
        tuple(_brief(me, message, name) for message in control._outbox),
        tuple(_brief(me, message, name) for message in control._held),
        tuple((name(me, x.id), x.offset, x.state, x.id in process.windows, process.received.get(x.id)) for x in leases),
        tuple((outputs[x.id], x.state, process.outputs.get(x.id)) for x in machine.send._leases.values()),
        tuple(_job(me, job, outputs, name) for job in machine.jobs.values()),
        tuple(name(me, lease) for lease in machine.grants),
        bool(machine._sizes), machine._refused, machine._joined,
        tuple((ready.request_id, ready.attempt) for ready in process.loads),
        tuple(work.key for work in process.computes), tuple(work.key for work in process.packs),
        frozenset(process.met), tuple(process.contacts),
    )  # fmt: skip


def _job(me: Incarnation, job: Job, outputs: dict[LeaseId, int], name: _Name) -> object:
    return (
        job.key, job.phase, job.slot and name(me, job.slot.lease), job.output and outputs[job.output], job.pushing,
        job.source_held, job.gone,
    )  # fmt: skip


def _router(cluster: Cluster, name: _Name) -> object:
    least = {x.role: min(y.given for _, y in cluster.pool(x.role)) for x in cluster.instances.values()}
    return (
        tuple(
            (i, x.busy, x.retained, x.draining, x.full, x.given - least[x.role],
             tuple(name(i, slot.lease) for slot in x.grants), tuple(x.links.items()))
            for i, x in cluster.instances.items()
        ),
        tuple(_request(request, name) for request in cluster.requests.values()),
        tuple(tuple(queue) for queue in cluster.queues.values()),
        tuple((receiver, name(receiver, lease), sender) for (receiver, lease), sender in cluster.closing.items()),
        tuple(cluster.retired),
    )  # fmt: skip


def _request(r: Request, name: _Name) -> object:
    slot = name(r.receiver, r.slot.lease) if r.receiver is not None and r.slot is not None else None
    return (
        r.id, r.phase, r.stage, r.attempt, r.holder, r.upstream, r.receiver, slot, r.losses, r.push_failures,
        r.failed_at,
    )  # fmt: skip


def _up(world: Handoff, sender: Incarnation, queue: tuple[Any, ...], name: _Name) -> Iterable[object]:
    known = world.cluster.instances.get(sender)
    for place, message in enumerate(queue):
        if isinstance(message, m.RoleHeartbeat):
            missing = message.said - known.heard - _counted(queue[:place]) if known is not None else 0
            yield ("RoleHeartbeat", message.cut, missing)
        else:
            yield _brief(sender, message, name)


def _down(world: Handoff, to: Incarnation, queue: tuple[Any, ...], name: _Name) -> Iterable[object]:
    got = world.processes[to].control._got
    for message in queue:
        if isinstance(message, m.RouterHeartbeat):
            yield ("RouterHeartbeat", message.said - got)
        else:
            yield _brief(to, message, name)
        if isinstance(message, m.Registered) and message.fresh:
            got = 0
        got += _counted((message,))


def _brief(role: Incarnation, message: Any, name: _Name) -> object:
    """What matters of a message from or to `role`."""
    kind = type(message).__name__
    match message:
        case m.Push():
            to = name(message.peer.incarnation, message.slot.lease)
            return (kind, message.request_id, message.attempt, to, message.slot.offset)
        case m.Pushed() | m.PushFailed():
            to = name(message.receiver, message.lease)
            return (kind, message.request_id, message.attempt, to, isinstance(message, m.Pushed) or message.settled)
        case m.Ungrant():
            return (kind, tuple(name(role, lease) for lease in message.leases))
        case m.Grant() | m.Allocated():
            return (kind, name(role, message.slot.lease), *_fields(message))
        case m.Ready() | m.Evicted() | m.Evict():
            return (kind, name(role, message.lease), *_fields(message))
        case m.Meet():
            return (kind, message.peer.incarnation)
    return (kind, *_fields(message))


def _fields(message: Any) -> Iterable[object]:
    for field in ("request_id", "attempt", "settled", "fresh", "again", "receiver", "code", "engine"):
        if hasattr(message, field):
            yield getattr(message, field)
