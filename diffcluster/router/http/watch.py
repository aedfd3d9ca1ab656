"""Notices a client that leaves before its answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from litestar import Request

from diffcluster.errors import CancelledError

__all__ = ["until_disconnected"]

_Result = TypeVar("_Result")


async def until_disconnected(
    request: Request[Any, Any, Any], work: Coroutine[Any, Any, _Result], cancel: Callable[[str], None]
) -> _Result:
    """The result of `work`; if the client leaves first, `cancel` is called and `work` ends with its error.

    The body of `request` must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            cancel("the client has left")
        return await working
    except asyncio.CancelledError:
        # The server is stopping: let the request end by its own error.
        cancel("the router is stopping")
        raise CancelledError("the router is stopping") from None
    finally:
        leaving.cancel()


async def _left(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
