"""Mooncake's transfer engine: writes straight into a peer's registered memory, over TCP or RDMA.

What the library does not do is done around it. It cannot say who is there, refuse a write, end one, or keep to a
deadline: so each half has a door (see `mooncake_door`), which knows the windows and which a sender asks first. It does
not say what has become of a write that failed: so that counts as still going on, its source is kept, and the next
write to that peer gets a fresh engine (see `mooncake_peer`).

Nothing is encrypted, and whoever reaches the library's ports can write into the slots and read them: they belong into
a private network, and only the slots, and `ECHO_BYTES` for proofs, are registered.
"""

from __future__ import annotations

import secrets
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from diffcluster.errors import ConfigError, TransferError
from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines.base import NEVER, EngineOptions
from diffcluster.transport.engines.mooncake_address import ECHO_BYTES, MooncakeAddress, parse
from diffcluster.transport.engines.mooncake_door import Door, Visit
from diffcluster.transport.engines.mooncake_library import Engine, load
from diffcluster.transport.engines.mooncake_peer import EXITING, PeerEngine, acquire
from diffcluster.transport.engines.waiting import Limit

__all__ = ["MooncakeReceiver", "MooncakeSender", "open_receiver", "open_sender"]

_REGION_SETTING: Final = "role.receive_bytes"


def open_receiver(arena: Arena, options: EngineOptions) -> MooncakeReceiver:
    """Register the slots of `arena`, and open the door on a free port of `options.bind_host`.

    Raises:
        ConfigError: Mooncake cannot be used here as it is set up.
    """
    return MooncakeReceiver(arena, options)


def open_sender() -> MooncakeSender:
    """A sender without connections."""
    return MooncakeSender()


class MooncakeReceiver:
    """Holds an engine of its own, which no sending half uses: those can be replaced without voiding its session."""

    kind: EngineKind = "mooncake"

    def __init__(self, arena: Arena, options: EngineOptions) -> None:
        host = options.advertise_host or options.bind_host
        transport = load(ipv6=":" in host)
        self._id = secrets.token_hex(16)
        echo = arena.control[-ECHO_BYTES:]
        echo[:] = 0
        self._door = Door(options.bind_host, self._id, echo)
        try:
            self._engine = Engine(host, "role.advertise_host" if options.advertise_host else "role.transfer_host")
            slots = arena.view(0, arena.nbytes)
            # All of it ahead of the session: the library has crashed when it was asked for memory while it registered.
            for region in (slots, echo):
                self._engine.register(region.ctypes.data, region.nbytes, _REGION_SETTING)
        except ConfigError:
            self._door.stop()
            raise
        self._address = MooncakeAddress(
            host=host,
            port=self._engine.port,
            door=self._door.port,
            base=slots.ctypes.data,
            nbytes=slots.nbytes,
            echo=echo.ctypes.data,
            id=self._id,
            transport=transport,
        )

    def session(self) -> Session:
        """Where peers begin, where the slots lie, and which life of this process that is."""
        return Session("mooncake", str(self._address))

    def open(self, slot: SlotAddress) -> None:
        """Let one write with `slot.token` begin."""
        self._door.open(slot)

    def close(self, slot: SlotAddress) -> None:
        """Let none begin. One that is under way goes on."""
        self._door.close(slot)

    def settled(self, lease: LeaseId) -> bool | None:
        """What its sender has said: None if that has left in mid-write, since its bytes may still be on their way."""
        return self._door.settled(lease)

    def stop(self) -> None:
        """Close the door and the engine, which can take a second."""
        self._door.stop()
        self._engine.close()


class _Link:
    """What one sender has of one receiver."""

    def __init__(self, address: MooncakeAddress, visit: Visit, engine: PeerEngine) -> None:
        self.address, self.visit, self.engine = address, visit, engine

    def fail(self) -> None:
        """Use it no more. The receiver hears of it at once; the engine goes later, since that takes a while."""
        self.visit.close()
        self.engine.poison()

    def close(self) -> None:
        """Leave."""
        self.visit.close()
        self.engine.release()


class MooncakeSender:
    """Keeps one link to each receiver."""

    kind: EngineKind = "mooncake"

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}
        self._busy = threading.Lock()
        self._stopping = threading.Event()

    def connect(self, session: Session, timeout_s: float) -> None:
        """Visit the receiver, and have it show that it sees what Mooncake writes."""
        with self._busy:
            self._link(session.address, Limit(timeout_s, self._stopping, EXITING))

    def write(
        self,
        session: Session,
        slot: SlotAddress,
        source: npt.NDArray[np.uint8],
        timeout_s: float,
        abort: threading.Event = NEVER,
    ) -> None:
        """Ask, write, wait for the end. After a failure the engine still holds `source`, and may go on sending it."""
        if not source.flags.c_contiguous:
            raise ValueError("the source must be one piece of memory")
        limit = Limit(timeout_s, abort, self._stopping, EXITING)
        with self._busy:
            link = self._link(session.address, limit)
            _check_place(link.address, slot, source.nbytes)
            _ask(link, slot, limit)
            try:
                if source.nbytes:
                    link.engine.write(source, link.address.base + slot.offset, limit, abort)
            except BaseException:
                link.fail()
                raise
            _report(link, slot, limit)

    def stop(self) -> None:
        """End what is under way, and close all links."""
        self._stopping.set()
        with self._busy:
            for address in list(self._links):
                self._links.pop(address).close()

    def _link(self, address: str, limit: Limit) -> _Link:
        # A receiver that was started again has another address: all that ended goes, not only what is needed now.
        for ended in [known for known, link in self._links.items() if link.visit.ended()]:
            self._links.pop(ended).close()
        if address not in self._links:
            try:
                self._links[address] = _reach(parse(address), limit)
            except (OSError, ConfigError) as error:
                raise TransferError(f"cannot connect to {address}: {error}", settled=True) from error
        return self._links[address]


def _reach(address: MooncakeAddress, limit: Limit) -> _Link:
    """Make contact; raises OSError, ConfigError or TransferError."""
    visit = Visit(address, limit)
    try:
        # First our own way, which keeps to the limit; only who answers there is given to the library.
        visit.meet(0, limit)
        transport = load(ipv6=":" in visit.local_host)
        if transport != address.transport:
            raise TransferError(f"the peer uses mooncake by {address.transport}, we by {transport}", settled=True)
        link = _Link(address, visit, acquire(address, visit.local_host))
    except BaseException:
        visit.close()
        raise
    try:
        link.engine.prove(visit, limit)
    except BaseException as error:
        link.fail()
        link.close()
        if isinstance(error, TransferError):
            raise TransferError(f"no first contact with {address.peer}: {error}", settled=True) from error
        raise
    return link


def _check_place(address: MooncakeAddress, slot: SlotAddress, nbytes: int) -> None:
    if nbytes > slot.nbytes or slot.offset + slot.nbytes > address.nbytes:
        problem = f"{nbytes} bytes do not fit slot {slot.offset}+{slot.nbytes} of {address.nbytes}"
        raise TransferError(problem, settled=True)


def _ask(link: _Link, slot: SlotAddress, limit: Limit) -> None:
    try:
        allowed = link.visit.may_i(slot, limit)
    except OSError as error:
        link.visit.close()
        raise TransferError(f"{link.address.peer} does not answer: {error}", settled=True) from error
    if not allowed:
        raise TransferError(f"{link.address.peer} has no such window open (lease {slot.lease})", settled=True)


def _report(link: _Link, slot: SlotAddress, limit: Limit) -> None:
    try:
        link.visit.done(slot, limit)
    except OSError:
        # All bytes have arrived, whether or not the receiver hears of it; the end of the connection tells it the rest.
        link.visit.close()
