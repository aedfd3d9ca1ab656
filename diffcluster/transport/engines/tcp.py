"""Plain TCP between hosts: one connection per pair of peers, kept; a header, the bytes, an answer.

What goes over it is told in `tcp_receiver`.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from diffcluster.errors import TransferError
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines.base import NEVER, EngineOptions
from diffcluster.transport.engines.tcp_receiver import (
    ECHO,
    ECHO_BYTES,
    HEADER,
    REJECTED,
    WRITE,
    WRITTEN,
    TcpReceiver,
    tune,
)
from diffcluster.transport.engines.waiting import Connection, Limit

__all__ = ["SEND_BYTES", "TcpReceiver", "TcpSender", "open_receiver", "open_sender"]

SEND_BYTES: Final = 16 << 20
"""Bytes sent between two looks at whether the peer refuses. A call that sends them comes back once it has waited for a
slice in all, however little was sent; so neither the deadline nor an abort needs them to be fewer."""

_RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)


def open_receiver(arena: Arena, options: EngineOptions) -> TcpReceiver:
    """Listen on a free port of `options.bind_host`."""
    return TcpReceiver(arena, options)


def open_sender() -> TcpSender:
    """A sender without connections."""
    return TcpSender()


class TcpSender:
    """Keeps one connection to each receiver."""

    kind: EngineKind = "tcp"

    def __init__(self) -> None:
        self._connections: dict[str, Connection] = {}
        self._busy = threading.Lock()
        self._stopping = threading.Event()

    def connect(self, session: Session, timeout_s: float) -> None:
        """Connect, and have the peer echo a few bytes from its memory."""
        with self._busy:
            self._connection(session.address, Limit(timeout_s, self._stopping))

    def write(
        self,
        session: Session,
        slot: SlotAddress,
        source: npt.NDArray[np.uint8],
        timeout_s: float,
        abort: threading.Event = NEVER,
    ) -> None:
        """Send and wait for the answer. A failed connection is not used again."""
        limit = Limit(timeout_s, abort, self._stopping)
        header = HEADER.pack(WRITE, bytes.fromhex(slot.token), slot.lease, source.nbytes)
        with self._busy:
            connection = self._connection(session.address, limit)
            problem = ""
            try:
                answer = _send(connection, header, source.data, limit)
            except OSError as error:
                # A receiver that refuses may have closed its end while we were sending; its answer came all the same.
                answer, problem = _pending(connection) or b"", str(error)
            if answer == WRITTEN and not problem:
                return
            self._drop(session.address)
        if answer == REJECTED:
            raise TransferError(f"{session.address} has no such window open (lease {slot.lease})", settled=True)
        problem = problem or "the connection was closed"
        raise TransferError(f"write to {session.address} failed: {problem}", settled=False)

    def stop(self) -> None:
        """End what is under way, and close all connections."""
        self._stopping.set()
        with self._busy:
            for address in list(self._connections):
                self._drop(address)

    def _connection(self, address: str, limit: Limit) -> Connection:
        known = self._connections.get(address)
        if known is not None and not known.poll(0):
            return known
        # A receiver that was started again has another address: whatever was closed goes, not only what is needed now.
        for closed in [other for other, connection in self._connections.items() if _pending(connection) is not None]:
            self._drop(closed)
        try:
            connection = self._connections[address] = _connect(address, limit)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot connect to {address}: {error}", settled=True) from error
        return connection

    def _drop(self, address: str) -> None:
        connection = self._connections.pop(address)
        # What the kernel still has to send is not to arrive any more.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        connection.close()


def _connect(address: str, limit: Limit) -> Connection:
    """A connection to a receiver that has proved what it is; raises OSError or ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    failure = OSError("no such host")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
        connection = Connection(family, kind, protocol)
        try:
            tune(connection)
            limit.connect(connection, place)
            _prove(connection, limit)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


def _prove(connection: socket.socket, limit: Limit) -> None:
    proof = secrets.token_bytes(ECHO_BYTES)
    header = HEADER.pack(ECHO, bytes(16), 0, len(proof))
    limit.send(connection, memoryview(header), memoryview(proof))
    if limit.receive(connection, len(proof)) != proof:
        raise ConnectionError("what answers there is no receiver")


def _send(connection: Connection, header: bytes, content: memoryview, limit: Limit) -> bytes:
    """Send a write; returns the answer, empty if the peer closed."""
    limit.send(connection, header, content[:SEND_BYTES])
    for start in range(SEND_BYTES, len(content), SEND_BYTES):
        answer = _pending(connection)
        if answer is not None:
            return answer if answer == REJECTED else b""
        limit.send(connection, content[start : start + SEND_BYTES])
    return limit.receive(connection, 1)


def _pending(connection: Connection) -> bytes | None:
    """What has come without being waited for: None if nothing, empty if the peer has closed."""
    if not connection.poll(0):
        return None
    try:
        return connection.recv(1, socket.MSG_DONTWAIT)
    except OSError:
        return b""
