"""Sender and receiver in one process: for tests and simulation, with faults on demand.

Windows, tokens and places are checked as strictly as by the engines that cross processes. What goes wrong, and when,
is written down in a `Script`, and time passes only through what it was given: so a run can be repeated.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diffcluster.errors import TransferError
from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines.base import CHUNK, NEVER, EngineOptions
from diffcluster.transport.engines.waiting import Limit

__all__ = ["InProcessReceiver", "InProcessSender", "Script", "open_receiver", "open_sender"]

_ECHO_AT: Final = 44 << 10  # in the control memory, behind the other engines' places
_ECHO_BYTES: Final = 32

_receivers: dict[str, InProcessReceiver] = {}
_registry: Final = threading.Lock()


class Script(Struct, frozen=True):
    """What happens to the writes into one receiver; writes count from 1, 0 means none of them.

    Each write first calls `delay`, then waits until `hold` is set. While it is held, and if its sender has given up
    meanwhile, it is not settled: as with an engine that cannot cancel. Write `fail` then fails with no byte written,
    and says that it is settled if `fail_settled`. Of write `lose` all bytes arrive, but the sender hears nothing.
    """

    delay: Callable[[], object] | None = None
    hold: threading.Event | None = None
    fail: int = 0
    fail_settled: bool = True
    lose: int = 0


def open_receiver(arena: Arena, options: EngineOptions, script: Script = Script()) -> InProcessReceiver:  # noqa: B008 - frozen
    """Offer `arena` to senders of this process."""
    del options  # neither addresses nor time-outs mean anything here
    return InProcessReceiver(arena, script)


def open_sender() -> InProcessSender:
    """A sender."""
    return InProcessSender()


class InProcessReceiver:
    """Found by its name while it is open."""

    kind: EngineKind = "inprocess"

    def __init__(self, arena: Arena, script: Script) -> None:
        self._arena, self._script = arena, script
        self._name = f"inprocess-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._windows: dict[LeaseId, SlotAddress] = {}
        self._writing: set[LeaseId] = set()
        self._held: set[LeaseId] = set()
        self._closed: set[LeaseId] = set()  # of those that are being written
        self._writes = 0
        self._stopped = threading.Event()
        with _registry:
            _receivers[self._name] = self

    def session(self) -> Session:
        """The name."""
        return Session("inprocess", self._name)

    def open(self, slot: SlotAddress) -> None:
        """Let one write with `slot.token` in."""
        with self._lock:
            self._windows[slot.lease] = slot

    def close(self, slot: SlotAddress) -> None:
        """Let none in; one that is under way ends at its next chunk."""
        with self._lock:
            self._windows.pop(slot.lease, None)
            self._closed |= {slot.lease} & self._writing

    def settled(self, lease: LeaseId) -> bool:
        """Whether nobody writes into the slot, and no write into it is held."""
        with self._lock:
            if self._script.hold is None or self._script.hold.is_set():
                self._held.clear()
            return lease not in self._writing and lease not in self._held

    def stop(self) -> None:
        """Give up the name, and wait until nobody writes any more."""
        with _registry:
            _receivers.pop(self._name, None)
        self._stopped.set()
        with self._idle:
            self._idle.wait_for(lambda: not self._writing)

    def echo(self) -> bool:
        """Whether bytes written into the arena can be read from it."""
        proof = np.frombuffer(secrets.token_bytes(_ECHO_BYTES), np.uint8)
        with self._lock:
            cell = self._arena.control[_ECHO_AT : _ECHO_AT + _ECHO_BYTES]
            cell[:] = proof
            return np.array_equal(cell, proof)

    def take(
        self, slot: SlotAddress, source: npt.NDArray[np.uint8], timeout_s: float, *aborts: threading.Event
    ) -> None:
        """One write, by the sender's thread."""
        limit = Limit(timeout_s, self._stopped, *aborts)
        with self._claimed(slot, source.nbytes) as number:
            try:
                self._hold_up(slot.lease, limit)
                if number == self._script.fail:
                    raise TransferError("failed as the script says", settled=self._script.fail_settled)
                self._copy(slot, source, limit)
            except TimeoutError as error:
                raise TransferError(str(error), settled=slot.lease not in self._held) from error
            if number == self._script.lose:
                raise TransferError("the completion was lost, as the script says", settled=False)

    @contextlib.contextmanager
    def _claimed(self, slot: SlotAddress, nbytes: int) -> Iterator[int]:
        """Hold a window; gives the number of the write."""
        with self._lock:
            window = self._windows.get(slot.lease)
            if window is None or not hmac.compare_digest(window.token, slot.token):
                raise TransferError(f"no such window is open (lease {slot.lease})", settled=True)
            if (window.offset, window.nbytes) != (slot.offset, slot.nbytes) or nbytes > window.nbytes:
                raise TransferError(f"{nbytes} bytes do not fit the slot that was leased", settled=True)
            del self._windows[slot.lease]
            self._writing.add(slot.lease)
            self._writes += 1
            number = self._writes
        try:
            yield number
        finally:
            with self._idle:
                self._writing.discard(slot.lease)
                self._closed.discard(slot.lease)
                self._idle.notify_all()

    def _hold_up(self, lease: LeaseId, limit: Limit) -> None:
        if self._script.delay is not None:
            self._script.delay()
        if self._script.hold is not None:
            with self._lock:
                self._held.add(lease)
            limit.wait(self._script.hold)
            with self._lock:
                self._held.discard(lease)

    def _copy(self, slot: SlotAddress, source: npt.NDArray[np.uint8], limit: Limit) -> None:
        target = self._arena.view(slot.offset, source.nbytes)
        for start in range(0, max(source.nbytes, 1), CHUNK):
            limit.remaining()
            if slot.lease in self._closed:
                raise TransferError("the window was closed", settled=True)
            np.copyto(target[start : start + CHUNK], source[start : start + CHUNK])


class InProcessSender:
    """Writes into arenas of this process."""

    kind: EngineKind = "inprocess"

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def connect(self, session: Session, timeout_s: float) -> None:
        """Find the receiver."""
        del timeout_s  # it takes no time
        if not _find(session).echo():
            raise TransferError("the receiver does not see what is written into its region", settled=True)

    def write(
        self,
        session: Session,
        slot: SlotAddress,
        source: npt.NDArray[np.uint8],
        timeout_s: float,
        abort: threading.Event = NEVER,
    ) -> None:
        """Copy into the slot, with what the receiver's script has for it."""
        _find(session).take(slot, source, timeout_s, abort, self._stopping)

    def stop(self) -> None:
        """End what is under way."""
        self._stopping.set()


def _find(session: Session) -> InProcessReceiver:
    with _registry:
        receiver = _receivers.get(session.address)
    if receiver is None:
        raise TransferError(f"there is no receiver {session.address}", settled=True)
    return receiver
