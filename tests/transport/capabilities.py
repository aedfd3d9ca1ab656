"""The engines that are tested, and what one of them can do that another cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from diffcluster.errors import ConfigError
from diffcluster.messages import EngineKind
from diffcluster.transport.engines.mooncake_library import load


@dataclass(frozen=True)
class Capabilities:
    """`skip`: why it cannot be tested here. The rest is what it can do."""

    skip: str = ""
    crosses_processes: bool = True
    """It can be held up in a process of its own by `peer`; Mooncake's own tests do that in another way."""
    checks_slots: bool = True
    """A window that is not open takes nothing; else any place in the region can be written."""
    knows_settled: bool = True
    """`settled` is never None."""
    ends_writes: bool = True
    """`close` ends a write whose sender is frozen."""
    needs_receiver: bool = True
    """A frozen receiver stalls its senders."""


def _without_mooncake() -> str:
    """Why it cannot be had. Its library keeps threads until the process exits: so it is loaded ahead of all tests."""
    try:
        load(ipv6=False)
    except ConfigError as error:
        return str(error)
    return ""


ENGINES: dict[EngineKind, Capabilities] = {
    "inprocess": Capabilities(crosses_processes=False, ends_writes=False),
    "shm": Capabilities(ends_writes=False, needs_receiver=False),
    "tcp": Capabilities(),
    "mooncake": Capabilities(skip=_without_mooncake(), crosses_processes=False, ends_writes=False),
}


def kinds(wanted: Callable[[Capabilities], bool] = lambda _: True) -> list[Any]:
    """Parameters for the engines that can do what is wanted."""
    found = [(kind, can) for kind, can in ENGINES.items() if wanted(can)]
    return [pytest.param(kind, marks=pytest.mark.skipif(bool(can.skip), reason=can.skip)) for kind, can in found]
