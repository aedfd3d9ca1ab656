"""The router's machine, in every state of small worlds and along random ways through larger ones.

In each state the invariants of the router hold, no slot is freed that may still be written, nothing is computed before
its bytes are there, no request is answered twice; and from each state all requests can end, leaving nothing behind.
A checker that finds nothing proves nothing: the mutants at the end must be caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcluster.ids import Role
from diffcluster.messages import Pushed
from diffcluster.router import machine as router_machine
from diffcluster.router.dispatch import Dispatch
from diffcluster.router.endings import Endings
from diffcluster.router.machine import HANDLERS, RouterMachine
from tests.model.explore import explore, walk
from tests.model.world import Budget, ViolationError, World
from tests.support import mutant

ONE: dict[Role, int] = {"encoder": 1, "denoiser": 1, "decoder": 1}
TWO: dict[Role, int] = {"encoder": 2, "denoiser": 2, "decoder": 2}

WORLDS: dict[str, Callable[[], World]] = {
    "one request, nothing goes wrong": lambda: World(ONE, 1, Budget()),
    "cancelled at any time": lambda: World(ONE, 1, Budget(cancels=1)),
    "late at any time": lambda: World(ONE, 1, Budget(deadline=True)),
    "a role gives up, and the client too": lambda: World(ONE, 1, Budget(failures=1, cancels=1)),
    "a write that may still land, and a cancel": lambda: World(ONE, 1, Budget(lost_writes=1, cancels=1)),
    "one of two instances dies": lambda: World(TWO, 1, Budget(crashes=1)),
    "the only instance dies and is started again": lambda: World(ONE, 1, Budget(crashes=1, restarts=1)),
    "an instance is cut off and comes back": lambda: World(ONE, 1, Budget(cuts=1)),
    "one of two instances leaves": lambda: World(TWO, 1, Budget(drains=1)),
    "an instance is cut off, and the client leaves": lambda: World(ONE, 1, Budget(cuts=1, cancels=1)),
    "two requests want one slot, and one is cancelled": lambda: World(ONE, 2, Budget(cancels=1), slots=1),
    "two requests want one slot, and a write may still land": lambda: World(ONE, 2, Budget(lost_writes=1), slots=1),
    "two requests, one of two dies, one is cancelled": lambda: World(
        {"monolithic": 2}, 2, Budget(crashes=1, cancels=1)
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_state_of_a_small_world_is_right_and_can_come_to_rest(name: str) -> None:
    assert explore(WORLDS[name]()) > 10


# ---------------------------------------------------------------- larger worlds, along random ways


BUDGETS = st.builds(
    Budget,
    crashes=st.integers(0, 2),
    restarts=st.just(2),
    cuts=st.integers(0, 2),
    cancels=st.integers(0, 2),
    deadline=st.booleans(),
    lost_writes=st.integers(0, 2),
    failures=st.integers(0, 1),
    drains=st.just(0),
)


@settings(max_examples=60, deadline=None)
@given(budget=BUDGETS, seed=st.integers(0, 2**32), slots=st.integers(1, 3))
def test_three_requests_end_whatever_happens(budget: Budget, seed: int, slots: int) -> None:
    world = walk(World(TWO, 3, budget, slots), seed)
    assert world.at_rest()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), cancels=st.integers(0, 1), lost_writes=st.integers(0, 1))
def test_three_requests_end_while_one_instance_of_each_pool_leaves(seed: int, cancels: int, lost_writes: int) -> None:
    world = World(TWO, 3, Budget(cancels=cancels, lost_writes=lost_writes, drains=3))
    for leaving in (1, 3, 5):
        world = world.after(("drain", list(world.roles)[leaving]))
    assert walk(world, seed).at_rest()


# ---------------------------------------------------------------- guards that are taken away


def _ready_before_pushed(self: RouterMachine, sender: Any, request: Any, message: Any) -> bool:
    if not RouterMachine._allocated(self, sender, request, message):
        return False
    now = self.cluster.requests[request.id]
    assert now.holder is not None
    early = Pushed(
        request_id=request.id, attempt=request.attempt, receiver=sender, lease=message.slot.lease, engine="tcp",
        nbytes=0, seconds=0.0,
    )  # fmt: skip
    return RouterMachine._pushed(self, now.holder, now, early)


MUTANTS: dict[str, tuple[type, str, str, str, Callable[[], World]]] = {
    "an old attempt is taken for this one": (
        RouterMachine, "_answered", "request and request.key == key", "request",
        lambda: World({"encoder": 2, "denoiser": 1, "decoder": 1}, 1, Budget(crashes=1)),
    ),
    "any push is taken for this one": (
        RouterMachine, "_is_of_this_push",
        "return (message.receiver, message.lease) == (request.receiver, request.slot.lease)", "return True",
        WORLDS["one of two instances dies"],
    ),
    "a receiver is asked again before it has answered the eviction": (
        Dispatch, "_receivers", "if request.key not in entry[1].busy", "",
        WORLDS["a write that may still land, and a cancel"],
    ),
    "an evicted slot is called settled while it is written": (
        Endings, "let_go", "settled=False", "settled=True",
        WORLDS["cancelled at any time"],
    ),
    "a failed push is called settled though it is not": (
        RouterMachine, "_push_failed", "settled=message.settled", "settled=True",
        WORLDS["a write that may still land, and a cancel"],
    ),
    "a finished stage's input is not released": (
        RouterMachine, "_stage_over", "request.upstream is not None", "False",
        WORLDS["one request, nothing goes wrong"],
    ),
    "a lost receiver is waited for": (
        Endings, "instance_lost", "request.receiver == lost", "False", WORLDS["one of two instances dies"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, old, new, world = MUTANTS[name]
    broken = mutant(getattr(owner, method), old, new)
    static = isinstance(vars(owner)[method], staticmethod)
    monkeypatch.setattr(owner, method, staticmethod(broken) if static else broken)
    for pair, handler in HANDLERS.items():
        if handler.__name__ == method:
            monkeypatch.setitem(HANDLERS, pair, broken)
    with pytest.raises((ViolationError, AssertionError, KeyError)):
        explore(world())


def test_a_ready_before_the_bytes_are_there_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = next(pair for pair in HANDLERS if HANDLERS[pair] is RouterMachine._allocated)
    monkeypatch.setitem(router_machine.HANDLERS, pair, _ready_before_pushed)
    with pytest.raises(ViolationError, match="Ready before all bytes were there"):
        explore(WORLDS["one request, nothing goes wrong"]())
