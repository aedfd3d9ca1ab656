"""How requests end, begin again, and let go of what they hold. The part of the router's machine that all others use."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from diffcluster.errors import FailureCode
from diffcluster.ids import Incarnation, RequestId, Role
from diffcluster.messages import Cancel, Evict, Release
from diffcluster.router.actions import Count, Fail
from diffcluster.router.links import Links
from diffcluster.router.state import Key, Request

__all__ = ["FIRST", "Endings"]

FIRST: Final[Role] = "encoder"
"""The queue of requests that have no route yet."""


MAX_ATTEMPTS: Final = 30
"""Of a request whose instances are cut off again and again, through no fault of its own."""


class Endings(Links):
    """Changes of requests that are not an answer to a message of theirs."""

    def instance_lost(self, lost: Incarnation, *, blame: bool) -> None:
        """Deal with the requests that a lost instance had a part in. Called after it left the cluster.

        `blame`: it may have died of one of them.
        """
        for request in list(self.cluster.requests.values()):
            if request.receiver == lost:
                self.wait_again(request)
            elif request.holder == lost:
                self.restart(request, blame=blame)
            elif request.upstream == lost:
                self.update(replace(request, upstream=None))  # its work is done

    def restart(self, request: Request, *, blame: bool) -> None:
        """Begin again with another attempt, unless the request seems to be what kills instances."""
        losses = request.losses + blame
        if blame and losses >= self.limits.max_losses:
            self.update(replace(request, losses=losses))
            self.fail(
                request.id, "worker_error", f"{losses} instances died while they worked on it; it is not tried again"
            )
            return
        if request.attempt >= MAX_ATTEMPTS:
            self.fail(request.id, "no_instance", f"{request.attempt} attempts were cut off: the links do not hold")
            return
        self.let_go(request)
        again = Request(
            request.id,
            request.parameters,
            request.submitted_at,
            request.deadline,
            attempt=request.attempt + 1,
            losses=losses,
            push_failures=request.push_failures,
        )
        self.update(again)
        self.enqueue(FIRST, again)
        self.do(Count("restarted"))

    def wait_again(self, request: Request) -> None:
        """Look for another receiver."""
        request = replace(request, phase="waiting", receiver=None, slot=None)
        self.update(request)
        self.enqueue(request.route[request.stage + 1], request)

    def fail(self, request_id: RequestId, code: FailureCode, message: str) -> None:
        """End a request with an error, if it has not ended yet."""
        request = self.cluster.requests.get(request_id)
        if request is not None:
            self.let_go(request)
            del self.cluster.requests[request_id]
            self.do(Fail(request_id, code, message))

    def let_go(self, request: Request) -> None:
        """Make everyone give up what they hold for this attempt."""
        for queue in self.cluster.queues.values():
            queue.pop(request.id, None)
        request_id, attempt = request.key
        if request.upstream is not None:
            self.release(request.upstream, request.key)
        if request.phase == "running" and request.holder is not None:
            self.send(request.holder, Cancel(request_id=request_id, attempt=attempt))
        elif request.holder is not None:
            self.release(request.holder, request.key)
        if request.receiver is None:
            return
        if request.phase == "pushing" and request.slot is not None:
            if request.holder is not None and request.holder in self.cluster.instances:
                self.cluster.closing[request.receiver, request.slot.lease] = request.holder
            self.send(
                request.receiver,
                Evict(request_id=request_id, attempt=attempt, lease=request.slot.lease, settled=False),
            )
        else:
            self.send(request.receiver, Cancel(request_id=request_id, attempt=attempt))

    def release(self, holder: Incarnation, key: Key) -> None:
        """What `holder` has staged for this attempt is not needed any more."""
        instance = self.cluster.instances.get(holder)
        if instance is not None:
            self.change(holder, retained=instance.retained - {key})
            self.send(holder, Release(request_id=key[0], attempt=key[1]))

    def enqueue(self, role: Role, request: Request) -> None:
        """Let a request wait for an instance of `role`, behind those that wait already."""
        self.cluster.queues.setdefault(role, {})[request.id] = None

    def update(self, request: Request) -> None:
        """Put the new state of a request in place of the old one."""
        self.cluster.requests[request.id] = request
