"""What both halves of the shared-memory engine read and write behind the slots: who may write, and who is writing.

    at 0          open leases    2048 words: a digest of lease, token and place for each open window, else 0
    at 16 KiB     connections    256 cells of 64 bytes: a word, the lease that the peer is writing, else 0; a proof (32)

The rule that fences a write without any message: a sender first says which lease it is about to write, and then looks
whether that is open. A receiver first closes the lease, and then looks who is writing it. Whichever comes first, one
of the two sees the other: a sender that found the lease open is seen, and a sender that was not seen finds it closed.

All of it is for peers of one user, who trust each other; it is there against mistakes and late comers, not malice.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from diffcluster.ids import LeaseId
from diffcluster.messages import SlotAddress

__all__ = ["BOARD_BYTES", "CELLS", "NO_BOARD", "PROOF_BYTES", "Board", "barrier", "digest"]

CELLS: Final = 256
PROOF_BYTES: Final = 32

_LEASES: Final = 2048
_FIRST: Final = 64
_CELL_BYTES: Final = 64  # one cache line, so that two senders do not slow each other
_CELLS_AT: Final = _LEASES * 8
_WORD_BYTES: Final = 8

BOARD_BYTES: Final = _CELLS_AT + (CELLS + 1) * _CELL_BYTES
"""One cell more than there are, for alignment."""


def barrier() -> None:
    """Nothing after this is read before everything ahead of it can be seen by all cores.

    Processors let a read overtake an earlier write; here that would hide the two sides from each other. A lock's
    atomic instructions forbid it: on x86 one of them is enough, on ARM it takes a release followed by an acquire,
    which keep their order. So: acquire, release, acquire, release. (The lock itself is nobody else's.)
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def digest(slot: SlotAddress) -> int:
    """All that a slot says in one word, never 0: whoever has any of it wrong finds no such window."""
    said = f"{slot.lease}/{slot.offset}/{slot.nbytes}/{slot.token}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=_WORD_BYTES).digest(), "little") | 1


class Board:
    """A view of the control bytes. Words are aligned, so each is read and written as a whole."""

    def __init__(self, control: npt.NDArray[np.uint8]) -> None:
        start = -control.ctypes.data % _CELL_BYTES  # the same on both sides: mappings begin at a page
        words = control[start : start + BOARD_BYTES - _CELL_BYTES].view(np.uint64)
        self._leases = words[:_LEASES]
        self._cells = words[_LEASES:].reshape(CELLS, -1)

    def open(self, slot: SlotAddress) -> bool:
        """Enter a window; False if there is no room for one more."""
        free = np.flatnonzero(self._leases == 0)
        if not len(free):
            return False
        self._leases[free[0]] = digest(slot)
        return True

    def close(self, slot: SlotAddress) -> None:
        """Remove a window. From here on no write into it begins without having been seen by `is_written`."""
        self._leases[self._leases == digest(slot)] = 0
        barrier()

    def is_written(self, lease: LeaseId) -> bool:
        """Whether a connection says that it writes this lease."""
        return bool((self._cells[:, 0] == lease).any())

    def begin(self, cell: int, lease: LeaseId) -> None:
        """Say that this connection writes `lease`; to be followed by a look at `is_open`."""
        self._cells[cell, 0] = lease
        barrier()

    def find(self, window: int) -> int:
        """Where the receiver has the window of this digest open; -1 if nowhere. Nearly always among the first."""
        for words in (self._leases[:_FIRST], self._leases):
            found = np.flatnonzero(words == window)
            if len(found):
                return int(found[0])
        return -1

    def is_open(self, place: int, window: int) -> bool:
        """Whether that window is still open where it was found."""
        return place >= 0 and int(self._leases[place]) == window

    def end(self, cell: int) -> None:
        """Say that this connection writes nothing."""
        barrier()  # the bytes first
        self._cells[cell, 0] = 0

    def proof(self, cell: int) -> npt.NDArray[np.uint8]:
        """The bytes of a cell that show, at first contact, that both sides see the same memory."""
        return self._cells[cell, 1 : 1 + PROOF_BYTES // _WORD_BYTES].view(np.uint8)

    def clear(self, cell: int) -> None:
        """Make a cell ready for another connection."""
        self._cells[cell] = 0


NO_BOARD: Final = Board(np.zeros(BOARD_BYTES, np.uint8))
"""Takes the place of a board whose memory must not be held any longer."""
