"""Puts finished files together from the pieces that arrive on the bulk link, and says when a `Done` is complete."""

from __future__ import annotations

from typing import Final

from diffcluster.errors import WireError
from diffcluster.ids import Incarnation
from diffcluster.messages import BulkPiece, Done
from diffcluster.router.state import Key

__all__ = ["MAX_BYTES", "Collector", "File"]

MAX_BYTES: Final = 2 << 30
"""Bytes of all unfinished files together; more are refused."""

File = tuple[str, bytes]
"""Media type and content."""


class _Parcel:
    """What has arrived of one attempt's files."""

    def __init__(self) -> None:
        self.files: list[bytearray] = []
        self.done: Done | None = None
        self.touched = 0.0

    def complete(self) -> bool:
        """Whether all bytes are there that `done` announced."""
        if self.done is None:
            return False
        return [info.nbytes for info in self.done.files] == [len(file) for file in self.files]


class Collector:
    """All files under way. Pieces of one file come in order, since one connection brings them."""

    def __init__(self) -> None:
        self._parcels: dict[tuple[Incarnation, Key], _Parcel] = {}
        self._held = 0

    def piece(self, sender: Incarnation, head: BulkPiece, data: bytes, now: float) -> Done | None:
        """Add a piece; the `Done` that is complete by it, if so.

        Raises:
            WireError: the piece does not continue what is there, or too much is there already.
        """
        place = (sender, (head.request_id, head.attempt))
        if self._held + len(data) > MAX_BYTES:
            raise WireError(f"more than {MAX_BYTES} bytes of unfinished files")
        parcel = self._parcels.get(place) or _Parcel()
        begins = head.file == len(parcel.files) and head.offset == 0
        continues = head.file == len(parcel.files) - 1 and head.offset == len(parcel.files[-1])
        if not begins and not continues:
            raise WireError(f"piece {head.offset} of file {head.file} does not continue what has arrived")
        if begins:
            parcel.files.append(bytearray())
        self._parcels[place] = parcel
        parcel.files[-1] += data
        parcel.touched = now
        self._held += len(data)
        return parcel.done if parcel.complete() else None

    def done(self, sender: Incarnation, done: Done, now: float) -> bool:
        """Note the announcement; whether its files are all there."""
        parcel = self._parcels.setdefault((sender, (done.request_id, done.attempt)), _Parcel())
        parcel.done, parcel.touched = done, now
        return parcel.complete()

    def take(self, sender: Incarnation, key: Key) -> list[File]:
        """Remove and return the files of a complete `Done`."""
        parcel = self._pop(sender, key)
        if parcel is None or parcel.done is None:
            return []
        return [(info.media_type, bytes(file)) for info, file in zip(parcel.done.files, parcel.files, strict=True)]

    def discard(self, sender: Incarnation, key: Key) -> None:
        """Drop what has arrived."""
        self._pop(sender, key)

    def __len__(self) -> int:
        """How many attempts have files under way."""
        return len(self._parcels)

    def stalled(self, since: float) -> set[Incarnation]:
        """Senders of files that were announced, but of which nothing has come since then."""
        return {sender for (sender, _), parcel in self._parcels.items() if parcel.done and parcel.touched < since}

    def keep_only(self, wanted: set[tuple[Incarnation, Key]]) -> None:
        """Drop all that nobody waits for."""
        for sender, key in set(self._parcels) - wanted:
            self._pop(sender, key)

    def _pop(self, sender: Incarnation, key: Key) -> _Parcel | None:
        parcel = self._parcels.pop((sender, key), None)
        if parcel is not None:
            self._held -= sum(len(file) for file in parcel.files)
        return parcel
