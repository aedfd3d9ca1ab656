"""Joining, being lost, and leaving the cluster."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from diffcluster.ids import Incarnation, InstanceName, RequestId
from diffcluster.messages import (
    PROTOCOL_VERSION,
    Cancelled,
    Done,
    Drain,
    Drained,
    Failed,
    Refused,
    Register,
    Registered,
    RoleHeartbeat,
    RouterHeartbeat,
    Submit,
)  # fmt: skip
from diffcluster.router import events
from diffcluster.router.actions import Action, Count, Send
from diffcluster.router.machine import RouterMachine
from diffcluster.router.state import Limits
from tests.support import REQUEST, TIMINGS, facts, incarnation, parameters, register

BEAT = RoleHeartbeat(queued=0, running=0, receive_free=0, receive_quarantined=0, send_free=0, resident_bytes=0)
HEARTBEAT_S = 2.0
ONE, TWO = incarnation(1), incarnation(2)


@pytest.fixture
def machine() -> RouterMachine:
    return RouterMachine(Limits(heartbeat_s=HEARTBEAT_S, max_losses=2, bulk_port=7))


def hear(machine: RouterMachine, message: Any, sender: Incarnation = ONE, now: float = 0.0) -> list[Action]:
    return machine.step(events.Heard(sender, message, now))


def join(machine: RouterMachine, message: Register, now: float = 0.0) -> list[Action]:
    return hear(machine, message, message.incarnation, now)


def said(actions: list[Action]) -> list[tuple[Incarnation, Any]]:
    return [(action.to, action.message) for action in actions if isinstance(action, Send)]


def refusal(actions: list[Action]) -> Refused:
    [(_, message)] = said(actions)
    assert isinstance(message, Refused)
    return message


# ---------------------------------------------------------------- joining


def test_an_instance_that_registers_is_told_the_interval_and_the_port(machine: RouterMachine) -> None:
    assert said(join(machine, register())) == [(ONE, Registered(fresh=True, heartbeat_s=HEARTBEAT_S, bulk_port=7))]
    assert machine.cluster.names == {"encoder-1": ONE}


def test_an_answer_that_was_lost_is_given_again_and_counts_once(machine: RouterMachine) -> None:
    join(machine, register())
    again = join(machine, register())
    assert said(again) == [(ONE, Registered(fresh=False, heartbeat_s=HEARTBEAT_S, bulk_port=7))]
    assert not any(isinstance(action, Count) for action in again)


def test_another_protocol_version_is_refused_for_good(machine: RouterMachine) -> None:
    refused = refusal(join(machine, register(version=PROTOCOL_VERSION + 1)))
    assert not refused.again
    assert refused.reason == f"it speaks protocol version {PROTOCOL_VERSION + 1}, the router {PROTOCOL_VERSION}"
    assert machine.cluster.instances == {}


def test_an_address_that_is_not_the_incarnation_is_refused(machine: RouterMachine) -> None:
    assert not refusal(hear(machine, register(number=1), sender=TWO)).again


def test_another_revision_of_a_model_that_is_served_is_refused(machine: RouterMachine) -> None:
    join(machine, register("encoder", 1))
    refused = refusal(join(machine, register("denoiser", 2, model=facts(revision="new"))))
    assert not refused.again
    assert "revision new" in refused.reason


def test_another_revision_is_taken_when_nobody_serves_the_old_one(machine: RouterMachine) -> None:
    join(machine, register("encoder", 1))
    machine.step(events.Gone(ONE, 0.0))
    join(machine, register("encoder", 2, model=facts(revision="new")))
    assert machine.cluster.models["m"].revision == "new"


def test_another_model_is_welcome(machine: RouterMachine) -> None:
    join(machine, register("encoder", 1))
    join(machine, register("encoder", 2, model=facts(id="other")))
    assert set(machine.cluster.models) == {"m", "other"}


def test_the_same_name_replaces_the_old_process_which_must_not_come_back(machine: RouterMachine) -> None:
    join(machine, register("encoder", 1))
    join(machine, register("encoder", 2, name=InstanceName("encoder-1")))
    assert set(machine.cluster.instances) == {TWO}
    for attempt_to_return in (BEAT, register("encoder", 1)):
        refused = refusal(hear(machine, attempt_to_return))
        assert (refused.again, refused.reason) == (False, "a newer process is called encoder-1")
    assert machine.cluster.names == {"encoder-1": TWO}


def test_what_an_unknown_instance_says_is_answered_by_register_again(machine: RouterMachine) -> None:
    cancelled = Cancelled(request_id=REQUEST, attempt=1)
    for message in (BEAT, Drain(), cancelled):
        assert refusal(hear(machine, message)).again


# ---------------------------------------------------------------- living


def test_a_heartbeat_is_answered(machine: RouterMachine) -> None:
    join(machine, register())
    assert said(hear(machine, BEAT, now=1.0)) == [(ONE, RouterHeartbeat(said=0))]
    assert machine.cluster.instances[ONE].heartbeat == BEAT


def tick(machine: RouterMachine, start: float, end: float) -> list[Action]:
    """Tick as a router does that is never stopped; what the last one led to."""
    actions: list[Action] = []
    while start <= end:
        actions, start = machine.step(events.Tick(start)), start + HEARTBEAT_S / 2
    return actions


def test_an_instance_is_lost_after_three_silent_heartbeats_and_not_before(machine: RouterMachine) -> None:
    join(machine, register())
    tick(machine, 0.0, 3 * HEARTBEAT_S)
    assert ONE in machine.cluster.instances
    actions = machine.step(events.Tick(3 * HEARTBEAT_S + 0.1))
    assert machine.cluster.instances == {}
    assert machine.cluster.names == {}
    assert Count("lost", "encoder") in actions


def test_whatever_it_says_keeps_an_instance(machine: RouterMachine) -> None:
    join(machine, register())
    tick(machine, 0.0, 5.0)
    hear(machine, Cancelled(request_id=REQUEST, attempt=1), now=5.0)
    tick(machine, 5.0, 5.0 + 3 * HEARTBEAT_S)
    assert ONE in machine.cluster.instances


def test_a_router_that_was_stopped_itself_takes_nobody_for_lost(machine: RouterMachine) -> None:
    join(machine, register())
    tick(machine, 0.0, 2.0)
    machine.step(events.Tick(60.0))
    assert ONE in machine.cluster.instances


def test_a_heartbeat_that_counts_more_than_was_heard_makes_it_begin_anew(machine: RouterMachine) -> None:
    join(machine, register())
    assert refusal(hear(machine, replace(BEAT, said=1))).again
    assert machine.cluster.instances == {}


def test_a_heartbeat_that_says_it_was_cut_off_makes_it_begin_anew(machine: RouterMachine) -> None:
    join(machine, register())
    assert refusal(hear(machine, replace(BEAT, cut=True))).again


def test_what_is_said_and_heard_is_counted_from_a_fresh_registration_on(machine: RouterMachine) -> None:
    join(machine, register("monolithic"))
    submit(machine)
    done = Done(request_id=REQUEST, attempt=1, files=(), timings=TIMINGS)
    hear(machine, done)
    assert said(hear(machine, replace(BEAT, said=1))) == [(ONE, RouterHeartbeat(said=1))]
    machine.step(events.Gone(ONE, 0.0))
    join(machine, register("monolithic"))
    assert said(hear(machine, BEAT)) == [(ONE, RouterHeartbeat(said=0))]


def test_a_lost_instance_that_comes_back_is_told_to_register_and_then_taken(machine: RouterMachine) -> None:
    join(machine, register())
    machine.step(events.Gone(ONE, 0.0))
    assert refusal(hear(machine, BEAT)).again
    assert [type(message) for _, message in said(join(machine, register()))] == [Registered]


def test_losing_an_unknown_instance_is_nothing(machine: RouterMachine) -> None:
    assert machine.step(events.Gone(ONE, 0.0)) == []


# ---------------------------------------------------------------- leaving


def submit(machine: RouterMachine, name: str = "r1") -> list[Action]:
    return machine.step(events.Submitted(RequestId(name), parameters(), 100.0, 0.0))


def test_an_idle_instance_may_leave_at_once(machine: RouterMachine) -> None:
    join(machine, register())
    assert said(hear(machine, Drain())) == [(ONE, Drained())]
    assert machine.cluster.instances == {}


@pytest.mark.parametrize(
    "end",
    [
        Done(request_id=RequestId("r1"), attempt=1, files=(), timings=TIMINGS),
        Failed(request_id=RequestId("r1"), attempt=1, code="worker_error", reason=""),
    ],
    ids=["done", "failed"],
)
def test_a_draining_instance_finishes_and_gets_nothing_new(machine: RouterMachine, end: Any) -> None:
    join(machine, register("monolithic"))
    submit(machine)
    assert said(hear(machine, Drain())) == []
    assert said(submit(machine, "r2")) == []
    assert said(hear(machine, end))[-1] == (ONE, Drained())


def test_what_waits_goes_to_another_instance(machine: RouterMachine) -> None:
    join(machine, register("monolithic", 1, max_outstanding=1))
    hear(machine, Drain())
    submit(machine)
    given = said(join(machine, register("monolithic", 2)))
    assert [type(message) for _, message in given] == [Registered, Submit]
