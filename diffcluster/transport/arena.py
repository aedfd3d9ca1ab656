"""Memory that transfers read and write: one region each for what is received and what is sent.

The receive region is a sealed memfd: peers on this host map it, and its size cannot change under them (a shrunk file
would kill a reader by SIGBUS). It has no name in the file system, so it vanishes with the last process that holds it,
however that one dies. Every page is touched at start: a first touch is several times slower than a warm write.

Behind the slots lies `CONTROL_BYTES` for the engines' own use: proofs of a first contact, who is writing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["CONTROL_BYTES", "Arena"]

CONTROL_BYTES: Final = 64 << 10
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """`nbytes` of page-aligned, touched memory for slots, then `CONTROL_BYTES`. `array` is a uint8 view of it all."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.nbytes = nbytes
        self.fd = -1
        total = nbytes + CONTROL_BYTES
        if shared:
            self.fd = os.memfd_create("diffcluster-receive", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # Reserves the memory now: a host without it says so here, not by SIGBUS in mid-transfer.
            os.posix_fallocate(self.fd, 0, total)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        # The array alone keeps the mapping, which holds a descriptor of its own.
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, total), dtype=np.uint8)
        self.array[:: mmap.PAGESIZE] = 0

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes offset .. offset + nbytes of the slots; raises ValueError if they are not all inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} are outside an arena of {self.nbytes}")
        return self.array[offset : offset + nbytes]

    @property
    def address(self) -> int:
        """Where the slots begin, in this process."""
        return int(self.array.ctypes.data)

    @property
    def control(self) -> npt.NDArray[np.uint8]:
        """The engines' own bytes."""
        return self.array[self.nbytes :]

    def close(self) -> None:
        """Give the memory back. The mapping itself goes when the last view of it does."""
        self.array = np.empty(0, np.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
