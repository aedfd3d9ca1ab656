"""The push thread: writes staged bytes into peers' slots while the compute thread is at its next request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diffcluster.errors import TransferError
from diffcluster.ids import HostId
from diffcluster.messages import EngineKind, Push
from diffcluster.transport.engines import open_sender
from diffcluster.transport.engines.base import Sender, choose
from diffcluster.transport.mailbox import Mailbox

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


class Pusher:
    """Owns the sending halves of all engines. Reports each push once, to `report`, which must be a mailbox's post."""

    def __init__(self, host: HostId, timeout_s: float, report: Callable[[PushResult], Any]) -> None:
        self._host, self._timeout_s, self._report = host, timeout_s, report
        self._inbox: Mailbox[tuple[Push, npt.NDArray[np.uint8], float] | None] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="push")
        self._senders: dict[EngineKind, Sender] = {}
        self._told: set[tuple[str, EngineKind]] = set()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def push(self, push: Push, source: npt.NDArray[np.uint8]) -> None:
        """Write `source` to the peer of `push`. `source` must stay as it is until the result is reported.

        The time-out runs from now: a push that has waited too long for others is not begun, since its slot may by then
        be somebody else's.
        """
        if not self._inbox.post((push, source, time.monotonic() + self._timeout_s)):
            self._report(PushResult(push, None, source.nbytes, 0.0, "too many pushes are waiting"))

    def stop(self) -> None:
        """Finish the push under way, and end the thread."""
        self._inbox.post(None)
        self._thread.join()
        self._inbox.close()

    def _run(self) -> None:
        try:
            while True:
                for item in self._inbox.take():
                    if item is None:
                        return
                    self._report(self._write(*item))
        finally:
            for sender in self._senders.values():
                sender.stop()

    def _write(self, push: Push, source: npt.NDArray[np.uint8], deadline: float) -> PushResult:
        started = time.monotonic()
        kind: EngineKind | None = None
        error, settled, held = "", True, False
        try:
            session = choose(self._host, push.host, push.sessions)
            kind = session.kind
            self._tell(push, kind)
            if kind not in self._senders:
                self._senders[kind] = open_sender(kind)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TransferError(f"not begun within {self._timeout_s} s", settled=True)
            self._senders[kind].write(session, push.slot, source, remaining)
        except TransferError as failure:
            error, settled, held = str(failure), failure.settled, failure.source_held
        except Exception as failure:  # noqa: BLE001 - a bug in an engine must end this push, not all pushes
            _log.exception("push of %s failed", push.request_id)
            error, settled, held = f"{type(failure).__name__}: {failure}", False, True
        return PushResult(push, kind, source.nbytes, time.monotonic() - started, error, settled, held)

    def _tell(self, push: Push, kind: EngineKind) -> None:
        if (push.incarnation, kind) not in self._told:
            self._told.add((push.incarnation, kind))
            _log.info("transfers to %s go by %s", push.receiver, kind)
