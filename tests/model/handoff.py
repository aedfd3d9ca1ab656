"""A small world of handoffs: the real router's machine and real roles with their ledgers, senders and receivers.

Links are ordered queues, and what threads and engines do are steps of their own, each of which may come at any time.
A write that was reported as failed may land until its engine would have closed the connection. Time stands still: the
end of a quarantine is a step, which comes no earlier than what a quarantine is longer than.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from diffcluster import messages as m
from diffcluster.ids import Incarnation, RequestId, Role
from diffcluster.router import dispatch, events, links
from diffcluster.router.actions import Fail, Finish, Send
from diffcluster.router.invariants import violations
from diffcluster.router.machine import RouterMachine
from diffcluster.router.state import Cluster, Instance
from diffcluster.transport.slots import GRANULE
from tests.model import handoff_key
from tests.model.handoff_processes import Processes
from tests.model.handoff_role import RECEIVER, SENDER, Process, Setup, Write, demand
from tests.model.world import LIMITS
from tests.support import parameters

__all__ = ["Budget", "Handoff", "Setup", "two_pools"]

_ANSWERS = (m.Staged, m.Done, m.Failed, m.AllocationRefused, m.Evicted)
_JOINING = (m.Register, m.RoleHeartbeat, m.Registered, m.Refused, m.RouterHeartbeat)
PARAMETERS = parameters()


@contextmanager
def two_pools() -> Iterator[None]:
    """One route: from senders to receivers, who are the last."""
    routes: tuple[tuple[Role, ...], ...] = ((SENDER, RECEIVER),)
    log = logging.getLogger("diffcluster.roles.control")
    with (
        mock.patch.object(dispatch, "ROUTES", routes),
        mock.patch.object(links, "_HANDS_TO", {SENDER: RECEIVER}),
        mock.patch.object(log, "disabled", True),
    ):
        yield


class Budget(NamedTuple):
    """What may yet go wrong."""

    crashes: int = 0
    restarts: int = 0
    cuts: int = 0
    """Connections that break, and lose what is under way in one direction or both."""
    strikes: int = 0
    """Instances that are taken for lost, and live."""
    pauses: int = 0
    """Processes that do not know, for a while, whether the router counts on them."""
    cancels: int = 0
    failed_writes: int = 0
    lost_writes: int = 0
    """Writes that fail, and may land nevertheless."""
    repeats: int = 0
    """Writes that are made a second time after they were reported as done, where windows fence."""
    corrupt: int = 0
    unreachable: int = 0
    """First contacts that fail."""


class Handoff(Processes):
    """One state of everything."""

    machine = RouterMachine(LIMITS)

    def __init__(
        self, requests: int, budget: Budget, setup: Setup, senders: int = 1, receivers: int = 1, *, warm: bool = True
    ) -> None:
        self.cluster = Cluster()
        self.setup = setup
        self.processes: dict[Incarnation, Process] = {}
        self.up: dict[Incarnation, tuple[Any, ...]] = {}
        self.down: dict[Incarnation, tuple[Any, ...]] = {}
        self.writes: tuple[Write, ...] = ()
        self.owed: frozenset[tuple[Any, ...]] = frozenset()
        """Answers that the router is owed: of pushes and of cancellations."""
        self.answers = (0,) * requests
        self.budget = budget
        self._mine: set[Incarnation] = set()
        for role in [SENDER] * senders + [RECEIVER] * receivers:
            new = self._start(role, len(self.processes) + 1)
            if warm and role == RECEIVER:  # as if it had worked before: so it knows a size
                new.machine.note_size(GRANULE, refused=False)
            self._beat(new.incarnation)
        self._calm_down()
        for number in range(requests):
            self._route(events.Submitted(RequestId(str(number)), PARAMETERS, 1e9, 0.0))
        self._settle_step()

    def _calm_down(self) -> None:
        """Let all that was said be heard."""
        while any(self.up.values()) or any(self.down.values()):
            for who in list(self.processes):
                if self.up[who]:
                    self._hear(who)
                if self.down[who]:
                    self._take(who)

    # ------------------------------------------------------------ as a value

    def copy(self) -> Handoff:
        """A world that can be changed without changing this one; a process is copied when a step changes it."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        old = self.cluster
        new.cluster = Cluster(
            dict(old.instances), dict(old.names), dict(old.retired), old.models, dict(old.requests),
            {role: dict(queue) for role, queue in old.queues.items()}, list(old.deadlines), old.closing.copy(),
        )  # fmt: skip
        new.processes, new.up, new.down = dict(self.processes), dict(self.up), dict(self.down)
        new._mine = set()
        return new

    def after(self, step: tuple[Any, ...]) -> Handoff:
        """The world after `step`."""
        new = self.copy()
        getattr(new, "_" + step[0])(*step[1:])
        new._settle_step()
        return new

    def _settle_step(self) -> None:
        for who in self._mine:
            process = self.processes[who]
            if process.alive:
                process.check()
            process.world = None
        self._mine.clear()

    def key(self) -> object:
        """Equal for worlds with the same future."""
        return handoff_key.key_of(self)

    def at_rest(self) -> bool:
        """All requests have ended, once, and nobody holds anything but grants, of which the router knows."""
        cluster = self.cluster
        if cluster.requests or self.writes or self.owed or any(self.up.values()) or any(self.down.values()):
            return False
        idle = not cluster.closing and not any(cluster.queues.values())
        idle = idle and not any(x.busy or x.retained for x in cluster.instances.values())
        return idle and self.answers == (1,) * len(self.answers) and all(map(self._is_idle, self.processes.values()))

    def _is_idle(self, process: Process) -> bool:
        if not process.alive:
            return True
        known = self.cluster.instances.get(process.incarnation)
        machine = process.machine
        works = process.loads or process.computes or process.packs or process.contacts
        if known is None or machine.jobs or machine.quarantine or works:
            return False
        grants = {slot.lease for slot in known.grants}
        free = machine.receive.bytes_by_state()["free"] + len(grants) * GRANULE == machine.receive.capacity
        receivers = {i for i, _ in self.cluster.pool(RECEIVER)} if process.role == SENDER else set()
        return free and set(machine.grants) == process.windows == grants and process.met == receivers

    # ------------------------------------------------------------ steps

    def fair_steps(self) -> Iterator[tuple[Any, ...]]:
        """What happens by itself sooner or later."""
        for who, process in self.processes.items():
            if self.up[who]:
                yield ("hear", who)
            if process.alive:
                yield from self._own_steps(who, process)
                continue
            if process.crashed and who in self.cluster.instances:
                yield ("notice", who)
            if process.crashed and self.budget.restarts:
                yield ("restart", who)
        yield from self.fair_writes()

    def _own_steps(self, who: Incarnation, process: Process) -> Iterator[tuple[Any, ...]]:
        if self.down[who]:
            yield ("take", who)
        if self._beats(process):
            yield ("beat", who)
        if process.loads:
            yield ("load", who)
        if process.computes:
            yield ("compute", who)
        if process.packs:
            yield ("pack", who)
        if process.contacts:
            yield ("contact", who)
        for region, lease in process.machine.quarantine:
            if region == "send" or not self._may_write(who, lease):
                yield ("settle", who, region, lease)

    def _beats(self, process: Process) -> bool:
        """Whether a heartbeat would change anything; there are always more of them."""
        who, control = process.incarnation, process.control
        if any(isinstance(message, _JOINING) for queue in (self.up[who], self.down[who]) for message in queue):
            return False
        known = self.cluster.instances.get(who)
        if not control._registered or control._cut or known is None or known.full:
            return True
        return handoff_key.lost_up(self, process) != 0 or handoff_key.lost_down(self, process) != 0

    def other_steps(self) -> Iterator[tuple[Any, ...]]:
        """What may happen or not, while the budget lasts."""
        budget = self.budget
        for who, process in self.processes.items():
            if process.alive:
                yield from self._misfortunes(who, process)
        if budget.cancels:
            for request_id in self.cluster.requests:
                yield ("cancel", request_id)
        yield from self.other_writes()

    def _misfortunes(self, who: Incarnation, process: Process) -> Iterator[tuple[Any, ...]]:
        budget = self.budget
        if budget.crashes:
            yield ("crash", who)
        if budget.strikes and who in self.cluster.instances:
            yield ("strike", who)
        if budget.pauses and process.control._registered:
            yield ("pause", who)
        if budget.corrupt and process.loads:
            yield ("corrupt", who)
        if budget.unreachable and process.contacts:
            yield ("no_contact", who)
        for region, lease in process.machine.quarantine:
            if region == "receive" and self.setup.fences and self.is_written(who, lease):
                yield ("overtime", who, lease)
        if budget.cuts:
            up, down = bool(self.up[who]), bool(self.down[who])
            yield from [("cut", who, *way) for way in ((up, down), (up, False), (False, down)) if any(way)]

    # ------------------------------------------------------------ the router

    def _route(self, event: events.Event) -> None:
        machine = self.machine
        machine.cluster = self.cluster
        for action in machine.step(event):
            match action:
                case Send():
                    self._post(action.to, action.message)
                case Finish() | Fail():
                    self._answer(int(action.request_id))
        gone = {owed for owed in self.owed if owed[1] not in self.cluster.instances}
        if gone:
            self.owed -= gone
        problems = violations(self.cluster)
        demand(not problems, "; ".join(problems))

    def _answer(self, request: int) -> None:
        demand(self.answers[request] == 0, f"request {request} was answered twice")
        self.answers = tuple(count + (number == request) for number, count in enumerate(self.answers))

    def _post(self, to: Incarnation, message: Any) -> None:
        match message:
            case m.Registered(fresh=True):
                self.owed = frozenset(owed for owed in self.owed if owed[1] != to)
            case m.Push():
                self._owe(("push", to, message.peer.incarnation, message.slot.lease))
            case m.Cancel():
                self._owe(("cancel", to, message.request_id, message.attempt))
        if self.processes[to].alive:
            self.down[to] += (message,)

    def _owe(self, answer: tuple[Any, ...]) -> None:
        demand(answer not in self.owed, "the router said the same twice")
        self.owed |= {answer}

    def _hear(self, sender: Incarnation) -> None:
        message, *rest = self.up[sender]
        self.up[sender] = tuple(rest)
        known = self.cluster.instances.get(sender)
        if known is not None:
            self._settle_debt(sender, message, known)
        self._route(events.Heard(sender, message, 0.0))

    def _settle_debt(self, sender: Incarnation, message: Any, known: Instance) -> None:
        """Nothing is answered that was not asked, or twice. But what a role was asked before it registered anew, and
        what its threads could not stop doing, it still reports.
        """
        match message:
            case m.Pushed() | m.PushFailed():
                debt = ("push", sender, message.receiver, message.lease)
                current = (message.request_id, message.attempt) in known.retained
                demand(debt in self.owed or not current, "a push was answered twice")
                self.owed -= {debt}
            case m.Cancelled():
                self.owed -= {("cancel", sender, message.request_id, message.attempt)}
            case _ if isinstance(message, _ANSWERS):
                asked = (message.request_id, message.attempt) in known.busy
                demand(asked, f"{type(message).__name__} though nothing was asked, or for a second time")

    def _notice(self, who: Incarnation) -> None:
        self._route(events.Gone(who, 0.0))

    def _strike(self, who: Incarnation) -> None:
        self._spend("strikes")
        self._route(events.Gone(who, 0.0))

    def _cancel(self, request_id: RequestId) -> None:
        self._spend("cancels")
        self._route(events.GivenUp(request_id, "", 0.0))
