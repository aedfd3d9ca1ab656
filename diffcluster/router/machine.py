"""The life of every request, and the membership of every instance: the router's decisions, as a pure state machine.

`step(event)` changes the state and returns what to do. A request goes along its route like this, stage by stage:

    queued -Submit-> running -Staged-> waiting -Allocate-> allocating -Allocated/Push-> pushing -Pushed/Ready-> running
                        |                 |---------- with a Grant in hand: Push ---------->|
                        |                 ^---- AllocationRefused ---'                     |
                        |                 ^---------------- PushFailed --------------------'
                        '-Done-> finished

The input of a stage stays staged upstream until that stage has finished. Whatever a role says is looked up in
`HANDLERS` by the request's phase; what is not there, or is of another attempt, or comes from another instance than
the phase waits for, is stale: it changes no request, but what it reports as held is released.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from diffcluster.ids import Incarnation
from diffcluster.messages import (
    Allocated,
    AllocationRefused,
    Cancelled,
    Done,
    Drain,
    Evict,
    Evicted,
    Failed,
    Grant,
    Met,
    Progress,
    Pushed,
    PushFailed,
    Ready,
    Register,
    Release,
    RoleHeartbeat,
    Staged,
    StageTimings,
)  # fmt: skip
from diffcluster.router import events
from diffcluster.router.actions import Action, Count, Discard, Finish, Note, StageRecord
from diffcluster.router.dispatch import Dispatch
from diffcluster.router.endings import FIRST
from diffcluster.router.state import Cluster, Key, Limits, Phase, Request

__all__ = ["HANDLERS", "RouterMachine"]

_MAX_PUSH_FAILURES: Final = 3

_Answer = Staged | Allocated | AllocationRefused | Pushed | PushFailed | Progress | Done | Failed | Cancelled | Evicted


class RouterMachine(Dispatch):
    """The state, and the one way to change it."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits, Cluster())

    def step(self, event: events.Event) -> list[Action]:
        """Take `event`. Total: nothing that a peer says raises."""
        self.now, self.actions = event.now, []
        match event:
            case events.Submitted():
                self._submitted(event)
            case events.Heard():
                self._heard(event.sender, event.message, event.announced)
            case events.Announced():
                self.count_heard(event.sender)
            case events.Gone():
                self.lose(event.instance, "cannot be reached", blame=not event.full)
            case events.GivenUp():
                self.fail(event.request_id, "cancelled", event.reason)
            case events.Tick():
                self._expire()
                self.lose_silent()
        self.dispatch()
        self.release_drained()
        return self.actions

    # ------------------------------------------------------------ events

    def _submitted(self, event: events.Submitted) -> None:
        request = Request(event.request_id, event.parameters, event.now, event.deadline)
        self.cluster.requests[request.id] = request
        self.enqueue(FIRST, request)
        heapq.heappush(self.cluster.deadlines, (event.deadline, request.id))

    def _expire(self) -> None:
        while self.cluster.deadlines and self.cluster.deadlines[0][0] <= self.now:
            _, request_id = heapq.heappop(self.cluster.deadlines)
            request = self.cluster.requests.get(request_id)
            if request is None:
                continue
            if request.phase == "queued" and not self.complete_routes(request.parameters.model):
                self.fail(request_id, "no_instance", "a role that it needs had no instance in its time")
            else:
                where = f"{request.phase}, stage {request.stage + 1}"
                self.fail(request_id, "deadline_exceeded", f"not finished in its time; it was {where}")

    def _heard(self, sender: Incarnation, message: Any, announced: bool) -> None:
        if isinstance(message, Register):
            if self.register(sender, message):
                self.introduce(sender)
        elif sender not in self.cluster.instances:
            self.refuse_stranger(sender)
        else:
            counts = not announced and not isinstance(message, RoleHeartbeat)
            self.change(sender, last_seen=self.now, heard=self.cluster.instances[sender].heard + counts)
            match message:
                case RoleHeartbeat():
                    self.beat(sender, message)
                case Drain():
                    self.change(sender, draining=True)
                case Grant():
                    self.granted(sender, message)
                case Met():
                    self.met(sender, message)
                case _:
                    self._answered(sender, message)

    def _answered(self, sender: Incarnation, message: _Answer) -> None:
        """Book what the message says of the instance; then what it means for the request, if it still does."""
        key = (message.request_id, message.attempt)
        if isinstance(message, (Staged, Done, Failed, Cancelled, AllocationRefused, Evicted)):
            self.change(
                sender, busy=self.cluster.instances[sender].busy - {key}, full=isinstance(message, AllocationRefused)
            )
        request = self.cluster.requests.get(message.request_id)
        handler = HANDLERS.get((type(message), request.phase)) if request and request.key == key else None
        if request is not None and handler is not None and handler(self, sender, request, message):
            return
        self._stale(sender, key, message)

    def _stale(self, sender: Incarnation, key: Key, message: _Answer) -> None:
        """Give back what a message of the past reports as held."""
        request_id, attempt = key
        match message:
            case Staged():
                self.send(sender, Release(request_id=request_id, attempt=attempt))
            case Allocated():
                lease = message.slot.lease
                self.send(sender, Evict(request_id=request_id, attempt=attempt, lease=lease, settled=True))
            case Done():
                self.do(Discard(request_id, sender, attempt))
            case Pushed() | PushFailed():
                slot = (message.receiver, message.lease)
                if slot in self.cluster.closing and (isinstance(message, Pushed) or message.settled):
                    evict = Evict(request_id=request_id, attempt=attempt, lease=message.lease, settled=True)
                    self.send(message.receiver, evict)
                self.cluster.closing.pop(slot, None)
            case Cancelled() | Evicted() | Progress():
                return  # expected after a request has ended
        self.do(Count("stale", type(message).__name__))

    # ------------------------------------------------------------ answers of roles. False: it was not for this sender

    def _staged(self, sender: Incarnation, request: Request, message: Staged) -> bool:
        if sender != request.holder or request.stage + 1 >= len(request.route):
            return False
        self._stage_over(request)
        self.change(sender, retained=self.cluster.instances[sender].retained | {request.key})
        request = replace(
            request, phase="waiting", staged=message, upstream=None, stages=self._timed(request, message.timings)
        )
        self.update(request)
        self.enqueue(request.route[request.stage + 1], request)
        return True

    def _allocated(self, sender: Incarnation, request: Request, message: Allocated) -> bool:
        if sender != request.receiver or request.holder is None:
            return False
        self.push(request, message.slot)
        return True

    def _allocation_refused(self, sender: Incarnation, request: Request, message: AllocationRefused) -> bool:
        if sender != request.receiver:
            return False
        self.do(Count("allocation_refused"))
        if message.permanent:
            self.fail(request.id, "out_of_memory", f"no receiver can take its tensors: {message.reason}")
        else:
            self.wait_again(request)
            self.give_grants_back(sender)
        return True

    def _pushed(self, sender: Incarnation, request: Request, message: Pushed) -> bool:
        if not self._is_of_this_push(sender, request, message):
            return False
        assert request.receiver is not None
        assert request.slot is not None
        assert request.staged is not None
        receiver = self.cluster.instances[request.receiver]
        record = StageRecord(
            receiver.role, receiver.name, 0.0, 0.0, 0.0, message.engine, message.seconds, message.nbytes
        )
        ready = Ready(
            request_id=request.id,
            attempt=request.attempt,
            lease=request.slot.lease,
            manifest=request.staged.manifest,
            scalars=request.staged.scalars,
            parameters=request.parameters,
            checksum=request.staged.checksum,
        )
        self.send(request.receiver, ready)
        self.update(
            replace(
                request,
                phase="running",
                stage=request.stage + 1,
                upstream=request.holder,
                holder=request.receiver,
                receiver=None,
                slot=None,
                stages=(*request.stages, record),
            )
        )
        return True

    def _push_failed(self, sender: Incarnation, request: Request, message: PushFailed) -> bool:
        if not self._is_of_this_push(sender, request, message):
            return False
        assert request.receiver is not None
        self.do(Count("push_failed"))
        self.do(
            Note(
                f"a push of {request.id} to {self.cluster.instances[request.receiver].name} failed: {message.reason}",
                True,
            )
        )
        evict = Evict(request_id=request.id, attempt=request.attempt, lease=message.lease, settled=message.settled)
        self.send(request.receiver, evict)
        failed_at = (*request.failed_at, request.receiver)
        request = replace(request, push_failures=request.push_failures + 1, failed_at=failed_at)
        if request.push_failures >= _MAX_PUSH_FAILURES:
            self.update(replace(request, phase="waiting", receiver=None, slot=None))
            self.fail(request.id, "transfer_failed", f"its tensors could not be handed over: {message.reason}")
        else:
            self.wait_again(request)
        return True

    @staticmethod
    def _is_of_this_push(sender: Incarnation, request: Request, message: Pushed | PushFailed) -> bool:
        """A push to an earlier receiver, or by an earlier holder, must not be taken for this one."""
        if request.slot is None or sender != request.holder:
            return False
        return (message.receiver, message.lease) == (request.receiver, request.slot.lease)

    def _progress(self, sender: Incarnation, request: Request, message: Progress) -> bool:
        if sender == request.holder:
            self.update(replace(request, step=message.step))
        return True

    def _done(self, sender: Incarnation, request: Request, message: Done) -> bool:
        if sender != request.holder or request.stage + 1 != len(request.route):
            return False
        self._stage_over(request)
        del self.cluster.requests[request.id]
        self.do(Finish(request.id, sender, request.attempt, self._timed(request, message.timings)))
        return True

    def _failed(self, sender: Incarnation, request: Request, message: Failed) -> bool:
        if sender != request.holder:
            return False
        name = self.cluster.instances[sender].name
        self._stage_over(request)
        request = replace(request, upstream=None, holder=None, push_failures=request.push_failures + 1)
        self.update(request)
        if message.code == "transfer_failed" and request.push_failures < _MAX_PUSH_FAILURES:
            self.do(Note(f"what {name} received for {request.id} cannot be used: {message.reason}", warning=True))
            self.restart(request, blame=False)
        else:
            reason = f"{message.reason} ({name})" if message.code == "worker_error" else message.reason
            self.fail(request.id, message.code, reason)
        return True

    def _stage_over(self, request: Request) -> None:
        """The input of the stage that has just ended is not needed any more."""
        if request.upstream is not None:
            self.release(request.upstream, request.key)

    @staticmethod
    def _timed(request: Request, timings: StageTimings) -> tuple[StageRecord, ...]:
        *before, last = request.stages
        done = replace(last, queued_s=timings.queued_s, loaded_s=timings.loaded_s, computed_s=timings.computed_s)
        return (*before, done)


HANDLERS: Final[dict[tuple[type, Phase], Callable[[RouterMachine, Incarnation, Request, Any], bool]]] = {
    (Staged, "running"): RouterMachine._staged,
    (Allocated, "allocating"): RouterMachine._allocated,
    (AllocationRefused, "allocating"): RouterMachine._allocation_refused,
    (Pushed, "pushing"): RouterMachine._pushed,
    (PushFailed, "pushing"): RouterMachine._push_failed,
    (Progress, "running"): RouterMachine._progress,
    (Done, "running"): RouterMachine._done,
    (Failed, "running"): RouterMachine._failed,
}
"""What an answer does, by the phase of its request. All other pairs are stale."""
