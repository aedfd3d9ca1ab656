"""The handoff from sender to receiver, with the real machines on both sides, in every state of small worlds.

In each state the bytes of both regions add up and nothing leaks; no write lands in a slot that is not its own, no
source is given away while it is read, nothing is computed on anything but what was staged for it, nothing is answered
twice; and from each state all requests can end, leaving nothing behind but grants of which both sides know. The guards
at the end are taken away one by one, and each must be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcluster.errors import LedgerError
from diffcluster.roles.grants import Granting
from diffcluster.roles.holdings import Holdings
from diffcluster.roles.machine import RoleMachine
from diffcluster.router.dispatch import Dispatch
from diffcluster.router.endings import Endings
from diffcluster.router.machine import HANDLERS, RouterMachine
from tests.model.explore import explore, walk
from tests.model.handoff import Budget, Handoff, Setup, two_pools
from tests.model.handoff_worlds import BLIND, BLIND_GRANT, WORLDS, all_are_writing, until
from tests.model.world import ViolationError
from tests.support import mutant


@pytest.fixture(autouse=True)
def routes() -> Iterator[None]:
    with two_pools():
        yield


@pytest.mark.parametrize("name", WORLDS)
def test_every_state_of_a_small_world_is_right_and_can_come_to_rest(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    states = explore(WORLDS[name]())
    with capsys.disabled():
        print(f" {states} states: {name} ", end="")
    assert states > 10


# ---------------------------------------------------------------- a larger world, along random ways

BUDGETS = st.builds(
    Budget,
    crashes=st.integers(0, 1),
    restarts=st.just(1),
    cuts=st.integers(0, 2),
    strikes=st.integers(0, 1),
    pauses=st.integers(0, 1),
    cancels=st.integers(0, 1),
    failed_writes=st.integers(0, 2),
    lost_writes=st.integers(0, 2),
    repeats=st.integers(0, 1),
    corrupt=st.integers(0, 1),
    unreachable=st.integers(0, 1),
)
SETUPS = st.builds(
    Setup,
    slots=st.integers(1, 4),
    send_slots=st.integers(1, 3),
    grants=st.integers(0, 2),
    fences=st.booleans(),
    packs=st.booleans(),
    overlap=st.booleans(),
    contacts=st.just(True),
)


@settings(max_examples=400, deadline=None)
@given(budget=BUDGETS, setup=SETUPS, seed=st.integers(0, 2**32), warm=st.booleans())
def test_three_requests_between_two_pairs_end_whatever_happens(
    budget: Budget, setup: Setup, seed: int, warm: bool
) -> None:
    assert walk(Handoff(3, budget, setup, senders=2, receivers=2, warm=warm), seed).at_rest()


# ---------------------------------------------------------------- guards that are taken away

Change = tuple[type, str, str, str]
"""Class, method, what is replaced in it, by what."""


def _one_writes(budget: Budget, setup: Setup) -> Callable[[], Handoff]:
    return lambda: until(Handoff(1, budget, setup), all_are_writing)


MUTANTS: dict[str, tuple[list[Change], Callable[[], Handoff]]] = {
    "a slot that may be written is freed, and not quarantined": (
        [(RoleMachine, "_on_window_closed", "if event.fenced:", "if True:")],
        WORLDS["one request, cancelled, windows do not fence"],
    ),
    "the time frees a slot of which the engine knows that it is written": (
        [(Holdings, "review_quarantine", "known is None and until", "until")],
        _one_writes(Budget(cancels=1), Setup()),
    ),
    "a receive slot is freed when its load begins": (
        [
            (RoleMachine, "_start_load", 'receive.move(job.slot.lease, "loading")', "receive.free(job.slot.lease)"),
            (RoleMachine, "_on_loaded", "self.free_slot(job)", "job.slot = None"),
        ],
        WORLDS["one request"],
    ),
    "a source is freed while it is pushed": (
        [(Holdings, "end_if_unused", "job.gone and job.pushing == 0", "job.gone")],
        _one_writes(Budget(cancels=1), Setup()),
    ),
    "a source that may still be read is freed, and not quarantined": (
        [(Holdings, "drop", "job.output is not None and job.source_held", "False")],
        _one_writes(Budget(lost_writes=1), BLIND),
    ),
    "a role does not look at the attempt": (
        [
            (
                Holdings, "job", "return self.jobs.get((event.request_id, event.attempt))",
                "return next((job for key, job in self.jobs.items() if key[0] == event.request_id), None)",
            ),
        ],
        WORLDS["one is taken for lost"],
    ),
    "a grant is used twice": (
        [(Dispatch, "_find_slot", "tuple(grant for grant in grants if grant is not slot)", "grants")],
        WORLDS["one request, a grant"],
    ),
    "a grant that is in use is given back": (
        [
            (
                Dispatch, "give_grants_back", "grants = self.cluster.instances[receiver].grants",
                "grants = [x.slot for x in self.cluster.requests.values() if x.receiver == receiver and x.slot]",
            ),
        ],
        lambda: until(Handoff(2, Budget(lost_writes=1), BLIND_GRANT), all_are_writing),
    ),
    "grants outlive the registration": (
        [(Granting, "void_grants", "for lease in list(self.grants):", "for lease in ():")],
        WORLDS["nothing to do, an instance is taken for lost"],
    ),
    "a grant that ends while it is written is freed": (
        [(Granting, "evict_grant", "event.settled", "True")],
        _one_writes(Budget(cancels=1), Setup(grants=1)),
    ),
    "a broken transfer is computed upon": (
        [
            (
                RoleMachine, "_on_load_failed", "self.fail(job, event.code, event.reason)",
                "self._on_loaded(Loaded(event.key, 0.0))",
            ),
        ],
        WORLDS["what arrives is broken"],
    ),
    "a window stays open when the content is complete": (
        [(RoleMachine, "_on_ready", "self.do(SealWindow(job.slot))", "pass")],
        WORLDS["a write is repeated"],
    ),
    "a failed write is called settled though it may land": (
        [(RouterMachine, "_push_failed", "settled=message.settled", "settled=True")],
        WORLDS["a write fails and may land"],
    ),
    "a slot is called settled while it is written": (
        [(Endings, "let_go", "settled=False", "settled=True")],
        _one_writes(Budget(cancels=1), Setup()),
    ),
    "what ended with the old registration is reported in the new one": (
        [(RoleMachine, "reset", "replace(action, key=None) if isinstance(action, CloseWindow) else action", "action")],
        WORLDS["one is stopped and taken for lost while it writes or is written"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, world = MUTANTS[name]
    if world not in WORLDS.values():
        explore(world())  # so that it is the guard that is missed
    for owner, method, old, new in changes:
        broken = mutant(getattr(owner, method), old, new)
        monkeypatch.setattr(owner, method, broken)
        for pair, handler in HANDLERS.items():
            if handler.__name__ == method:
                monkeypatch.setitem(HANDLERS, pair, broken)
    with pytest.raises((ViolationError, AssertionError, KeyError, LedgerError)):
        explore(world())
