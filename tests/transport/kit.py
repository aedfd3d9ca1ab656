"""What the tests of all engines share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from diffcluster.ids import LeaseId
from diffcluster.messages import SlotAddress
from diffcluster.transport.engines.base import EngineOptions

SIZE = 8 << 20
OPTIONS = EngineOptions("127.0.0.1", "", 5.0)


def slot(lease: int, offset: int, nbytes: int) -> SlotAddress:
    return SlotAddress(LeaseId(lease), offset, nbytes, f"{lease:032x}")


def content(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The block must not take longer, however it ends."""
    started = time.monotonic()
    try:
        yield
    finally:
        elapsed = time.monotonic() - started
        assert elapsed < seconds, f"took {elapsed:.1f} s, which is more than {seconds}"


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Look again and again until it holds."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        pause.wait(0.005)
