"""Who gets what waits: instances and slots for requests. Under the router's machine."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from diffcluster.ids import Incarnation, Role
from diffcluster.messages import Allocate, Grant, Push, SlotAddress, Submit, Ungrant
from diffcluster.router.actions import Count, StageRecord
from diffcluster.router.endings import Endings
from diffcluster.router.links import peer
from diffcluster.router.policy import least_loaded
from diffcluster.router.state import ROUTES, Instance, Request

__all__ = ["Dispatch"]

_TRIES_PER_PAIR: Final = 2
"""Pushes between the same two instances that may fail before another receiver is preferred."""

_MAX_GRANTS: Final = 256
"""Of one instance; it should know better than to lease more ahead."""


class Dispatch(Endings):
    """Takes from the queues."""

    def dispatch(self) -> None:
        """Give what waits to whoever has room."""
        for role in ROUTES[0]:
            queue = self.cluster.queues.setdefault(role, {})
            if not queue:
                continue
            given, full = [], set()
            for request_id in queue:
                request = self.cluster.requests[request_id]
                chosen = None if request.parameters.model in full else self._choose(role, request)
                if chosen is not None:
                    given.append(request_id)
                    self._give(chosen, request)
                elif not self._is_being_evicted(role, request):
                    full.add(request.parameters.model)
                if full.issuperset(self.cluster.models):
                    break  # nobody further back can have more luck
            for request_id in given:
                del queue[request_id]

    def _choose(self, role: Role, request: Request) -> Incarnation | None:
        """An instance of `role`; for a request without a route, one of the first pool of any route that is complete."""
        model = request.parameters.model
        if request.route:
            return least_loaded(self._receivers(role, request))
        complete = self.complete_routes(model)
        return least_loaded([instance for route in complete for instance in self.pool(route[0], model)])

    def complete_routes(self, model: str) -> list[tuple[Role, ...]]:
        """The routes all of whose pools have an instance for `model`."""
        return [route for route in ROUTES if all(self.pool(pool, model) for pool in route)]

    def _receivers(self, role: Role, request: Request) -> list[tuple[Incarnation, Instance]]:
        """Instances that may be given a request: those whose region is large enough, that its holder can reach, and to
        which pushes did not fail already. Where none is left after one of these questions, it is not asked.
        """
        assert request.staged is not None, "what looks for a receiver is staged"
        nbytes = request.staged.manifest.nbytes
        pool = self.pool(role, request.parameters.model)
        pool = [entry for entry in pool if entry[1].register.slot_bytes >= nbytes] or pool
        pool = [entry for entry in pool if self.can_reach(request.holder, entry[0])] or pool
        pool = [entry for entry in pool if request.failed_at.count(entry[0]) < _TRIES_PER_PAIR] or pool
        return [entry for entry in pool if request.key not in entry[1].busy]

    def _is_being_evicted(self, role: Role, request: Request) -> bool:
        """An instance that gave it a slot has not answered `Evict` yet: until then it is not asked again, so that what
        it says of this attempt means one slot only.
        """
        return any(request.key in instance.busy for _, instance in self.pool(role, request.parameters.model))

    def _give(self, chosen: Incarnation, request: Request) -> None:
        instance = self.cluster.instances[chosen]
        self.change(chosen, busy=instance.busy | {request.key}, given=instance.given + 1)
        if request.phase == "queued":
            route = next(route for route in ROUTES if route[0] == instance.role)
            record = StageRecord(instance.role, instance.name, 0.0, 0.0, 0.0)
            self.update(replace(request, phase="running", route=route, holder=chosen, stages=(record,)))
            self.send(chosen, Submit(request_id=request.id, attempt=request.attempt, parameters=request.parameters))
        else:
            assert request.staged is not None, "what waits for a receiver is staged"
            self._find_slot(chosen, request, request.staged.manifest.nbytes)

    def _find_slot(self, receiver: Incarnation, request: Request, nbytes: int) -> None:
        """The smallest grant that is large enough; else the receiver is asked for a slot."""
        grants = self.cluster.instances[receiver].grants
        slot = min((slot for slot in grants if slot.nbytes >= nbytes), key=lambda slot: slot.nbytes, default=None)
        if slot is None:
            self.do(Count("grant_missed"))
            self.update(replace(request, phase="allocating", receiver=receiver))
            self.send(receiver, Allocate(request_id=request.id, attempt=request.attempt, nbytes=nbytes))
        else:
            self.do(Count("grant_used"))
            self.change(receiver, grants=tuple(grant for grant in grants if grant is not slot))
            self.push(replace(request, receiver=receiver), slot)

    def push(self, request: Request, slot: SlotAddress) -> None:
        """Have the holder of a request write into a slot of its receiver."""
        assert request.holder is not None
        assert request.receiver is not None
        self.update(replace(request, phase="pushing", slot=slot))
        receiver = self.cluster.instances[request.receiver].register
        push = Push(request_id=request.id, attempt=request.attempt, peer=peer(receiver), slot=slot)
        self.send(request.holder, push)

    def granted(self, sender: Incarnation, message: Grant) -> None:
        """A receiver has leased a slot ahead: so it has room again."""
        grants = self.cluster.instances[sender].grants
        if len(grants) < _MAX_GRANTS:
            self.change(sender, grants=(*grants, message.slot), full=False)
        else:
            self.send(sender, Ungrant(leases=(message.slot.lease,)))

    def give_grants_back(self, receiver: Incarnation) -> None:
        """Make room at a receiver that had to refuse a slot."""
        grants = self.cluster.instances[receiver].grants
        if grants:
            self.change(receiver, grants=())
            self.send(receiver, Ungrant(leases=tuple(slot.lease for slot in grants)))
