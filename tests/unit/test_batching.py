"""The policy: who leads, who comes along, why not more; and that nobody waits for ever."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from diffcluster.roles.batching import Candidate, Decision, Policy, Signature, choose, difference

NET = Signature("net", (("x", 1), ("t", 2)))
WIDE = Signature("net", (("x", 9), ("t", 2)))
OTHER = Signature("other", (("x", 1), ("t", 2)))
ALONE = Signature("vae.encode", (), "it returns a distribution")


class Costs:
    """`room`: samples that fit. `gain`: samples up to which each more makes all faster."""

    def __init__(self, room: int = 1000, gain: int = 1000) -> None:
        self.room, self.gain = room, gain

    def fits(self, signature: Signature, samples: int) -> bool:
        return samples <= self.room

    def worthwhile(self, signature: Signature, samples: int, more: int) -> bool:
        return samples + more <= self.gain


def candidate(key: object, signature: Signature = NET, **fields: Any) -> Candidate:
    values: dict[str, Any] = {"samples": 1, "units": 1, "started": 0.0, "waits_since": 0.0, **fields}
    return Candidate(key, signature, **values)


def decide(*candidates: Candidate, now: float = 0.0, running: int | None = None, **fields: Any) -> Decision:
    costs = Costs(fields.pop("room", 1000), fields.pop("gain", 1000))
    return choose(candidates, Policy(**fields), costs, now, len(candidates) if running is None else running)


# ---------------------------------------------------------------- who leads


def leader(*candidates: Candidate, now: float = 0.0, **fields: Any) -> object:
    return decide(*candidates, now=now, max_size=1, **fields).keys[0]


def test_the_highest_priority_leads_then_the_least_time_left_then_the_oldest() -> None:
    calm = candidate("calm", priority=-1, due=1.0, started=1.0)
    usual = candidate("usual", due=9.0, started=2.0)
    late = candidate("late", due=5.0, started=4.0)
    older = candidate("older", due=5.0, started=3.0)
    urgent = candidate("urgent", priority=1, started=5.0)
    everyone = [calm, usual, late, older, urgent]
    order = []
    while everyone:
        order.append(leader(*everyone))
        everyone = [other for other in everyone if other.key != order[-1]]
    assert order == ["urgent", "older", "late", "usual", "calm"]


def test_those_who_come_along_do_so_in_the_same_order() -> None:
    requests = [candidate(number, priority=number % 3, started=float(number)) for number in range(6)]
    assert decide(*requests, max_size=4).keys == (2, 5, 1, 4)


def test_waiting_raises_the_priority() -> None:
    waits, urgent = candidate("waits", waits_since=0.0), candidate("urgent", waits_since=30.0, priority=2)
    assert leader(waits, urgent, now=30.0, aging_s=20.0) == "urgent"
    assert leader(waits, urgent, now=30.0, aging_s=10.0) == "waits"


@given(
    others=st.integers(1, 5),
    priority=st.integers(0, 10),
    max_size=st.integers(1, 3),
    aging_s=st.sampled_from([1.0, 5.0]),
)
def test_nobody_starves_under_an_endless_stream_of_urgent_requests(
    others: int, priority: int, max_size: int, aging_s: float
) -> None:
    """A step takes a second, and each is filled by a new request, more urgent than all that wait."""
    waiting = {number: candidate(number, started=float(number)) for number in range(others)}
    bound = (priority + 1) * aging_s + others + 2
    now = 0.0
    while waiting:
        stream = [
            candidate(("new", number), waits_since=now, priority=priority, started=now) for number in range(max_size)
        ]
        for key in decide(*waiting.values(), *stream, now=now, max_size=max_size, aging_s=aging_s).keys:
            waiting.pop(key, None)
        assert now <= bound, f"{list(waiting)} starve"
        now += 1.0


# ---------------------------------------------------------------- why not more


def test_all_that_can_be_made_together_are() -> None:
    assert decide(candidate("a"), candidate("b", samples=2)) == Decision(("a", "b"), ("ready",))


def test_one_alone_is_ready() -> None:
    assert decide(candidate("a")) == Decision(("a",), ("ready",))


def test_more_than_the_largest_number_do_not_come_along() -> None:
    decision = decide(*map(candidate, "abcd"), max_size=2)
    assert decision == Decision(("a", "b"), ("max_size",))


def test_what_would_make_the_batch_slower_does_not_come_along() -> None:
    decision = decide(candidate("a", samples=2), candidate("b", samples=2), candidate("c"), gain=3)
    assert decision == Decision(("a", "c"), ("cost",))


def test_what_does_not_fit_does_not_come_along() -> None:
    decision = decide(candidate("a", samples=2), candidate("b", samples=2), candidate("c"), room=3)
    assert decision == Decision(("a", "c"), ("memory",))


def test_a_leader_that_does_not_fit_is_tried_all_the_same() -> None:
    assert decide(candidate("a", samples=5), room=1).keys == ("a",)


def test_what_differs_does_not_come_along_and_what_is_behind_it_does() -> None:
    decision = decide(candidate("a"), candidate("b", WIDE), candidate("c"), candidate("d", OTHER))
    assert decision == Decision(("a", "c"), ("incompatible:x", "incompatible:module"))


def test_a_module_whose_calls_are_not_joined_is_called_alone() -> None:
    decision = decide(candidate("a", ALONE), candidate("b", ALONE))
    assert decision == Decision(("a",), ("alone:it returns a distribution",))


def test_the_first_difference_is_named() -> None:
    assert difference(NET, OTHER) == "module"
    assert difference(NET, WIDE) == "x"
    assert difference(NET, Signature("net", (("x", 1), ("t", 3)))) == "t"
    assert difference(NET, Signature("net", (("x", 1), ("time", 2)))) == "t"
    assert difference(NET, Signature("net", (("x", 1),))) == "arguments"


# ---------------------------------------------------------------- waiting for company


def test_a_lone_request_waits_and_then_goes() -> None:
    lone = candidate("a", waits_since=10.0)
    assert decide(lone, now=10.5, delay_s=2.0) == Decision((), (), 12.0)
    assert decide(lone, now=12.0, delay_s=2.0) == Decision(("a",), ("delay",))


def test_all_that_run_wait_together_for_others() -> None:
    decision = decide(
        candidate("a", waits_since=1.0), candidate("b", waits_since=2.0, started=1.0), delay_s=2.0, now=2.5
    )
    assert decision == Decision((), (), 3.0)


def test_without_a_delay_nobody_waits() -> None:
    assert decide(candidate("a")).wait_until is None


def test_a_full_batch_does_not_wait() -> None:
    assert decide(candidate("a"), candidate("b"), max_size=2, delay_s=9.0) == Decision(("a", "b"), ("ready",))


def test_nobody_waits_while_others_run_that_do_not_come_along() -> None:
    assert decide(candidate("a"), candidate("b", WIDE), delay_s=9.0).keys == ("a",)
    assert decide(candidate("a"), running=2, delay_s=9.0).keys == ("a",)


def test_nobody_waits_for_a_module_whose_calls_are_not_joined() -> None:
    assert decide(candidate("a", ALONE), delay_s=9.0) == Decision(("a",), ("ready",))


# ---------------------------------------------------------------- whatever comes

candidates = st.lists(
    st.builds(
        candidate,
        key=st.uuids(),
        signature=st.sampled_from([NET, WIDE, OTHER, ALONE]),
        samples=st.integers(1, 4),
        started=st.floats(0, 50),
        waits_since=st.floats(0, 50),
        priority=st.integers(-3, 3),
        due=st.one_of(st.just(float("inf")), st.floats(0, 100)),
    ),
    min_size=1,
    max_size=12,
)


@given(
    waiting=candidates, max_size=st.integers(1, 8), delay_s=st.sampled_from([0.0, 1.0, 60.0]), now=st.floats(50, 100),
    room=st.integers(1, 12), gain=st.integers(1, 12),
)  # fmt: skip
def test_a_batch_is_one_that_can_be_made_and_contains_its_leader(
    waiting: list[Candidate], max_size: int, delay_s: float, now: float, room: int, gain: int
) -> None:
    decision = decide(*waiting, now=now, max_size=max_size, delay_s=delay_s, room=room, gain=gain)
    assert bool(decision.keys) != (decision.wait_until is not None)
    if not decision.keys:
        assert now < decision.wait_until <= min(one.waits_since for one in waiting) + delay_s + 50
        assert len({one.signature for one in waiting}) == 1
        return
    chosen = [one for key in decision.keys for one in waiting if one.key == key]
    first = leader(*waiting, now=now)
    assert decision.keys[0] == first
    assert len(set(decision.keys)) == len(decision.keys) == len(chosen) <= max_size
    assert len({one.signature for one in chosen}) == 1
    assert len(chosen) == 1 or not chosen[0].signature.alone
    assert len(chosen) == 1 or sum(one.samples for one in chosen) <= min(room, gain)
    assert decision.reasons
    assert len(chosen) == len(waiting) or "ready" not in decision.reasons
