"""The files of requests on their way: clients' pictures to the roles, and finished files from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from diffcluster.ids import Incarnation, RequestId
from diffcluster.messages import BulkPiece, Done, Submit
from diffcluster.router.outgoing import Outgoing, Sender
from diffcluster.router.state import Key, Request
from diffcluster.transport.collect import Collector

__all__ = ["File", "Files"]

_STALLED_HEARTBEATS: Final = 3

File = tuple[str, bytes]
"""Media type and content."""
_Place = tuple[Incarnation, Key]
"""Who sends files, or gets pictures, for which attempt at which request."""


class Files:
    """`limit`: bytes of clients' pictures that are kept. `send` sends one piece to a role."""

    def __init__(self, limit: int, send: Sender) -> None:
        self._limit = limit
        self._inputs: dict[RequestId, tuple[bytes, ...]] = {}
        self._outgoing = Outgoing(send)
        self._collector: Collector[_Place, Done] = Collector()

    def keep(self, request_id: RequestId, inputs: tuple[bytes, ...]) -> bool:
        """Keep the client's pictures until the request ends; False if they are too many."""
        if not inputs:
            return True
        kept = [picture for pictures in (*self._inputs.values(), inputs) for picture in pictures]
        # The same bytes may serve several requests: those of one HTTP request differ in their seeds alone.
        if sum({id(picture): len(picture) for picture in kept}.values()) > self._limit:
            return False
        self._inputs[request_id] = inputs
        return True

    def forget(self, request_id: RequestId) -> None:
        """The request has ended."""
        self._inputs.pop(request_id, None)

    def submit(self, to: Incarnation, message: Submit) -> None:
        """Send the client's pictures after, or before, the message that announces them."""
        inputs = self._inputs.get(message.request_id)
        if inputs is not None:
            self._outgoing.add(to, (message.request_id, message.attempt), inputs)

    def flush(self) -> bool:
        """Send what can be sent; whether more could be, right away."""
        return self._outgoing.flush()

    def announced(self, sender: Incarnation, done: Done, now: float) -> bool:
        """Whether all files of `done` have arrived already."""
        sizes = [info.nbytes for info in done.files]
        return self._collector.announce((sender, (done.request_id, done.attempt)), done, sizes, now)

    def piece(self, sender: Incarnation, head: BulkPiece, data: bytes, now: float) -> Done | None:
        """Add a piece of a finished file; the `Done` that is complete by it, if so.

        Raises:
            WireError: the piece does not continue what is there, or too much is there already.
        """
        return self._collector.piece((sender, (head.request_id, head.attempt)), head, data, now)

    def take(self, sender: Incarnation, key: Key) -> list[File]:
        """Remove and return the files of a complete `Done`."""
        taken = self._collector.take((sender, key))
        if taken is None:
            return []
        done, contents = taken
        return [(info.media_type, content) for info, content in zip(done.files, contents, strict=True)]

    def discard(self, sender: Incarnation, key: Key) -> None:
        """Drop what has arrived of an attempt that nobody waits for."""
        self._collector.discard((sender, key))

    def stalled(self, now: float, heartbeat_s: float) -> set[Incarnation]:
        """Senders whose files have stopped half-way."""
        return {sender for sender, _ in self._collector.stalled(now - _STALLED_HEARTBEATS * heartbeat_s)}

    def __bool__(self) -> bool:
        """Whether anything is under way."""
        return bool(len(self._collector) or len(self._outgoing))

    def keep_only(self, requests: Iterable[Request]) -> None:
        """Drop what belongs to no attempt of these."""
        wanted: set[_Place] = {(request.holder, request.key) for request in requests if request.holder}
        self._collector.keep_only(wanted)
        self._outgoing.keep_only(wanted)
