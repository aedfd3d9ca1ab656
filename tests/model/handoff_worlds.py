"""The small worlds of handoffs that are explored exhaustively: one or two misfortunes each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.model.handoff import Budget, Handoff, Setup

__all__ = ["BLIND", "BLIND_GRANT", "WORLDS", "all_are_writing", "until"]

GRANT: Final = Setup(grants=1)
BLIND: Final = Setup(fences=False)
BLIND_GRANT: Final = Setup(fences=False, grants=1)
ONE_SLOT: Final = Setup(slots=1)


def until(world: Handoff, condition: Callable[[Handoff], bool]) -> Handoff:
    """The world, once things have gone their way so far: to explore only from there on."""
    while not condition(world):
        world = world.after(next(step for step in world.fair_steps() if step[0] not in ("finish", "fade")))
    return world


def all_are_writing(world: Handoff) -> bool:
    """A transfer is under way for each request."""
    return len(world.writes) == len(world.answers) and all(write.phase == "begun" for write in world.writes)


WORLDS: Final[dict[str, Callable[[], Handoff]]] = {
    "nothing to do, an instance is taken for lost": lambda: Handoff(0, Budget(strikes=1), GRANT),
    "one request": lambda: Handoff(1, Budget(), Setup(contacts=True)),
    "one request, a grant": lambda: Handoff(1, Budget(), GRANT),
    "one request, a grant, cancelled": lambda: Handoff(1, Budget(cancels=1), GRANT),
    "one request, cancelled, windows do not fence": lambda: Handoff(1, Budget(cancels=1), BLIND),
    "three writes fail": lambda: Handoff(1, Budget(failed_writes=3), GRANT),
    "a write fails and may land": lambda: Handoff(1, Budget(lost_writes=1), GRANT),
    "a write fails and may land, windows do not fence": lambda: Handoff(1, Budget(lost_writes=1), BLIND_GRANT),
    "a write fails and may land, cancelled": lambda: Handoff(1, Budget(lost_writes=1, cancels=1), GRANT),
    "a write fails and may land, cancelled, windows do not fence": lambda: Handoff(
        1, Budget(lost_writes=1, cancels=1), BLIND_GRANT
    ),
    "a write is repeated": lambda: Handoff(1, Budget(repeats=1), GRANT),
    "what arrives is broken": lambda: Handoff(1, Budget(corrupt=3), GRANT),
    "what arrives is broken, cancelled": lambda: Handoff(1, Budget(corrupt=1, cancels=1), GRANT),
    "one dies and is started again": lambda: Handoff(1, Budget(crashes=1, restarts=1), GRANT),
    "one dies and is started again, windows do not fence": lambda: Handoff(1, Budget(crashes=1, restarts=1), BLIND),
    "one is taken for lost": lambda: Handoff(1, Budget(strikes=1), Setup()),
    "one is taken for lost, a grant": lambda: Handoff(1, Budget(strikes=1), GRANT),
    "one is taken for lost, windows do not fence": lambda: Handoff(1, Budget(strikes=1), BLIND),
    "one is taken for lost, cancelled, windows do not fence": lambda: Handoff(1, Budget(strikes=1, cancels=1), BLIND),
    "one dies and is started again, a write may land, windows do not fence": lambda: Handoff(
        1, Budget(crashes=1, restarts=1, lost_writes=1), BLIND
    ),
    "one is stopped and taken for lost while it writes or is written": lambda: until(
        Handoff(1, Budget(pauses=1, strikes=1), Setup()), all_are_writing
    ),
    "one is stopped for a while": lambda: Handoff(1, Budget(pauses=1), GRANT),
    "messages are lost": lambda: Handoff(1, Budget(cuts=1), GRANT),
    "messages are lost, windows do not fence": lambda: Handoff(1, Budget(cuts=1), BLIND_GRANT),
    "messages are lost, cancelled": lambda: Handoff(1, Budget(cuts=1, cancels=1), Setup()),
    "two requests, a grant": lambda: Handoff(2, Budget(), GRANT),
    "two requests, each region has room for one": lambda: Handoff(
        2, Budget(), Setup(slots=1, send_slots=1, packs=True)
    ),
    "two requests, one thing at a time": lambda: Handoff(2, Budget(), Setup(overlap=False)),
    "two requests want one slot, one is cancelled": lambda: Handoff(2, Budget(cancels=1), ONE_SLOT),
    "two requests want one slot, messages are lost": lambda: Handoff(2, Budget(cuts=1), Setup(slots=1, send_slots=1)),
    "two requests want one slot, it is granted": lambda: Handoff(2, Budget(), Setup(slots=1, grants=1)),
    "two requests want one slot, a write may land": lambda: Handoff(
        2, Budget(lost_writes=1), Setup(slots=1, grants=1, fences=False)
    ),
}
