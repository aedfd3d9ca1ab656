"""The ledger of one region of memory: which bytes are held, for what, and who may still touch them. Pure.

Each byte is free or in exactly one lease, and each lease is in one state:

    receive region:  leased -> full -> loading -> free        a peer may write | all there | being copied to the device
    send region:     leased -> full <-> writing -> free       being computed   | staged    | being pushed to a peer
    either:          any    -> quarantined -> free             someone may still be reading or writing

A lease id is never used twice, so a late message about an old lease finds nothing. Ranges are multiples of 4 KiB,
taken best fit and merged with their neighbours when they are free again; both take O(log n) comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final, Literal

from msgspec import Struct

from diffcluster.errors import LedgerError
from diffcluster.ids import LeaseId
from diffcluster.tensors import aligned

__all__ = ["GRANULE", "TRANSITIONS", "Lease", "Ledger", "State"]

GRANULE: Final = 4096
"""Bytes. Every lease starts at and covers a multiple of this."""

State = Literal["leased", "writing", "full", "loading", "quarantined"]

TRANSITIONS: Final[dict[State, frozenset[State]]] = {
    "leased": frozenset({"full", "quarantined"}),
    "full": frozenset({"loading", "writing", "quarantined"}),
    "writing": frozenset({"full", "quarantined"}),
    "loading": frozenset({"quarantined"}),
    "quarantined": frozenset(),
}
"""Where a lease may go from each state. From each it may also be freed."""


class Lease(Struct, frozen=True):
    """One holding of the bytes offset .. offset + nbytes."""

    id: LeaseId
    offset: int
    nbytes: int
    state: State


class Ledger:
    """All leases of a region of `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self._leases: dict[LeaseId, Lease] = {}
        self._next = 1
        # The free ranges twice: by place, to merge neighbours, and by size, to find the best fit.
        self._by_offset: list[tuple[int, int]] = [(0, self.capacity)] if self.capacity else []
        self._by_size: list[tuple[int, int]] = [(self.capacity, 0)] if self.capacity else []

    def lease(self, nbytes: int) -> Lease | None:
        """Hold `nbytes`, in state `leased`; None if no free range is large enough now."""
        size = self.size_of(nbytes)
        at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            return None
        found, offset = self._by_size.pop(at)
        del self._by_offset[bisect_left(self._by_offset, (offset, found))]
        if found > size:
            self._insert(offset + size, found - size)
        lease = Lease(LeaseId(self._next), offset, size, "leased")
        self._next += 1
        self._leases[lease.id] = lease
        return lease

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` could be leased if all were free."""
        return self.size_of(nbytes) <= self.capacity

    def get(self, lease: LeaseId) -> Lease | None:
        """The lease of that id, if it is still held."""
        return self._leases.get(lease)

    def move(self, lease: LeaseId, to: State) -> None:
        """Change a lease's state; raises `LedgerError`, changing nothing, if the table does not allow it."""
        held = self._held(lease)
        if to not in TRANSITIONS[held.state]:
            raise LedgerError(f"lease {lease} is {held.state} and cannot become {to}")
        self._leases[lease] = Lease(held.id, held.offset, held.nbytes, to)

    def free(self, lease: LeaseId) -> None:
        """Give a lease's bytes back; raises `LedgerError` if it is not held."""
        held = self._held(lease)
        del self._leases[lease]
        offset, end = held.offset, held.offset + held.nbytes
        at = bisect_left(self._by_offset, (offset, 0))
        if at < len(self._by_offset) and self._by_offset[at][0] == end:
            end += self._remove(at)[1]
        if at > 0 and sum(self._by_offset[at - 1]) == offset:
            offset = self._remove(at - 1)[0]
        self._insert(offset, end - offset)

    def bytes_by_state(self) -> dict[str, int]:
        """Bytes in each state, `free` included; they always add up to the capacity."""
        counts = dict.fromkeys(("free", *TRANSITIONS), 0)
        counts["free"] = sum(size for size, _ in self._by_size)
        for lease in self._leases.values():
            counts[lease.state] += lease.nbytes
        return counts

    def largest_free(self) -> int:
        """Bytes of the largest free range: together with the free bytes, this is fragmentation."""
        return self._by_size[-1][0] if self._by_size else 0

    @staticmethod
    def size_of(nbytes: int) -> int:
        """What a lease for `nbytes` covers. Even an empty one covers a granule, so that it has a place."""
        return max(aligned(nbytes, GRANULE), GRANULE)

    def _held(self, lease: LeaseId) -> Lease:
        held = self._leases.get(lease)
        if held is None:
            raise LedgerError(f"lease {lease} is not held")
        return held

    def _insert(self, offset: int, size: int) -> None:
        insort(self._by_offset, (offset, size))
        insort(self._by_size, (size, offset))

    def _remove(self, at: int) -> tuple[int, int]:
        offset, size = self._by_offset.pop(at)
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return offset, size
