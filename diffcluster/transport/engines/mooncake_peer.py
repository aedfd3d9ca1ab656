"""The engine by which this process writes to one peer, shared by its senders.

One for each peer, and not one for all: the library's first contact holds a lock of its engine while it waits for an
answer, and a session in which a write has failed cannot be mended. So a peer that is frozen or gone holds up nobody
but its own senders, and a fresh engine can take the place of a failed one while no other transfer is in flight on it.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from diffcluster.errors import TransferError
from diffcluster.transport.engines.mooncake_address import MooncakeAddress
from diffcluster.transport.engines.mooncake_door import CELL_BYTES, CELLS, Visit
from diffcluster.transport.engines.mooncake_library import Engine
from diffcluster.transport.engines.waiting import Limit

__all__ = ["EXITING", "PeerEngine", "acquire"]

EXITING: Final = threading.Event()
"""Set when the process is about to exit: ends all writes."""

_SETTING: Final = "role.engine"
_TRIES: Final = 3
_SHORTEST_S: Final = 50e-6
_LONGEST_S: Final = 2e-3
_EXIT_S: Final = 2.0

_lock: Final = threading.Lock()
_idle: Final = threading.Condition()
_engines: Final[dict[MooncakeAddress, PeerEngine]] = {}
_writes = 0


class PeerEngine:
    """Kept while it has users. What it may still read is kept as long."""

    def __init__(self, address: MooncakeAddress, host: str) -> None:
        self._address, self._engine = address, Engine(host, _SETTING)
        self._users = 0
        self._contact = threading.Lock()
        self._met = False
        self._kept: list[npt.NDArray[np.uint8]] = []
        self._registered: set[int] = set()

    def prove(self, visit: Visit, limit: Limit) -> None:
        """Make first contact, one sender at a time, and see that what is written arrives."""
        with limit_lock(self._contact, limit):
            if not self._met:
                self._echo(visit, limit)
                self._met = True

    def write(self, source: npt.NDArray[np.uint8], target: int, limit: Limit, abort: threading.Event) -> None:
        """Write and wait for the end. A write cannot be taken back: if it fails, its bytes may still be sent."""
        try:
            with _counted():
                self._register(source)
                number = self._engine.submit(self._address.peer, source.ctypes.data, target, source.nbytes)
                self._follow(number, limit, abort)
        except (TimeoutError, TransferError) as error:
            self.poison()
            self._kept.append(source)
            problem = f"write to {self._address.peer} failed: {error}"
            raise TransferError(problem, settled=False, source_held=True) from error

    def poison(self) -> None:
        """Give it to nobody any more: who comes next gets a fresh one."""
        with _lock:
            if _engines.get(self._address) is self:
                del _engines[self._address]

    def release(self) -> None:
        """One user less. The last one closes the engine, which can take a second."""
        with _lock:
            self._users -= 1
            last = self._users == 0
            if last and _engines.get(self._address) is self:
                del _engines[self._address]
        if last:
            self._engine.close()
            self._kept.clear()

    def retain(self) -> None:
        """One user more; with `_lock` held, or by a user."""
        self._users += 1

    def _echo(self, visit: Visit, limit: Limit) -> None:
        for _ in range(_TRIES):  # another sender may have taken the same cell
            cell, proof = secrets.randbelow(CELLS), secrets.token_bytes(CELL_BYTES)
            source = np.frombuffer(bytearray(proof), np.uint8)
            self._kept.append(source)
            self._register(source)
            number = self._first_submit(source, self._address.echo + cell * CELL_BYTES, limit)
            self._follow(number, limit, EXITING)
            if visit.meet(cell, limit) == proof:
                return
        raise TransferError("the receiver does not see what mooncake writes into its memory", settled=True)

    def _first_submit(self, source: npt.NDArray[np.uint8], target: int, limit: Limit) -> int:
        """As `submit`, which may wait 60 s for a peer that froze since it was visited: on a thread, left behind then.

        The thread is a user of the engine, and no daemon: an exit while it is in the library would be an abort.
        """
        numbers: list[int] = []
        over = threading.Event()

        def submit() -> None:
            try:
                with contextlib.suppress(TransferError):  # told by the number that is missing
                    numbers.append(self._engine.submit(self._address.peer, source.ctypes.data, target, source.nbytes))
            finally:
                over.set()
                self.release()

        with _lock:
            self.retain()
        threading.Thread(target=submit, name="mooncake-contact").start()
        limit.wait(over)
        if not numbers:
            raise TransferError("mooncake makes no contact with the receiver", settled=True)
        return numbers[0]

    def _follow(self, number: int, limit: Limit, abort: threading.Event) -> None:
        pause = _SHORTEST_S
        while (status := self._engine.status(number)) == "pending":
            limit.remaining()
            abort.wait(pause)
            pause = min(2 * pause, _LONGEST_S)
        if status == "failed":
            raise TransferError("mooncake gives no reason", settled=False, source_held=True)

    def _register(self, source: npt.NDArray[np.uint8]) -> None:
        """Have the adapter know the memory that `source` lies in. TCP reads any memory, and peers need not."""
        if self._engine.transport != "rdma":
            return
        while isinstance(source.base, np.ndarray):
            source = source.base
        with _lock:
            if source.ctypes.data not in self._registered:
                self._engine.register(source.ctypes.data, source.nbytes, _SETTING)
                self._registered.add(source.ctypes.data)
                self._kept.append(source)


def acquire(address: MooncakeAddress, host: str) -> PeerEngine:
    """The engine for a peer; `host` is how that peer sees us. To be released."""
    with _lock:
        engine = _engines.get(address)
        if engine is None:
            engine = _engines[address] = PeerEngine(address, host)
        engine.retain()
        return engine


@contextlib.contextmanager
def limit_lock(lock: threading.Lock, limit: Limit) -> Iterator[None]:
    """Hold `lock`, unless it takes longer than allowed to get it."""
    while not lock.acquire(timeout=min(limit.remaining(), _LONGEST_S)):
        pass
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    global _writes
    with _idle:
        _writes += 1
    try:
        yield
    finally:
        with _idle:
            _writes -= 1
            _idle.notify_all()


@atexit.register
def _end_writes() -> None:
    # A daemon thread that the interpreter stops inside the library takes the whole process down with SIGABRT.
    EXITING.set()
    with _idle:
        _idle.wait_for(lambda: _writes == 0, _EXIT_S)
