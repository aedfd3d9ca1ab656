"""The mailbox: nothing is lost, each producer's order is kept, a full one refuses, a closed one too."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from diffcluster.transport.mailbox import Mailbox

PRODUCERS, POSTS = 4, 2000


@pytest.fixture
def mailbox() -> Iterator[Mailbox[object]]:
    made: Mailbox[object] = Mailbox(capacity=PRODUCERS * POSTS)
    yield made
    made.close()


def _is_readable(mailbox: Mailbox[object]) -> bool:
    return bool(select.select([mailbox], [], [], 0)[0])


def test_items_come_out_once_oldest_first(mailbox: Mailbox[object]) -> None:
    assert mailbox.post("a")
    assert mailbox.post("b")
    assert mailbox.take() == ["a", "b"]
    assert mailbox.take_all() == []


def test_it_is_readable_exactly_while_there_is_something_to_take(mailbox: Mailbox[object]) -> None:
    assert not _is_readable(mailbox)
    mailbox.post("a")
    mailbox.post("b")
    assert _is_readable(mailbox)
    mailbox.take_all()
    assert not _is_readable(mailbox)


def test_four_producers_lose_nothing_and_keep_their_order(mailbox: Mailbox[object]) -> None:
    def produce(producer: int) -> None:
        for number in range(POSTS):
            assert mailbox.post((producer, number))

    threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    taken: list[object] = []
    while len(taken) < PRODUCERS * POSTS:
        taken += mailbox.take()
    for thread in threads:
        thread.join()
    for producer in range(PRODUCERS):
        assert [item for item in taken if item[0] == producer] == [(producer, n) for n in range(POSTS)]  # type: ignore[index]


def test_a_full_one_refuses_and_keeps_what_it_has() -> None:
    mailbox: Mailbox[object] = Mailbox(capacity=2)
    assert [mailbox.post(n) for n in range(3)] == [True, True, False]
    assert mailbox.take_all() == [0, 1]
    assert mailbox.post(3)
    mailbox.close()


def test_a_closed_one_refuses_gives_back_its_descriptor_and_may_be_closed_again() -> None:
    mailbox: Mailbox[object] = Mailbox()
    descriptor = mailbox.fileno()
    mailbox.close()
    mailbox.close()
    assert not mailbox.post("late")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_was_posted_before_it_closed_can_still_be_taken() -> None:
    mailbox: Mailbox[object] = Mailbox()
    mailbox.post("a")
    mailbox.close()
    assert mailbox.take_all() == ["a"]
    assert mailbox.take_all() == []


def test_taking_waits_for_a_post_of_another_thread(mailbox: Mailbox[object]) -> None:
    poster = threading.Timer(0.05, mailbox.post, args=("late",))
    poster.start()
    assert mailbox.take() == ["late"]
    poster.join()
