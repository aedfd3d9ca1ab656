"""Shared memory between processes of one host: one copy, straight into the receiver's slot.

The receiver listens on an abstract Unix socket (no file, so nothing to leave behind) and hands the descriptor of its
sealed receive region to peers of the same user. The connection then stays open and silent: its end is how a sender
learns that the receiver is gone. A write cannot be fenced from the receiver's side, so `close` never says so; but when
the sender's `write` has returned, however it did, it writes no more.
"""

from __future__ import annotations

import logging
import mmap
import os
import selectors
import socket
import struct
import threading
import time
import uuid
from typing import Final

import numpy as np
import numpy.typing as npt

from diffcluster.errors import TransferError
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines.base import CHUNK, EngineOptions

__all__ = ["ShmReceiver", "ShmSender", "open_receiver", "open_sender"]

_SIZE: Final = struct.Struct("!Q")
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.1

_log = logging.getLogger(__name__)


def open_receiver(arena: Arena, options: EngineOptions) -> ShmReceiver:
    """Offer `arena`, which must be shared, to peers of this host."""
    del options  # neither addresses nor time-outs mean anything here
    return ShmReceiver(arena)


def open_sender() -> ShmSender:
    """A sender without connections."""
    return ShmSender()


class ShmReceiver:
    """Hands out the receive region's descriptor."""

    kind: EngineKind = "shm"

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._name = f"diffcluster-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._pause = threading.Event()  # never set: a way to wait
        self._thread = threading.Thread(target=self._serve, name="shm-receiver", daemon=True)
        self._thread.start()

    def session(self) -> Session:
        """The socket's abstract name."""
        return Session("shm", self._name)

    def open(self, slot: SlotAddress) -> None:
        """Nothing to do: whoever has the region can write to all of it."""

    def close(self, slot: SlotAddress) -> bool:
        """Always False: a peer's write cannot be stopped from here."""
        return False

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener, self._woken:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            peers: set[socket.socket] = set()
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        for peer in peers:
                            peer.close()
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector, peers)
                        continue
                    assert isinstance(key.fileobj, socket.socket)
                    # Peers have nothing to say: readable means closed, or a stranger.
                    selector.unregister(key.fileobj)
                    peers.discard(key.fileobj)
                    key.fileobj.close()

    def _accept(self, selector: selectors.BaseSelector, peers: set[socket.socket]) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:  # gone already, or no descriptors left: the others go on
            _log.warning("shm engine: accept failed: %s", error)
            self._pause.wait(_PAUSE_S)
            return
        _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            peer.close()
            return
        try:
            socket.send_fds(peer, [_SIZE.pack(self._arena.nbytes)], [self._arena.fd])
        except OSError:  # gone already
            peer.close()
            return
        peers.add(peer)
        selector.register(peer, selectors.EVENT_READ)


class _Peer:
    """A receiver's region, mapped here, and the connection that shows whether it lives."""

    def __init__(self, name: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(_CONNECT_S)
        try:
            self._connection.connect(f"\0{name}")
            size, fds, _, _ = socket.recv_fds(self._connection, _SIZE.size, 1)
            if len(size) != _SIZE.size or len(fds) != 1:
                raise TransferError("the receiver closed the connection before it handed over its region", settled=True)
            self._map(_SIZE.unpack(size)[0], fds[0])
        except OSError as error:
            self._connection.close()
            raise TransferError(f"cannot reach the receiver's shared memory: {error}", settled=True) from error
        except TransferError:
            self._connection.close()
            raise
        self._connection.setblocking(False)

    def _map(self, size: int, fd: int) -> None:
        try:
            if not 0 < size <= os.fstat(fd).st_size:
                raise TransferError("the receiver's region is not of the size it says", settled=True)
            self.array = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
        finally:
            os.close(fd)

    def alive(self) -> bool:
        """Whether the receiver still holds its end."""
        try:
            return len(self._connection.recv(1)) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Give up the mapping and the connection."""
        self.array = np.empty(0, np.uint8)
        self._connection.close()


class ShmSender:
    """Writes into regions of receivers on this host."""

    kind: EngineKind = "shm"

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def write(self, session: Session, slot: SlotAddress, source: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """Copy in chunks; between them, look at the deadline and at the peer."""
        deadline = time.monotonic() + timeout_s
        peer = self._peer(session.address)
        if source.nbytes > slot.nbytes or slot.offset + slot.nbytes > peer.array.nbytes:
            raise TransferError(f"{source.nbytes} bytes do not fit the slot that was leased", settled=True)
        for start in range(0, source.nbytes, CHUNK):
            if not peer.alive():
                self._drop(session.address)
                raise TransferError("the receiver is gone", settled=True)
            if time.monotonic() > deadline:
                raise TransferError(f"not done after {timeout_s} s", settled=True)
            chunk = source[start : start + CHUNK]
            np.copyto(peer.array[slot.offset + start : slot.offset + start + chunk.nbytes], chunk)

    def stop(self) -> None:
        """Unmap all regions."""
        for name in list(self._peers):
            self._drop(name)

    def _peer(self, name: str) -> _Peer:
        # A dead peer's name never comes again: whatever is dead goes, or its memory would stay mapped for ever.
        for dead in [known for known, peer in self._peers.items() if not peer.alive()]:
            self._drop(dead)
        if name not in self._peers:
            self._peers[name] = _Peer(name)
        return self._peers[name]

    def _drop(self, name: str) -> None:
        self._peers.pop(name).close()
