"""A process of its own that receives or sends, told what to do line by line: python -m tests.transport.peer ROLE ...

receiver KIND NBYTES [ADDRESS]   says its address; then: open LEASE OFFSET NBYTES | close ... | settled LEASE
                                 | count BYTE OFFSET NBYTES | quit
sender KIND                      write ADDRESS LEASE OFFSET NBYTES BYTE TIMEOUT | gated ... | during HOW ... | quit

A gated write stops ahead of its second chunk, says "gate" and goes on when it reads a line. A source whose write failed
is filled with 0xEE. `during` leaves the program in the middle of a write: HOW is abort, stop or exit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np

from diffcluster.errors import TransferError
from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import open_receiver, open_sender
from diffcluster.transport.engines.base import CHUNK, EngineOptions

STALE = 0xEE


def say(text: object) -> None:
    print(text, flush=True)


def place(lease: str, offset: str, nbytes: str) -> SlotAddress:
    return SlotAddress(LeaseId(int(lease)), int(offset), int(nbytes), f"{int(lease):032x}")


def take_address(kind: str, address: str) -> None:
    """Make the next receiver have the address of one that is gone."""
    if kind == "shm":
        from diffcluster.transport.engines import shm_receiver

        class Known:
            hex = address.removeprefix("diffcluster-")

        shm_receiver.uuid.uuid4 = Known  # type: ignore[assignment,misc]
    elif kind == "tcp":
        from diffcluster.transport.engines import tcp_receiver

        create, (host, _, port) = tcp_receiver.socket.create_server, address.rpartition(":")
        tcp_receiver.socket.create_server = lambda _, **options: create((host, int(port)), **options)
    else:
        raise ValueError(f"no way to give {kind} an address")


def receive(kind: EngineKind, nbytes: str, address: str = "") -> None:
    arena = Arena(int(nbytes), shared=True)
    if address:
        take_address(kind, address)
    receiver = open_receiver(kind, arena, EngineOptions("127.0.0.1", "", 5.0))
    say(receiver.session().address)
    for line in sys.stdin:
        match line.split():
            case ["open", *words]:
                say(receiver.open(place(*words)))
            case ["close", *words]:
                say(receiver.close(place(*words)))
            case ["settled", lease]:
                say(receiver.settled(LeaseId(int(lease))))
            case ["count", byte, offset, count]:
                say(int((arena.view(int(offset), int(count)) == int(byte)).sum()))
            case ["quit"]:
                break
    receiver.stop()
    arena.close()


def hold_second_chunk(kind: str, reached: Callable[[], object]) -> None:
    """Have `reached` called ahead of the second chunk, once all that is looked at between chunks has been looked at."""
    chunks = 0

    def count() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 2:
            reached()

    if kind == "shm":
        from diffcluster.transport.engines import shm

        shm.COPY_BYTES = CHUNK  # type: ignore[misc]
        copy = shm._copy
        shm._copy = lambda target, source: (count(), copy(target, source))[1]
    elif kind == "tcp":
        from diffcluster.transport.engines import tcp
        from diffcluster.transport.engines.waiting import Limit

        tcp.SEND_BYTES = CHUNK  # type: ignore[misc]
        send = Limit.send
        Limit.send = lambda self, *args: (count(), send(self, *args))[1]  # type: ignore[method-assign]
    else:
        raise ValueError(f"no way to hold up {kind}")


class Writer:
    """The sending peer."""

    def __init__(self, kind: EngineKind) -> None:
        self._kind = kind
        self._sender = open_sender(kind)
        self._abort = threading.Event()

    def write(self, address: str, lease: str, offset: str, nbytes: str, byte: str, timeout_s: str) -> str:
        source = np.full(int(nbytes), int(byte), np.uint8)
        session, slot = Session(self._kind, address), place(lease, offset, nbytes)
        try:
            self._sender.write(session, slot, source, float(timeout_s), self._abort)
        except TransferError as error:
            source[:] = STALE
            return f"failed {'settled' if error.settled else 'unsettled'} {error}"
        return "ok"

    def gated(self, *words: str) -> str:
        self._sender.connect(Session(self._kind, words[0]), 5)
        hold_second_chunk(self._kind, lambda: (say("gate"), sys.stdin.readline()))
        return self.write(*words)

    def during(self, how: str, *words: str) -> None:
        """Leave while another thread is in the middle of a write."""
        self._sender.connect(Session(self._kind, words[0]), 5)
        reached = threading.Event()
        # The write goes on only when it has something to notice.
        ends = {"abort": self._abort, "stop": self._sender._stopping, "exit": threading.Event()}  # type: ignore[attr-defined]
        hold_second_chunk(self._kind, lambda: (reached.set(), ends[how].wait()))
        thread = threading.Thread(target=lambda: say(self.write(*words)), daemon=True)
        thread.start()
        reached.wait()
        if how == "exit":
            return
        if how == "abort":
            self._abort.set()
        self._sender.stop()
        thread.join()

    def stop(self) -> None:
        self._sender.stop()


def send(kind: EngineKind) -> None:
    writer = Writer(kind)
    for line in sys.stdin:
        match line.split():
            case ["write", *words]:
                say(writer.write(*words))
            case ["gated", *words]:
                say(writer.gated(*words))
            case ["during", how, *words]:
                writer.during(how, *words)
                return
            case ["quit"]:
                break
    writer.stop()


if __name__ == "__main__":
    {"receiver": receive, "sender": send}[sys.argv[1]](*sys.argv[2:])  # type: ignore[operator]
