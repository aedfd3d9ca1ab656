"""The router's machine, by example: slots leased ahead, who can reach whom, and handoffs that go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from diffcluster.ids import Incarnation, RequestId, Role
from diffcluster.messages import (
    Allocate,
    Allocated,
    AllocationRefused,
    Drain,
    Evict,
    Evicted,
    Failed,
    Grant,
    Meet,
    Met,
    Part,
    Push,
    Pushed,
    PushFailed,
    Ready,
    RoleHeartbeat,
    Staged,
    Submit,
    Ungrant,
)
from diffcluster.router import events
from diffcluster.router.actions import Fail, Send
from diffcluster.router.invariants import violations
from diffcluster.router.machine import RouterMachine
from diffcluster.router.state import Limits
from tests.support import TIMINGS, incarnation, manifest, parameters, register, slot

E1, E2, D1, D2, D3 = (incarnation(number) for number in (1, 2, 11, 12, 13))
ROLES: dict[Incarnation, Role] = {E1: "encoder", E2: "encoder", D1: "denoiser", D2: "denoiser", D3: "denoiser"}
LAST = incarnation(21)


class Router:
    """The machine, and what it has said since somebody looked."""

    def __init__(self, *instances: Incarnation, slot_bytes: int = 65536) -> None:
        self.machine = RouterMachine(Limits(heartbeat_s=1e9, max_losses=3, bulk_port=1))
        self.said: list[tuple[Incarnation, Any]] = []
        self.failed: list[Fail] = []
        self.slot_bytes = slot_bytes
        self.join(LAST, "decoder")
        for instance in instances:
            self.join(instance)
        self.said.clear()

    def do(self, event: events.Event) -> list[tuple[Incarnation, Any]]:
        """What the router tells whom."""
        actions = self.machine.step(event)
        problems = violations(self.machine.cluster)
        assert not problems, problems
        self.failed += [action for action in actions if isinstance(action, Fail)]
        sent = [(action.to, action.message) for action in actions if isinstance(action, Send)]
        self.said += sent
        return sent

    def join(self, instance: Incarnation, role: Role | None = None) -> list[tuple[Incarnation, Any]]:
        role = role or ROLES[instance]
        return self.hear(instance, register(role, int(instance, 16), slot_bytes=self.slot_bytes))

    def hear(self, sender: Incarnation, message: Any) -> list[tuple[Incarnation, Any]]:
        return self.do(events.Heard(sender, message, 0.0))

    def submit(self, name: str) -> Incarnation:
        """Who is to compute it."""
        told = self.do(events.Submitted(RequestId(name), parameters(), 1e9, 0.0))
        return next(to for to, message in told if isinstance(message, Submit))

    def stage(self, name: str, nbytes: int = 4096) -> list[tuple[Incarnation, Any]]:
        holder = self.machine.cluster.requests[RequestId(name)].holder
        assert holder is not None
        return self.hear(holder, Staged(**self.of(name), manifest=manifest(nbytes), scalars={}, timings=TIMINGS))

    def waiting(self, name: str, nbytes: int = 4096) -> list[tuple[Incarnation, Any]]:
        """Submit it and compute it; what the router says then."""
        self.submit(name)
        return self.stage(name, nbytes)

    def of(self, name: str) -> dict[str, Any]:
        return {"request_id": RequestId(name), "attempt": self.machine.cluster.requests[RequestId(name)].attempt}

    def push_of(self, name: str) -> Push:
        return [m for _, m in self.said if isinstance(m, Push) and m.request_id == name][-1]

    def push_ends(self, name: str, *, fails: bool, settled: bool = True) -> list[tuple[Incarnation, Any]]:
        push = self.push_of(name)
        to = {"receiver": push.peer.incarnation, "lease": push.slot.lease}
        holder = self.machine.cluster.requests[RequestId(name)].holder
        assert holder is not None
        if fails:
            return self.hear(holder, PushFailed(**self.of(name), **to, settled=settled, reason="no"))
        return self.hear(holder, Pushed(**self.of(name), **to, engine="tcp", nbytes=1, seconds=0.0))

    def evicted(self, name: str) -> list[tuple[Incarnation, Any]]:
        """The receiver of the last push has given its slot up."""
        push = self.push_of(name)
        return self.hear(push.peer.incarnation, Evicted(**self.of(name), lease=push.slot.lease, quarantined=False))


def kinds(sent: list[tuple[Incarnation, Any]], kind: type) -> list[tuple[Incarnation, Any]]:
    return [(to, message) for to, message in sent if isinstance(message, kind)]


# ---------------------------------------------------------------- grants


def test_a_grant_is_used_and_nobody_is_asked() -> None:
    router = Router(E1, D1)
    router.hear(D1, Grant(slot=slot(7)))
    told = router.waiting("a")
    [(to, push)] = kinds(told, Push)
    assert (to, push.peer.incarnation, push.slot.lease) == (E1, D1, 7)
    assert kinds(told, Allocate) == []
    [(_, ready)] = kinds(router.push_ends("a", fails=False), Ready)
    assert ready.lease == 7


def test_a_grant_is_used_once() -> None:
    router = Router(E1, D1)
    router.hear(D1, Grant(slot=slot(7)))
    router.waiting("a")
    told = router.waiting("b")
    assert kinds(told, Push) == []
    assert [to for to, _ in kinds(told, Allocate)] == [D1]


def test_the_smallest_grant_that_is_large_enough_is_used() -> None:
    router = Router(E1, D1)
    for lease, nbytes in ((1, 4096), (2, 12288), (3, 8192), (4, 16384)):
        router.hear(D1, Grant(slot=slot(lease, nbytes)))
    [(_, push)] = kinds(router.waiting("a", 5120), Push)
    assert push.slot.lease == 3


def test_a_slot_is_asked_for_where_no_grant_is_large_enough() -> None:
    router = Router(E1, D1)
    router.hear(D1, Grant(slot=slot(1, 4096)))
    told = router.waiting("a", 8192)
    assert kinds(told, Push) == []
    [(to, allocate)] = kinds(told, Allocate)
    assert (to, allocate.nbytes) == (D1, 8192)


def test_a_refusal_gives_all_grants_back_and_a_new_grant_is_used_at_once() -> None:
    router = Router(E1, D1)
    for lease in (1, 2):
        router.hear(D1, Grant(slot=slot(lease, 4096)))
    router.waiting("a", 8192)
    told = router.hear(D1, AllocationRefused(**router.of("a"), permanent=False, reason="full"))
    assert [(to, message.leases) for to, message in kinds(told, Ungrant)] == [(D1, (1, 2))]
    assert router.machine.cluster.instances[D1].full
    [(to, push)] = kinds(router.hear(D1, Grant(slot=slot(3, 8192))), Push)
    assert (to, push.slot.lease) == (E1, 3)
    assert not router.machine.cluster.instances[D1].full


def test_grants_beyond_reason_are_given_back() -> None:
    router = Router(E1, D1)
    for lease in range(1, 257):
        assert router.hear(D1, Grant(slot=slot(lease))) == []
    [(_, ungrant)] = kinds(router.hear(D1, Grant(slot=slot(257))), Ungrant)
    assert ungrant.leases == (257,)


def test_grants_of_a_lost_instance_are_void() -> None:
    router = Router(E1, D1)
    router.hear(D1, Grant(slot=slot(7)))
    router.do(events.Gone(D1, 0.0))
    router.join(D1)
    assert [to for to, _ in kinds(router.waiting("a"), Allocate)] == [D1]


def test_a_granted_slot_whose_push_is_not_needed_any_more_is_evicted() -> None:
    router = Router(E1, D1)
    router.hear(D1, Grant(slot=slot(7)))
    router.waiting("a")
    [(to, evict)] = kinds(router.do(events.GivenUp(RequestId("a"), "", 0.0)), Evict)
    assert (to, evict.lease, evict.settled) == (D1, 7, False)


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("order", [(E1, E2, D1, D2), (D1, D2, E1, E2), (E1, D1, E2, D2), (D2, E2, D1, E1)])
def test_each_sender_meets_each_receiver_once_whoever_comes_first(order: tuple[Incarnation, ...]) -> None:
    router = Router()
    for instance in order:
        router.join(instance)
    met = [(to, message.peer.incarnation) for to, message in kinds(router.said, Meet) if ROLES[to] == "encoder"]
    assert sorted(met) == [(E1, D1), (E1, D2), (E2, D1), (E2, D2)]


def test_a_middle_stage_is_both() -> None:
    router = Router(E1)
    told = router.join(D1)
    assert [(to, message.peer.incarnation) for to, message in kinds(told, Meet)] == [(D1, LAST), (E1, D1)]


def test_a_registration_that_is_repeated_introduces_nobody_again() -> None:
    router = Router(E1, D1)
    assert kinds(router.join(D1), Meet) == []


def test_senders_part_from_a_receiver_that_is_lost() -> None:
    router = Router(E1, E2, D1)
    router.hear(E1, Met(receiver=D1, engine="shm"))
    told = router.do(events.Gone(D1, 0.0))
    assert [(to, message.receiver) for to, message in kinds(told, Part)] == [(E1, D1), (E2, D1)]
    assert router.machine.cluster.instances[E1].links == {}
    assert [to for to, _ in kinds(router.join(D1), Meet)] == [D1, E1, E2]


def test_senders_part_from_a_receiver_that_leaves() -> None:
    router = Router(E1, D1)
    assert [to for to, _ in kinds(router.hear(D1, Drain()), Part)] == [E1]


def test_nobody_parts_from_a_sender() -> None:
    router = Router(E1, D1)
    assert kinds(router.do(events.Gone(E1, 0.0)), Part) == []


def test_a_link_to_somebody_who_is_gone_is_not_kept() -> None:
    router = Router(E1, D1)
    router.do(events.Gone(D1, 0.0))
    router.hear(E1, Met(receiver=D1, engine="tcp"))
    assert router.machine.cluster.instances[E1].links == {}


def test_a_receiver_that_cannot_be_reached_is_avoided_while_there_is_another() -> None:
    router = Router(E1, D1, D2)
    router.hear(E1, Met(receiver=D1, engine=None, reason="refused"))
    router.hear(E1, Met(receiver=D2, engine="tcp"))
    for name in "abc":
        assert [to for to, _ in kinds(router.waiting(name), Allocate)] == [D2]


def test_a_receiver_that_nobody_else_can_replace_is_tried_though_it_could_not_be_reached() -> None:
    router = Router(E1, D1)
    router.hear(E1, Met(receiver=D1, engine=None))
    assert [to for to, _ in kinds(router.waiting("a"), Allocate)] == [D1]


# ---------------------------------------------------------------- what goes wrong


def _offer(router: Router, name: str, sent: list[tuple[Incarnation, Any]], lease: int) -> Incarnation:
    """The receiver that was asked for a slot leases one."""
    [(receiver, _)] = kinds(sent, Allocate)
    router.hear(receiver, Allocated(**router.of(name), slot=slot(lease)))
    return receiver


def test_after_two_failed_pushes_to_one_receiver_another_is_preferred() -> None:
    router = Router(E1, D1)
    _offer(router, "a", router.waiting("a"), 1)
    router.push_ends("a", fails=True)
    assert _offer(router, "a", router.evicted("a"), 2) == D1, "once more on a fresh connection"
    router.join(D2)
    router.submit("b")  # so that it is D1 that has less to do
    router.stage("b")
    told = router.push_ends("a", fails=True)
    assert [to for to, _ in kinds(told, Allocate)] == [D2]


def test_after_two_failed_pushes_a_receiver_is_tried_on_where_there_is_no_other() -> None:
    router = Router(E1, D1)
    _offer(router, "a", router.waiting("a"), 1)
    for lease in (2, 3):
        router.push_ends("a", fails=True)
        assert _offer(router, "a", router.evicted("a"), lease) == D1


def test_a_third_failed_push_fails_the_request() -> None:
    router = Router(E1, D1)
    _offer(router, "a", router.waiting("a"), 1)
    for lease in (2, 3):
        router.push_ends("a", fails=True)
        _offer(router, "a", router.evicted("a"), lease)
    router.push_ends("a", fails=True)
    assert [(fail.request_id, fail.code) for fail in router.failed] == [("a", "transfer_failed")]


def _arrive_broken(router: Router) -> list[tuple[Incarnation, Any]]:
    """Hand `a` over, and have the receiver find that the bytes are not those that were sent."""
    receiver = _offer(router, "a", router.stage("a"), router.machine.cluster.requests[RequestId("a")].attempt)
    router.push_ends("a", fails=False)
    return router.hear(receiver, Failed(**router.of("a"), code="transfer_failed", reason="checksum"))


def test_bytes_that_arrived_broken_are_made_again_without_blame() -> None:
    router = Router(E1, D1)
    router.submit("a")
    [(to, submit)] = kinds(_arrive_broken(router), Submit)
    assert (to, submit.attempt) == (E1, 2)
    assert router.machine.cluster.requests[RequestId("a")].losses == 0


def test_bytes_that_arrive_broken_again_and_again_fail_the_request() -> None:
    router = Router(E1, D1)
    router.submit("a")
    for _ in range(2):
        _arrive_broken(router)
        assert router.failed == []
    _arrive_broken(router)
    assert [(fail.request_id, fail.code) for fail in router.failed] == [("a", "transfer_failed")]


def test_a_heartbeat_ends_a_refusal() -> None:
    router = Router(E1, D1)
    router.waiting("a")
    router.hear(D1, AllocationRefused(**router.of("a"), permanent=False, reason="full"))
    heard = router.machine.cluster.instances[D1].heard
    beat = RoleHeartbeat(
        queued=0, running=0, receive_free=0, receive_quarantined=0, send_free=0, resident_bytes=0, said=heard
    )
    assert [to for to, _ in kinds(router.hear(D1, beat), Allocate)] == [D1]
