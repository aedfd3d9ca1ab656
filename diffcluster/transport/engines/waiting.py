"""Waiting for a peer, never longer than allowed: what the engines that own sockets share.

Sockets stay in blocking mode and get the kernel's own time-outs. So one call moves a whole chunk inside the kernel,
where non-blocking calls would come back to Python (and its lock) for each part that the socket's buffer takes.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from typing import Any, Final

__all__ = ["SLICE_S", "Limit", "set_timeout"]

SLICE_S: Final = 0.1
"""How long a call may wait before the deadline and the aborts are looked at again."""

_TIMEVAL: Final = struct.Struct("@ll")
_WAITING: Final = frozenset({errno.EAGAIN, errno.EINPROGRESS, errno.EALREADY})
_LEAST_US: Final = 1000  # none at all would mean: wait for ever


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Bound each single wait of a blocking socket; a call that moved nothing in that time raises BlockingIOError."""
    value = _TIMEVAL.pack(*divmod(max(int(seconds * 1e6), _LEAST_US), 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Limit:
    """What ends a transfer early: its deadline, or one of the `aborts`. Its methods then raise TimeoutError."""

    def __init__(self, timeout_s: float, *aborts: threading.Event) -> None:
        self._timeout_s, self._aborts = timeout_s, aborts
        self._deadline = time.monotonic() + timeout_s
        self._sliced: socket.socket | None = None  # the connection whose calls wait for a whole slice

    def remaining(self) -> float:
        """Seconds that are left, more than none."""
        remaining = self._deadline - time.monotonic()
        if any(abort.is_set() for abort in self._aborts):
            raise TimeoutError("given up")
        if remaining <= 0:
            raise TimeoutError(f"not done after {self._timeout_s:g} s")
        return remaining

    def wait(self, event: threading.Event) -> None:
        """Return when `event` is set."""
        while not event.wait(min(self.remaining(), SLICE_S)):
            pass

    def set_on(self, connection: socket.socket) -> None:
        """Let the next call on `connection` wait for no longer than a slice."""
        remaining = self.remaining()
        if remaining >= SLICE_S and self._sliced is connection:
            return
        set_timeout(connection, min(remaining, SLICE_S))
        self._sliced = connection if remaining >= SLICE_S else None

    def connect(self, connection: socket.socket, address: Any) -> None:
        """Connect; raises OSError, which TimeoutError is, too."""
        while True:
            self.set_on(connection)
            code = connection.connect_ex(address)
            if code == 0:
                return
            # A second call for the same address goes on waiting for what the first has begun.
            if code not in _WAITING:
                raise OSError(code, os.strerror(code))

    def send(self, connection: socket.socket, *parts: memoryview) -> None:
        """Send all of `parts`, in as few calls as it takes."""
        left = [part for part in parts if len(part)]
        while left:
            self.set_on(connection)
            try:
                sent = connection.sendmsg(left)
            except BlockingIOError:
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def receive(self, connection: socket.socket, nbytes: int) -> bytes:
        """`nbytes` from `connection`, or less if the peer closes first."""
        received = b""
        while len(received) < nbytes:
            self.set_on(connection)
            try:
                part = connection.recv(nbytes - len(received), socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            if not part:
                break
            received += part
        return received
