"""Clients' pictures on their way to a role: sent as its link takes them, held until whole, given up if they stop."""

from __future__ import annotations

import pytest

from diffcluster.errors import WireError
from diffcluster.ids import Incarnation, RequestId
from diffcluster.messages import BulkPiece, InputImage, Submit
from diffcluster.roles.inputs import Inputs
from diffcluster.router.outgoing import Outgoing
from diffcluster.transport import control
from tests.support import REQUEST, incarnation, parameters

KEY = (REQUEST, 1)
ROLE = incarnation(1)


def submit(*sizes: int, attempt: int = 1, request_id: str = REQUEST) -> Submit:
    images = tuple(InputImage("image", 8, 8, size) for size in sizes)
    return Submit(request_id=RequestId(request_id), attempt=attempt, parameters=parameters(inputs=images))


def head(file: int = 0, offset: int = 0, request_id: str = REQUEST) -> BulkPiece:
    return BulkPiece(request_id=RequestId(request_id), attempt=1, file=file, offset=offset)


# ---------------------------------------------------------------- in the role


def test_a_submit_without_pictures_does_not_wait() -> None:
    inputs = Inputs()
    assert inputs.submit(submit(), 0.0)
    assert inputs.take(KEY) == ()


def test_pieces_before_the_submit() -> None:
    inputs = Inputs()
    assert inputs.piece(head(), b"ab", 0.0) is None
    assert inputs.piece(head(1), b"c", 0.0) is None
    assert inputs.submit(submit(2, 1), 0.0)
    assert inputs.take(KEY) == (b"ab", b"c")
    assert inputs.take(KEY) == ()


def test_pieces_after_the_submit() -> None:
    inputs, message = Inputs(), submit(3, 1)
    assert not inputs.submit(message, 0.0)
    assert inputs.piece(head(), b"ab", 0.0) is None
    assert inputs.piece(head(0, 2), b"c", 0.0) is None
    assert inputs.piece(head(1), b"d", 0.0) is message
    assert inputs.take(KEY) == (b"abc", b"d")


def test_pictures_that_do_not_come_are_given_up_after_three_heartbeats() -> None:
    inputs = Inputs()
    inputs.submit(submit(2), 10.0)
    inputs.piece(head(), b"a", 11.0)
    assert inputs.lost(14.0, 1.0) == []
    (failed,) = inputs.lost(14.1, 1.0)
    assert (failed.request_id, failed.attempt, failed.code) == (*KEY, "transfer_failed")
    assert inputs.lost(20.0, 1.0) == []
    assert inputs.piece(head(0, 1), b"b", 20.0) is None


def test_pictures_that_wait_behind_others_are_given_more_time() -> None:
    inputs = Inputs()
    inputs.submit(submit(2), 0.0)
    for second in range(31):
        inputs.piece(head(0, second, "r2"), b"x", float(second))
        assert inputs.lost(float(second), 1.0) == []
    assert len(inputs.lost(30.5, 1.0)) == 1


@pytest.mark.parametrize("submitted_first", [True, False])
def test_a_piece_that_is_missing_gives_the_request_up_at_once(submitted_first: bool) -> None:
    inputs = Inputs()
    if submitted_first:
        inputs.submit(submit(3), 0.0)
    inputs.piece(head(), b"a", 0.0)
    inputs.piece(head(0, 2), b"c", 0.0)
    assert inputs.piece(head(0, 1), b"b", 0.0) is None
    if not submitted_first:
        assert inputs.lost(0.0, 1.0) == []
        assert not inputs.submit(submit(3), 0.0)
    assert len(inputs.lost(0.0, 1.0)) == 1
    assert inputs.lost(0.0, 1.0) == []


def test_other_sizes_than_announced_never_complete() -> None:
    inputs = Inputs()
    inputs.piece(head(), b"abc", 0.0)
    assert not inputs.submit(submit(2), 0.0)
    assert len(inputs.lost(3.1, 1.0)) == 1


def test_what_was_cancelled_is_dropped_and_its_late_pieces_go_by_age() -> None:
    inputs = Inputs()
    inputs.submit(submit(2), 0.0)
    inputs.forget(KEY)
    inputs.piece(head(), b"a", 0.0)
    inputs.piece(head(0, 5), b"a", 0.0)
    assert inputs.lost(31.0, 1.0) == []
    assert not inputs.submit(submit(1), 31.0)
    assert inputs.piece(head(), b"a", 31.0) is not None


def test_clearing_keeps_pieces_that_are_ahead_of_their_submit() -> None:
    inputs = Inputs()
    inputs.submit(submit(2), 0.0)
    inputs.piece(head(0, 0, "r2"), b"ab", 0.0)
    inputs.piece(head(0, 0, "r3"), b"ab", 0.0)
    assert inputs.submit(submit(2, request_id="r3"), 0.0)
    inputs.clear()
    assert inputs.take((RequestId("r3"), 1)) == ()
    assert inputs.lost(9.0, 1.0) == []
    assert inputs.submit(submit(2, request_id="r2"), 0.0)


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", b"x"], [b"nonsense", b"x"], [b"x", b"x", b"x"]])
def test_frames_that_are_no_piece(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        Inputs().frames(frames, 0.0)


# ---------------------------------------------------------------- in the router


class Link:
    """Takes `room` pieces."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[tuple[Incarnation, BulkPiece, bytes]] = []

    def send(self, to: Incarnation, piece: BulkPiece, data: bytes) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append((to, piece, data))
        return True


def test_what_a_role_does_not_take_now_is_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PIECE_BYTES", 2)
    link = Link(2)
    outgoing = Outgoing(link.send)
    outgoing.add(ROLE, KEY, [b"abcde", b""])
    assert not outgoing.flush()
    assert [data for _, _, data in link.sent] == [b"ab", b"cd"]
    link.room = 10
    assert not outgoing.flush()
    assert [(piece.file, piece.offset, data) for _, piece, data in link.sent[2:]] == [(0, 4, b"e"), (1, 0, b"")]
    assert len(outgoing) == 0


def test_one_turn_is_bounded_and_says_that_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "PIECE_BYTES", 1)
    link = Link(1000)
    outgoing = Outgoing(link.send)
    outgoing.add(ROLE, KEY, [b"x" * 100])
    assert outgoing.flush()
    assert len(link.sent) == 64
    assert not outgoing.flush()
    assert len(link.sent) == 100


def test_a_role_that_takes_nothing_does_not_hold_up_others() -> None:
    sent = []

    def send(to: Incarnation, piece: BulkPiece, data: bytes) -> bool:
        sent.append(to)
        return to != ROLE

    outgoing = Outgoing(send)
    outgoing.add(ROLE, KEY, [b"a"])
    outgoing.add(incarnation(2), (RequestId("r2"), 1), [b"b"])
    outgoing.flush()
    assert set(sent) == {ROLE, incarnation(2)}
    assert len(outgoing) == 1


def test_what_nobody_waits_for_is_not_sent() -> None:
    link = Link(0)
    outgoing = Outgoing(link.send)
    outgoing.add(ROLE, KEY, [b"a"])
    outgoing.add(ROLE, (RequestId("r2"), 1), [b"b"])
    outgoing.keep_only({(ROLE, (RequestId("r2"), 1))})
    link.room = 9
    outgoing.flush()
    assert [data for _, _, data in link.sent] == [b"b"]
