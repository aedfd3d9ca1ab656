"""How many bytes of bodies with pictures are taken in at one time, and how many of pictures are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diffcluster.errors import QueueFullError
from diffcluster.ids import RequestId
from diffcluster.router.files import Files
from diffcluster.router.http.uploads import Uploads


def request(length: str | None) -> Any:
    return SimpleNamespace(headers={} if length is None else {"content-length": length})


def test_bodies_are_read_as_long_as_there_is_room() -> None:
    uploads = Uploads(100, 60)
    with uploads.reading(request("50")), uploads.reading(request("50")), pytest.raises(QueueFullError):
        uploads.reading(request("1")).__enter__()
    with uploads.reading(request("60")):
        pass


@pytest.mark.parametrize("length", [None, "", "x", "-1", "9" * 30, "٣"])
def test_a_body_of_unknown_length_may_be_the_largest(length: str | None) -> None:
    uploads = Uploads(100, 60)
    with uploads.reading(request(length)):
        with pytest.raises(QueueFullError), uploads.reading(request("41")):
            pass
        with uploads.reading(request("3")):
            pass


def test_one_body_is_always_read_and_gives_its_room_back_whatever_happens() -> None:
    uploads = Uploads(10, 60)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), uploads.reading(request("60")):
            raise ZeroDivisionError


def test_pictures_are_kept_once_and_no_more_than_allowed() -> None:
    files = Files(10, lambda *_: False)
    picture = b"123456"
    assert files.keep(RequestId("a"), (picture,))
    assert files.keep(RequestId("b"), (picture, b"7890"))
    assert not files.keep(RequestId("c"), (b"x",))
    assert files.keep(RequestId("d"), ())
    files.forget(RequestId("b"))
    assert files.keep(RequestId("c"), (b"xyz!",))
