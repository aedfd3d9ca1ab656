"""The one way into another thread: a bounded queue whose owner can wait on it in a poller, beside its sockets."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

_Item = TypeVar("_Item")


class Mailbox(Generic[_Item]):
    """Any thread posts; one thread takes. A full mailbox refuses: it never drops, and never blocks the poster."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._items: deque[_Item] = deque()
        self._capacity = capacity
        # Reentrant: a signal handler may post while its own thread is in the middle of posting.
        self._lock = threading.RLock()
        self._closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when there may be something to take."""
        return self._event

    def post(self, item: _Item) -> bool:
        """Put `item` at the end; False if the mailbox is full or closed."""
        with self._lock:
            if self._closed or len(self._items) >= self._capacity:
                return False
            self._items.append(item)
            # Written under the lock: `close` may not take the descriptor away in between.
            os.eventfd_write(self._event, 1)
            return True

    def take_all(self) -> list[_Item]:
        """All items, oldest first; empty if there are none."""
        if not self._items:
            return []  # if one is being posted right now, the event will say so
        with self._lock:
            if not self._closed:
                try:
                    os.eventfd_read(self._event)
                except BlockingIOError:  # nothing was posted since the last time
                    return []
            items = list(self._items)
            self._items.clear()
            return items

    def take(self, seconds: float | None = None) -> list[_Item]:
        """Wait for items, at most for `seconds`, and take all; for owners that have nothing else to wait for."""
        select.select([self._event], [], [], seconds)
        return self.take_all()

    def close(self) -> None:
        """Refuse further items and give the descriptor back. Only the owner may call it, after its last `take`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event)
