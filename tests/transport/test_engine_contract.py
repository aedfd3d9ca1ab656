"""One contract for all engines: what holds within one process. What holds between processes: test_engine_processes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from msgspec.structs import replace

from diffcluster.errors import TransferError
from diffcluster.messages import EngineKind, Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import open_receiver, open_sender
from diffcluster.transport.engines.base import Receiver, Sender
from tests.transport.capabilities import ENGINES, kinds
from tests.transport.kit import OPTIONS, SIZE, content, slot, within

NOBODY: dict[EngineKind, str] = {
    "inprocess": "nobody",
    "shm": "diffcluster-nobody",
    "tcp": "127.0.0.1:1",
    "mooncake": f"127.0.0.1:15000/1/4096/{SIZE}/4096/{'0' * 32}/tcp",
}
"""An address of each kind that never existed."""


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
        receiver.close(place)
    assert all(np.array_equal(arena.view(lease * 4096, 4096), content(4096, lease)) for lease in range(1, 30))


def test_many_senders_at_once(kind: EngineKind, arena: Arena, receiver: Receiver) -> None:
    places = {
        (lease, round_): slot(lease * 100 + round_, lease * 65536, 65536)
        for lease in range(1, 9)
        for round_ in range(5)
    }
    for place in places.values():
        receiver.open(place)

    def send(lease: int) -> None:
        sender = open_sender(kind)
        try:
            for round_ in range(5):
                sender.write(receiver.session(), places[lease, round_], content(65536, lease), 5)
        finally:
            sender.stop()

    threads = [threading.Thread(target=send, args=(lease,)) for lease in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(arena.view(lease * 65536, 65536), content(65536, lease)) for lease in range(1, 9))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "forged",
    [
        slot(2, 0, 4096),
        slot(2**63, 0, 4096),
        slot(1, SIZE - 100, 4096),
        slot(1, SIZE, 4096),
        slot(1, 2**53, 4096),
        slot(1, 4096, 8192),
        replace(slot(1, 4096, 4096), token="f" * 32),
    ],
    ids=["another lease", "a lease from nowhere", "half outside", "outside", "far outside", "longer", "wrong token"],
)
def test_a_forged_slot_is_refused(
    kind: EngineKind, arena: Arena, receiver: Receiver, sender: Sender, forged: SlotAddress
) -> None:
    """The offset of some engines never leaves the sender; then the bytes go where they ought to."""
    true = slot(1, 4096, 4096)
    receiver.open(true)
    refusal = None
    try:
        sender.write(receiver.session(), forged, content(forged.nbytes), 5)
    except TransferError as error:
        refusal = error
    if refusal is None:
        assert (forged.lease, forged.token, forged.nbytes) == (true.lease, true.token, true.nbytes)
        assert not arena.view(0, 4096).any()
        assert not arena.view(8192, SIZE - 8192).any()
        return
    assert refusal.settled
    assert not arena.view(0, SIZE).any()
    receiver.close(true)
    assert receiver.settled(true.lease) is (True if ENGINES[kind].knows_settled else None)


def test_more_than_the_slot_holds_is_refused_and_writes_nothing(
    arena: Arena, receiver: Receiver, sender: Sender
) -> None:
    place = slot(1, 0, 4096)
    receiver.open(place)
    with pytest.raises(TransferError) as failure:
        sender.write(receiver.session(), place, content(4097), 5)
    assert failure.value.settled
    assert not arena.view(0, SIZE).any()


@pytest.mark.parametrize("kind", kinds(lambda can: can.checks_slots))
def test_a_large_write_that_is_refused_is_settled(kind: EngineKind, receiver: Receiver, sender: Sender) -> None:
    for lease in range(1, 6):
        with pytest.raises(TransferError) as failure, within(3):
            sender.write(receiver.session(), slot(lease, 0, SIZE), content(SIZE), 5)
        assert failure.value.settled


@pytest.mark.parametrize("kind", kinds(lambda can: can.checks_slots))
def test_a_lease_that_was_closed_takes_nothing(
    kind: EngineKind, arena: Arena, receiver: Receiver, sender: Sender
) -> None:
    old, new = slot(1, 0, 4096), slot(2, 0, 4096)
    receiver.open(old)
    sender.connect(receiver.session(), 5)
    receiver.close(old)
    assert receiver.settled(old.lease)
    receiver.open(new)
    with pytest.raises(TransferError) as failure:
        sender.write(receiver.session(), old, content(4096), 5)
    assert failure.value.settled
    assert not arena.view(0, SIZE).any()
    sender.write(receiver.session(), new, content(4096, 2), 5)
    assert np.array_equal(arena.view(0, 4096), content(4096, 2))


# ---------------------------------------------------------------- reaching a peer


def test_after_a_first_contact_writes_go_on_as_usual(arena: Arena, receiver: Receiver, sender: Sender) -> None:
    for _ in range(2):
        sender.connect(receiver.session(), 5)
    assert not arena.view(0, SIZE).any()
    receiver.open(slot(1, 0, 4096))
    sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)
    assert np.array_equal(arena.view(0, 4096), content(4096))


def test_an_address_that_never_existed_is_a_settled_failure(
    kind: EngineKind, receiver: Receiver, sender: Sender
) -> None:
    session = Session(kind, NOBODY[kind])
    with pytest.raises(TransferError) as failure, within(2):
        sender.connect(session, 5)
    assert failure.value.settled
    with pytest.raises(TransferError) as failure, within(2):
        sender.write(session, slot(1, 0, 4096), content(4096), 5)
    assert failure.value.settled
    receiver.open(slot(1, 0, 4096))
    sender.write(receiver.session(), slot(1, 0, 4096), content(4096), 5)


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


# ---------------------------------------------------------------- giving up


def test_what_is_aborted_ahead_of_its_begin_writes_nothing(arena: Arena, receiver: Receiver, sender: Sender) -> None:
    abort = threading.Event()
    abort.set()
    receiver.open(slot(1, 0, SIZE))
    with pytest.raises(TransferError), within(1):
        sender.write(receiver.session(), slot(1, 0, SIZE), content(SIZE), 5, abort)
    assert not arena.view(0, SIZE).any()


def test_stop_may_come_twice(kind: EngineKind) -> None:
    sender = open_sender(kind)
    sender.stop()
    sender.stop()
