"""Puts files together from the pieces that arrive on the bulk link, and says when what announced them is complete.

The router collects finished files, which a `Done` announces; a role collects the client's pictures, which a `Submit`
announces. Pieces and announcement come on two connections, so either may be first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

from diffcluster.errors import WireError
from diffcluster.messages import BulkPiece

__all__ = ["MAX_BYTES", "Collector"]

MAX_BYTES: Final = 2 << 30
"""Bytes of all unfinished files together; more are refused."""

_Place = TypeVar("_Place", bound=Hashable)
"""Whose files: one attempt at one request, and where several may send for it, the sender."""
_Message = TypeVar("_Message")


class _Parcel(Generic[_Message]):
    """What has arrived for one place."""

    def __init__(self) -> None:
        self.files: list[bytearray] = []
        self.message: _Message | None = None
        self.sizes: tuple[int, ...] = ()
        self.touched = 0.0

    def complete(self) -> bool:
        """Whether all bytes are there that were announced."""
        return self.message is not None and self.sizes == tuple(len(file) for file in self.files)


class Collector(Generic[_Place, _Message]):
    """All files under way. Pieces of one file come in order, since one connection brings them."""

    def __init__(self) -> None:
        self._parcels: dict[_Place, _Parcel[_Message]] = {}
        self._held = 0

    def piece(self, place: _Place, head: BulkPiece, data: bytes, now: float) -> _Message | None:
        """Add a piece; the announcement that is complete by it, if so.

        Raises:
            WireError: the piece does not continue what is there, or too much is there already.
        """
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
        return parcel.message if parcel.complete() else None

    def announce(self, place: _Place, message: _Message, sizes: Sequence[int], now: float) -> bool:
        """Note which files are to come; whether they are all there."""
        parcel = self._parcels.setdefault(place, _Parcel())
        parcel.message, parcel.sizes, parcel.touched = message, tuple(sizes), now
        return parcel.complete()

    def take(self, place: _Place) -> tuple[_Message, list[bytes]] | None:
        """Remove and return a complete announcement and its files."""
        parcel = self._pop(place)
        if parcel is None or parcel.message is None:
            return None
        return parcel.message, [bytes(file) for file in parcel.files]

    def discard(self, place: _Place) -> _Message | None:
        """Drop what has arrived; the announcement, if there was one."""
        parcel = self._pop(place)
        return None if parcel is None else parcel.message

    def __len__(self) -> int:
        """How many places have files under way."""
        return len(self._parcels)

    def stalled(self, since: float) -> set[_Place]:
        """Places whose files were announced, but for which nothing has come since then."""
        return {place for place, parcel in self._parcels.items() if parcel.message and parcel.touched < since}

    def orphaned(self, since: float) -> set[_Place]:
        """Places whose files were never announced, and for which nothing has come since then."""
        return {place for place, parcel in self._parcels.items() if not parcel.message and parcel.touched < since}

    def keep_only(self, wanted: set[_Place]) -> None:
        """Drop all that nobody waits for."""
        for place in set(self._parcels) - wanted:
            self._pop(place)

    def _pop(self, place: _Place) -> _Parcel[_Message] | None:
        parcel = self._parcels.pop(place, None)
        if parcel is not None:
            self._held -= sum(len(file) for file in parcel.files)
        return parcel
