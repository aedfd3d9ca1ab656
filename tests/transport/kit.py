"""What the tests of all engines share, and what one engine can do that another cannot."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from diffcluster.ids import LeaseId
from diffcluster.messages import EngineKind, SlotAddress
from diffcluster.transport.engines.base import EngineOptions

SIZE = 8 << 20
OPTIONS = EngineOptions("127.0.0.1", "", 5.0)


@dataclass(frozen=True)
class Capabilities:
    """`skip`: why it cannot be tested here. The rest is what it can do."""

    skip: str = ""
    crosses_processes: bool = True
    checks_slots: bool = True
    """A window that is not open takes nothing; else any place in the region can be written."""
    knows_settled: bool = True
    """`settled` is never None."""
    ends_writes: bool = True
    """`close` ends a write whose sender is frozen."""
    needs_receiver: bool = True
    """A frozen receiver stalls its senders."""


ENGINES: dict[EngineKind, Capabilities] = {
    "inprocess": Capabilities(crosses_processes=False, ends_writes=False),
    "shm": Capabilities(ends_writes=False, needs_receiver=False),
    "tcp": Capabilities(),
}


def kinds(wanted: Callable[[Capabilities], bool] = lambda _: True) -> list[Any]:
    """Parameters for the engines that can do what is wanted."""
    found = [(kind, can) for kind, can in ENGINES.items() if wanted(can)]
    return [pytest.param(kind, marks=pytest.mark.skipif(bool(can.skip), reason=can.skip)) for kind, can in found]


def slot(lease: int, offset: int, nbytes: int) -> SlotAddress:
    return SlotAddress(LeaseId(lease), offset, nbytes, f"{lease:032x}")


def content(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block must not take longer."""
    started = time.monotonic()
    yield
    elapsed = time.monotonic() - started
    assert elapsed < seconds, f"took {elapsed:.1f} s, which is more than {seconds}"


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Look again and again until it holds."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        pause.wait(0.005)
