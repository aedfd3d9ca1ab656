"""A way to a Mooncake receiver besides Mooncake: small questions, answered at once or not at all.

The library's own first contact can wait 60 s for a peer that accepts and says nothing, and its writes cannot be
refused. So a sender asks here first, within its own deadline: is that receiver still there, did my bytes arrive in its
memory, may I write. It keeps the connection, whose end tells each side of the other's.

    sender -> receiver   word (4 bytes), token (16 bytes), lease, offset, nbytes (u64 each)
    "MEET"   answer: id of the session (16 bytes), then cell `offset` of the echo memory (64 bytes)
    "MAYI"   may I write `nbytes`, the whole slot, at `offset`?   answer: one byte, 1 for yes, once for each window
    "DONE"   all bytes of that lease have arrived   no answer

A write that the receiver let begin counts as under way until "DONE". If the connection ends first, nobody can know.
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import struct
import threading
from collections import deque
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from diffcluster.errors import AddressInUseError
from diffcluster.ids import LeaseId
from diffcluster.messages import SlotAddress
from diffcluster.transport.engines.mooncake_address import ECHO_BYTES, MooncakeAddress
from diffcluster.transport.engines.tcp_receiver import tune
from diffcluster.transport.engines.waiting import Limit

__all__ = ["CELLS", "CELL_BYTES", "Door", "Visit"]

CELL_BYTES: Final = 64
CELLS: Final = ECHO_BYTES // CELL_BYTES

_QUESTION: Final = struct.Struct("!4s16sQQQ")
_MEET: Final = b"MEET"
_MAY_I: Final = b"MAYI"
_DONE: Final = b"DONE"
_YES: Final = b"\x01"
_NO: Final = b"\x00"
_ID_BYTES: Final = 16
_NOTHING: Final = bytes(16)
_MAX_CONNECTIONS: Final = 256
_MAX_LOST: Final = 4096

_log = logging.getLogger(__name__)


class _Visitor:
    """A connection of a sender: what it has said of its next question, and what it is writing."""

    def __init__(self) -> None:
        self.said = b""
        self.writing: set[LeaseId] = set()


class Door:
    """The receiver's end: one thread that answers, and the windows that it answers by."""

    def __init__(self, host: str, session_id: str, cells: npt.NDArray[np.uint8]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise AddressInUseError(f"role.transfer_host: cannot listen on {host}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._id, self._cells = bytes.fromhex(session_id), cells
        self._lock = threading.Lock()
        self._windows: dict[LeaseId, SlotAddress] = {}
        self._writing: set[LeaseId] = set()
        self._lost: deque[LeaseId] = deque(maxlen=_MAX_LOST)  # so many losses later, time has settled the oldest
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._bell, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._bell):
            source.setblocking(False)
            self._selector.register(source, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="mooncake-door", daemon=True)
        self._thread.start()

    def open(self, slot: SlotAddress) -> None:
        """Say yes, once, to whoever asks for exactly this slot."""
        with self._lock:
            self._windows[slot.lease] = slot

    def close(self, slot: SlotAddress) -> None:
        """Say yes no more."""
        with self._lock:
            self._windows.pop(slot.lease, None)

    def settled(self, lease: LeaseId) -> bool | None:
        """Whether no write into the lease is under way; None if its sender has gone without a word."""
        with self._lock:
            if lease in self._writing:
                return False
            return None if lease in self._lost else True

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._waker.close()
        self._thread.join()
        self._cells = np.empty(0, np.uint8)  # a view would keep the whole region mapped

    def _run(self) -> None:
        while True:
            ready = {cast("socket.socket", key.fileobj) for key, _ in self._selector.select()}
            if self._bell in ready:
                break
            if self._listener in ready:
                self._accept()
            for connection in ready & self._visitors.keys():
                self._hear(connection)
        for connection in list(self._visitors):
            self._dismiss(connection)
        self._selector.close()
        self._listener.close()
        self._bell.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            _log.warning("mooncake door: accept failed: %s", error)
            return
        if len(self._visitors) >= _MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        tune(connection)
        self._visitors[connection] = _Visitor()
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        visitor = self._visitors[connection]
        try:
            said = connection.recv(_QUESTION.size - len(visitor.said))
            visitor.said += said
            if len(visitor.said) == _QUESTION.size:
                question, visitor.said = visitor.said, b""
                # What does not fit into the socket's buffer is for somebody who asks and does not listen.
                answer = self._answer(visitor, question)
                if connection.send(answer) < len(answer):
                    said = b""
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            _log.debug("mooncake door: a connection ended: %s", error)
            said = b""
        if not said:
            self._dismiss(connection)

    def _answer(self, visitor: _Visitor, question: bytes) -> bytes:
        """Raises ValueError for what is no question."""
        word, token, number, offset, nbytes = _QUESTION.unpack(question)
        lease = LeaseId(number)
        if word == _MEET and offset < CELLS:
            return self._id + self._cells[offset * CELL_BYTES : (offset + 1) * CELL_BYTES].tobytes()
        if word == _MAY_I:
            return _YES if self._let_in(visitor, SlotAddress(lease, offset, nbytes, token.hex())) else _NO
        if word == _DONE and lease in visitor.writing:
            with self._lock:
                visitor.writing.discard(lease)
                self._writing.discard(lease)
            return b""
        raise ValueError(f"no question: {question[:4]!r}")

    def _let_in(self, visitor: _Visitor, asked: SlotAddress) -> bool:
        with self._lock:
            slot = self._windows.get(asked.lease)
            if slot is None or (slot.offset, slot.nbytes) != (asked.offset, asked.nbytes):
                return False
            if not hmac.compare_digest(slot.token, asked.token):
                return False
            del self._windows[asked.lease]
            self._writing.add(asked.lease)
            visitor.writing.add(asked.lease)
            return True

    def _dismiss(self, connection: socket.socket) -> None:
        visitor = self._visitors.pop(connection)
        with self._lock:
            self._writing -= visitor.writing
            self._lost.extend(visitor.writing)
        self._selector.unregister(connection)
        connection.close()


class Visit:
    """The sender's end. Its methods raise OSError, and TimeoutError when `limit` has passed."""

    def __init__(self, address: MooncakeAddress, limit: Limit) -> None:
        self._connection = _connect(address, limit)
        self._id = bytes.fromhex(address.id)

    @property
    def local_host(self) -> str:
        """Our own address, as that host sees it."""
        return str(self._connection.getsockname()[0])

    def meet(self, cell: int, limit: Limit) -> bytes:
        """Make sure that this is the receiver of the session; what it has in `cell`."""
        answer = self._ask(_QUESTION.pack(_MEET, _NOTHING, 0, cell, 0), _ID_BYTES + CELL_BYTES, limit)
        if answer[:_ID_BYTES] != self._id:
            raise ConnectionError("what answers there is not the receiver of that session")
        return answer[_ID_BYTES:]

    def may_i(self, slot: SlotAddress, limit: Limit) -> bool:
        """Ask to write into a slot. If it is allowed, `done` must follow, or the end of this connection."""
        question = _QUESTION.pack(_MAY_I, bytes.fromhex(slot.token), slot.lease, slot.offset, slot.nbytes)
        return self._ask(question, 1, limit) == _YES

    def done(self, slot: SlotAddress, limit: Limit) -> None:
        """Say that all bytes have arrived."""
        limit.send(self._connection, memoryview(_QUESTION.pack(_DONE, _NOTHING, slot.lease, 0, 0)))

    def ended(self) -> bool:
        """Whether the receiver has closed its end."""
        try:
            return len(self._connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)) == 0
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Leave. What was allowed and is not done will count as unknown."""
        self._connection.close()

    def _ask(self, question: bytes, nbytes: int, limit: Limit) -> bytes:
        limit.send(self._connection, memoryview(question))
        answer = limit.receive(self._connection, nbytes)
        if len(answer) < nbytes:
            raise ConnectionError("the receiver closed the connection")
        return answer


def _connect(address: MooncakeAddress, limit: Limit) -> socket.socket:
    failure = OSError("no such host")
    for family, kind, protocol, _, place in socket.getaddrinfo(address.host, address.door, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            tune(connection)
            limit.connect(connection, place)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure
