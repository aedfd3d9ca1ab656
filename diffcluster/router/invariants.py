"""What is true of the router's state after every event. Tests check it at each step; it finds bugs, not bad input."""

from __future__ import annotations

from collections.abc import Iterator

from diffcluster.router.state import Cluster, Request

__all__ = ["violations"]


def violations(cluster: Cluster) -> list[str]:
    """What is wrong with `cluster`; empty if nothing is."""
    found = [
        f"{request.id}: {problem}" for request in cluster.requests.values() for problem in _of_request(cluster, request)
    ]
    found += [
        f"{i}: registered under another name" for i, x in cluster.instances.items() if cluster.names.get(x.name) != i
    ]
    for incarnation, instance in cluster.instances.items():
        if len(instance.busy) > instance.register.max_outstanding:
            found.append(f"{incarnation}: has {len(instance.busy)} requests, takes {instance.register.max_outstanding}")
    for receiver, instance in cluster.instances.items():
        leases = [slot.lease for slot in instance.grants]
        leases += [x.slot.lease for x in cluster.requests.values() if x.receiver == receiver and x.slot is not None]
        if len(leases) != len(set(leases)):
            found.append(f"{receiver}: a slot is used twice, or used and granted: {sorted(leases)}")
        found += [
            f"{receiver}: linked to {other}, which is gone"
            for other in instance.links
            if other not in cluster.instances
        ]
    for role, queue in cluster.queues.items():
        found += [
            f"{request_id}: ended, but queued at {role}" for request_id in queue if request_id not in cluster.requests
        ]
    return found


def _of_request(cluster: Cluster, request: Request) -> Iterator[str]:
    queued = [role for role, queue in cluster.queues.items() if request.id in queue]
    waits = request.phase in ("queued", "waiting")
    if len(queued) != int(waits):
        yield f"{request.phase}, but in the queues of {queued}"
    if request.phase != "queued" and request.holder not in cluster.instances:
        yield f"{request.phase}, but its holder is not there"
    if (request.receiver is not None) != (request.phase in ("allocating", "pushing")):
        yield f"{request.phase}, with receiver {request.receiver}"
    if request.receiver is not None and request.receiver not in cluster.instances:
        yield f"{request.phase}, but its receiver is not there"
    if (request.slot is not None) != (request.phase == "pushing"):
        yield f"{request.phase}, with slot {request.slot}"
    if request.phase in ("waiting", "allocating", "pushing"):
        holder = cluster.instances.get(request.holder) if request.holder else None
        if request.staged is None or holder is None or request.key not in holder.retained:
            yield f"{request.phase}, but nothing is staged for it"
    runs = request.phase == "running" and request.holder in cluster.instances
    if runs and request.holder is not None and request.key not in cluster.instances[request.holder].busy:
        yield "running, but its holder is not busy with it"
    upstream = cluster.instances.get(request.upstream) if request.upstream else None
    if upstream is not None and request.key not in upstream.retained:
        yield "running, but its input is not retained"
