"""What an engine is: two halves, and the rule by which two peers choose one.

The receiving half belongs to the control thread, which opens a window for each lease and closes it when the lease
ends; its own threads only copy. A sending half belongs to one push thread, and has connections of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from diffcluster.errors import TransferError
from diffcluster.ids import HostId, LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress

__all__ = ["CHUNK", "NEVER", "EngineOptions", "Receiver", "Sender", "choose"]

CHUNK: Final = 4 << 20
"""Bytes written between two looks at the deadline, at the peer and at `abort`."""

NEVER: Final = threading.Event()
"""An `abort` that nobody sets."""


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

    def close(self, slot: SlotAddress) -> None:
        """Let no write into the slot begin any more, and end the one that is under way if that can be done."""

    def settled(self, lease: LeaseId) -> bool | None:
        """Of a lease whose window is closed: True when nobody can be writing into it any more, False while somebody
        may be, None when this engine cannot know, so that only time helps.
        """

    def stop(self) -> None:
        """Close everything and end the threads."""


class Sender(Protocol):
    """Writes into slots of peers. `TransferError` says what is known of the bytes of a write that failed."""

    kind: EngineKind

    def connect(self, session: Session, timeout_s: float) -> None:
        """Reach a peer, and prove by an echo through its memory that writes arrive there. Else `TransferError`.

        `write` does this by itself; done beforehand, it is not on the way of a request.
        """

    def write(
        self,
        session: Session,
        slot: SlotAddress,
        source: npt.NDArray[np.uint8],
        timeout_s: float,
        abort: threading.Event = NEVER,
    ) -> None:
        """Return when all of `source` is in the peer's memory; raises `TransferError` otherwise, also once `abort` is
        set. However it ends, within `timeout_s` and a second of grace, what a frozen peer cannot prolong.
        """

    def stop(self) -> None:
        """Close all connections."""


_PREFERENCE: Final[tuple[EngineKind, ...]] = ("inprocess", "shm", "mooncake", "tcp")
_ONE_HOST: Final[frozenset[EngineKind]] = frozenset({"inprocess", "shm"})


def choose(host: HostId, peer_host: HostId, sessions: Sequence[Session]) -> Session:
    """The session of a peer by which to write to it: the fastest of those that it offers and that work from here.

    A receiver offers Mooncake only where it was told to, so where it is offered it goes before plain TCP.

    Raises:
        TransferError: the peer offers nothing that works from here. There is no silent other way.
    """
    offered = {session.kind: session for session in sessions}
    usable = [kind for kind in _PREFERENCE if kind in offered and (kind not in _ONE_HOST or host == peer_host)]
    if not usable:
        names = ", ".join(offered) or "no engine"
        problem = f"the peer offers {names}, which does not work from host {host} to {peer_host}"
        raise TransferError(problem, settled=True)
    return offered[usable[0]]
