"""The receiving half of the shared-memory engine.

The receiver listens on an abstract Unix socket (no file, so nothing to leave behind) and hands the descriptor of its
sealed receive region to peers of the same user:

    receiver -> sender   magic "DCS1", bytes of slots, bytes behind them, cell (u64 each), 32 random bytes; the fd
    sender -> receiver   "?" once it has put those bytes into its cell, through its own mapping
    receiver -> sender   0x00 once it has found them there and has inverted them, which the sender looks at; else 0x01

The connection then stays open and silent: its end is how each side learns that the other is gone. Who may write, and
who is writing, stands in the shared memory itself: see `shm_board`.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import uuid
from typing import Final

import numpy as np

from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import CONTROL_BYTES, Arena
from diffcluster.transport.engines.shm_board import CELLS, NO_BOARD, PROOF_BYTES, Board

__all__ = ["GREETING", "MAGIC", "OTHER", "SAME", "WRITTEN", "ShmReceiver"]

GREETING: Final = struct.Struct(f"!4sQQQ{PROOF_BYTES}s")
MAGIC: Final = b"DCS1"
WRITTEN, SAME, OTHER = b"?", b"\x00", b"\x01"
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_PAUSE_S: Final = 0.1

_log = logging.getLogger(__name__)


class _Guest:
    """A sender's connection, as the receiver knows it. `proof` is None when it has been given."""

    def __init__(self, connection: socket.socket, cell: int) -> None:
        self.connection, self.cell = connection, cell
        self.proof: bytes | None = secrets.token_bytes(PROOF_BYTES)


class ShmReceiver:
    """Hands out the receive region's descriptor, and keeps the board."""

    kind: EngineKind = "shm"

    def __init__(self, arena: Arena) -> None:
        self._arena, self._board = arena, Board(arena.control)
        self._name = f"diffcluster-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._cells = list(range(CELLS))  # those that are free
        self._pause = threading.Event()  # never set: a way to wait
        self._thread = threading.Thread(target=self._serve, name="shm-receiver", daemon=True)
        self._thread.start()

    def session(self) -> Session:
        """The socket's abstract name."""
        return Session("shm", self._name)

    def open(self, slot: SlotAddress) -> None:
        """Enter the window where senders look."""
        with self._lock:
            entered = self._board.open(slot)
        if not entered:
            _log.warning("shm engine: too many windows are open; what comes for lease %d will be refused", slot.lease)

    def close(self, slot: SlotAddress) -> None:
        """Remove the window. A write that is under way ends at its next chunk."""
        with self._lock:
            self._board.close(slot)

    def settled(self, lease: LeaseId) -> bool:
        """Whether no living peer says that it writes into the slot."""
        return not self._board.is_written(lease)

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        self._board = NO_BOARD

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            guests: dict[socket.socket, _Guest] = {}
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        for guest in guests.values():
                            guest.connection.close()
                        return
                    if key.fileobj is self._listener:
                        arrived = self._accept()
                        if arrived is not None:
                            guests[arrived.connection] = arrived
                            selector.register(arrived.connection, selectors.EVENT_READ)
                    elif isinstance(key.fileobj, socket.socket) and not self._hear(guests[key.fileobj]):
                        selector.unregister(key.fileobj)
                        self._part(guests.pop(key.fileobj))

    def _accept(self) -> _Guest | None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # gone already, or no descriptors left: the others go on
            _log.warning("shm engine: accept failed: %s", error)
            self._pause.wait(_PAUSE_S)
            return None
        connection.setblocking(False)
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid() or not self._cells:
            connection.close()
            return None
        guest = _Guest(connection, self._cells.pop())
        try:
            greeting = GREETING.pack(MAGIC, self._arena.nbytes, CONTROL_BYTES, guest.cell, guest.proof)
            socket.send_fds(connection, [greeting], [self._arena.fd])
        except OSError:  # gone already
            self._part(guest)
            return None
        return guest

    def _hear(self, guest: _Guest) -> bool:
        """Take the proof; anything else that makes a connection readable is its end, or a stranger."""
        try:
            said = guest.connection.recv(2)
            if said != WRITTEN or guest.proof is None:
                return False
            cell = self._board.proof(guest.cell)
            same = secrets.compare_digest(cell.tobytes(), guest.proof)
            np.invert(cell, out=cell)
            guest.connection.send(SAME if same else OTHER)
            guest.proof = None
        except OSError:
            return False
        return same

    def _part(self, guest: _Guest) -> None:
        # Its end of the connection is closed, so whoever wrote through it writes no more.
        guest.connection.close()
        self._board.clear(guest.cell)
        self._cells.append(guest.cell)
