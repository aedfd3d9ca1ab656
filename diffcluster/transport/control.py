"""ZeroMQ: the control link and the bulk link between the router and its roles. The only module with sockets of it.

Control carries small typed messages; bulk carries files in pieces, finished ones to the router and clients' pictures to
the roles, on a connection of its own, so that a heartbeat never waits behind a video. A role's identity on both is
its incarnation, so a role that reconnects, or whose router was restarted, is still itself. Sockets belong to the thread
that made them and refuse all others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final, Literal, cast

import zmq

from diffcluster.codec import MAX_MESSAGE_BYTES, encode
from diffcluster.errors import AddressInUseError, ConfigError
from diffcluster.ids import Incarnation
from diffcluster.messages import BulkPiece, RoleToRouter, RouterToRole
from diffcluster.transport.mailbox import Mailbox

__all__ = ["PIECE_BYTES", "RoleLink", "RouterLink", "pieces"]

PIECE_BYTES: Final = 256 << 10
"""Largest piece of a file on the bulk link."""

_MAX_FRAMES_A_TURN: Final = 500
_HIGH_WATER: Final = 20_000
_PIECES_HIGH_WATER: Final = 64
"""Pieces that wait in a socket on their way to a role; what is more waits at the router, where it lies anyway."""


Sent = Literal["sent", "gone", "full"]
"""What became of a message."""


class _Owner:
    """Remembers which thread made it; sockets of libzmq break when two threads use them."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def check(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError("a socket was used outside the thread that owns it")


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, largest: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, largest)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket


def _receive(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """What has arrived, at most so much that the caller comes to its other duties."""
    for _ in range(_MAX_FRAMES_A_TURN):
        # Asked first: most of the time there is nothing, and an exception would cost more than the question.
        if not cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def pieces(head: BulkPiece, files: Sequence[bytes]) -> Iterator[tuple[BulkPiece, bytes]]:
    """Each of `files` in pieces; `head` names the request. An empty file is one empty piece."""
    for index, content in enumerate(files):
        for offset in range(0, max(len(content), 1), PIECE_BYTES):
            piece = BulkPiece(request_id=head.request_id, attempt=head.attempt, file=index, offset=offset)
            yield piece, content[offset : offset + PIECE_BYTES]


class RouterLink:
    """The router's ends: two ROUTER sockets, polled together with a mailbox."""

    def __init__(self, host: str, control_port: int, bulk_port: int, mailbox: Mailbox[object]) -> None:
        self._owner = _Owner()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = _socket(self._context, zmq.ROUTER, MAX_MESSAGE_BYTES)
        self._bulk = _socket(self._context, zmq.ROUTER, max(PIECE_BYTES, MAX_MESSAGE_BYTES))
        for socket in (self._control, self._bulk):
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._bulk.setsockopt(zmq.SNDHWM, _PIECES_HIGH_WATER)
        try:
            self.control_port = _bind(self._control, host, control_port, "router.control_port")
            self.bulk_port = _bind(self._bulk, host, bulk_port, "router.bulk_port")
        except Exception:
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._control, self._bulk, mailbox.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Return when there is something to receive, or in the mailbox, or the time is up."""
        self._owner.check()
        self._poller.poll(max(0, int(seconds * 1000)))

    def control(self) -> Iterator[list[bytes]]:
        """Arrived control frames: identity, then what the peer sent."""
        self._owner.check()
        return _receive(self._control)

    def bulk(self) -> Iterator[list[bytes]]:
        """Arrived bulk frames: identity, then what the peer sent."""
        self._owner.check()
        return _receive(self._bulk)

    def send(self, to: bytes, message: RouterToRole) -> Sent:
        """`gone` if the peer is not connected, `full` if it takes nothing any more."""
        return self._sent(self._control, [to, encode(message)])

    def send_piece(self, to: bytes, head: BulkPiece, data: bytes) -> bool:
        """Send a piece of a client's picture. False if the peer's bulk link is not there, or takes no more just now."""
        return self._sent(self._bulk, [to, encode(head), data]) == "sent"

    def _sent(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> Sent:
        self._owner.check()
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return "full" if error.errno == zmq.EAGAIN else "gone"
            raise
        return "sent"

    def close(self) -> None:
        """Close the sockets; what is unsent is dropped."""
        self._control.close()
        self._bulk.close()
        self._context.term()


def _bind(socket: zmq.Socket[bytes], host: str, port: int, setting: str) -> int:
    wildcard = f"[{host}]" if ":" in host and not host.startswith("[") else host
    try:
        socket.bind(f"tcp://{wildcard}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUseError(f"{setting}: port {port} of {host} is in use") from error
        raise ConfigError(setting, f"cannot bind {host}:{port}: {error}") from error
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


class RoleLink:
    """A role's ends: two DEALER sockets, polled together with a mailbox."""

    def __init__(self, router: str, incarnation: Incarnation, mailbox: Mailbox[object]) -> None:
        self._owner = _Owner()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._host = router.rpartition(":")[0]
        self._identity = incarnation.encode()
        self._control = self._dealer()
        self._bulk: zmq.Socket[bytes] | None = None
        self._bulk_port = 0
        try:
            self._control.connect(router)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError("role.router", f"cannot connect to {router!r}: {error}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(mailbox.fileno(), zmq.POLLIN)

    def _dealer(self) -> zmq.Socket[bytes]:
        socket = _socket(self._context, zmq.DEALER, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing for a router that is not there
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        return socket

    def connect_bulk(self, port: int) -> None:
        """Connect the bulk link to that port of the router's host."""
        self._owner.check()
        if port != self._bulk_port:
            if self._bulk is not None:
                self._poller.unregister(self._bulk)
                self._bulk.close()
            self._bulk = self._dealer()
            self._bulk.setsockopt(zmq.IMMEDIATE, 0)
            self._bulk.setsockopt(zmq.SNDHWM, 0)  # bounded by the results that the role holds anyway
            self._bulk.setsockopt(zmq.RCVHWM, _PIECES_HIGH_WATER)
            self._bulk.connect(f"{self._host}:{port}")
            self._poller.register(self._bulk, zmq.POLLIN)
            self._bulk_port = port

    def wait(self, seconds: float) -> None:
        """Return when there is something to receive, or in the mailbox, or the time is up."""
        self._owner.check()
        self._poller.poll(max(0, int(seconds * 1000)))

    def control(self) -> Iterator[list[bytes]]:
        """Arrived control frames."""
        self._owner.check()
        return _receive(self._control)

    def bulk(self) -> Iterator[list[bytes]]:
        """Arrived bulk frames; none before the router said where to connect."""
        self._owner.check()
        return iter(()) if self._bulk is None else _receive(self._bulk)

    def send(self, message: RoleToRouter) -> bool:
        """False if the router is not connected, or so much is unsent that nothing more is taken."""
        self._owner.check()
        try:
            self._control.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def send_files(self, head: BulkPiece, files: Sequence[bytes]) -> None:
        """Send each file in pieces; `head` names the request."""
        self._owner.check()
        if self._bulk is None:
            raise RuntimeError("files to send, but the router never said where to")
        for piece, data in pieces(head, files):
            self._bulk.send_multipart([encode(piece), data], zmq.NOBLOCK)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the sockets; what is unsent is given `linger_s` to leave."""
        for socket in (self._control, self._bulk):
            if socket is not None:
                socket.close(linger=int(linger_s * 1000))
        self._context.term()
