"""Transfers by the Mooncake library, and what happens to them when a peer is killed, frozen, silent or another.

The library keeps a few threads and descriptors from when it is loaded until the process exits. So it is loaded here,
when the tests are collected, ahead of the first look at what exists.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from diffcluster.errors import TransferError
from diffcluster.ids import LeaseId
from diffcluster.messages import Session, SlotAddress
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import mooncake, mooncake_peer
from diffcluster.transport.engines.mooncake_address import parse
from diffcluster.transport.engines.mooncake_door import CELL_BYTES, Visit
from tests.transport.capabilities import ENGINES
from tests.transport.kit import OPTIONS, SIZE, content, slot, until, within
from tests.transport.processes import ROOT, Peer, receiving

LARGE = 64 << 20
"""More than all buffers on the way hold."""

GRACE_S = 1.0


pytestmark = pytest.mark.skipif(bool(ENGINES["mooncake"].skip), reason=ENGINES["mooncake"].skip)


@pytest.fixture
def receiver(arena: Arena) -> Iterator[mooncake.MooncakeReceiver]:
    receiver = mooncake.open_receiver(arena, OPTIONS)
    yield receiver
    receiver.stop()


@pytest.fixture
def sender() -> Iterator[mooncake.MooncakeSender]:
    sender = mooncake.open_sender()
    yield sender
    sender.stop()


@pytest.fixture
def after_asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What is in the list is called, once, when a write has been allowed and before Mooncake gets it."""
    todo: list[Callable[[], object]] = []
    ask = mooncake._ask

    def ask_and_do(*arguments: object) -> None:
        ask(*arguments)  # type: ignore[arg-type]
        while todo:
            todo.pop()()

    monkeypatch.setattr(mooncake, "_ask", ask_and_do)
    return todo


def changed(session: Session, **fields: object) -> Session:
    return Session("mooncake", str(replace(parse(session.address), **fields)))


def ask_to_write(peer: Peer, sender: mooncake.MooncakeSender, lease: int, byte: int) -> None:
    peer.ask("open", lease, 0, SIZE)
    sender.write(peer.session, slot(lease, 0, SIZE), np.full(SIZE, byte, np.uint8), 20)
    assert peer.ask("count", byte, 0, SIZE) == str(SIZE)


# ---------------------------------------------------------------- writes


def test_all_bytes_are_in_the_slot_when_write_returns(
    arena: Arena, receiver: mooncake.MooncakeReceiver, sender: mooncake.MooncakeSender
) -> None:
    for lease, nbytes in enumerate([0, 1, 511, 512, 4095, 4096, 1 << 20, (5 << 20) + 3], 1):
        arena.view(0, SIZE)[:] = 0
        place = slot(lease, 4096, 6 << 20)
        receiver.open(place)
        sender.write(receiver.session(), place, content(nbytes), 10)
        assert np.array_equal(arena.view(4096, nbytes), content(nbytes))
        assert not arena.view(0, 4096).any()
        assert not arena.view(4096 + nbytes, 4096).any()
        until(lambda: receiver.settled(place.lease) is True)  # noqa: B023 - called here and now


def test_peers_in_two_processes(sender: mooncake.MooncakeSender) -> None:
    with receiving("mooncake", SIZE) as first, receiving("mooncake", SIZE) as second:
        for lease in (1, 2):
            ask_to_write(first, sender, lease, 10 + lease)
            ask_to_write(second, sender, lease, 20 + lease)
        assert first.ask("count", 12, 0, SIZE) == str(SIZE)


@pytest.mark.parametrize(
    ("place", "nbytes"),
    [(slot(1, SIZE - 100, 4096), 8), (slot(1, 2**53, 8), 8), (slot(1, 0, 4096), 4097), (slot(2, 0, 4096), 8)],
    ids=["half outside", "far outside", "more than the slot", "another lease"],
)
def test_what_does_not_fit_or_was_not_leased_is_refused(
    arena: Arena,
    receiver: mooncake.MooncakeReceiver,
    sender: mooncake.MooncakeSender,
    place: SlotAddress,
    nbytes: int,
) -> None:
    receiver.open(slot(1, 0, 4096))
    with pytest.raises(TransferError) as failure:
        sender.write(receiver.session(), place, content(nbytes), 5)
    assert failure.value.settled
    assert not arena.view(0, SIZE).any()


def test_the_library_keeps_writes_to_what_was_registered(
    receiver: mooncake.MooncakeReceiver, sender: mooncake.MooncakeSender, arena: Arena
) -> None:
    """Between the slots and the last bytes of the control memory lies what other engines keep there."""
    wrong = changed(receiver.session(), nbytes=SIZE + 4096)
    place = slot(1, SIZE, 4096)
    receiver.open(place)
    with pytest.raises(TransferError, match="gives no reason") as failure:
        sender.write(wrong, place, content(4096), 5)
    assert not failure.value.settled
    assert not arena.control[:4096].any()


# ---------------------------------------------------------------- first contact


def test_an_echo_that_comes_back_wrong_is_tried_three_times(
    receiver: mooncake.MooncakeReceiver, sender: mooncake.MooncakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    meet = Visit.meet
    wrong = 2

    def lie(self: Visit, cell: int, *rest: object) -> bytes:
        asked.append(cell)
        echo = meet(self, cell, *rest)  # type: ignore[arg-type]
        return echo if len(asked) == 1 or len(asked) > 1 + wrong else bytes(CELL_BYTES)

    monkeypatch.setattr(Visit, "meet", lie)
    sender.connect(receiver.session(), 10)
    assert len(asked) == 4, "one greeting, two that were wrong, one that was right"
    sender.stop()
    wrong = 3
    asked.clear()
    other = mooncake.open_sender()
    with pytest.raises(TransferError, match="does not see") as failure:
        other.connect(receiver.session(), 10)
    assert failure.value.settled
    other.stop()


def keep_writing(receiver: mooncake.MooncakeReceiver, stop: threading.Event, written: list[int]) -> None:
    sender = mooncake.open_sender()
    try:
        while not stop.is_set():
            place = slot(len(written) + 1, 0, 4096)
            receiver.open(place)
            sender.write(receiver.session(), place, content(4096), 3.0)
            written.append(1)
    finally:
        sender.stop()


@pytest.mark.parametrize("silent", ["door", "port"])
def test_a_silent_listener_costs_no_more_than_the_time_out_and_others_go_on(
    receiver: mooncake.MooncakeReceiver, sender: mooncake.MooncakeSender, silent: str
) -> None:
    """As the door, and worse: as the library's port, behind a door that answers. The library waits there for 60 s."""
    stop, written = threading.Event(), list[int]()
    thread = threading.Thread(target=keep_writing, args=(receiver, stop, written))
    thread.start()
    try:
        until(lambda: bool(written), 20)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            session = changed(receiver.session(), **{silent: listener.getsockname()[1]})
            before = len(written)
            with within(1.0 + GRACE_S), pytest.raises(TransferError) as failure:
                sender.connect(session, 1.0)
            assert failure.value.settled
            assert len(written) > before
        # With the listener closed, the library's wait is over.
        until(lambda: not any(other.name == "mooncake-contact" for other in threading.enumerate()))
    finally:
        stop.set()
        thread.join()


def test_a_receiver_that_was_started_again_is_another(arena: Arena, sender: mooncake.MooncakeSender) -> None:
    first = mooncake.open_receiver(arena, OPTIONS)
    old = first.session()
    sender.connect(old, 10)
    first.stop()
    second = mooncake.open_receiver(arena, OPTIONS)
    second.open(slot(1, 0, 4096))
    # As if it had got the same ports again.
    for session in (old, changed(second.session(), id=parse(old.address).id)):
        with pytest.raises(TransferError) as failure:
            sender.write(session, slot(1, 0, 4096), content(4096), 5)
        assert failure.value.settled
    sender.write(second.session(), slot(1, 0, 4096), content(4096), 10)
    assert np.array_equal(arena.view(0, 4096), content(4096))
    second.stop()


def test_a_peer_of_another_transport_is_refused(
    receiver: mooncake.MooncakeReceiver, sender: mooncake.MooncakeSender
) -> None:
    with pytest.raises(TransferError, match="the peer uses mooncake by rdma, we by tcp") as failure:
        sender.connect(changed(receiver.session(), transport="rdma"), 5)
    assert failure.value.settled


# ---------------------------------------------------------------- killed and frozen


def test_a_receiver_killed_or_frozen_ahead_of_the_write_is_a_settled_failure(sender: mooncake.MooncakeSender) -> None:
    with receiving("mooncake", SIZE) as killed, receiving("mooncake", SIZE) as frozen:
        for peer in (killed, frozen):
            sender.connect(peer.session, 10)
            peer.ask("open", 1, 0, SIZE)
        killed.kill()
        frozen.freeze()
        for peer in (killed, frozen):
            with within(0.5 + 2 * GRACE_S), pytest.raises(TransferError) as failure:
                sender.write(peer.session, slot(1, 0, SIZE), content(SIZE), 0.5)
            assert failure.value.settled
            assert not failure.value.source_held
        frozen.thaw()
        ask_to_write(frozen, sender, 2, 7)


def test_a_receiver_killed_in_the_middle_of_a_write(
    sender: mooncake.MooncakeSender, after_asking: list[Callable[[], object]]
) -> None:
    reached = threading.Event()
    failures: list[TransferError] = []

    def write() -> None:
        try:
            sender.write(peer.session, slot(1, 0, LARGE), content(LARGE), 20)
        except TransferError as error:
            failures.append(error)

    with receiving("mooncake", LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        sender.connect(peer.session, 10)
        after_asking += [reached.set, peer.freeze]
        thread = threading.Thread(target=write)
        thread.start()
        reached.wait()
        assert not threading.Event().wait(0.3)  # for the buffers on the way to fill; the outcome does not hang on it
        with within(3):
            peer.kill()
            thread.join()
    assert [(failure.settled, failure.source_held) for failure in failures] == [(False, True)]


def test_a_write_into_a_frozen_receiver_ends_at_its_deadline_and_the_next_gets_a_fresh_engine(
    sender: mooncake.MooncakeSender, after_asking: list[Callable[[], object]]
) -> None:
    other = mooncake.open_sender()
    with receiving("mooncake", LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        sender.connect(peer.session, 10)
        other.connect(peer.session, 10)
        (engine,) = mooncake_peer._engines.values()
        after_asking.append(peer.freeze)
        with within(0.5 + GRACE_S), pytest.raises(TransferError, match="not done after") as failure:
            sender.write(peer.session, slot(1, 0, LARGE), content(LARGE), 0.5)
        assert (failure.value.settled, failure.value.source_held) == (False, True)
        peer.thaw()
        peer.ask("close", 1, 0, LARGE)
        until(lambda: peer.ask("settled", 1) == "None")  # bytes may be on their way: only time helps
        ask_to_write(peer, sender, 2, 7)
        (fresh,) = mooncake_peer._engines.values()
        assert fresh is not engine
        assert any(kept.nbytes == LARGE for kept in engine._kept), "the library may still read the source"
        other.stop()
        assert not engine._kept, "nobody uses it any more, so it is closed"


def test_an_abort_ends_a_write(sender: mooncake.MooncakeSender, after_asking: list[Callable[[], object]]) -> None:
    abort = threading.Event()
    with receiving("mooncake", LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        sender.connect(peer.session, 10)
        after_asking += [threading.Timer(0.2, abort.set).start, peer.freeze]
        with within(5), pytest.raises(TransferError, match="given up") as failure:
            sender.write(peer.session, slot(1, 0, LARGE), content(LARGE), 60, abort)
        assert not failure.value.settled


# ---------------------------------------------------------------- processes of their own


def run(script: str, *arguments: object, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, check=False)


_LEAVES = """
import os, signal, sys, threading
import numpy as np
from diffcluster.messages import Session
from diffcluster.transport.engines import mooncake
from tests.transport.kit import slot
address, pid, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
begun, wait = threading.Event(), mooncake.PeerEngine._follow
def follow(self, *rest):
    begun.set()
    try:
        wait(self, *rest)
    except TimeoutError as error:
        os.write(1, str(error).encode())
        raise
sender, session = mooncake.open_sender(), Session("mooncake", address)
sender.connect(session, 10)
os.kill(pid, signal.SIGSTOP)
mooncake._ask = lambda *_: None  # the frozen peer would not answer
mooncake.PeerEngine._follow = follow
def write():
    sender.write(session, slot(1, 0, nbytes), np.full(nbytes, 1, np.uint8), 60)
threading.Thread(target=write, daemon=True).start()
assert begun.wait(10)
"""


def test_an_exit_in_the_middle_of_a_transfer_is_no_abort() -> None:
    with receiving("mooncake", LARGE) as peer:
        peer.ask("open", 1, 0, LARGE)
        with within(30):
            left = run(_LEAVES, peer.session.address, peer.process.pid, LARGE)
    assert left.returncode == 0, left.stderr
    # The abort itself comes only if the thread is stopped inside the library; so look that it was not there any more.
    assert left.stdout == "given up"


_IPV6 = """
import numpy as np
from diffcluster.errors import ConfigError
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import mooncake
from diffcluster.transport.engines.base import EngineOptions
from tests.transport.kit import content, slot
arena = Arena(1 << 20, shared=True)
receiver, sender = mooncake.open_receiver(arena, EngineOptions("::1", "", 5.0)), mooncake.open_sender()
assert receiver.session().address.startswith("[::1]:"), receiver.session()
receiver.open(slot(1, 0, 1 << 20))
sender.write(receiver.session(), slot(1, 0, 1 << 20), content(1 << 20), 10)
assert np.array_equal(arena.view(0, 1 << 20), content(1 << 20))
sender.stop()
receiver.stop()
arena.close()
try:
    mooncake.open_receiver(Arena(4096, shared=True), EngineOptions("127.0.0.1", "", 5.0))
except ConfigError as error:
    print(error)
"""


def test_ipv6_and_nothing_else_in_that_process() -> None:
    done = run(_IPV6)
    assert done.returncode == 0, done.stderr
    assert "uses IPv6 alone" in done.stdout


_FORKS = """
import os
from diffcluster.errors import ConfigError
from diffcluster.transport.engines.mooncake_library import load
load(ipv6=False)
child = os.fork()
if child == 0:
    try:
        load(ipv6=False)
    except ConfigError as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_child_is_told_instead_of_hanging() -> None:
    assert "forked" in run(_FORKS).stdout


def test_the_leases_of_a_sender_that_was_killed_are_for_time_to_settle(receiver: mooncake.MooncakeReceiver) -> None:
    place = slot(1, 0, SIZE)
    receiver.open(place)
    limit = mooncake.Limit(5)
    visit = Visit(parse(receiver.session().address), limit)
    assert visit.may_i(place, limit)
    receiver.close(place)
    assert receiver.settled(place.lease) is False
    visit.close()
    until(lambda: receiver.settled(LeaseId(1)) is None)
