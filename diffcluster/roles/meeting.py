"""Where the requests of a role meet: each runs in a fiber of its own, and parks at every call of a module.

A stage is written as if it had the model to itself: it calls the pipeline, and the pipeline calls its modules. The
modules' functions are wrapped (`meeting`), so that within a fiber a call does not happen at once: the fiber parks, and
its call lies open for the compute loop, which makes it alone or together with calls of other fibers, and has the fiber
go on with its part of the answer. Outside of a fiber a wrapped function is the function itself.

A fiber is a greenlet: it runs in the thread of the compute loop, and only when the loop lets it. Gradient mode and the
current stream belong to the thread, so they are set once, around the loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import greenlet

from diffcluster.roles.joining import Call, JoinRules

__all__ = ["Fiber", "meeting"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Fiber:
    """A computation that can be left at its calls. `call`: the one at which it is parked; None before and after."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._greenlet = _Parked(function)
        self.call: Call | None = None
        self.result: Any = None

    @property
    def ended(self) -> bool:
        """Whether `result` is there, or an exception was raised."""
        return bool(self._greenlet.dead)

    def start(self) -> None:
        """Run to the first call, or to the end; raises what the computation raises."""
        self._arrived(self._greenlet.switch())

    def answer(self, value: Any) -> None:
        """Go on: the call at which it is parked returns `value`."""
        self._arrived(self._greenlet.switch(value))

    def throw(self, error: BaseException) -> None:
        """Go on: the call at which it is parked raises `error`. If nobody catches it, it is raised here."""
        self.call = None
        self._arrived(self._greenlet.throw(error))

    def _arrived(self, value: Any) -> None:
        if not self._greenlet.dead:
            self.call = value
            return
        self.call = None
        if isinstance(value, greenlet.GreenletExit):  # which greenlets return instead of raising it
            raise value
        self.result = value


class _Parked(greenlet.greenlet):
    """Marks the greenlets in which calls park."""


def meeting(module: str, function: _Function, rules: JoinRules) -> _Function:
    """`function` of `module`, such as its `forward`, so that calls of different requests can be made as one."""

    @functools.wraps(function)
    def met(*args: Any, **kwargs: Any) -> Any:
        here = greenlet.getcurrent()
        if not isinstance(here, _Parked):
            return function(*args, **kwargs)
        assert here.parent is not None, "a fiber is always started by somebody"
        return here.parent.switch(Call(module, function, args, kwargs, rules))

    return cast(_Function, met)
