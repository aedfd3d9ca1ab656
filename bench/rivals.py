"""Ways to get bytes from one process into a buffer of another: ours, and those that they are measured against.

Each has a sending half here, and a receiving half in a process of its own, which is told by lines on its standard input
what to expect, and answers by lines. What is timed is `send` alone: until the sender knows that all bytes are there.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.checksum import checksum_of
from diffcluster.transport.engines import open_sender

__all__ = ["RIVALS", "Bare", "Gloo", "Memcpy", "MooncakeSync", "Ours", "Peer", "Rival", "ZeroMQ"]

Bytes = npt.NDArray[np.uint8]
_TIMEOUT_S = 60.0


class Peer:
    """The receiving process of a rival. `hello` is the first thing it says."""

    def __init__(self, name: str, capacity: int, *arguments: str) -> None:
        command = [sys.executable, "-m", "bench.rivals", name, str(capacity), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.hello = self.read()
        except RuntimeError:
            self.close()
            raise

    def ask(self, *words: object) -> Any:
        """Say a line, and return the answer."""
        self.say(*words)
        return self.read()

    def say(self, *words: object) -> None:
        """Say a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def read(self) -> Any:
        """The next line of the peer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer has ended: {self._process.args!r}")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise RuntimeError(answer["failed"])
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=_TIMEOUT_S)
        self._process.stdout.close()


class Rival:
    """A sending half. `prepare` is not timed; `send` is."""

    peer: Peer

    def prepare(self, nbytes: int) -> None:
        """Let the peer expect `nbytes`. All peers are spoken to: one that slept since its last turn wakes up slower."""
        self.peer.ask("ready", nbytes)

    def clear(self, nbytes: int) -> None:
        """Wipe the peer's buffer, so that what lies there afterwards has come since."""
        self.peer.ask("clear", nbytes)

    def send(self, source: Bytes) -> None:
        """Return when all of `source` is in the peer's buffer."""
        raise NotImplementedError

    def arrived(self, nbytes: int) -> str:
        """The checksum of what lies in the peer's buffer."""
        return str(self.peer.ask("sum", nbytes))

    def close(self) -> None:
        """End both halves."""
        self.peer.close()


class Memcpy(Rival):
    """A copy within one process: the limit."""

    def __init__(self, capacity: int) -> None:
        self._target = np.ones(capacity, np.uint8)

    def prepare(self, nbytes: int) -> None:
        """There is no peer."""

    def clear(self, nbytes: int) -> None:
        """Our own buffer."""
        self._target[:nbytes] = 0

    def send(self, source: Bytes) -> None:
        """Copy."""
        np.copyto(self._target[: source.nbytes], source)

    def arrived(self, nbytes: int) -> str:
        """Of our own buffer."""
        return checksum_of(self._target[:nbytes])

    def close(self) -> None:
        """Nothing to end."""


class Ours(Rival):
    """One of our engines, with a window opened for each transfer, as a grant would be."""

    def __init__(self, kind: EngineKind, capacity: int) -> None:
        self.peer = Peer("ours", capacity, kind)
        self._session = Session(kind, self.peer.hello)
        self._sender = open_sender(kind)
        self._sender.connect(self._session, _TIMEOUT_S)
        self._lease = 0

    def prepare(self, nbytes: int) -> None:
        """Open a window."""
        self._lease += 1
        self._slot = _slot(self._lease, nbytes)
        self.peer.ask("open", self._lease, nbytes)

    def send(self, source: Bytes) -> None:
        """By the engine."""
        self._sender.write(self._session, self._slot, source, _TIMEOUT_S)

    def close(self) -> None:
        """The sender before its peer."""
        self._sender.stop()
        super().close()


def _slot(lease: int, nbytes: int) -> SlotAddress:
    return SlotAddress(LeaseId(lease), 0, -(-nbytes // 4096) * 4096, f"{lease:032x}")


class Bare(Rival):
    """A pair of TCP sockets: the length and the bytes in one sendmsg, recv_into, one byte of answer."""

    def __init__(self, capacity: int) -> None:
        self.peer = Peer("bare", capacity)
        self._socket = socket.create_connection(("127.0.0.1", self.peer.hello))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, source: Bytes) -> None:
        """All in one call; the kernel may take it in parts."""
        head = source.nbytes.to_bytes(8, "big")
        sent = self._socket.sendmsg([head, source.data])
        if sent < source.nbytes + 8:
            self._socket.sendall(source[sent - 8 :].data)
        self._socket.recv(1)

    def close(self) -> None:
        """Both ends."""
        self._socket.close()
        super().close()


class ZeroMQ(Rival):
    """A pair of DEALERs over TCP, without a copy at either end but for the one into the buffer.

    `part`: bytes to a message. In several, the copy into the buffer goes on while the next is received.
    """

    def __init__(self, capacity: int, part: int) -> None:
        import zmq

        self._part = part
        self.peer = Peer("zeromq", capacity)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # no message waits for another one to be taken
        self._socket.connect(f"tcp://127.0.0.1:{self.peer.hello}")

    def send(self, source: Bytes) -> None:
        """The length, the bytes, one byte back."""
        self._socket.send(source.nbytes.to_bytes(8, "big"))
        for start in range(0, source.nbytes, self._part):
            self._socket.send(source[start : start + self._part].data, copy=False)
        self._socket.recv()

    def close(self) -> None:
        """Both ends."""
        self._socket.close(linger=0)
        self._context.term()
        super().close()


class Gloo(Rival):
    """torch.distributed send and recv, and one byte of answer."""

    def __init__(self, capacity: int) -> None:
        import torch.distributed as dist

        # A listener of ours: the store would take connections on all addresses.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        own = listener.detach()
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False, master_listen_fd=own)
        self.peer = Peer("gloo", capacity, str(port))
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)
        self.peer.read()

    def prepare(self, nbytes: int) -> None:
        """Let the peer receive."""
        self.peer.ask("receive", nbytes)

    def send(self, source: Bytes) -> None:
        """As they are meant to be used."""
        import torch
        import torch.distributed as dist

        dist.send(torch.from_numpy(source), 1)
        dist.recv(torch.zeros(1, dtype=torch.uint8), 1)

    def close(self) -> None:
        """Both ends."""
        import torch.distributed as dist

        super().close()
        dist.destroy_process_group()


class MooncakeSync(Rival):
    """Mooncake's own call that waits, over its TCP."""

    def __init__(self, capacity: int) -> None:
        self.peer = Peer("mooncake_sync", capacity)
        self._engine = _mooncake()
        self._session, self._address = self.peer.hello

    def send(self, source: Bytes) -> None:
        """Spins until it is done."""
        if self._engine.transfer_sync_write(self._session, source.ctypes.data, self._address, source.nbytes):
            raise RuntimeError("mooncake's transfer_sync_write failed")

    def close(self) -> None:
        """The engine goes with its last reference."""
        del self._engine
        super().close()


def _mooncake() -> Any:
    from diffcluster.transport.engines.mooncake_library import load

    load(ipv6=False)  # sets the environment that the library reads when it is imported
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("mooncake could not be initialised")
    return engine


RIVALS: dict[str, Callable[[int], Rival]] = {
    "memcpy": Memcpy,
    "shm": lambda capacity: Ours("shm", capacity),
    "tcp": lambda capacity: Ours("tcp", capacity),
    "mooncake": lambda capacity: Ours("mooncake", capacity),
    "mooncake sync": MooncakeSync,
    "bare sockets": Bare,
    "zeromq": lambda capacity: ZeroMQ(capacity, capacity),
    "zeromq parts": lambda capacity: ZeroMQ(capacity, 1 << 20),
    "gloo": Gloo,
}
"""By name; `mooncake` is our engine on top of the library, which writes asynchronously and polls with sleeps."""


if __name__ == "__main__":
    from bench.rival_peers import main

    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
