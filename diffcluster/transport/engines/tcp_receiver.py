"""The receiving half of the TCP engine: what a connection carries, and who may write where.

    sender -> receiver   magic, token (16 bytes), lease (u64), nbytes (u64), then nbytes bytes
    "DCT1": a write      answer: 0x00 all bytes are in the slot   0x01 no such window, and none of them is
    "DCE1": an echo      answer: the bytes, at most 4 KiB, from where they were put in the receiver's control memory

A window is opened per lease, with a token of its own, and takes one write. The bytes go from the socket straight into
the slot, whose place the receiver alone knows. Closing a window shuts down the connection that writes into it; once
its thread has let go, which is at once, the write is over, whatever the sender does.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import struct
import threading
from typing import Final

from diffcluster.errors import AddressInUseError
from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines.base import EngineOptions
from diffcluster.transport.engines.waiting import Limit, set_timeout

__all__ = ["ECHO", "ECHO_BYTES", "HEADER", "REJECTED", "WRITE", "WRITTEN", "TcpReceiver", "tune"]

ECHO_BYTES: Final = 4096
"""More than one Ethernet frame, so that a path which loses large ones is found out at first contact."""

HEADER: Final = struct.Struct("!4s16sQQ")
WRITE: Final = b"DCT1"
ECHO: Final = b"DCE1"
WRITTEN: Final = b"\x00"
REJECTED: Final = b"\x01"
_ECHO_AT: Final = 40 << 10  # in the control memory, where the shared-memory engine has nothing
_PAUSE_S: Final = 0.1
_LET_GO_S: Final = 0.1
_MAX_CONNECTIONS: Final = 256
_DRAIN_BYTES: Final = 64 << 20
_DRAIN_S: Final = 1.0
_KEEPALIVE: Final = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}

_log = logging.getLogger(__name__)


class _Window:
    """A slot that takes one write. What the write will need is looked up when it opens, ahead of the bytes.

    `connection` is that of the write which is under way. `closed`: the window was closed meanwhile.
    """

    __slots__ = ("closed", "connection", "target", "token")

    def __init__(self, slot: SlotAddress, arena: Arena) -> None:
        self.token = bytes.fromhex(slot.token)
        self.target = arena.view(slot.offset, slot.nbytes).data
        self.connection: socket.socket | None = None
        self.closed = False


class TcpReceiver:
    """Accepts connections and reads into windows. Each connection has a thread."""

    kind: EngineKind = "tcp"

    def __init__(self, arena: Arena, options: EngineOptions) -> None:
        self._arena, self._options = arena, options
        family = socket.AF_INET6 if ":" in options.bind_host else socket.AF_INET
        try:
            self._listener = socket.create_server((options.bind_host, 0), family=family, backlog=128)
        except OSError as error:
            raise AddressInUseError(f"role.transfer_host: cannot listen on {options.bind_host}: {error}") from error
        self._port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._let_go = threading.Condition(self._lock)
        self._echo_lock = threading.Lock()
        self._windows: dict[int, _Window] = {}  # by lease
        self._writing: dict[int, _Window] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._stopping = False
        self._pause = threading.Event()  # never set: a way to wait
        self._acceptor = threading.Thread(target=self._accept, name="tcp-receiver", daemon=True)
        self._acceptor.start()

    def session(self) -> Session:
        """The address that peers connect to."""
        host = self._options.advertise_host or self._options.bind_host
        return Session("tcp", f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}")

    def open(self, slot: SlotAddress) -> None:
        """Let one write with `slot.token` in."""
        window = _Window(slot, self._arena)
        with self._lock:
            self._windows[slot.lease] = window

    def close(self, slot: SlotAddress) -> None:
        """Let none in, and end the one that is under way."""
        with self._lock:
            self._windows.pop(slot.lease, None)
            writing = self._writing.get(slot.lease)
            if writing is not None and writing.connection is not None:
                writing.closed = True
                _shut(writing.connection)
                self._let_go.wait_for(lambda: slot.lease not in self._writing, _LET_GO_S)

    def settled(self, lease: LeaseId) -> bool:
        """Whether the thread that wrote into the slot has let go of it."""
        with self._lock:
            return lease not in self._writing

    def stop(self) -> None:
        """Close all connections and end all threads."""
        with self._lock:
            self._stopping = True
            self._windows.clear()
            threads = list(self._connections.values())
            for connection in self._connections:
                _shut(connection)
        _shut(self._listener)
        self._acceptor.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                _log.warning("tcp engine: accept failed: %s", error)
                self._pause.wait(_PAUSE_S)
                continue
            with self._lock:
                if self._stopping or len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="tcp-peer", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads: this peer is told by the end of its connection
                    _log.warning("tcp engine: %s", error)
                    connection.close()
                    continue
                self._connections[connection] = thread

    def _serve(self, connection: socket.socket) -> None:
        """Take writes from one peer until it leaves or breaks a rule."""
        try:
            with connection:
                tune(connection)
                set_timeout(connection, self._options.timeout_s)
                header = memoryview(bytearray(HEADER.size))
                there = _read(connection, header)
                while there and self._serve_one(connection, header):
                    there = _read_next(connection, header)
        except OSError as error:
            _log.debug("tcp engine: a peer's connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _serve_one(self, connection: socket.socket, header: memoryview) -> bool:
        magic, token, lease, nbytes = HEADER.unpack(header)
        if magic == ECHO and nbytes <= ECHO_BYTES:
            return self._echo(connection, nbytes)
        writing = self._claim(connection, magic, token, lease, nbytes)
        if writing is None:
            _reject(connection)
            return False
        try:
            complete = _read(connection, writing.target[:nbytes])
        finally:
            with self._lock:
                del self._writing[lease]
                if writing.closed:  # else nobody waits for it
                    self._let_go.notify_all()
        # The answer is promised to the sender only while the window is still open.
        if complete and not writing.closed:
            connection.sendall(WRITTEN)
        return complete and not writing.closed

    def _echo(self, connection: socket.socket, nbytes: int) -> bool:
        # Looked at first, so that all of it is here when the one place for all connections is taken.
        if len(connection.recv(nbytes, socket.MSG_PEEK | socket.MSG_WAITALL)) < nbytes:
            return False
        with self._echo_lock:
            cell = self._arena.control[_ECHO_AT : _ECHO_AT + nbytes]
            complete = _read(connection, cell.data)
            echo = cell.tobytes()
        connection.sendall(echo)
        return complete

    def _claim(self, connection: socket.socket, magic: bytes, token: bytes, lease: int, nbytes: int) -> _Window | None:
        with self._lock:
            window = self._windows.get(lease)
            if magic != WRITE or window is None or nbytes > len(window.target):
                return None
            if not hmac.compare_digest(window.token, token):
                return None
            del self._windows[lease]
            window.connection = connection
            self._writing[lease] = window
            return window


def tune(connection: socket.socket) -> None:
    """Send at once, and notice within a minute that the other host has gone without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _read_next(connection: socket.socket, target: memoryview) -> bool:
    """As `_read`, but the first byte may be long in coming: between transfers a connection may be idle for ever."""
    while True:
        try:
            count = connection.recv_into(target, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue
        return count > 0 and _read(connection, target[count:])


def _read(connection: socket.socket, target: memoryview) -> bool:
    """Fill `target`; False if the peer closed first."""
    filled = 0
    while filled < len(target):
        # The kernel bounds what one call waits altogether, and gives what has come by then; only silence is an error.
        count = connection.recv_into(target[filled:], 0, socket.MSG_WAITALL)
        if count == 0:
            return False
        filled += count
    return True


def _reject(connection: socket.socket) -> None:
    """Say no, so that it is heard: closing while bytes come in would throw away the answer that is on its way."""
    connection.sendall(REJECTED)
    connection.shutdown(socket.SHUT_WR)
    limit, waste, left = Limit(_DRAIN_S), bytearray(1 << 16), _DRAIN_BYTES
    while left > 0:
        limit.set_on(connection)
        with contextlib.suppress(BlockingIOError):
            count = connection.recv_into(waste)
            if count == 0:
                return
            left -= count


def _shut(connection: socket.socket) -> None:
    """Wake whoever reads from `connection`, from any thread."""
    with contextlib.suppress(OSError):  # not connected any more: nobody reads
        connection.shutdown(socket.SHUT_RDWR)
