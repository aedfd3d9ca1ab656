"""Processes in the world of handoffs: what they do with a message, what their threads finish, how they end."""

from __future__ import annotations

from typing import Any

from diffcluster.ids import Incarnation, LeaseId, Role
from diffcluster.messages import EngineKind, Met, Register
from tests.model.handoff_role import Process
from tests.model.handoff_writes import Writes
from tests.support import incarnation

__all__ = ["Processes"]


class Processes(Writes):
    """The roles' part of a world."""

    up: dict[Incarnation, tuple[Any, ...]]
    was_cut = False
    _mine: set[Incarnation]
    """Processes that are not shared with other worlds."""

    def _start(self, role: Role, number: int, name: int = 0) -> Process:
        who = incarnation(number)
        new = self.processes[who] = Process(self.setup, role, who, name or number)
        new.world = self
        self._mine.add(who)
        self.up[who] = self.down[who] = ()
        return new

    def _own(self, who: Incarnation) -> Process:
        if who not in self._mine:
            self._mine.add(who)
            self.processes[who] = self.processes[who].copy()
            self.processes[who].world = self
        return self.processes[who]

    def _spend(self, what: str) -> None:
        self.budget = self.budget._replace(**{what: getattr(self.budget, what) - 1})

    # ------------------------------------------------------------ processes

    def _flush(self, process: Process) -> None:
        process.control._flush()
        if process.alive:
            self.up[process.incarnation] += tuple(process.sent)
        process.sent = []

    def _take(self, who: Incarnation) -> None:
        message, *rest = self.down[who]
        self.down[who] = tuple(rest)
        process = self._own(who)
        process.control._take_message(message)
        self._flush(process)

    def _beat(self, who: Incarnation) -> None:
        process = self._own(who)
        process.control._beat(0.0)
        self._flush(process)

    def _load(self, who: Incarnation, *, works: bool = True) -> None:
        process = self._own(who)
        process.loaded(works=works)
        self._flush(process)

    def _corrupt(self, who: Incarnation) -> None:
        self._spend("corrupt")
        self._load(who, works=False)

    def _compute(self, who: Incarnation) -> None:
        process = self._own(who)
        process.computed()
        self._flush(process)

    def _pack(self, who: Incarnation) -> None:
        process = self._own(who)
        process.packed()
        self._flush(process)

    def _settle(self, who: Incarnation, region: str, lease: LeaseId) -> None:
        """So much time has passed that no write to or from a lease can be under way."""
        self.writes = tuple(w for w in self.writes if w.phase != "ghost" or w.end(region) != (who, lease))
        self._overtime(who, lease, region)

    def _overtime(self, who: Incarnation, lease: LeaseId, region: str = "receive") -> None:
        """The time of a quarantine is over; perhaps the engine knows of a writer that was stopped in the middle."""
        process = self._own(who)
        process.machine.quarantine[region, lease] = 0.0
        process.control._perform(process.machine.step(process.control._windows.tick(process.machine.quarantine), 0.0))
        self._flush(process)

    def _contact(self, who: Incarnation, engine: EngineKind | None = "tcp") -> None:
        process = self._own(who)
        process.control._take(Met(receiver=process.contacts.pop(0), engine=engine))
        self._flush(process)

    def _no_contact(self, who: Incarnation) -> None:
        self._spend("unreachable")
        self._contact(who, None)

    def _pause(self, who: Incarnation) -> None:
        self._spend("pauses")
        self._own(who).control._registered = False

    def _cut(self, who: Incarnation, up: bool, down: bool) -> None:
        self._spend("cuts")
        self.was_cut = True
        self.up[who] = () if up else self.up[who]
        self.down[who] = () if down else self.down[who]

    def _crash(self, who: Incarnation) -> None:
        self._spend("crashes")
        process = self._own(who)
        process.end()
        process.crashed = True
        self.down[who] = ()
        # A registration that arrives after that of the next process of this name would turn that one out. Left out: it
        # takes a connection on which bytes are delayed for longer than a process takes to start.
        self.up[who] = tuple(message for message in self.up[who] if not isinstance(message, Register))
        ended = [w._replace(phase="ghost") if w.sender == who and w.phase == "begun" else w for w in self.writes]
        self.writes = tuple(
            w for w in ended
            if not (w.sender == who and w.phase in ("asked", "again"))
            and not (w.receiver == who and w.phase in ("ghost", "again"))
        )  # fmt: skip

    def _restart(self, who: Incarnation) -> None:
        """Another process of the same name."""
        self._spend("restarts")
        old = self._own(who)
        old.crashed = False
        self._start(old.role, len(self.processes) + 1, old.number)
