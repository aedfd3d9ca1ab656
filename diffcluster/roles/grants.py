"""Slots leased ahead: with one in hand, the router need not ask for a slot before a push. Under the role's machine.

A grant is as large as the largest input of late, so there is none before the first input. Grants together take at most
half of the region, and the rest is for `Allocate`. What had to be refused for lack of room is granted as soon as there
is room: so a request that waits hears of it at once, and the router gives back smaller grants to make that room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from diffcluster.messages import Evict, Grant, Ready, SlotAddress, Ungrant
from diffcluster.roles.holdings import Holdings
from diffcluster.roles.jobs import CloseWindow, Job, Joined, OpenWindow, SealWindow

__all__ = ["Granting"]

_REMEMBERED: Final = 8
"""Inputs whose sizes are looked at."""


class Granting(Holdings):
    """`grants` is how many to keep out; 0 turns them off."""

    def __init__(
        self, receive_bytes: int, send_bytes: int, quarantine_s: float, grants: int, new_token: Callable[[], str]
    ) -> None:
        super().__init__(receive_bytes, send_bytes, quarantine_s)
        self._most, self._new_token = grants, new_token
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._refused = 0
        """Bytes of the largest allocation that had to wait, until there is room for it."""
        self._joined = False

    def open_slot(self, nbytes: int) -> SlotAddress | None:
        """Lease a receive slot and let peers write into it; None if there is no room now."""
        lease = self.receive.lease(nbytes)
        if lease is None:
            return None
        slot = SlotAddress(lease.id, lease.offset, lease.nbytes, self._new_token())
        self.do(OpenWindow(slot))
        return slot

    def note_size(self, nbytes: int, *, refused: bool) -> None:
        """An input of `nbytes` was asked for."""
        if refused:
            self._refused = max(self._refused, nbytes)
        else:
            self._sizes.append(nbytes)
            if nbytes >= self._refused:
                self._refused = 0

    def claim(self, event: Ready) -> Job | None:
        """The job that begins in a granted slot, if the message names one."""
        slot = self.grants.pop(event.lease, None)
        if slot is None:
            return None
        self.note_size(event.manifest.nbytes, refused=False)
        key = (event.request_id, event.attempt)
        job = self.jobs[key] = Job(key, "leased", self.now, slot=slot)
        return job

    def evict_grant(self, event: Evict) -> bool:
        """End a grant that a sender was told of; False if it is none."""
        slot = self.grants.pop(event.lease, None)
        if slot is None:
            return False
        self.do(CloseWindow((event.request_id, event.attempt), slot, event.settled))
        return True

    def on_ungrant(self, event: Ungrant) -> None:
        """End grants that nobody was told of."""
        for lease in event.leases:
            slot = self.grants.pop(lease, None)
            if slot is not None:
                self.do(SealWindow(slot))
                self.receive.free(lease)

    def on_joined(self, event: Joined) -> None:
        """From now on the router listens."""
        del event
        self._joined = True

    def void_grants(self) -> None:
        """The router does not know of them any more; but a sender may."""
        self._joined = False
        for lease in list(self.grants):
            self.do(CloseWindow(None, self.grants.pop(lease), settled=False))

    def advance_grants(self) -> None:
        """Grant what can be granted."""
        if not self._joined or not self._most:
            return
        if self._refused:
            if self._grant(self._refused):
                self._refused = 0
            return
        size = max(self._sizes, default=0)
        while size and len(self.grants) < self._most and self._is_within_share(size) and self._grant(size):
            pass

    def _is_within_share(self, nbytes: int) -> bool:
        granted = sum(slot.nbytes for slot in self.grants.values())
        return 2 * (granted + self.receive.size_of(nbytes)) <= self.receive.capacity

    def _grant(self, nbytes: int) -> bool:
        slot = self.open_slot(nbytes)
        if slot is None:
            return False
        self.grants[slot.lease] = slot
        self.say(Grant(slot=slot))
        return True
