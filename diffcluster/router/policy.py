"""Which instance of a pool gets the next request. Pure, tiny, one function a policy."""

from __future__ import annotations

from collections.abc import Iterable

from diffcluster.ids import Incarnation
from diffcluster.router.state import Instance

__all__ = ["least_loaded"]


def least_loaded(pool: Iterable[tuple[Incarnation, Instance]]) -> Incarnation | None:
    """The instance with the fewest requests in hand, among equals the one that was given the fewest so far.

    None if each one drains, is full, or has as many as it takes.
    """
    open_ = [
        (len(instance.busy), instance.given, incarnation)
        for incarnation, instance in pool
        if not instance.draining and not instance.full and len(instance.busy) < instance.register.max_outstanding
    ]
    return min(open_)[2] if open_ else None
