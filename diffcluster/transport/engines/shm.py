"""Shared memory between processes of one host: one copy, straight into the receiver's slot.

How the two halves meet is told in `shm_receiver`, how a write is fenced in `shm_board`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from diffcluster.errors import TransferError
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import CONTROL_BYTES, Arena
from diffcluster.transport.engines.base import NEVER, EngineOptions
from diffcluster.transport.engines.shm_board import CELLS, NO_BOARD, Board, digest
from diffcluster.transport.engines.shm_receiver import GREETING, MAGIC, SAME, WRITTEN, ShmReceiver
from diffcluster.transport.engines.waiting import Limit

__all__ = ["COPY_BYTES", "ShmReceiver", "ShmSender", "open_receiver", "open_sender"]

COPY_BYTES: Final = 64 << 20
"""Bytes copied between two looks at what may end a write: some 10 ms. More than other engines' `CHUNK`, since from a
few tens of megabytes on the C library copies past the caches, which takes half the time."""


def open_receiver(arena: Arena, options: EngineOptions) -> ShmReceiver:
    """Offer `arena`, which must be shared, to peers of this host."""
    del options  # neither addresses nor time-outs mean anything here
    return ShmReceiver(arena)


def open_sender() -> ShmSender:
    """A sender without connections."""
    return ShmSender()


class _Peer:
    """A receiver's region, mapped here, and the connection that shows whether it lives."""

    def __init__(self, name: str, limit: Limit) -> None:
        self._slots, self._board = np.empty(0, np.uint8), NO_BOARD
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            limit.connect(self._connection, f"\0{name}")
            self._prove(self._greet(limit), limit)
        except OSError as error:
            self.close()
            raise TransferError(f"cannot reach the receiver's shared memory: {error}", settled=True) from error
        except TransferError:
            self.close()
            raise

    def _greet(self, limit: Limit) -> bytes:
        greeting, fds = _receive_fds(self._connection, limit)
        try:
            if len(greeting) != GREETING.size or len(fds) != 1:
                raise TransferError("the receiver closed the connection before it handed over its region", settled=True)
            magic, slots, control, self._cell, proof = GREETING.unpack(greeting)
            if magic != MAGIC or control != CONTROL_BYTES or self._cell >= CELLS:
                raise TransferError("what answers is no receiver of this version", settled=True)
            sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or slots + control > os.fstat(fds[0]).st_size:
                raise TransferError("the receiver's region is not of the size it says, or may shrink", settled=True)
            # Populated now, at first contact: a page that is touched first by a copy makes that several times slower.
            mapping = mmap.mmap(fds[0], slots + control, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            memory = np.frombuffer(mapping, dtype=np.uint8)
        finally:
            for fd in fds:
                os.close(fd)
        self._slots, self._board = memory[:slots], Board(memory[slots:])
        return bytes(proof)

    def _prove(self, proof: bytes, limit: Limit) -> None:
        cell = self._board.proof(self._cell)
        cell[:] = np.frombuffer(proof, np.uint8)
        limit.send(self._connection, memoryview(WRITTEN))
        answer = limit.receive(self._connection, 1)
        if answer != SAME or not np.array_equal(~cell, np.frombuffer(proof, np.uint8)):
            raise TransferError("the receiver does not see what is written into its region", settled=True)

    def alive(self) -> bool:
        """Whether the receiver still holds its end."""
        try:
            return len(self._connection.recv(1, socket.MSG_DONTWAIT)) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False

    def write(self, slot: SlotAddress, source: npt.NDArray[np.uint8], limit: Limit) -> None:
        """Copy in chunks; between them, look at everything that may end it."""
        if source.nbytes > slot.nbytes or slot.offset + slot.nbytes > self._slots.nbytes:
            raise TransferError(f"{source.nbytes} bytes do not fit the slot that was leased", settled=True)
        target = self._slots[slot.offset : slot.offset + source.nbytes]
        window = digest(slot)
        self._board.begin(self._cell, slot.lease)
        try:
            place = self._board.find(window)
            for start in range(0, source.nbytes, COPY_BYTES):
                self._check(place, window, limit)
                _copy(target[start : start + COPY_BYTES], source[start : start + COPY_BYTES])
            self._check(place, window, limit)
        except TimeoutError as error:
            raise TransferError(str(error), settled=True) from error
        finally:
            self._board.end(self._cell)

    def _check(self, place: int, window: int, limit: Limit) -> None:
        limit.remaining()
        if not self.alive():
            raise TransferError("the receiver is gone", settled=True)
        if not self._board.is_open(place, window):
            raise TransferError("the receiver has no such window open, or not any more", settled=True)

    def close(self) -> None:
        """Give up the mapping and the connection."""
        self._slots, self._board = np.empty(0, np.uint8), NO_BOARD
        self._connection.close()


class ShmSender:
    """Writes into regions of receivers on this host."""

    kind: EngineKind = "shm"

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}
        self._busy = threading.Lock()
        self._stopping = threading.Event()

    def connect(self, session: Session, timeout_s: float) -> None:
        """Map the peer's region, and prove that it is the one that the peer reads."""
        with self._busy:
            self._peer(session.address, Limit(timeout_s, self._stopping))

    def write(
        self,
        session: Session,
        slot: SlotAddress,
        source: npt.NDArray[np.uint8],
        timeout_s: float,
        abort: threading.Event = NEVER,
    ) -> None:
        """Copy into the slot. When this returns or raises, nothing of it is written any more."""
        limit = Limit(timeout_s, abort, self._stopping)
        with self._busy:
            peer = self._peer(session.address, limit)
            try:
                peer.write(slot, source, limit)
            except TransferError:
                self._drop_dead()
                raise

    def stop(self) -> None:
        """End what is under way, and unmap all regions."""
        self._stopping.set()
        with self._busy:
            for name in list(self._peers):
                self._peers.pop(name).close()

    def _peer(self, name: str, limit: Limit) -> _Peer:
        if name not in self._peers:
            self._drop_dead()
            self._peers[name] = _Peer(name, limit)
        return self._peers[name]

    def _drop_dead(self) -> None:
        # A dead peer's name never comes again: whatever is dead goes, or its memory would stay mapped for ever.
        for dead in [known for known, peer in self._peers.items() if not peer.alive()]:
            self._peers.pop(dead).close()


def _copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    np.copyto(target, source)


def _receive_fds(connection: socket.socket, limit: Limit) -> tuple[bytes, list[int]]:
    while True:
        limit.set_on(connection)
        try:
            greeting, fds, _, _ = socket.recv_fds(connection, GREETING.size, 1)
        except BlockingIOError:
            continue
        return greeting, fds
