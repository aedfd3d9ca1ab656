"""The receiving halves of `bench.rivals`, each in a process of its own."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diffcluster.errors import DiffclusterError
from diffcluster.messages import EngineKind
from diffcluster.transport.arena import Arena
from diffcluster.transport.checksum import checksum_of
from diffcluster.transport.engines import open_receiver
from diffcluster.transport.engines.base import EngineOptions

__all__ = ["main"]

Bytes = npt.NDArray[np.uint8]


def main(name: str, capacity: int, *arguments: str) -> int:
    """Serve until standard input ends. What cannot be had here is said instead of the hello, with the reason."""
    halves = {"ours": _ours, "bare": _bare, "zeromq": _zeromq, "gloo": _gloo, "mooncake_sync": _mooncake_sync}
    try:
        halves[name](capacity, *arguments)
    except (DiffclusterError, ImportError) as error:
        _say({"failed": str(error)})
        return 1
    return 0


def _say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _commands(target: Bytes, **handlers: Callable[..., Any]) -> None:
    """Answer each line: `sum N`, `clear N` and `ready N` always, and what `handlers` know."""
    handlers["sum"] = lambda nbytes: checksum_of(target[: int(nbytes)])
    handlers["clear"] = lambda nbytes: target[: int(nbytes)].fill(0)
    handlers["ready"] = lambda _: True
    for line in sys.stdin:
        word, *rest = line.split()
        _say(handlers[word](*rest))


def _ours(capacity: int, kind: EngineKind) -> None:
    from bench.rivals import _slot

    arena = Arena(capacity, shared=True)
    receiver = open_receiver(kind, arena, EngineOptions("127.0.0.1", "", 60.0))
    _say(receiver.session().address)
    _commands(arena.array, open=lambda lease, nbytes: receiver.open(_slot(int(lease), int(nbytes))))
    receiver.stop()
    arena.close()


def _bare(capacity: int) -> None:
    target = np.ones(capacity, np.uint8)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := connection.recv(8, socket.MSG_WAITALL):
                left = target[: int.from_bytes(head, "big")].data
                while left:
                    left = left[connection.recv_into(left, 0, socket.MSG_WAITALL) :]
                connection.sendall(b"1")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        _say(listener.getsockname()[1])
        _commands(target)
        thread.join()


def _zeromq(capacity: int) -> None:
    import zmq

    target = np.ones(capacity, np.uint8)
    context = zmq.Context()

    def serve() -> None:
        bulk = context.socket(zmq.DEALER)
        bulk.set_hwm(0)
        _say(bulk.bind_to_random_port("tcp://127.0.0.1"))
        poller = zmq.Poller()
        poller.register(bulk, zmq.POLLIN)
        while not ended.is_set():
            if not poller.poll(100):
                continue
            left = target[: int.from_bytes(bulk.recv(), "big")]
            while left.nbytes:
                part = np.frombuffer(bulk.recv(copy=False).buffer, np.uint8)
                np.copyto(left[: part.nbytes], part)
                left = left[part.nbytes :]
            bulk.send(b"1")
        bulk.close(linger=0)

    ended = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    _commands(target)
    ended.set()
    thread.join()
    context.term()


def _gloo(capacity: int, port: str) -> None:
    import torch
    import torch.distributed as dist

    _say("started")
    store = dist.TCPStore("127.0.0.1", int(port), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    _say("joined")
    target = torch.ones(capacity, dtype=torch.uint8)
    for line in sys.stdin:
        word, nbytes = line.split()
        if word == "sum":
            _say(checksum_of(target[: int(nbytes)]))
            continue
        if word == "clear":
            _say(target[: int(nbytes)].zero_().numel())
            continue
        _say("receiving")
        dist.recv(target[: int(nbytes)], 0)
        dist.send(torch.ones(1, dtype=torch.uint8), 0)
    dist.destroy_process_group()


def _mooncake_sync(capacity: int) -> None:
    from bench.rivals import _mooncake

    target = np.ones(capacity, np.uint8)
    engine = _mooncake()
    if engine.register_memory(target.ctypes.data, target.nbytes):
        raise RuntimeError("mooncake could not register the buffer")
    _say((f"127.0.0.1:{engine.get_rpc_port()}", target.ctypes.data))
    _commands(target)
    engine.unregister_memory(target.ctypes.data)
