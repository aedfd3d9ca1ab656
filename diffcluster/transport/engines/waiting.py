"""Waiting for a peer, never longer than allowed: what the engines that own sockets share.

Sockets stay in blocking mode and get the kernel's own time-outs. So one call moves a whole chunk inside the kernel,
where non-blocking calls would come back to Python (and its lock) for each part that the socket's buffer takes.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import time
from typing import Any, Final

__all__ = ["SLICE_S", "Connection", "Limit", "set_timeout"]

SLICE_S: Final = 0.1
"""How long a call may wait before the deadline and the aborts are looked at again."""

_TIMEVAL: Final = struct.Struct("@ll")
_WAITING: Final = frozenset({errno.EAGAIN, errno.EINPROGRESS, errno.EALREADY})
_LEAST_US: Final = 1000  # none at all would mean: wait for ever


class Connection(socket.socket):
    """A socket for many transfers, which keeps what each would have to tell or ask the kernel again."""

    wait_s = 0.0
    """What its calls wait at most, as `set_timeout` has it; 0 is for ever."""

    def __init__(self, *family_kind_protocol: int) -> None:
        super().__init__(*family_kind_protocol)
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        self.poll = poller.poll
        """With 0: true if a call to receive would not wait, because something has come or the peer has closed."""


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Bound what a call of a blocking socket waits; one that moved nothing in that time raises BlockingIOError."""
    value = _TIMEVAL.pack(*divmod(max(int(seconds * 1e6), _LEAST_US), 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    if isinstance(connection, Connection):
        connection.wait_s = seconds


class Limit:
    """What ends a transfer early: its deadline, or one of the `aborts`. Its methods then raise TimeoutError."""

    __slots__ = ("_aborts", "_deadline", "_timeout_s")

    def __init__(self, timeout_s: float, *aborts: threading.Event) -> None:
        self._timeout_s, self._aborts = timeout_s, aborts
        self._deadline = time.monotonic() + timeout_s

    def remaining(self) -> float:
        """Seconds that are left, more than none."""
        for abort in self._aborts:
            if abort.is_set():
                raise TimeoutError("given up")
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"not done after {self._timeout_s:g} s")
        return remaining

    def wait(self, event: threading.Event) -> None:
        """Return when `event` is set."""
        while not event.wait(min(self.remaining(), SLICE_S)):
            pass

    def set_on(self, connection: socket.socket) -> None:
        """Let the next call on `connection` wait for no longer than a slice."""
        wait_s = self.remaining()
        if wait_s > SLICE_S:
            wait_s = SLICE_S
        if getattr(connection, "wait_s", 0.0) != wait_s:
            set_timeout(connection, wait_s)

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

    def send(self, connection: socket.socket, *parts: bytes | memoryview) -> None:
        """Send all of `parts`, in as few calls as it takes."""
        left = list(parts)
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
