"""Plain TCP between hosts: one connection per pair of peers, kept; a header, the bytes, one byte of answer.

    sender -> receiver   magic "DCT1", token (16 bytes), lease (u64), nbytes (u64), then nbytes bytes
    receiver -> sender   0x00 all bytes are in the slot   0x01 no such window

A window is opened per lease, with a token of its own, and takes one write. The bytes go from the socket straight
into the slot. Closing a window shuts down the connection that writes into it and waits until its thread has let go:
so unlike shared memory, TCP is fenced from the receiver's side.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import struct
import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from diffcluster.errors import AddressInUseError, TransferError
from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines.base import CHUNK, EngineOptions

__all__ = ["TcpReceiver", "TcpSender", "open_receiver", "open_sender"]

_HEADER: Final = struct.Struct("!4s16sQQ")
_MAGIC: Final = b"DCT1"
_WRITTEN: Final = b"\x00"
_REJECTED: Final = b"\x01"
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.1
_MAX_CONNECTIONS: Final = 256

_log = logging.getLogger(__name__)


def open_receiver(arena: Arena, options: EngineOptions) -> TcpReceiver:
    """Listen on a free port of `options.bind_host`."""
    return TcpReceiver(arena, options)


def open_sender() -> TcpSender:
    """A sender without connections."""
    return TcpSender()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Window:
    """One lease that may be written once. `writer` is the connection that does so."""

    def __init__(self, slot: SlotAddress) -> None:
        self.slot = slot
        self.writer: socket.socket | None = None
        self.left = threading.Event()


class TcpReceiver:
    """Accepts connections and reads into windows."""

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
        self._windows: dict[LeaseId, _Window] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._stopping = False
        self._pause = threading.Event()  # never set: a way to wait
        self._acceptor = threading.Thread(target=self._accept, name="tcp-receiver", daemon=True)
        self._acceptor.start()

    def session(self) -> Session:
        """The address that peers connect to."""
        return Session("tcp", _join(self._options.advertise_host or self._options.bind_host, self._port))

    def open(self, slot: SlotAddress) -> None:
        """Let one write with `slot.token` in."""
        with self._lock:
            self._windows[slot.lease] = _Window(slot)

    def close(self, slot: SlotAddress) -> bool:
        """Let none in, and end the one that is under way. Always True."""
        with self._lock:
            window = self._windows.pop(slot.lease, None)
            writer = window.writer if window else None
            if writer is not None:
                _shut(writer)
        if window is not None and writer is not None:
            window.left.wait()
        return True

    def stop(self) -> None:
        """Close all connections and end all threads."""
        with self._lock:
            self._stopping = True
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
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Take writes from one peer until it leaves or breaks a rule."""
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                while self._serve_one(connection):
                    pass
        except OSError as error:
            _log.debug("tcp engine: a peer's connection ended: %s", error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _serve_one(self, connection: socket.socket) -> bool:
        connection.settimeout(None)  # between transfers a connection may be idle for ever
        header = bytearray(_HEADER.size)
        if not _read(connection, memoryview(header)):
            return False
        connection.settimeout(self._options.timeout_s)
        magic, token, lease, nbytes = _HEADER.unpack(header)
        window = self._claim(connection, magic, token, LeaseId(lease), nbytes)
        if window is None:
            connection.sendall(_REJECTED)
            return False  # what follows the header is not read
        try:
            target = self._arena.view(window.slot.offset, nbytes).data
            if not _read(connection, target):
                return False
            # The answer is promised to the sender only while the window is still open.
            with self._lock:
                if self._windows.pop(window.slot.lease, None) is None:
                    return False
                window.writer = None
        finally:
            window.left.set()
        connection.sendall(_WRITTEN)
        return True

    def _claim(self, connection: socket.socket, magic: bytes, token: bytes, lease: LeaseId, nbytes: int) -> _Window | None:
        with self._lock:
            window = self._windows.get(lease)
            if magic != _MAGIC or window is None or window.writer is not None:
                return None
            if not hmac.compare_digest(bytes.fromhex(window.slot.token), token) or nbytes > window.slot.nbytes:
                return None
            window.writer = connection
            return window


class TcpSender:
    """Keeps one connection to each receiver."""

    kind: EngineKind = "tcp"

    def __init__(self) -> None:
        self._connections: dict[str, socket.socket] = {}

    def write(self, session: Session, slot: SlotAddress, source: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """Send and wait for the answer. A failed connection is not used again."""
        deadline = time.monotonic() + timeout_s
        connection = self._connection(session.address)
        header = _HEADER.pack(_MAGIC, bytes.fromhex(slot.token), slot.lease, source.nbytes)
        try:
            _send(connection, header, deadline)
            for start in range(0, source.nbytes, CHUNK):
                _send(connection, source[start : start + CHUNK].data, deadline)
            connection.settimeout(_remaining(deadline))
            answer = connection.recv(1)
        except OSError as error:
            self._drop(session.address)
            raise TransferError(f"write to {session.address} failed: {error or 'timed out'}", settled=False) from error
        if answer != _WRITTEN:
            self._drop(session.address)
            raise TransferError(f"{session.address} did not accept the write", settled=answer == _REJECTED)

    def stop(self) -> None:
        """Close all connections."""
        for address in list(self._connections):
            self._drop(address)

    def _connection(self, address: str) -> socket.socket:
        # A receiver that was started again has another address: whatever was closed goes, not only what is needed now.
        for closed in [known for known, connection in self._connections.items() if not _is_idle(connection)]:
            self._drop(closed)
        connection = self._connections.get(address)
        if connection is None:
            try:
                connection = socket.create_connection(_split(address), timeout=_CONNECT_S)
            except (OSError, ValueError) as error:
                raise TransferError(f"cannot connect to {address}: {error}", settled=True) from error
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[address] = connection
        return connection

    def _drop(self, address: str) -> None:
        self._connections.pop(address).close()


def _is_idle(connection: socket.socket) -> bool:
    """Whether a kept connection is still good: open, and with nothing to read."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining


def _send(connection: socket.socket, data: bytes | memoryview, deadline: float) -> None:
    connection.settimeout(_remaining(deadline))
    connection.sendall(data)


def _read(connection: socket.socket, target: memoryview) -> bool:
    """Fill `target`; False if the peer closed first."""
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled:])
        if count == 0:
            return False
        filled += count
    return True


def _shut(connection: socket.socket) -> None:
    """Wake whoever reads from `connection`, from any thread."""
    with contextlib.suppress(OSError):  # not connected any more: nobody reads
        connection.shutdown(socket.SHUT_RDWR)
