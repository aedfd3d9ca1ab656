"""A small world around the router's machine: roles, links and transfers, each step of which may come at any time.

Roles are tables, not the real `RoleMachine`: a state must be small, so that all of them can be visited. They react to
messages as roles do, with the worst engine there is: a window that was closed keeps no writer out, so that a slot is
safe only because it is quarantined. Links keep their order. What has arrived when a process dies may be heard later.

Time stands still: heartbeats, the end of a quarantine and a deadline are steps of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from msgspec.structs import replace

from diffcluster import messages as m
from diffcluster.ids import Incarnation, RequestId, Role
from diffcluster.router import events
from diffcluster.router.actions import Fail, Finish, Send
from diffcluster.router.invariants import violations
from diffcluster.router.machine import RouterMachine
from diffcluster.router.state import Cluster, Key, Limits
from tests.support import TIMINGS, manifest, parameters, register, slot

LIMITS = Limits(heartbeat_s=1e9, max_losses=3, bulk_port=1)
DEADLINE = 100.0
PARAMETERS, MANIFEST = parameters(), manifest()
LAST: frozenset[Role] = frozenset({"decoder", "monolithic"})
_NO_PART_OF_THIS = (m.Meet, m.Part)
"""Who knows whom changes nothing for table roles; nor do they lease ahead. The world of handoffs has both."""

Said = tuple[Any, ...]
"""A message in a queue: its type's name, and what matters of it. Small and hashable."""

Slot = tuple[Incarnation, int]


class ViolationError(AssertionError):
    """Something happened that must never happen."""


def _demand(condition: object, problem: str) -> None:
    if not condition:
        raise ViolationError(problem)


class Job(NamedTuple):
    """What a role does for a request: leased, computing, given_up (until the computation notices), staged."""

    key: Key
    phase: str
    lease: int = 0


class RoleState(NamedTuple):
    """One process. `registered` is what it believes."""

    role: Role
    number: int
    registered: bool = True
    alive: bool = True
    crashed: bool = False
    jobs: frozenset[Job] = frozenset()
    quarantined: frozenset[int] = frozenset()
    leases: int = 0

    def job(self, key: Key) -> Job | None:
        return next((job for job in self.jobs if job.key == key), None)


class Write(NamedTuple):
    """A transfer. A ghost is one that its sender has given up, and whose bytes may still arrive."""

    sender: Incarnation
    key: Key
    to: Slot
    ghost: bool = False


class Budget(NamedTuple):
    """What may yet go wrong."""

    crashes: int = 0
    restarts: int = 0
    cuts: int = 0
    cancels: int = 0
    deadline: bool = False
    lost_writes: int = 0
    failures: int = 0
    drains: int = 0


class World:
    """One state of everything. `slots` is how many leases a receiver has room for."""

    machine = RouterMachine(LIMITS)

    def __init__(self, pools: dict[Role, int], requests: int, budget: Budget, slots: int = 2) -> None:
        self.cluster = Cluster()
        self.roles: dict[Incarnation, RoleState] = {}
        self.up: dict[Incarnation, tuple[Said, ...]] = {}
        self.down: dict[Incarnation, tuple[Said, ...]] = {}
        self.writes: frozenset[Write] = frozenset()
        self.complete: frozenset[Slot] = frozenset()
        self.answers: tuple[int, ...] = (0,) * requests
        self.budget, self.slots = budget, slots
        for role, count in pools.items():
            for _ in range(count):
                self._start(role, len(self.roles) + 1, registered=True)
        for incarnation in self.roles:
            self._route(events.Heard(incarnation, build(("Register", *self._who(incarnation))), 0.0))
        self.down = dict.fromkeys(self.roles, ())
        for number in range(requests):
            self._route(events.Submitted(RequestId(str(number)), PARAMETERS, DEADLINE, 0.0))

    def _start(self, role: Role, number: int, *, registered: bool, name: int = 0) -> Incarnation:
        incarnation = register(role, number).incarnation
        self.roles[incarnation] = RoleState(role, name or number, registered)
        self.up[incarnation] = self.down[incarnation] = ()
        return incarnation

    def _who(self, incarnation: Incarnation) -> tuple[Role, int, str]:
        state = self.roles[incarnation]
        return state.role, state.number, incarnation

    # ------------------------------------------------------------ as a value

    def copy(self) -> World:
        """A world that can be changed without changing this one; states are shared, since they are frozen."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        old = self.cluster
        new.cluster = Cluster(
            dict(old.instances), dict(old.names), dict(old.retired), old.models, dict(old.requests),
            {role: dict(queue) for role, queue in old.queues.items()}, list(old.deadlines), old.closing.copy(),
        )  # fmt: skip
        new.roles, new.up, new.down = dict(self.roles), dict(self.up), dict(self.down)
        return new

    def key(self) -> object:
        """Equal for worlds with the same future. Left out: times, timings, and what other fields imply."""
        cluster = self.cluster
        least = {x.role: min(y.given for _, y in cluster.pool(x.role)) for x in cluster.instances.values()}
        return (
            tuple(
                (i, x.busy, x.retained, x.draining, x.full, x.given - least[x.role])
                for i, x in cluster.instances.items()
            ),
            tuple(
                (r.id, r.phase, r.stage, r.attempt, r.holder, r.upstream, r.receiver, r.slot and r.slot.lease,
                 r.losses, r.push_failures, r.failed_at)
                for r in cluster.requests.values()
            ),
            tuple(tuple(queue) for queue in cluster.queues.values()), frozenset(cluster.closing),
            tuple(cluster.retired),
            tuple(self.roles.items()), tuple(self.up.values()), tuple(self.down.values()), self.writes, self.complete,
            self.answers, self.budget,
        )  # fmt: skip

    def at_rest(self) -> bool:
        """All requests have ended, once, and nobody holds anything for them."""
        cluster = self.cluster
        router_holds = cluster.requests or cluster.closing or any(cluster.queues.values())
        instances_hold = any(x.busy or x.retained for x in cluster.instances.values())
        roles_hold = any(state.alive and (state.jobs or state.quarantined) for state in self.roles.values())
        under_way = self.writes or any(self.up.values()) or any(self.down.values())
        return self.answers == (1,) * len(self.answers) and not (
            router_holds or instances_hold or roles_hold or under_way
        )

    # ------------------------------------------------------------ steps

    def fair_steps(self) -> Iterator[tuple[Any, ...]]:
        """What happens by itself sooner or later."""
        for incarnation, state in self.roles.items():
            known = self.cluster.instances.get(incarnation)
            waits = known is None or known.full
            if self.up[incarnation]:
                yield ("hear", incarnation)
            elif state.alive and state.registered and waits and not self.down[incarnation]:
                yield ("beat", incarnation)
            if state.alive:
                yield from self._role_steps(incarnation, state)
                continue
            if known is not None and state.crashed:
                yield ("notice", incarnation)
            if self.budget.restarts and state.crashed:
                yield ("restart", incarnation)
        for write in self.writes:
            if not write.ghost:
                yield ("write", write)
            elif not self.roles[write.to[0]].alive:
                yield ("fade", write)

    def _role_steps(self, incarnation: Incarnation, state: RoleState) -> Iterator[tuple[Any, ...]]:
        if self.down[incarnation]:
            yield ("take", incarnation)
        for job in state.jobs:
            if job.phase in ("computing", "given_up"):
                yield ("compute", incarnation, job)
        for lease in state.quarantined:
            if not self._may_begin_to_write(incarnation, lease):
                yield ("settle", incarnation, lease)

    def _may_begin_to_write(self, receiver: Incarnation, lease: int) -> bool:
        """Whether a sender writes in good faith, or was told to: a quarantine is longer than that can take."""
        told = any(
            said[0] == "Push" and said[3:] == (receiver, lease) for queue in self.down.values() for said in queue
        )
        return told or any(write.to == (receiver, lease) and not write.ghost for write in self.writes)

    def other_steps(self) -> Iterator[tuple[Any, ...]]:
        """What may happen or not, while the budget lasts."""
        budget = self.budget
        for incarnation, state in self.roles.items():
            if state.alive:
                yield from self._misfortunes(incarnation, state)
        if budget.cancels:
            for request_id in self.cluster.requests:
                yield ("cancel", request_id)
        if budget.deadline and self.cluster.requests:
            yield ("expire",)
        if budget.lost_writes:
            for write in self.writes:
                if not write.ghost:
                    yield ("lose_write", write)

    def _misfortunes(self, incarnation: Incarnation, state: RoleState) -> Iterator[tuple[Any, ...]]:
        budget = self.budget
        if budget.crashes:
            yield ("crash", incarnation)
        if budget.cuts and incarnation in self.cluster.instances:
            yield ("cut", incarnation)
        if budget.drains and incarnation in self.cluster.instances:
            yield ("drain", incarnation)
        if budget.failures:
            for job in state.jobs:
                if job.phase == "computing":
                    yield ("fail", incarnation, job)

    def after(self, step: tuple[Any, ...]) -> World:
        """The world after `step`."""
        new = self.copy()
        getattr(new, "_" + step[0])(*step[1:])
        return new

    def _spend(self, **amounts: Any) -> None:
        self.budget = self.budget._replace(**amounts)

    # ------------------------------------------------------------ the router

    def _route(self, event: events.Event) -> None:
        machine = self.machine
        machine.cluster = self.cluster
        there = set(self.cluster.instances)
        for action in machine.step(event):
            match action:
                case Send():
                    self._post(action.to, action.message, there | set(self.cluster.instances))
                    if isinstance(action.message, m.Drained):
                        there.discard(action.to)
                case Finish() | Fail():
                    self._answer(int(action.request_id))
        problems = violations(self.cluster)
        _demand(not problems, "; ".join(problems))

    def _answer(self, request: int) -> None:
        _demand(self.answers[request] == 0, f"request {request} was answered twice")
        self.answers = tuple(count + (number == request) for number, count in enumerate(self.answers))

    def _post(self, to: Incarnation, message: Any, there: set[Incarnation]) -> None:
        if not isinstance(message, m.Refused):
            _demand(to in there, f"{type(message).__name__} for an instance that has left")
        if isinstance(message, m.Ready):
            there = (to, message.lease) in self.complete or not self.roles[to].alive
            _demand(there, "Ready before all bytes were there")
        if self.roles[to].alive and not isinstance(message, _NO_PART_OF_THIS):
            self.down[to] += (brief(message),)

    def _hear(self, sender: Incarnation) -> None:
        said, *rest = self.up[sender]
        self.up[sender] = tuple(rest)
        message = build(said)
        if said[0] == "RoleHeartbeat" and sender in self.cluster.instances:
            message = replace(message, said=self.cluster.instances[sender].heard)  # links lose nothing here
        self._route(events.Heard(sender, message, 0.0))

    def _notice(self, instance: Incarnation) -> None:
        self._route(events.Gone(instance, 0.0))

    def _cut(self, instance: Incarnation) -> None:
        """The router takes an instance for lost that lives, and that will hear of it."""
        self._spend(cuts=self.budget.cuts - 1)
        self._route(events.Gone(instance, 0.0))

    def _cancel(self, request_id: RequestId) -> None:
        self._spend(cancels=self.budget.cancels - 1)
        self._route(events.GivenUp(request_id, "", 0.0))

    def _expire(self) -> None:
        self._spend(deadline=False)
        self._route(events.Tick(DEADLINE))

    # ------------------------------------------------------------ roles

    def _say(self, role: Incarnation, *said: Any) -> None:
        """While the router does not count on a role, what it says is void, except that it registers."""
        if self.roles[role].registered or said[0] == "Register":
            self.up[role] += (said,)

    def _set(self, role: Incarnation, **fields: Any) -> None:
        self.roles[role] = self.roles[role]._replace(**fields)

    def _put(self, role: Incarnation, job: Job) -> None:
        jobs = {old for old in self.roles[role].jobs if old.key != job.key}
        self._set(role, jobs=frozenset(jobs | {job}))

    def _drop(self, role: Incarnation, job: Job) -> None:
        self._set(role, jobs=self.roles[role].jobs - {job})

    def _free(self, slot: Slot) -> None:
        _demand(not any(write.to == slot for write in self.writes), "a slot was freed that may still be written")
        self.complete -= {slot}

    def _quarantine(self, role: Incarnation, job: Job) -> None:
        self._drop(role, job)
        self._set(role, quarantined=self.roles[role].quarantined | {job.lease})
        self._say(role, "Evicted", *job.key, job.lease, True)

    def _settle(self, role: Incarnation, lease: int) -> None:
        """So much time has passed that no write can be under way."""
        self.writes = frozenset(write for write in self.writes if write.to != (role, lease))
        self._set(role, quarantined=self.roles[role].quarantined - {lease})
        self._free((role, lease))

    def _beat(self, role: Incarnation) -> None:
        self._say(role, "RoleHeartbeat")

    def _drain(self, role: Incarnation) -> None:
        self._spend(drains=self.budget.drains - 1)
        self._say(role, "Drain")

    def _crash(self, role: Incarnation) -> None:
        self._spend(crashes=self.budget.crashes - 1)
        self._end(role)
        self._set(role, crashed=True)

    def _end(self, role: Incarnation) -> None:
        self._set(role, alive=False, jobs=frozenset(), quarantined=frozenset())
        self.down[role] = ()
        self.writes = frozenset(write._replace(ghost=True) if write.sender == role else write for write in self.writes)
        self.writes = frozenset(write for write in self.writes if not (write.ghost and write.to[0] == role))
        self.complete = frozenset(slot for slot in self.complete if slot[0] != role)

    def _restart(self, role: Incarnation) -> None:
        """Another process of the same name."""
        self._spend(restarts=self.budget.restarts - 1)
        old = self.roles[role]
        new = self._start(old.role, len(self.roles) + 1, registered=False, name=old.number)
        self._say(new, "Register", *self._who(new))

    def _compute(self, role: Incarnation, job: Job) -> None:
        if job.phase == "given_up":
            self._drop(role, job)
            self._say(role, "Cancelled", *job.key)
        elif self.roles[role].role in LAST:
            self._drop(role, job)
            self._say(role, "Done", *job.key)
        else:
            self._put(role, job._replace(phase="staged"))
            self._say(role, "Staged", *job.key)

    def _fail(self, role: Incarnation, job: Job) -> None:
        self._spend(failures=self.budget.failures - 1)
        self._drop(role, job)
        self._say(role, "Failed", *job.key)

    def _write(self, write: Write) -> None:
        """A transfer ends: well if its slot still exists, whatever has become of the request."""
        self.writes -= {write}
        receiver, lease = write.to
        state = self.roles[receiver]
        if lease in state.quarantined or any(job.lease == lease and job.phase == "leased" for job in state.jobs):
            self.complete |= {write.to}
            self._say(write.sender, "Pushed", *write.key, receiver, lease)
        else:
            self._say(write.sender, "PushFailed", *write.key, receiver, lease, True)

    def _lose_write(self, write: Write) -> None:
        self._spend(lost_writes=self.budget.lost_writes - 1)
        self.writes = self.writes - {write} | {write._replace(ghost=True)}
        self._say(write.sender, "PushFailed", *write.key, *write.to, False)

    def _fade(self, write: Write) -> None:
        self.writes -= {write}

    # ------------------------------------------------------------ what a role does with a message

    def _take(self, role: Incarnation) -> None:
        said, *rest = self.down[role]
        self.down[role] = tuple(rest)
        getattr(self, "_take_" + said[0].lower())(role, *said[1:])

    def _take_submit(self, role: Incarnation, *key: Any) -> None:
        if self.roles[role].job(key) is None:
            self._put(role, Job(key, "computing"))

    def _take_allocate(self, role: Incarnation, *key: Any) -> None:
        state = self.roles[role]
        if state.job(key) is not None:
            return
        if sum(job.phase == "leased" for job in state.jobs) + len(state.quarantined) >= self.slots:
            self._say(role, "AllocationRefused", *key)
            return
        lease = state.leases + 1
        self._set(role, leases=lease)
        self._put(role, Job(key, "leased", lease))
        self._say(role, "Allocated", *key, lease)

    def _take_push(
        self, role: Incarnation, request_id: RequestId, attempt: int, receiver: Incarnation, lease: int
    ) -> None:
        job = self.roles[role].job((request_id, attempt))
        if job is None or job.phase != "staged":
            self._say(role, "PushFailed", request_id, attempt, receiver, lease, True)
        else:
            self.writes |= {Write(role, job.key, (receiver, lease))}

    def _take_ready(self, role: Incarnation, request_id: RequestId, attempt: int, lease: int) -> None:
        job = self.roles[role].job((request_id, attempt))
        if job is not None and job.phase == "leased" and job.lease == lease:
            self._free((role, lease))
            self._put(role, Job(job.key, "computing"))

    def _take_release(self, role: Incarnation, *key: Any) -> None:
        job = self.roles[role].job(key)
        if job is not None and job.phase == "staged":
            self._drop(role, job)

    def _take_evict(self, role: Incarnation, request_id: RequestId, attempt: int, lease: int, settled: bool) -> None:
        state = self.roles[role]
        job = state.job((request_id, attempt))
        if lease in state.quarantined:
            if settled:
                self._free((role, lease))
                self._set(role, quarantined=state.quarantined - {lease})
        elif job is not None and job.phase == "leased" and job.lease == lease:
            if settled:
                self._free((role, lease))
                self._drop(role, job)
                self._say(role, "Evicted", *job.key, lease, False)
            else:
                self._quarantine(role, job)

    def _take_cancel(self, role: Incarnation, *key: Any) -> None:
        job = self.roles[role].job(key)
        if job is not None:
            self._give_up(role, job)
            if job.phase == "computing":
                return
        self._say(role, "Cancelled", *key)

    def _give_up(self, role: Incarnation, job: Job) -> None:
        if job.phase == "leased":
            self._quarantine(role, job)
        elif job.phase == "computing":
            self._put(role, job._replace(phase="given_up"))
        elif job.phase == "staged":
            self._drop(role, job)

    def _take_refused(self, role: Incarnation, again: bool) -> None:
        if not again:
            self._end(role)
            return
        self._set(role, registered=False)
        for job in self.roles[role].jobs:
            self._give_up(role, job)
        self._say(role, "Register", *self._who(role))

    def _take_registered(self, role: Incarnation, fresh: bool) -> None:
        if fresh:
            for job in self.roles[role].jobs:
                self._give_up(role, job)
        self._set(role, registered=True)

    def _take_routerheartbeat(self, role: Incarnation) -> None:
        pass

    def _take_drained(self, role: Incarnation) -> None:
        self._end(role)


# ---------------------------------------------------------------- messages and their short forms


def brief(message: Any) -> Said:
    """What a role needs of a message of the router."""
    name = type(message).__name__
    match message:
        case m.Push():
            return (name, message.request_id, message.attempt, message.peer.incarnation, message.slot.lease)
        case m.Ready():
            return (name, message.request_id, message.attempt, message.lease)
        case m.Evict():
            return (name, message.request_id, message.attempt, message.lease, message.settled)
        case m.Submit() | m.Allocate() | m.Release() | m.Cancel():
            return (name, message.request_id, message.attempt)
        case m.Refused():
            return (name, message.again)
        case m.Registered():
            return (name, message.fresh)
    return (name,)


@cache
def build(said: Said) -> Any:
    """The whole message of a role."""
    name, *rest = said
    if name == "Register":
        role, number, incarnation = rest
        return register(role, number, incarnation=incarnation)
    if name == "RoleHeartbeat":
        return m.RoleHeartbeat(
            queued=0, running=0, receive_free=0, receive_quarantined=0, send_free=0, resident_bytes=0
        )
    if name == "Drain":
        return m.Drain()
    fields: dict[str, Any] = {"request_id": rest[0], "attempt": rest[1]}
    match name:
        case "Staged":
            fields |= {"manifest": MANIFEST, "scalars": {}, "timings": TIMINGS}
        case "Done":
            fields |= {"files": (), "timings": TIMINGS}
        case "Failed":
            fields |= {"code": "worker_error", "reason": ""}
        case "Allocated":
            fields |= {"slot": slot(rest[2])}
        case "AllocationRefused":
            fields |= {"permanent": False, "reason": ""}
        case "Evicted":
            fields |= {"lease": rest[2], "quarantined": rest[3]}
        case "Pushed":
            fields |= {"receiver": rest[2], "lease": rest[3], "engine": "tcp", "nbytes": 0, "seconds": 0.0}
        case "PushFailed":
            fields |= {"receiver": rest[2], "lease": rest[3], "settled": rest[4], "reason": ""}
    return getattr(m, name)(**fields)
