"""What an engine is: two halves, and the rule by which two peers choose one.

The receiving half belongs to the control thread, which opens a window for each lease and closes it when the lease
ends; its own threads only copy. The sending half belongs to the push thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diffcluster.errors import TransferError
from diffcluster.ids import HostId
from diffcluster.messages import EngineKind, Session, SlotAddress

__all__ = ["CHUNK", "EngineOptions", "Receiver", "Sender", "choose"]

CHUNK: Final = 4 << 20
"""Bytes written between two looks at the deadline and at the peer."""


class EngineOptions(Struct, frozen=True):
    """How a receiving half is set up. `timeout_s` bounds the silence of a peer in mid-transfer."""

    bind_host: str
    advertise_host: str
    timeout_s: float


class Receiver(Protocol):
    """Lets peers write into leased slots of this process."""

    kind: EngineKind

    def session(self) -> Session:
        """How peers reach this half."""

    def open(self, slot: SlotAddress) -> None:
        """Let the holder of `slot.token` write into the slot, once."""

    def close(self, slot: SlotAddress) -> bool:
        """End that. True if nobody can be writing into the slot any more."""

    def stop(self) -> None:
        """Close everything and end the threads."""


class Sender(Protocol):
    """Writes into slots of peers."""

    kind: EngineKind

    def write(self, session: Session, slot: SlotAddress, source: npt.NDArray[np.uint8], timeout_s: float) -> None:
        """Return when all of `source` is in the peer's memory; raises `TransferError` otherwise."""

    def stop(self) -> None:
        """Close all connections."""


_PREFERENCE: Final[tuple[EngineKind, ...]] = ("shm", "tcp")


def choose(host: HostId, peer_host: HostId, sessions: Sequence[Session]) -> Session:
    """The session of a peer by which to write to it: shared memory on one host, else TCP.

    Raises:
        TransferError: the peer offers nothing that works from here. There is no silent other way.
    """
    offered = {session.kind: session for session in sessions}
    usable = [kind for kind in _PREFERENCE if kind in offered and (kind != "shm" or host == peer_host)]
    if not usable:
        names = ", ".join(offered) or "no engine"
        raise TransferError(f"the peer offers {names}, which does not work from host {host} to {peer_host}", settled=True)
    return offered[usable[0]]
