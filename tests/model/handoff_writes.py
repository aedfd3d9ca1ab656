"""Transfers in the world of handoffs: asked for, begun, ended well or badly; and what lands unexpectedly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from diffcluster.ids import Incarnation, LeaseId
from diffcluster.messages import Push
from tests.model.handoff_role import Process, Setup, Write

__all__ = ["Writes"]


class Writes(ABC):
    """The engines' part of a world."""

    setup: Setup
    budget: Any
    writes: tuple[Write, ...]
    processes: dict[Incarnation, Process]
    down: dict[Incarnation, tuple[Any, ...]]

    @abstractmethod
    def _own(self, who: Incarnation) -> Process:
        """The process, which this step will change."""

    @abstractmethod
    def _flush(self, process: Process) -> None:
        """What it said is under way."""

    @abstractmethod
    def _spend(self, what: str) -> None:
        """One misfortune less."""

    def fair_writes(self) -> Iterator[tuple[Any, ...]]:
        """What happens by itself sooner or later."""
        for write in self.writes:
            if write.phase == "asked":
                yield ("begin", write)
            elif write.phase == "begun":
                yield ("finish", write)
            elif self.setup.fences:
                yield ("fade", write)

    def other_writes(self) -> Iterator[tuple[Any, ...]]:
        """What may happen or not. That a write lands costs nothing."""
        budget = self.budget
        for write in self.writes:
            if write.phase in ("ghost", "again"):
                yield ("land", write)
            elif budget.failed_writes:
                yield ("fail_write", write)
            if write.phase == "begun" and budget.lost_writes:
                yield ("lose_write", write)
            if write.phase == "begun" and budget.repeats and self.setup.fences:
                yield ("repeat", write)

    def is_written(self, receiver: Incarnation, lease: LeaseId) -> bool:
        """Whether bytes are under way to a slot."""
        return any(w.phase in ("begun", "ghost") and (w.receiver, w.lease) == (receiver, lease) for w in self.writes)

    def _may_write(self, receiver: Incarnation, lease: LeaseId) -> bool:
        """Whether the slot must stay quarantined: its engine knows of a writer; or, where engines know nothing, a
        sender writes in good faith, or was told to, since a quarantine is longer than that can take.
        """
        if self.setup.fences:
            return self.is_written(receiver, lease)
        coming = [*self.down.values(), *(x.control._held for x in self.processes.values() if x.alive)]
        told = [message for queue in coming for message in queue if isinstance(message, Push)]
        return any((push.peer.incarnation, push.slot.lease) == (receiver, lease) for push in told) or any(
            write.phase != "ghost" and (write.receiver, write.lease) == (receiver, lease) for write in self.writes
        )

    # ------------------------------------------------------------ writes

    def _replace_write(self, write: Write, phase: str | None) -> None:
        new = [write._replace(phase=phase)] if phase else []
        at = self.writes.index(write)
        self.writes = (*self.writes[:at], *new, *self.writes[at + 1 :])

    def _report(self, write: Write, **result: bool) -> None:
        process = self._own(write.sender)
        process.pushed(write, **result)
        self._flush(process)

    def _begin(self, write: Write) -> None:
        receiver = self.processes[write.receiver]
        is_open = receiver.alive and write.lease in receiver.windows
        self._replace_write(write, "begun" if is_open else None)
        if not is_open:
            self._report(write, works=False)

    def _finish(self, write: Write, then: str | None = None) -> None:
        works = self.processes[write.receiver].alive
        if works:
            self.processes[write.sender].check_source(write)
            self._own(write.receiver).land(write)
        self._replace_write(write, then if works else None)
        self._report(write, works=works)

    def _repeat(self, write: Write) -> None:
        self._spend("repeats")
        self._finish(write, "again")

    def _land(self, write: Write) -> None:
        """What nobody counts on any more arrives after all. The engine lets nothing new into a closed window."""
        receiver = self._own(write.receiver)
        self._replace_write(write, None)
        if write.phase == "ghost" or write.lease in receiver.windows:
            sender = self.processes[write.sender]
            if sender.alive and not self.setup.fences:  # it is read from where it lies, and not from a buffer
                sender.check_source(write)
            receiver.land(write)

    def _fade(self, write: Write) -> None:
        self._replace_write(write, None)

    def _fail_write(self, write: Write) -> None:
        self._spend("failed_writes")
        self._replace_write(write, None)
        self._report(write, works=False)

    def _lose_write(self, write: Write) -> None:
        self._spend("lost_writes")
        self._replace_write(write, "ghost" if self.processes[write.receiver].alive else None)
        self._report(write, works=False, settled=False, held=not self.setup.fences)
