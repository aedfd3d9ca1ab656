"""One contract for all engines, and what each promises beyond it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from diffcluster.errors import TransferError
from diffcluster.ids import HostId, LeaseId
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import open_receiver, open_sender
from diffcluster.transport.engines.base import EngineOptions, Receiver, Sender, choose

ENGINES: tuple[EngineKind, ...] = ("shm", "tcp")
SIZE = 8 << 20
OPTIONS = EngineOptions("127.0.0.1", "", 5.0)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(SIZE, shared=True)
    yield arena
    arena.close()


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> EngineKind:
    return request.param


@pytest.fixture
def receiver(kind: EngineKind, arena: Arena) -> Iterator[Receiver]:
    receiver = open_receiver(kind, arena, OPTIONS)
    yield receiver
    receiver.stop()


@pytest.fixture
def sender(kind: EngineKind) -> Iterator[Sender]:
    sender = open_sender(kind)
    yield sender
    sender.stop()


def slot(lease: int, offset: int, nbytes: int) -> SlotAddress:
    return SlotAddress(LeaseId(lease), offset, nbytes, f"{lease:032x}")


def content(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("nbytes", [0, 1, 511, 512, 4095, 4096, 1 << 20, (5 << 20) + 3])
def test_all_bytes_are_in_the_slot_when_write_returns(
    arena: Arena, receiver: Receiver, sender: Sender, nbytes: int
) -> None:
    place = slot(1, 4096, 6 << 20)
    receiver.open(place)
    sender.write(receiver.session(), place, content(nbytes), 5)
    assert np.array_equal(arena.view(4096, nbytes), content(nbytes))
    assert not arena.view(0, 4096).any()
    assert not arena.view(4096 + nbytes, 4096).any()


def test_one_sender_writes_into_many_slots_one_after_another(arena: Arena, receiver: Receiver, sender: Sender) -> None:
    for lease in range(1, 30):
        place = slot(lease, lease * 4096, 4096)
        receiver.open(place)
        sender.write(receiver.session(), place, content(4096, lease), 5)
    assert all(np.array_equal(arena.view(lease * 4096, 4096), content(4096, lease)) for lease in range(1, 30))


def test_more_than_the_slot_holds_is_refused_and_writes_nothing(
    arena: Arena, receiver: Receiver, sender: Sender
) -> None:
    place = slot(1, 0, 4096)
    receiver.open(place)
    with pytest.raises(TransferError):
        sender.write(receiver.session(), place, content(4097), 5)
    assert not arena.array.any()


def test_a_slot_outside_the_region_is_refused(arena: Arena, receiver: Receiver, sender: Sender) -> None:
    with pytest.raises(TransferError):
        sender.write(receiver.session(), slot(1, SIZE - 100, 4096), content(4096), 5)
    assert not arena.array.any()


def test_a_receiver_that_has_stopped_is_a_settled_failure(kind: EngineKind, arena: Arena, sender: Sender) -> None:
    receiver = open_receiver(kind, arena, OPTIONS)
    session = receiver.session()
    receiver.stop()
    with pytest.raises(TransferError) as failure:
        sender.write(session, slot(1, 0, 4096), content(4096), 5)
    assert failure.value.settled


def test_a_receiver_that_stops_between_writes_is_noticed(kind: EngineKind, arena: Arena, sender: Sender) -> None:
    receiver = open_receiver(kind, arena, OPTIONS)
    session, place = receiver.session(), slot(1, 0, 4096)
    receiver.open(place)
    sender.write(session, place, content(4096), 5)
    receiver.stop()
    with pytest.raises(TransferError):
        sender.write(session, slot(2, 4096, 4096), content(4096), 5)


def test_the_same_sender_reaches_a_receiver_that_was_started_again(
    kind: EngineKind, arena: Arena, sender: Sender
) -> None:
    for lease in (1, 2):
        receiver = open_receiver(kind, arena, OPTIONS)
        place = slot(lease, 0, 4096)
        receiver.open(place)
        sender.write(receiver.session(), place, content(4096, lease), 5)
        assert np.array_equal(arena.view(0, 4096), content(4096, lease))
        receiver.stop()


def test_many_senders_at_once(kind: EngineKind, arena: Arena, receiver: Receiver) -> None:
    def send(lease: int) -> None:
        sender = open_sender(kind)
        try:
            for round_ in range(5):
                place = slot(lease * 100 + round_, lease * 65536, 65536)
                receiver.open(place)
                sender.write(receiver.session(), place, content(65536, lease), 5)
        finally:
            sender.stop()

    threads = [threading.Thread(target=send, args=(lease,)) for lease in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(arena.view(lease * 65536, 65536), content(65536, lease)) for lease in range(1, 9))


# ---------------------------------------------------------------- TCP


@pytest.fixture
def tcp(arena: Arena) -> Iterator[Receiver]:
    receiver = open_receiver("tcp", arena, OPTIONS)
    yield receiver
    receiver.stop()


@pytest.fixture
def tcp_sender() -> Iterator[Sender]:
    sender = open_sender("tcp")
    yield sender
    sender.stop()


def test_tcp_takes_one_write_per_window(arena: Arena, tcp: Receiver, tcp_sender: Sender) -> None:
    place = slot(1, 0, 4096)
    tcp.open(place)
    tcp_sender.write(tcp.session(), place, content(4096), 5)
    with pytest.raises(TransferError) as failure:
        tcp_sender.write(tcp.session(), place, content(4096, 2), 5)
    assert failure.value.settled
    assert np.array_equal(arena.view(0, 4096), content(4096))


@pytest.mark.parametrize(
    "forged",
    [
        SlotAddress(LeaseId(1), 0, 4096, "f" * 32),
        SlotAddress(LeaseId(2), 0, 4096, f"{1:032x}"),
        SlotAddress(LeaseId(2**63), 0, 4096, f"{1:032x}"),
    ],
)
def test_tcp_refuses_a_forged_slot(arena: Arena, tcp: Receiver, tcp_sender: Sender, forged: SlotAddress) -> None:
    tcp.open(slot(1, 0, 4096))
    with pytest.raises(TransferError) as failure:
        tcp_sender.write(tcp.session(), forged, content(4096), 5)
    assert failure.value.settled
    assert not arena.array.any()


def _connect(session: Session) -> socket.socket:
    host, _, port = session.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def test_closing_a_window_ends_the_write_that_is_under_way(arena: Arena, tcp: Receiver) -> None:
    place = slot(1, 0, 1 << 20)
    tcp.open(place)
    with _connect(tcp.session()) as writer:
        writer.sendall(struct.pack("!4s16sQQ", b"DCT1", bytes.fromhex(place.token), 1, 1 << 20) + b"x" * 1000)
        deadline = time.monotonic() + 5
        while not arena.view(999, 1)[0] and time.monotonic() < deadline:
            pass  # the first bytes are on their way
        assert tcp.close(place)
        before = arena.array.copy()
        with contextlib.suppress(OSError):
            writer.sendall(b"y" * 100_000)
        assert writer.recv(1) == b""
        assert np.array_equal(arena.array, before)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 100, os.urandom(4096), b"", b"DCT1"])
def test_garbage_on_the_tcp_port_harms_nobody(arena: Arena, tcp: Receiver, tcp_sender: Sender, garbage: bytes) -> None:
    place = slot(1, 0, 4096)
    tcp.open(place)
    with _connect(tcp.session()) as stranger:
        with contextlib.suppress(OSError):  # it may be cut off at any point
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            stranger.recv(100)
    tcp_sender.write(tcp.session(), place, content(4096), 5)
    assert np.array_equal(arena.view(0, 4096), content(4096))


_FROZEN = """
import sys
from diffcluster.ids import LeaseId
from diffcluster.messages import SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import open_receiver
from diffcluster.transport.engines.base import EngineOptions
arena = Arena(64 << 20, shared=True)
receiver = open_receiver("tcp", arena, EngineOptions("127.0.0.1", "", 5.0))
receiver.open(SlotAddress(LeaseId(1), 0, 64 << 20, f"{1:032x}"))
print(receiver.session().address, flush=True)
sys.stdin.read()
receiver.stop()
arena.close()
"""


def test_a_frozen_receiver_costs_no_more_than_the_deadline(tcp_sender: Sender) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FROZEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdout is not None
        address = peer.stdout.readline().strip()
        os.kill(peer.pid, signal.SIGSTOP)
        with pytest.raises(TransferError) as failure:
            tcp_sender.write(Session("tcp", address), slot(1, 0, 64 << 20), content(64 << 20), 0.5)
        assert not failure.value.settled
        os.kill(peer.pid, signal.SIGKILL)


def test_tcp_over_ipv6(arena: Arena, tcp_sender: Sender) -> None:
    receiver = open_receiver("tcp", arena, EngineOptions("::1", "", 5.0))
    try:
        assert receiver.session().address.startswith("[::1]:")
        place = slot(1, 0, 4096)
        receiver.open(place)
        tcp_sender.write(receiver.session(), place, content(4096), 5)
        assert np.array_equal(arena.view(0, 4096), content(4096))
    finally:
        receiver.stop()


# ---------------------------------------------------------------- shared memory


def test_the_shared_region_cannot_be_shrunk_or_grown(arena: Arena) -> None:
    for size in (0, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


def test_a_peer_that_talks_on_the_shm_socket_is_cut_off_and_harms_nobody(arena: Arena) -> None:
    receiver, sender = open_receiver("shm", arena, OPTIONS), open_sender("shm")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect("\0" + receiver.session().address)
            _, fds, _, _ = socket.recv_fds(stranger, 8, 1)
            for fd in fds:
                os.close(fd)
            stranger.sendall(b"hello")
            with contextlib.suppress(ConnectionResetError):  # which of the two ways it is told is the kernel's choice
                assert stranger.recv(1) == b""
        sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)
        assert np.array_equal(arena.view(0, 4096), content(4096))
    finally:
        sender.stop()
        receiver.stop()


# ---------------------------------------------------------------- the choice


SHM, TCP = Session("shm", "name"), Session("tcp", "127.0.0.1:1")


def test_peers_on_one_host_take_shared_memory() -> None:
    assert choose(HostId("a"), HostId("a"), [TCP, SHM]) == SHM


def test_peers_on_two_hosts_take_tcp() -> None:
    assert choose(HostId("a"), HostId("b"), [SHM, TCP]) == TCP


def test_a_receiver_that_offers_tcp_alone_gets_tcp() -> None:
    assert choose(HostId("a"), HostId("a"), [TCP]) == TCP


@pytest.mark.parametrize("sessions", [[], [SHM]])
def test_nothing_in_common_is_an_error_and_not_another_way(sessions: list[Session]) -> None:
    with pytest.raises(TransferError, match="does not work"):
        choose(HostId("a"), HostId("b"), sessions)
