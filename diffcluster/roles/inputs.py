"""The client's pictures, as they arrive at a first stage: a `Submit` waits until all that it announces is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from diffcluster import codec
from diffcluster.errors import WireError
from diffcluster.messages import BulkPiece, Failed, Submit
from diffcluster.roles.jobs import Key
from diffcluster.transport.collect import Collector

__all__ = ["Inputs"]

_SILENT: Final = 3
"""Heartbeats without any piece after which what is missing is taken for lost."""
_STARVED: Final = 30
"""Heartbeats without a piece of its own, while others' pieces come, after which a request is given up too."""

_REASON: Final = "the client's pictures did not arrive whole"


class Inputs:
    """Pictures under way, and those that wait for their computation. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self._collector: Collector[Key, Submit] = Collector()
        self._complete: dict[Key, tuple[bytes, ...]] = {}
        self._broken: dict[Key, float] = {}
        """Attempts of which a piece was missing, and when that was noticed."""
        self._last_piece = 0.0

    def submit(self, message: Submit, now: float) -> bool:
        """Whether all pictures of `message` are there; if not, it is kept until `piece` gives it back."""
        inputs = message.parameters.inputs
        key = (message.request_id, message.attempt)
        if inputs and not self._collector.announce(key, message, [image.nbytes for image in inputs], now):
            return False
        self._finish(key)
        return True

    def frames(self, frames: Sequence[bytes], now: float) -> Submit | None:
        """`piece`, as it comes from the link; raises `WireError` if it is none."""
        if len(frames) != 2:
            raise WireError(f"a piece of {len(frames)} frames")
        return self.piece(codec.decode_bulk(frames[0]), frames[1], now)

    def piece(self, head: BulkPiece, data: bytes, now: float) -> Submit | None:
        """Add a piece; the `Submit` that is complete by it, if so. What does not fit breaks its request alone."""
        key = (head.request_id, head.attempt)
        self._last_piece = now
        if key in self._broken:
            return None
        try:
            message = self._collector.piece(key, head, data, now)
        except WireError:
            self._broken[key] = now
            return None
        if message is not None:
            self._finish(key)
        return message

    def take(self, key: Key) -> tuple[bytes, ...]:
        """Remove and return the pictures of a request whose `Submit` was complete."""
        return self._complete.pop(key, ())

    def forget(self, key: Key) -> None:
        """Drop all of a request that has ended, or was cancelled. What may still arrive of it goes by its age."""
        self._complete.pop(key, None)
        self._collector.discard(key)
        self._broken.pop(key, None)

    def clear(self) -> None:
        """Drop all of requests that are known. Pieces may be ahead of their `Submit`, so those of others stay."""
        for key in self._collector.stalled(math.inf):
            self._collector.discard(key)
        self._complete.clear()

    def lost(self, now: float, heartbeat_s: float) -> list[Failed]:
        """What to say of those whose pictures will not come any more. They are dropped, as is what is nobody's."""
        silent, starved = now - _SILENT * heartbeat_s, now - _STARVED * heartbeat_s
        stalled = self._collector.stalled(silent if self._last_piece < silent else starved)
        stalled |= {key for key in self._collector.stalled(math.inf) if key in self._broken}
        for key in stalled | self._collector.orphaned(starved):
            self._collector.discard(key)
        self._broken = {key: at for key, at in self._broken.items() if at >= starved and key not in stalled}
        return [Failed(request_id=key[0], attempt=key[1], code="transfer_failed", reason=_REASON) for key in stalled]

    def _finish(self, key: Key) -> None:
        taken = self._collector.take(key)
        if taken is not None:
            self._complete[key] = tuple(taken[1])
