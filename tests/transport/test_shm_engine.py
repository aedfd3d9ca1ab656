"""What shared memory promises beyond the contract."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from diffcluster.errors import TransferError
from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, Session
from diffcluster.transport.arena import CONTROL_BYTES, Arena
from diffcluster.transport.engines import open_sender, shm
from diffcluster.transport.engines.base import CHUNK, Receiver, Sender
from diffcluster.transport.engines.shm_board import BOARD_BYTES, CELLS, PROOF_BYTES, Board, digest
from diffcluster.transport.engines.shm_receiver import GREETING, MAGIC, SAME
from tests.transport.kit import SIZE, content, slot, until


@pytest.fixture
def kind() -> EngineKind:
    return "shm"


def raw(session: Session) -> tuple[socket.socket, bytes]:
    """A stranger's connection, and what it is greeted with."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.settimeout(5)
    stranger.connect("\0" + session.address)
    greeting, fds, _, _ = socket.recv_fds(stranger, 1024, 1)
    for fd in fds:
        os.close(fd)
    return stranger, greeting


def test_the_shared_region_cannot_be_shrunk_or_grown(arena: Arena) -> None:
    for size in (0, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)


# ---------------------------------------------------------------- first contact


@pytest.mark.parametrize("words", [b"hello", b"?", b"??"])
def test_a_stranger_without_a_proof_is_cut_off_and_harms_nobody(
    arena: Arena, receiver: Receiver, sender: Sender, words: bytes
) -> None:
    stranger, _ = raw(receiver.session())
    with stranger, contextlib.suppress(ConnectionResetError):  # which of the two ways it is told is the kernel's choice
        stranger.sendall(words)
        assert stranger.recv(1) in (b"", b"\x01")
        assert stranger.recv(1) == b""
    receiver.open(slot(1, 0, 4096))
    sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)
    assert np.array_equal(arena.view(0, 4096), content(4096))


def test_cells_are_used_again_and_there_are_no_more_peers_than_cells(receiver: Receiver, sender: Sender) -> None:
    for _ in range(2):
        with contextlib.ExitStack() as strangers:
            for _ in range(CELLS):
                strangers.enter_context(raw(receiver.session())[0])
            with pytest.raises(TransferError, match="closed the connection") as failure:
                sender.connect(receiver.session(), 5)
            assert failure.value.settled
        until(lambda: _connects(sender, receiver))
        sender._peers.popitem()[1].close()  # type: ignore[attr-defined]
        until(lambda: len(receiver._cells) == CELLS)  # type: ignore[attr-defined]


def _connects(sender: Sender, receiver: Receiver) -> bool:
    try:
        sender.connect(receiver.session(), 5)
    except TransferError:
        return False
    return True


@contextlib.contextmanager
def impostor(greeting: bytes, fd: int) -> Iterator[Session]:
    """Hands over `fd` and says yes to whatever is asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0diffcluster-impostor")
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # it may be left at any point
                socket.send_fds(connection, [greeting], [fd])
                connection.sendall(SAME)
                while connection.recv(100):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield Session("shm", "diffcluster-impostor")
        thread.join()


@pytest.mark.parametrize(
    ("magic", "nbytes", "cell"),
    [(MAGIC, SIZE, 0), (b"DCS2", SIZE, 0), (MAGIC, SIZE, CELLS), (MAGIC, SIZE * 2, 0), (MAGIC, 2**63, 0)],
    ids=["looks at another region", "another version", "no such cell", "too large", "far too large"],
)
def test_a_receiver_that_is_not_what_it_says_fails_at_first_contact(
    arena: Arena, sender: Sender, magic: bytes, nbytes: int, cell: int
) -> None:
    greeting = GREETING.pack(magic, nbytes, CONTROL_BYTES, cell, bytes(PROOF_BYTES))
    with impostor(greeting, arena.fd) as session, pytest.raises(TransferError) as failure:
        sender.connect(session, 5)
    assert failure.value.settled


def test_a_region_that_could_shrink_is_not_mapped(sender: Sender) -> None:
    fd = os.memfd_create("diffcluster-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE + CONTROL_BYTES)
        greeting = GREETING.pack(MAGIC, SIZE, CONTROL_BYTES, 0, bytes(PROOF_BYTES))
        with impostor(greeting, fd) as session, pytest.raises(TransferError, match="shrink"):
            sender.connect(session, 5)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- the fence


def test_a_write_under_way_is_seen_and_ends_at_its_next_chunk(
    arena: Arena, receiver: Receiver, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, seen = slot(1, 0, SIZE), []

    def close_meanwhile(target: np.ndarray, source: np.ndarray) -> None:
        receiver.close(place)
        seen.append(receiver.settled(place.lease))
        np.copyto(target, source)

    monkeypatch.setattr(shm, "COPY_BYTES", CHUNK)
    monkeypatch.setattr(shm, "_copy", close_meanwhile)
    receiver.open(place)
    with pytest.raises(TransferError, match="not any more") as failure:
        sender.write(receiver.session(), place, np.full(SIZE, 7, np.uint8), 5)
    assert failure.value.settled
    assert seen == [False]
    assert receiver.settled(place.lease)
    assert not arena.view(CHUNK, SIZE - CHUNK).any()


def test_each_way_a_write_ends_leaves_it_settled_and_the_sender_usable(
    arena: Arena, receiver: Receiver, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = threading.Event()
    monkeypatch.setattr(shm, "_copy", lambda *_: abort.set())
    receiver.open(slot(1, 0, SIZE))
    with pytest.raises(TransferError, match="given up") as failure:
        sender.write(receiver.session(), slot(1, 0, SIZE), content(SIZE), 5, abort)
    assert failure.value.settled
    monkeypatch.setattr(shm, "_copy", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        sender.write(receiver.session(), slot(1, 0, SIZE), content(SIZE), 5)
    monkeypatch.undo()
    receiver.close(slot(1, 0, SIZE))
    assert receiver.settled(LeaseId(1))
    receiver.open(slot(2, 0, SIZE))
    sender.write(receiver.session(), slot(2, 0, SIZE), content(SIZE), 5)
    assert np.array_equal(arena.view(0, SIZE), content(SIZE))


def test_a_sender_that_is_gone_without_a_word_writes_nothing_any_more(receiver: Receiver) -> None:
    other = open_sender("shm")
    other.connect(receiver.session(), 5)
    peer = other._peers[receiver.session().address]  # type: ignore[attr-defined]
    peer._board.begin(peer._cell, LeaseId(1))
    assert not receiver.settled(LeaseId(1))
    other.stop()
    until(lambda: receiver.settled(LeaseId(1)) is True)


# ---------------------------------------------------------------- the board


@pytest.fixture
def board() -> Board:
    return Board(np.zeros(CONTROL_BYTES + 3, np.uint8)[3:])


def test_the_board_has_room_for_many_windows_and_says_when_it_is_full(board: Board) -> None:
    places = [slot(lease, lease * 4096, 4096) for lease in range(1, 2049)]
    assert all(board.open(place) for place in places)
    assert not board.open(slot(4000, 0, 4096))
    assert all(board.is_open(board.find(digest(place)), digest(place)) for place in places)
    board.close(places[7])
    assert board.find(digest(places[7])) == -1
    assert board.open(slot(4000, 0, 4096))


def test_each_cell_has_its_own_word_and_proof(board: Board) -> None:
    for cell in range(CELLS):
        board.proof(cell)[:] = 0xFF
        assert not board.is_written(LeaseId(cell + 1))
        board.begin(cell, LeaseId(cell + 1))
    assert all(board.is_written(LeaseId(cell + 1)) for cell in range(CELLS))
    board.end(3)
    board.clear(4)
    assert [cell for cell in range(CELLS) if not board.is_written(LeaseId(cell + 1))] == [3, 4]
    assert not board.proof(4).any()


def test_the_board_leaves_room_for_the_other_engines() -> None:
    assert BOARD_BYTES <= 40 << 10
