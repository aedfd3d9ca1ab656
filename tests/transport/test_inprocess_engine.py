"""The faults that the in-process engine makes on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from diffcluster.errors import TransferError
from diffcluster.messages import EngineKind
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines.base import Sender
from diffcluster.transport.engines.inprocess import InProcessReceiver, Script, open_receiver
from tests.transport.kit import OPTIONS, content, slot, until, within

Open = Callable[[Script], InProcessReceiver]


@pytest.fixture
def kind() -> EngineKind:
    return "inprocess"


@pytest.fixture
def opened(arena: Arena) -> Iterator[Open]:
    """Opens receivers that follow a script, with leases 1 to 3 in them."""
    receivers: list[InProcessReceiver] = []

    def open_one(script: Script) -> InProcessReceiver:
        receivers.append(open_receiver(arena, OPTIONS, script))
        for lease in range(1, 4):
            receivers[-1].open(slot(lease, lease * 4096, 4096))
        return receivers[-1]

    yield open_one
    for receiver in receivers:
        receiver.stop()


@pytest.mark.parametrize("settled", [True, False])
def test_one_write_fails(arena: Arena, opened: Open, sender: Sender, settled: bool) -> None:
    receiver = opened(Script(fail=2, fail_settled=settled))
    sender.write(receiver.session(), slot(1, 4096, 4096), content(4096), 5)
    with pytest.raises(TransferError, match="script") as failure:
        sender.write(receiver.session(), slot(2, 8192, 4096), content(4096), 5)
    assert failure.value.settled is settled
    assert not arena.view(8192, 4096).any()
    sender.write(receiver.session(), slot(3, 12288, 4096), content(4096), 5)


def test_a_completion_is_lost(arena: Arena, opened: Open, sender: Sender) -> None:
    receiver = opened(Script(lose=1))
    with pytest.raises(TransferError, match="completion") as failure:
        sender.write(receiver.session(), slot(1, 4096, 4096), content(4096), 5)
    assert not failure.value.settled
    assert np.array_equal(arena.view(4096, 4096), content(4096))
    receiver.close(slot(1, 4096, 4096))
    assert receiver.settled(slot(1, 4096, 4096).lease)


def test_each_write_is_delayed(opened: Open, sender: Sender) -> None:
    delays: list[int] = []
    receiver = opened(Script(delay=lambda: delays.append(1)))
    for lease in (1, 2):
        sender.write(receiver.session(), slot(lease, lease * 4096, 4096), content(4096), 5)
    assert len(delays) == 2


def test_a_held_write_is_not_settled_until_it_is_let_go(arena: Arena, opened: Open, sender: Sender) -> None:
    hold, place = threading.Event(), slot(1, 4096, 4096)
    receiver = opened(Script(hold=hold))
    thread = threading.Thread(target=sender.write, args=(receiver.session(), place, content(4096), 20))
    thread.start()
    until(lambda: not receiver.settled(place.lease))
    assert not arena.view(4096, 4096).any()
    hold.set()
    thread.join()
    assert receiver.settled(place.lease)
    assert np.array_equal(arena.view(4096, 4096), content(4096))


def test_a_held_write_that_was_given_up_is_not_settled_either(arena: Arena, opened: Open, sender: Sender) -> None:
    hold, place = threading.Event(), slot(1, 4096, 4096)
    receiver = opened(Script(hold=hold))
    with pytest.raises(TransferError) as failure, within(1):
        sender.write(receiver.session(), place, content(4096), 0.2)
    assert not failure.value.settled
    receiver.close(place)
    assert not receiver.settled(place.lease)
    hold.set()
    assert receiver.settled(place.lease)
    assert not arena.view(4096, 4096).any()


def test_a_held_write_whose_window_is_closed_writes_nothing(arena: Arena, opened: Open, sender: Sender) -> None:
    hold, place = threading.Event(), slot(1, 4096, 4096)
    receiver = opened(Script(hold=hold))
    failures: list[pytest.ExceptionInfo[TransferError]] = []

    def write() -> None:
        with pytest.raises(TransferError, match="closed") as failure:
            sender.write(receiver.session(), place, content(4096), 20)
        failures.append(failure)

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: not receiver.settled(place.lease))
    receiver.close(place)
    assert not receiver.settled(place.lease)
    hold.set()
    thread.join()
    assert failures[0].value.settled
    assert receiver.settled(place.lease)
    assert not arena.view(4096, 4096).any()


def test_stop_ends_a_held_write(opened: Open, sender: Sender) -> None:
    receiver = opened(Script(hold=threading.Event()))
    place = slot(1, 4096, 4096)

    def write() -> None:
        with pytest.raises(TransferError, match="given up"):
            sender.write(receiver.session(), place, content(4096), 20)

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: not receiver.settled(place.lease))
    with within(2):
        sender.stop()
        thread.join()


def test_a_window_takes_one_write(opened: Open, sender: Sender) -> None:
    receiver = opened(Script())
    sender.write(receiver.session(), slot(1, 4096, 4096), content(4096), 5)
    with pytest.raises(TransferError) as failure:
        sender.write(receiver.session(), slot(1, 4096, 4096), content(4096), 5)
    assert failure.value.settled
