"""Visits every state of a small world, and sees that from each one all requests can end; or walks a random way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from tests.model.world import ViolationError

__all__ = ["Explorable", "explore", "walk"]


class Explorable(Protocol):
    """One state of a world, which is never changed."""

    def key(self) -> object:
        """Equal for states with the same future."""

    def at_rest(self) -> bool:
        """Whether all has ended as it should."""

    def fair_steps(self) -> Iterator[tuple[Any, ...]]:
        """What happens by itself sooner or later."""

    def other_steps(self) -> Iterator[tuple[Any, ...]]:
        """What may happen or not."""

    def after(self, step: tuple[Any, ...]) -> Any:
        """The state after a step; raises `ViolationError`."""


SomeWorld = TypeVar("SomeWorld", bound=Explorable)


def walk(world: SomeWorld, seed: int, patience: int = 400) -> SomeWorld:
    """Take random steps until the budget or the patience is used up; then let things happen by themselves."""
    way = random.Random(seed)
    for _ in range(patience):
        fair, other = list(world.fair_steps()), list(world.other_steps())
        if not fair:
            break
        world = world.after(way.choice(other) if other and way.random() < 0.1 else way.choice(fair))
    for _ in range(10 * patience):
        fair = list(world.fair_steps())
        if not fair:
            break
        world = world.after(way.choice(fair))
    return world


def explore(world: Explorable, limit: int = 100_000) -> int:
    """How many states there are. Raises `ViolationError` with the way to the first one that is wrong."""
    start = world.key()
    way: dict[object, tuple[object, Any]] = {start: (None, None)}
    before: dict[object, list[object]] = {start: []}  # by steps that happen by themselves
    rests = []
    frontier = [(start, world)]
    while frontier:
        reached = []
        for key, here in frontier:
            if here.at_rest():
                rests.append(key)
            fair = list(here.fair_steps())
            for step in (*fair, *here.other_steps()):
                try:
                    there = here.after(step)
                except ViolationError as error:
                    raise ViolationError(f"{error}, after\n{_story(way, key, step)}") from error
                next_key = there.key()
                if next_key not in way:
                    way[next_key] = (key, step)
                    before[next_key] = []
                    reached.append((next_key, there))
                if step in fair:
                    before[next_key].append(key)
        frontier = reached
        assert len(way) <= limit, f"more than {limit} states: this world is too large"
    _can_all_end(way, before, rests)
    return len(way)


def _can_all_end(
    way: dict[object, tuple[object, Any]], before: dict[object, list[object]], rests: list[object]
) -> None:
    """From the states at rest backwards, along steps that happen by themselves, every state must be found."""
    good, todo = set(rests), list(rests)
    while todo:
        for key in before[todo.pop()]:
            if key not in good:
                good.add(key)
                todo.append(key)
    stuck = next((key for key in way if key not in good), None)
    if stuck is not None:
        raise ViolationError(
            f"{len(way) - len(good)} of {len(way)} states can never come to rest, the first after\n{_story(way, stuck)}"
        )


def _story(way: dict[object, tuple[object, Any]], key: object, *last: Any) -> str:
    """The shortest way to a state."""
    steps = list(last)
    while key is not None:
        key, step = way[key]
        if step is not None:
            steps.insert(0, step)
    return "\n".join(f"  {' '.join(str(part).replace('0' * 30, '~') for part in step)}" for step in steps)
