"""Finished files: a `Done` counts when all of its bytes are there, in whatever order both arrive."""

from __future__ import annotations

import pytest

from diffcluster.errors import WireError
from diffcluster.ids import Incarnation, RequestId
from diffcluster.messages import BulkPiece
from diffcluster.transport import collect
from diffcluster.transport.collect import Collector
from tests.support import REQUEST, incarnation

KEY = (incarnation(1), (REQUEST, 1))
OTHER = (incarnation(1), (RequestId("r2"), 1))
SECOND = (incarnation(1), (REQUEST, 2))
Places = Collector[tuple[Incarnation, tuple[RequestId, int]], str]


def head(file: int, offset: int) -> BulkPiece:
    return BulkPiece(request_id=REQUEST, attempt=1, file=file, offset=offset)


def test_pieces_before_the_announcement() -> None:
    collector: Places = Collector()
    assert collector.piece(KEY, head(0, 0), b"ab", 0.0) is None
    assert collector.piece(KEY, head(0, 2), b"c", 0.0) is None
    assert collector.announce(KEY, "done", [3], 0.0)
    assert collector.take(KEY) == ("done", [b"abc"])
    assert len(collector) == 0


def test_the_announcement_before_the_last_piece() -> None:
    collector: Places = Collector()
    assert not collector.announce(KEY, "done", [2, 1], 0.0)
    assert collector.piece(KEY, head(0, 0), b"ab", 0.0) is None
    assert collector.piece(KEY, head(1, 0), b"c", 0.0) == "done"
    assert collector.take(KEY) == ("done", [b"ab", b"c"])


def test_an_empty_file_arrives_by_an_empty_piece() -> None:
    collector: Places = Collector()
    assert not collector.announce(KEY, "done", [0], 0.0)
    assert collector.piece(KEY, head(0, 0), b"", 0.0) == "done"


def test_no_files_at_all_are_complete_at_once() -> None:
    assert Places().announce(KEY, "done", [], 0.0)


def test_places_are_kept_apart() -> None:
    collector: Places = Collector()
    collector.piece(KEY, head(0, 0), b"a", 0.0)
    collector.piece(SECOND, head(0, 0), b"b", 0.0)
    collector.piece((incarnation(2), (REQUEST, 1)), head(0, 0), b"c", 0.0)
    assert collector.announce(KEY, "done", [1], 0.0)
    assert collector.take(KEY) == ("done", [b"a"])
    assert len(collector) == 2


@pytest.mark.parametrize("bad", [head(0, 1), head(0, 3), head(1, 1), head(2, 0)], ids=str)
def test_a_piece_that_does_not_continue_is_refused_and_changes_nothing(bad: BulkPiece) -> None:
    collector: Places = Collector()
    collector.piece(KEY, head(0, 0), b"ab", 0.0)
    with pytest.raises(WireError, match="does not continue"):
        collector.piece(KEY, bad, b"xy", 0.0)
    assert collector.announce(KEY, "done", [2], 0.0)


def test_a_first_piece_that_does_not_begin_is_refused_and_leaves_nothing_behind() -> None:
    collector: Places = Collector()
    with pytest.raises(WireError, match="does not continue"):
        collector.piece(KEY, head(0, 5), b"x", 0.0)
    assert len(collector) == 0


def test_an_earlier_file_is_closed_when_the_next_one_has_begun() -> None:
    collector: Places = Collector()
    collector.piece(KEY, head(0, 0), b"a", 0.0)
    collector.piece(KEY, head(1, 0), b"b", 0.0)
    with pytest.raises(WireError, match="does not continue"):
        collector.piece(KEY, head(0, 1), b"c", 0.0)


def test_more_bytes_than_announced_are_never_complete() -> None:
    collector: Places = Collector()
    collector.piece(KEY, head(0, 0), b"abc", 0.0)
    assert not collector.announce(KEY, "done", [2], 0.0)


def test_all_unfinished_files_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_BYTES", 4)
    collector: Places = Collector()
    collector.piece(KEY, head(0, 0), b"abcd", 0.0)
    with pytest.raises(WireError, match="more than 4 bytes"):
        collector.piece(OTHER, head(0, 0), b"e", 0.0)
    collector.discard(KEY)
    collector.piece(OTHER, head(0, 0), b"efgh", 0.0)


def test_what_nobody_waits_for_is_dropped() -> None:
    collector: Places = Collector()
    collector.piece(KEY, head(0, 0), b"a", 0.0)
    collector.piece(SECOND, head(0, 0), b"a", 0.0)
    collector.keep_only({SECOND})
    assert len(collector) == 1
    assert collector.take(KEY) is None


def test_announced_and_unannounced_files_that_stop_are_told_apart() -> None:
    collector: Places = Collector()
    collector.piece(KEY, head(0, 0), b"a", 1.0)
    collector.announce(OTHER, "done", [1], 2.0)
    assert (collector.orphaned(1.0), collector.stalled(2.0)) == (set(), set())
    assert (collector.orphaned(1.1), collector.stalled(2.1)) == ({KEY}, {OTHER})


def test_taking_and_discarding_what_is_not_there_is_harmless() -> None:
    collector: Places = Collector()
    assert collector.discard(KEY) is None
    assert collector.take(KEY) is None
