"""The clients' pictures on their way to the roles: in pieces, in order, as fast as each role's bulk link takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from diffcluster.ids import Incarnation
from diffcluster.messages import BulkPiece
from diffcluster.router.state import Key
from diffcluster.transport.control import pieces

__all__ = ["Outgoing"]

_PIECES_A_TURN: Final = 64
"""To one role, before the thread comes to its other duties."""

_Piece = tuple[BulkPiece, bytes]
Sender = Callable[[Incarnation, BulkPiece, bytes], bool]
"""Sends one piece; False if the role is not connected, or takes no more at the moment."""


class _Parcel:
    """What one attempt still has to send. A piece is cut when it is its turn: nothing is held twice."""

    def __init__(self, key: Key, files: Sequence[bytes]) -> None:
        self.key = key
        self._pieces: Iterator[_Piece] = pieces(BulkPiece(request_id=key[0], attempt=key[1], file=0, offset=0), files)
        self.next: _Piece | None = next(self._pieces, None)

    def advance(self) -> None:
        """The next piece was sent."""
        self.next = next(self._pieces, None)


class Outgoing:
    """What is still to be sent. A role that never takes its pieces says so itself, when it has waited for too long."""

    def __init__(self, send: Sender) -> None:
        self._send = send
        self._queues: dict[Incarnation, deque[_Parcel]] = {}

    def add(self, to: Incarnation, key: Key, files: Sequence[bytes]) -> None:
        """Send `files` to a role, behind what it gets already."""
        self._queues.setdefault(to, deque()).append(_Parcel(key, files))

    def flush(self) -> bool:
        """Send what can be sent; whether more could be, right away."""
        more = [self._flush(to, queue) for to, queue in self._queues.items()]
        self._queues = {to: queue for to, queue in self._queues.items() if queue}
        return any(more)

    def _flush(self, to: Incarnation, queue: deque[_Parcel]) -> bool:
        for _ in range(_PIECES_A_TURN):
            while queue and queue[0].next is None:
                queue.popleft()
            if not queue:
                return False
            piece = queue[0].next
            assert piece is not None, "parcels without pieces were taken away"
            if not self._send(to, *piece):
                return False
            queue[0].advance()
        return True

    def __len__(self) -> int:
        """How many roles have something to come."""
        return len(self._queues)

    def keep_only(self, wanted: set[tuple[Incarnation, Key]]) -> None:
        """Drop what nobody waits for any more."""
        for to, queue in self._queues.items():
            kept = [parcel for parcel in queue if (to, parcel.key) in wanted]
            queue.clear()
            queue.extend(kept)
