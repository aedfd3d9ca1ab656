"""The push threads: write staged bytes into peers' slots while the compute thread is at its next request.

Each peer has a lane: a queue, and threads that take from it, as many as transfers to that peer may be under way at one
time. A lane has senders and connections of its own, so that a peer which has stopped answering, or answers slowly,
holds up nobody but those who wait for it. A lane begins when the router makes the two acquainted, with a first contact
that no request waits for, and ends when the router says that the peer is gone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diffcluster.errors import TransferError
from diffcluster.ids import HostId, Incarnation
from diffcluster.messages import EngineKind, Met, Peer, Push, Session
from diffcluster.transport.engines import open_sender
from diffcluster.transport.engines.base import Sender, choose

__all__ = ["PushResult", "Pusher"]

_log = logging.getLogger(__name__)


class PushResult(Struct, frozen=True):
    """How a push ended. `error` is "" when all bytes arrived; `settled` and `source_held` are as in `TransferError`."""

    push: Push
    engine: EngineKind | None
    nbytes: int
    seconds: float
    error: str = ""
    settled: bool = True
    source_held: bool = False


class _Write(Struct, frozen=True):
    """A push that waits. `deadline` counts from when it was asked for."""

    push: Push
    source: npt.NDArray[np.uint8]
    deadline: float


class _Meet:
    """A first contact that waits."""


class _End:
    """Nothing comes after it."""


_Report = Callable[[PushResult | Met], Any]


class Pusher:
    """All lanes. Its methods are for one thread, and never block it but for `stop`.

    Each push and each first contact is reported once, to `report`, which must be a mailbox's post. `window` is how
    many transfers to one peer may be under way.
    """

    def __init__(self, host: HostId, timeout_s: float, window: int, report: _Report) -> None:
        self._host, self._timeout_s, self._window, self._report = host, timeout_s, window, report
        self._lanes: dict[Incarnation, _Lane] = {}
        self._ending: list[_Lane] = []

    def meet(self, peer: Peer) -> None:
        """Connect to a peer, and report how that went."""
        self._lane(peer).meet()

    def push(self, push: Push, source: npt.NDArray[np.uint8]) -> None:
        """Write `source` to the peer of `push`. `source` must stay as it is until the result is reported.

        The time-out runs from now: a push that has waited too long for others is not begun, since its slot may by then
        be somebody else's.
        """
        self._lane(push.peer).put(_Write(push, source, time.monotonic() + self._timeout_s))

    def part(self, peer: Incarnation) -> None:
        """A peer is gone: what is under way to it fails, and its connections are closed."""
        self._ending = [lane for lane in self._ending if lane.lives()]
        lane = self._lanes.pop(peer, None)
        if lane is not None:
            lane.end()
            self._ending.append(lane)

    def part_all(self) -> None:
        """The router that knew all these peers is not there any more."""
        for peer in list(self._lanes):
            self.part(peer)

    def stop(self) -> None:
        """End what is under way, which then fails, and all threads."""
        self.part_all()
        for lane in self._ending:
            lane.join()

    def _lane(self, peer: Peer) -> _Lane:
        lane = self._lanes.get(peer.incarnation)
        if lane is None:
            lane = self._lanes[peer.incarnation] = _Lane(self._host, peer, self._timeout_s, self._window, self._report)
        return lane


class _Lane:
    """Transfers to one peer."""

    def __init__(self, host: HostId, peer: Peer, timeout_s: float, window: int, report: _Report) -> None:
        self._host, self._peer, self._timeout_s, self._report = host, peer, timeout_s, report
        self._window = window
        self._session: Session | None = None
        self._work: queue.SimpleQueue[_Write | _Meet | _End] = queue.SimpleQueue()
        self._abort = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._unfinished = 0
        self._met = False

    def meet(self) -> None:
        """Make contact, unless that was done."""
        if not self._met:
            self._met = True
            self.put(_Meet())

    def end(self) -> None:
        """Fail what is under way and what waits, and let the threads go."""
        self._abort.set()
        for _ in self._threads:
            self._work.put(_End())

    def lives(self) -> bool:
        """Whether a thread of it is still there."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait for the threads; after `end`."""
        for thread in self._threads:
            thread.join()

    def put(self, item: _Write | _Meet) -> None:
        """Do it as soon as a thread is free; another one is started if there is none and the window allows."""
        with self._lock:
            self._unfinished += 1
            all_busy = self._unfinished > len(self._threads)
        self._work.put(item)
        if all_busy and len(self._threads) < self._window:
            thread = threading.Thread(target=self._run, name=f"push-{self._peer.name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        sender: Sender | None = None
        try:
            while not isinstance(item := self._work.get(), _End):
                if isinstance(item, _Write):
                    sender, result = self._write(sender, item)
                    self._report(result)
                elif not self._abort.is_set():
                    sender = self._meet(sender)
                with self._lock:
                    self._unfinished -= 1
        finally:
            if sender is not None:
                sender.stop()

    def _meet(self, sender: Sender | None) -> Sender | None:
        try:
            session = self._chosen()
            sender = sender or open_sender(session.kind)
            sender.connect(session, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the lane
            _log.warning("cannot write to %s: %s", self._peer.name, error)
            self._report(Met(receiver=self._peer.incarnation, engine=None, reason=str(error)[:4096]))
            return sender
        _log.info("transfers to %s go by %s", self._peer.name, session.kind)
        self._report(Met(receiver=self._peer.incarnation, engine=session.kind))
        return sender

    def _chosen(self) -> Session:
        if self._session is None:
            self._session = choose(self._host, self._peer.host, self._peer.sessions)
        return self._session

    def _write(self, sender: Sender | None, write: _Write) -> tuple[Sender | None, PushResult]:
        started = time.monotonic()
        kind: EngineKind | None = None
        error, settled, held = "", True, False
        try:
            session = self._chosen()
            kind = session.kind
            sender = sender or open_sender(kind)
            remaining = write.deadline - started
            if remaining <= 0 or self._abort.is_set():
                raise TransferError("not begun: it had waited too long, or its peer is gone", settled=True)
            sender.write(session, write.push.slot, write.source, remaining, self._abort)
        except TransferError as failure:
            error, settled, held = str(failure), failure.settled, failure.source_held
        except Exception as failure:  # noqa: BLE001 - a bug in an engine must end this push, not all pushes
            _log.exception("push of %s failed", write.push.request_id)
            error, settled, held = f"{type(failure).__name__}: {failure}", False, True
        seconds = time.monotonic() - started
        return sender, PushResult(write.push, kind, write.source.nbytes, seconds, error, settled, held)
