"""Finished files: a `Done` counts when all of its bytes are there, in whatever order both arrive."""

from __future__ import annotations

import pytest

from diffcluster.errors import WireError
from diffcluster.ids import RequestId
from diffcluster.messages import BulkPiece, Done, FileInfo
from diffcluster.router import collect
from diffcluster.router.collect import Collector
from tests.support import REQUEST, TIMINGS, incarnation

SENDER = incarnation(1)
KEY = (REQUEST, 1)


def head(file: int, offset: int, attempt: int = 1, request_id: str = REQUEST) -> BulkPiece:
    return BulkPiece(request_id=RequestId(request_id), attempt=attempt, file=file, offset=offset)


def done(*sizes: int) -> Done:
    files = tuple(FileInfo("image/png", size) for size in sizes)
    return Done(request_id=REQUEST, attempt=1, files=files, timings=TIMINGS)


def test_pieces_before_the_announcement() -> None:
    collector = Collector()
    assert collector.piece(SENDER, head(0, 0), b"ab", 0.0) is None
    assert collector.piece(SENDER, head(0, 2), b"c", 0.0) is None
    assert collector.done(SENDER, done(3), 0.0)
    assert collector.take(SENDER, KEY) == [("image/png", b"abc")]
    assert len(collector) == 0


def test_the_announcement_before_the_last_piece() -> None:
    collector, announced = Collector(), done(2, 1)
    assert not collector.done(SENDER, announced, 0.0)
    assert collector.piece(SENDER, head(0, 0), b"ab", 0.0) is None
    assert collector.piece(SENDER, head(1, 0), b"c", 0.0) == announced
    assert collector.take(SENDER, KEY) == [("image/png", b"ab"), ("image/png", b"c")]


def test_an_empty_file_arrives_by_an_empty_piece() -> None:
    collector = Collector()
    assert not collector.done(SENDER, done(0), 0.0)
    assert collector.piece(SENDER, head(0, 0), b"", 0.0) == done(0)


def test_no_files_at_all_are_complete_at_once() -> None:
    assert Collector().done(SENDER, done(), 0.0)


def test_attempts_and_senders_are_kept_apart() -> None:
    collector = Collector()
    collector.piece(SENDER, head(0, 0), b"a", 0.0)
    collector.piece(SENDER, head(0, 0, attempt=2), b"b", 0.0)
    collector.piece(incarnation(2), head(0, 0), b"c", 0.0)
    assert collector.done(SENDER, done(1), 0.0)
    assert collector.take(SENDER, KEY) == [("image/png", b"a")]
    assert len(collector) == 2


@pytest.mark.parametrize("bad", [head(0, 1), head(0, 3), head(1, 1), head(2, 0)], ids=str)
def test_a_piece_that_does_not_continue_is_refused_and_changes_nothing(bad: BulkPiece) -> None:
    collector = Collector()
    collector.piece(SENDER, head(0, 0), b"ab", 0.0)
    with pytest.raises(WireError, match="does not continue"):
        collector.piece(SENDER, bad, b"xy", 0.0)
    assert collector.done(SENDER, done(2), 0.0)


def test_a_first_piece_that_does_not_begin_is_refused_and_leaves_nothing_behind() -> None:
    collector = Collector()
    with pytest.raises(WireError, match="does not continue"):
        collector.piece(SENDER, head(0, 5), b"x", 0.0)
    assert len(collector) == 0


def test_an_earlier_file_is_closed_when_the_next_one_has_begun() -> None:
    collector = Collector()
    collector.piece(SENDER, head(0, 0), b"a", 0.0)
    collector.piece(SENDER, head(1, 0), b"b", 0.0)
    with pytest.raises(WireError, match="does not continue"):
        collector.piece(SENDER, head(0, 1), b"c", 0.0)


def test_more_bytes_than_announced_are_never_complete() -> None:
    collector = Collector()
    collector.piece(SENDER, head(0, 0), b"abc", 0.0)
    assert not collector.done(SENDER, done(2), 0.0)


def test_all_unfinished_files_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_BYTES", 4)
    collector = Collector()
    collector.piece(SENDER, head(0, 0), b"abcd", 0.0)
    with pytest.raises(WireError, match="more than 4 bytes"):
        collector.piece(SENDER, head(0, 0, request_id="r2"), b"e", 0.0)
    collector.discard(SENDER, KEY)
    collector.piece(SENDER, head(0, 0, request_id="r2"), b"efgh", 0.0)


def test_what_nobody_waits_for_is_dropped() -> None:
    collector = Collector()
    collector.piece(SENDER, head(0, 0), b"a", 0.0)
    collector.piece(SENDER, head(0, 0, attempt=2), b"b", 0.0)
    collector.keep_only({(SENDER, (REQUEST, 2))})
    assert len(collector) == 1
    assert collector.take(SENDER, KEY) == []


def test_taking_and_discarding_what_is_not_there_is_harmless() -> None:
    collector = Collector()
    collector.discard(SENDER, KEY)
    assert collector.take(SENDER, KEY) == []
