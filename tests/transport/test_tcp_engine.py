"""What TCP promises beyond the contract, and how it treats strangers."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

import numpy as np
import pytest
from msgspec.structs import replace

from diffcluster.errors import TransferError
from diffcluster.messages import EngineKind, Session
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import open_receiver, open_sender
from diffcluster.transport.engines.base import EngineOptions, Receiver, Sender
from diffcluster.transport.engines.tcp_receiver import ECHO, ECHO_BYTES, HEADER, REJECTED, WRITE, WRITTEN
from diffcluster.transport.engines.waiting import SLICE_S
from tests.transport.kit import SIZE, content, slot, until, within
from tests.transport.processes import receiving

LARGE = 64 << 20


@pytest.fixture
def kind() -> EngineKind:
    return "tcp"


def raw(session: Session) -> socket.socket:
    host, _, port = session.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def header(lease: int, nbytes: int, token: str = "") -> bytes:
    return HEADER.pack(WRITE, bytes.fromhex(token or f"{lease:032x}"), lease, nbytes)


# ---------------------------------------------------------------- windows


def test_a_window_takes_one_write(arena: Arena, receiver: Receiver, sender: Sender) -> None:
    place = slot(1, 0, 4096)
    receiver.open(place)
    sender.write(receiver.session(), place, content(4096), 5)
    with pytest.raises(TransferError) as failure:
        sender.write(receiver.session(), place, content(4096, 2), 5)
    assert failure.value.settled
    assert np.array_equal(arena.view(0, 4096), content(4096))


def test_the_receiver_alone_knows_where_bytes_go(arena: Arena, receiver: Receiver, sender: Sender) -> None:
    receiver.open(slot(1, 8192, 4096))
    sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)
    assert np.array_equal(arena.view(8192, 4096), content(4096))
    assert not arena.view(0, 8192).any()


def test_closing_a_window_ends_the_write_that_is_under_way(arena: Arena, receiver: Receiver) -> None:
    place = slot(1, 0, 1 << 20)
    receiver.open(place)
    with raw(receiver.session()) as writer:
        writer.sendall(header(1, 1 << 20) + b"x" * 1000)
        until(lambda: bool(arena.view(999, 1)[0]))
        with within(1):
            receiver.close(place)
        until(lambda: receiver.settled(place.lease) is True)
        before = arena.array.copy()
        with contextlib.suppress(OSError):
            writer.sendall(b"y" * 100_000)
        with contextlib.suppress(ConnectionResetError):
            assert writer.recv(1) == b""
        assert np.array_equal(arena.array, before)


def test_a_second_write_into_a_window_that_is_being_written_is_refused(arena: Arena, receiver: Receiver) -> None:
    receiver.open(slot(1, 0, 1 << 20))
    with raw(receiver.session()) as first, raw(receiver.session()) as second:
        first.sendall(header(1, 1 << 20) + b"x" * 1000)
        until(lambda: bool(arena.view(999, 1)[0]))
        second.sendall(header(1, 1 << 20))
        assert second.recv(1) == REJECTED
        first.sendall(b"x" * ((1 << 20) - 1000))
        assert first.recv(1) == WRITTEN


def test_a_sender_that_falls_silent_is_cut_off(arena: Arena) -> None:
    receiver = open_receiver("tcp", arena, EngineOptions("127.0.0.1", "", 0.3))
    try:
        receiver.open(slot(1, 0, 4096))
        with raw(receiver.session()) as early, raw(receiver.session()) as late, within(3):
            late.sendall(header(1, 4096) + b"x")
            assert late.recv(1) == b""  # in the middle of a write
            assert early.recv(1) == b""  # without a word
    finally:
        receiver.stop()


def test_half_a_header_and_then_silence_is_cut_off(arena: Arena) -> None:
    receiver = open_receiver("tcp", arena, EngineOptions("127.0.0.1", "", 0.3))
    try:
        with raw(receiver.session()) as early, raw(receiver.session()) as late:
            late.sendall(HEADER.pack(ECHO, bytes(16), 0, 1) + b"x")
            assert late.recv(1) == b"x"
            for peer in (early, late):  # what a peer has said before gives it no more time
                peer.sendall(header(1, 4096)[:20])
            assert [early.recv(1), late.recv(1)] == [b"", b""]
    finally:
        receiver.stop()


def test_a_header_that_comes_in_two_parts_is_read(arena: Arena, receiver: Receiver) -> None:
    with raw(receiver.session()) as peer:
        for lease in (1, 2):
            receiver.open(slot(lease, 0, 4096))
            peer.sendall(header(lease, 4096)[:20])
            threading.Event().wait(0.05)  # so that they do not come in one
            peer.sendall(header(lease, 4096)[20:] + content(4096, lease).tobytes())
            assert peer.recv(1) == WRITTEN
            assert np.array_equal(arena.view(0, 4096), content(4096, lease))


def test_a_connection_that_has_said_something_may_be_idle(arena: Arena) -> None:
    receiver, sender = open_receiver("tcp", arena, EngineOptions("127.0.0.1", "", 0.2)), open_sender("tcp")
    try:
        sender.connect(receiver.session(), 5)
        known = dict(sender._connections)  # type: ignore[attr-defined]
        threading.Event().wait(0.5)
        receiver.open(slot(1, 0, 4096))
        sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)
        assert sender._connections == known  # type: ignore[attr-defined]
    finally:
        sender.stop()
        receiver.stop()


# ---------------------------------------------------------------- strangers


def test_a_refusal_is_heard_whatever_is_still_being_sent(receiver: Receiver, sender: Sender) -> None:
    for forged in (slot(1, 0, LARGE), replace(slot(1, 0, LARGE), token="f" * 32)):
        with pytest.raises(TransferError, match="no such window") as failure, within(5):
            sender.write(receiver.session(), forged, np.zeros(LARGE, np.uint8), 10)
        assert failure.value.settled


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 100, os.urandom(4096), b"", WRITE])
def test_garbage_harms_nobody(arena: Arena, receiver: Receiver, sender: Sender, garbage: bytes) -> None:
    place = slot(1, 0, 4096)
    receiver.open(place)
    with raw(receiver.session()) as stranger, contextlib.suppress(OSError):  # it may be cut off at any point
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        stranger.recv(100)
    sender.write(receiver.session(), place, content(4096), 5)
    assert np.array_equal(arena.view(0, 4096), content(4096))


@pytest.mark.parametrize("nbytes", [0, 1, ECHO_BYTES])
def test_an_echo_comes_back(arena: Arena, receiver: Receiver, nbytes: int) -> None:
    with raw(receiver.session()) as peer:
        peer.sendall(HEADER.pack(ECHO, bytes(16), 0, nbytes) + content(nbytes).tobytes())
        assert peer.recv(nbytes, socket.MSG_WAITALL) == content(nbytes).tobytes()
    assert not arena.view(0, SIZE).any()


def test_an_echo_is_bounded(arena: Arena, receiver: Receiver) -> None:
    with raw(receiver.session()) as peer:
        peer.sendall(HEADER.pack(ECHO, bytes(16), 0, ECHO_BYTES + 1) + bytes(ECHO_BYTES + 1))
        assert peer.recv(1) == REJECTED


def test_an_echo_that_stays_incomplete_holds_up_nobody(receiver: Receiver, sender: Sender) -> None:
    with raw(receiver.session()) as peer, within(2):
        peer.sendall(HEADER.pack(ECHO, bytes(16), 0, ECHO_BYTES) + b"x")
        sender.connect(receiver.session(), 2)


# ---------------------------------------------------------------- waiting


def test_an_abort_is_noticed_while_the_peer_stalls(sender: Sender) -> None:
    abort = threading.Event()
    problems: list[TransferError] = []

    def write() -> None:
        with pytest.raises(TransferError) as failure:
            sender.write(peer.session, slot(1, 0, LARGE), np.zeros(LARGE, np.uint8), 30, abort)
        problems.append(failure.value)

    with receiving("tcp", LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        sender.connect(peer.session, 5)
        peer.freeze()
        thread = threading.Thread(target=write)
        thread.start()
        assert not abort.wait(0.2)  # it fills the buffers
        with within(1):
            abort.set()
            thread.join()
    assert not problems[0].settled


def test_a_deadline_holds_whatever_the_writes_before_were_given(receiver: Receiver, sender: Sender) -> None:
    """The kernel's time-outs are kept from one write to the next, but not too long."""
    waits = {}
    for lease, timeout_s in enumerate([30, SLICE_S / 2, 30, 30, SLICE_S / 4], 1):
        receiver.open(slot(lease, 0, 4096))
        sender.write(receiver.session(), slot(lease, 0, 4096), content(4096), timeout_s)
        (connection,) = sender._connections.values()  # type: ignore[attr-defined]
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds, microseconds = struct.unpack("@ll", connection.getsockopt(socket.SOL_SOCKET, option, 16))
            waits[lease, option] = seconds + microseconds / 1e6
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        # The kernel counts in ticks of its clock, and rounds up.
        assert [waits[lease, option] for lease in (1, 3, 4)] == pytest.approx([SLICE_S] * 3, abs=0.011)
        assert waits[2, option] <= SLICE_S / 2 + 0.011
        assert waits[5, option] <= SLICE_S / 4 + 0.011


def test_a_short_write_to_a_frozen_peer_ends_in_time_after_a_long_one(sender: Sender) -> None:
    with receiving("tcp", LARGE) as peer:
        peer.ask("open", 1, 0, 4096)
        sender.write(peer.session, slot(1, 0, 4096), content(4096), 30)
        peer.ask("open", 2, 0, LARGE)
        peer.freeze()
        with pytest.raises(TransferError, match="not done after") as failure, within(1):
            sender.write(peer.session, slot(2, 0, LARGE), np.zeros(LARGE, np.uint8), 0.05)
        assert not failure.value.settled


def test_stop_ends_a_first_contact_that_waits(sender: Sender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        session = Session("tcp", f"127.0.0.1:{listener.getsockname()[1]}")

        def connect() -> None:
            with pytest.raises(TransferError, match="given up"):
                sender.connect(session, 30)

        thread = threading.Thread(target=connect)
        thread.start()
        with within(2):
            sender.stop()
            thread.join()


def test_a_full_backlog_costs_no_more_than_the_time_out(sender: Sender) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as others:
        for _ in range(3):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        started = time.monotonic()
        with pytest.raises(TransferError) as failure, within(1.5):
            sender.connect(Session("tcp", f"127.0.0.1:{listener.getsockname()[1]}"), 0.5)
        assert time.monotonic() - started > 0.45
        assert failure.value.settled


def test_ipv6(arena: Arena, sender: Sender) -> None:
    receiver = open_receiver("tcp", arena, EngineOptions("::1", "", 5.0))
    try:
        assert receiver.session().address.startswith("[::1]:")
        receiver.open(slot(1, 0, 4096))
        sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)
        assert np.array_equal(arena.view(0, 4096), content(4096))
    finally:
        receiver.stop()


def test_a_reset_of_the_sender_ends_the_write(arena: Arena, receiver: Receiver) -> None:
    receiver.open(slot(1, 0, 4096))
    writer = raw(receiver.session())
    writer.sendall(header(1, 4096) + b"x" * 10)
    until(lambda: bool(arena.view(9, 1)[0]))
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    writer.close()
    until(lambda: receiver.settled(slot(1, 0, 4096).lease) is True)
