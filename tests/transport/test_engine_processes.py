"""The contract between processes: what holds when a peer is killed, frozen, started again, or not what it says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from diffcluster.errors import TransferError
from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import open_sender
from diffcluster.transport.engines.base import Receiver, Sender
from tests.transport.capabilities import ENGINES, kinds
from tests.transport.kit import SIZE, content, slot, until, within
from tests.transport.peer import STALE
from tests.transport.processes import receiving, sending

LARGE = 64 << 20
"""More than all buffers on the way hold."""

GRACE_S = 1.0


@pytest.fixture(params=kinds(lambda can: can.crosses_processes))
def kind(request: pytest.FixtureRequest) -> EngineKind:
    return request.param


def write_words(receiver: Receiver, lease: int, byte: int, timeout_s: float, nbytes: int = SIZE) -> tuple[object, ...]:
    return receiver.session().address, lease, 0, nbytes, byte, timeout_s


# ---------------------------------------------------------------- killed


def test_a_receiver_killed_ahead_of_the_write(kind: EngineKind, receiver: Receiver, sender: Sender) -> None:
    with receiving(kind, SIZE) as peer:
        peer.ask("open", 1, 0, 4096)
        sender.connect(peer.session, 5)
        peer.kill()
        with pytest.raises(TransferError), within(3):
            sender.write(peer.session, slot(1, 0, 4096), content(4096), 5)
    receiver.open(slot(1, 0, 4096))
    sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)


@pytest.mark.parametrize("kind", kinds(lambda can: can.crosses_processes and can.needs_receiver))
def test_a_receiver_killed_in_the_middle_of_a_write(kind: EngineKind, receiver: Receiver, sender: Sender) -> None:
    failures: list[TransferError] = []
    ended = threading.Event()
    source = np.zeros(LARGE, np.uint8)

    def write() -> None:
        try:
            sender.write(peer.session, slot(1, 0, LARGE), source, 30)
        except TransferError as error:
            failures.append(error)
        ended.set()

    with receiving(kind, LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        sender.connect(peer.session, 5)
        peer.freeze()
        thread = threading.Thread(target=write)
        thread.start()
        assert not ended.wait(0.3)  # it cannot end while the peer is frozen
        with within(5):
            peer.kill()
            thread.join()
    assert len(failures) == 1
    receiver.open(slot(1, 0, 4096))
    sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)


@pytest.mark.parametrize("kind", kinds(lambda can: can.crosses_processes and not can.needs_receiver))
def test_a_frozen_receiver_does_not_stall_one_sided_writes(kind: EngineKind, sender: Sender) -> None:
    with receiving(kind, LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        sender.connect(peer.session, 5)
        peer.freeze()
        sender.write(peer.session, slot(1, 0, LARGE), np.full(LARGE, 7, np.uint8), 10)
        peer.thaw()
        assert peer.ask("count", 7, 0, LARGE) == str(LARGE)


def test_a_sender_killed_in_the_middle_of_a_write(
    kind: EngineKind, arena: Arena, receiver: Receiver, sender: Sender
) -> None:
    old, new = slot(1, 0, SIZE), slot(2, 0, SIZE)
    receiver.open(old)
    with sending(kind) as peer:
        assert peer.ask("gated", *write_words(receiver, 1, 0xAA, 20)) == "gate"
        peer.freeze()
        receiver.close(old)
        if ENGINES[kind].ends_writes:
            until(lambda: receiver.settled(old.lease) is True)
        else:
            assert not receiver.settled(old.lease)
        peer.kill()
    if ENGINES[kind].knows_settled:
        until(lambda: receiver.settled(old.lease) is True, 2)
        receiver.open(new)
        sender.write(receiver.session(), new, content(SIZE), 10)
        assert np.array_equal(arena.view(0, SIZE), content(SIZE))


def test_a_sender_killed_between_write_and_commit(kind: EngineKind, arena: Arena, receiver: Receiver) -> None:
    place = slot(1, 0, SIZE)
    receiver.open(place)
    with sending(kind) as peer:
        assert peer.ask("write", *write_words(receiver, 1, 0xAA, 10)) == "ok"
        peer.kill()
    assert (arena.view(0, SIZE) == 0xAA).all()
    receiver.close(place)
    if ENGINES[kind].knows_settled:
        assert receiver.settled(place.lease)


# ---------------------------------------------------------------- frozen for longer than the deadline


@pytest.mark.parametrize("kind", kinds(lambda can: can.crosses_processes and can.needs_receiver))
def test_nothing_of_a_write_that_timed_out_shows_in_a_slot_leased_again(kind: EngineKind, sender: Sender) -> None:
    source = np.full(LARGE, 0xAA, np.uint8)
    with receiving(kind, LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        sender.connect(peer.session, 5)
        peer.freeze()
        with pytest.raises(TransferError) as failure, within(0.5 + GRACE_S):
            sender.write(peer.session, slot(1, 0, LARGE), source, 0.5)
        assert not failure.value.settled
        if not failure.value.source_held:
            source[:] = STALE
        peer.thaw()
        peer.ask("close", 1, 0, LARGE)
        if not ENGINES[kind].knows_settled:
            return
        peer.settles(1)
        peer.ask("open", 2, 0, LARGE)
        sender.write(peer.session, slot(2, 0, LARGE), np.full(LARGE, 0x55, np.uint8), 20)
        assert peer.ask("count", STALE, 0, LARGE) == "0"
        assert peer.ask("count", 0x55, 0, LARGE) == str(LARGE)


@pytest.mark.parametrize("kind", kinds(lambda can: can.crosses_processes and can.knows_settled))
def test_a_sender_frozen_in_mid_write_never_writes_into_a_slot_leased_again(
    kind: EngineKind, arena: Arena, receiver: Receiver, sender: Sender
) -> None:
    old, new = slot(1, 0, SIZE), slot(2, 0, SIZE)
    receiver.open(old)
    with sending(kind) as peer:
        assert peer.ask("gated", *write_words(receiver, 1, 0xAA, 0.5)) == "gate"
        peer.freeze()
        receiver.close(old)
        if not ENGINES[kind].ends_writes:
            # It found its window open, so it may still write: for as long as it stands there.
            assert receiver.settled(old.lease) is False
            peer.thaw()
            assert peer.ask("go").startswith("failed settled")
        until(lambda: receiver.settled(old.lease) is True)
        receiver.open(new)
        sender.write(receiver.session(), new, np.full(SIZE, 0x55, np.uint8), 10)
        if ENGINES[kind].ends_writes:
            peer.thaw()
            assert peer.ask("go").startswith("failed")
        # By now its source is full of stale bytes; and it cannot be talked into another try.
        assert peer.ask("write", *write_words(receiver, 1, 0xAA, 5)).startswith("failed settled")
        assert (arena.view(0, SIZE) == 0x55).all()
        receiver.close(new)
        assert receiver.settled(new.lease)


# ---------------------------------------------------------------- started again, silent, or something else


def test_a_receiver_started_again_at_the_same_address_knows_no_old_leases(kind: EngineKind, sender: Sender) -> None:
    with receiving(kind, SIZE) as first:
        first.ask("open", 1, 0, 4096)
        sender.connect(first.session, 5)
        first.kill()
    with receiving(kind, SIZE, first.session.address) as second:
        assert second.session == first.session
        second.ask("open", 2, 0, 4096)
        with pytest.raises(TransferError) as failure, within(3):
            sender.write(first.session, slot(1, 0, 4096), content(4096), 5)
        assert failure.value.settled
        sender.write(second.session, slot(2, 0, 4096), np.full(4096, 7, np.uint8), 5)
        assert second.ask("count", 7, 0, 4096) == "4096"


@contextlib.contextmanager
def silent(kind: EngineKind) -> Iterator[Session]:
    """Something to which one can connect, and which then says nothing."""
    if kind == "shm":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0diffcluster-silent")
            listener.listen()
            yield Session(kind, "diffcluster-silent")
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield Session(kind, f"127.0.0.1:{listener.getsockname()[1]}")


def test_a_silent_listener_costs_no_more_than_the_time_out_and_others_go_on(
    kind: EngineKind, receiver: Receiver, sender: Sender
) -> None:
    written, stop = 0, threading.Event()
    problems: list[TransferError] = []

    def write_to_the_healthy() -> None:
        nonlocal written
        other = open_sender(kind)
        try:
            while not stop.is_set():
                place = slot(written + 1, 0, 4096)
                receiver.open(place)
                other.write(receiver.session(), place, content(4096), 1.0)
                receiver.close(place)
                written += 1
        except TransferError as error:
            problems.append(error)
        finally:
            other.stop()

    with silent(kind) as session:
        thread = threading.Thread(target=write_to_the_healthy)
        thread.start()
        for attempt in (
            lambda: sender.connect(session, 0.7),
            lambda: sender.write(session, slot(1, 0, 8), content(8), 0.7),
        ):
            before = written
            with pytest.raises(TransferError) as failure, within(0.7 + GRACE_S):
                attempt()
            assert failure.value.settled
            assert written > before
        stop.set()
        thread.join()
    assert not problems


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(8192)])
def test_first_contact_with_something_else_fails(kind: EngineKind, sender: Sender, answer: bytes) -> None:
    family = socket.AF_UNIX if kind == "shm" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind("\0diffcluster-other" if kind == "shm" else ("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        address = "diffcluster-other" if kind == "shm" else f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TransferError) as failure, within(3):
            sender.connect(Session(kind, address), 2)
        assert failure.value.settled
        thread.join()


# ---------------------------------------------------------------- leaving in the middle of a write


@pytest.mark.parametrize("how", ["abort", "stop", "exit"])
def test_a_process_that_leaves_during_a_transfer_exits_as_it_should(
    kind: EngineKind, receiver: Receiver, how: str
) -> None:
    place = slot(1, 0, SIZE)
    receiver.open(place)
    with sending(kind) as peer, within(20):
        peer.tell("during", how, *write_words(receiver, 1, 0xAA, 60))
        if how != "exit":
            assert peer.hear().startswith("failed")
        assert peer.leave() == 0
    receiver.close(place)
    if ENGINES[kind].knows_settled:
        until(lambda: receiver.settled(LeaseId(1)) is True, 2)
