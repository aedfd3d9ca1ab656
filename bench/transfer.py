"""How fast bytes get into a buffer of another process: our engines beside memcpy and all rivals, in turns.

    python -m bench.transfer [--quick] [--json FILE]

The time runs until the sender knows that all bytes are there. Buffers are warm. After each size one more transfer, into
a wiped buffer, is compared. Rivals that cannot be had here are named with the reason.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from contextlib import ExitStack

import numpy as np

from bench.command import alone
from bench.report import Claim, Result
from bench.rivals import RIVALS, Rival
from diffcluster.errors import DiffclusterError
from diffcluster.transport.checksum import checksum_of

__all__ = ["measure"]

_KB, _MB = 1 << 10, 1 << 20
_SIZES = {"64 KB": 64 * _KB, "1 MB": _MB, "16 MB": 16 * _MB, "128 MB": 128 * _MB}
_ROUNDS = {"64 KB": 300, "1 MB": 150, "16 MB": 40, "128 MB": 15}
_QUICK_ROUNDS = {"64 KB": 100, "1 MB": 60, "16 MB": 20, "128 MB": 5}
_OTHERS = ("zeromq", "zeromq parts", "gloo", "mooncake", "mooncake sync")

Seconds = dict[str, dict[str, list[float]]]
"""Of each transfer, by rival and size."""


def measure(quick: bool) -> Result:
    """Medians, 95th percentiles, bandwidth against memcpy, and the claims."""
    source = np.random.default_rng(1).integers(0, 256, max(_SIZES.values()), np.uint8)
    missing: dict[str, str] = {}
    seconds: Seconds = {}
    with ExitStack() as stack:
        rivals: dict[str, Rival] = {}
        for name, start in RIVALS.items():
            try:
                rivals[name] = start(source.nbytes)
                stack.callback(rivals[name].close)
            except (DiffclusterError, ImportError, RuntimeError) as error:
                missing[name] = str(error)
        for size, nbytes in _SIZES.items():
            rounds = (_QUICK_ROUNDS if quick else _ROUNDS)[size]
            for name, times in _in_turns(rivals, source[:nbytes], rounds).items():
                seconds.setdefault(name, {})[size] = times
    rows = [_row(name, times, seconds["memcpy"]) for name, times in seconds.items()]
    rows += [(name, f"not here: {reason}", *[""] * (len(_SIZES) - 1)) for name, reason in missing.items()]
    return Result(("ms (p95), x memcpy", *_SIZES), rows, _claims(seconds))


def _in_turns(rivals: dict[str, Rival], source: np.ndarray, rounds: int) -> dict[str, list[float]]:
    """One transfer by each rival, again and again, so that whatever else the machine does meets all alike.

    In another order each time: who came before decides what lies in the caches, and which processors sleep.
    """
    times: dict[str, list[float]] = {name: [] for name in rivals}
    expected = checksum_of(source)
    order, shuffle = list(rivals.items()), random.Random(1).shuffle  # noqa: S311 - an order, not a secret
    for turn in range(-2, rounds):
        shuffle(order)
        for name, rival in order:
            rival.prepare(source.nbytes)
            started = time.perf_counter()
            rival.send(source)
            if turn >= 0:  # the first ones warm up
                times[name].append(time.perf_counter() - started)
    for name, rival in rivals.items():
        rival.clear(source.nbytes)
        rival.prepare(source.nbytes)
        rival.send(source)
        if rival.arrived(source.nbytes) != expected:
            raise RuntimeError(f"{name}: what arrived is not what was sent")
    return times


def _row(name: str, times: dict[str, list[float]], memcpy: dict[str, list[float]]) -> tuple[str, ...]:
    cells = []
    for size, values in times.items():
        median = statistics.median(values)
        p95 = sorted(values)[int(0.95 * len(values))]
        cells.append(f"{1000 * median:.3f} ({1000 * p95:.3f}) {median / statistics.median(memcpy[size]):.1f}x")
    return (name, *cells)


def _claims(seconds: Seconds) -> list[Claim]:
    def ratio(slower: str, faster: str, size: str) -> float:
        return statistics.median(seconds[slower][size]) / statistics.median(seconds[faster][size])

    large = ("1 MB", "16 MB", "128 MB")
    claims = [
        _at_least(f"shm bandwidth against memcpy, {size}", ratio("memcpy", "shm", size), 0.8) for size in large[1:]
    ]
    claims += [
        _at_least(f"tcp bandwidth against a bare pair, {size}", ratio("bare sockets", "tcp", size), 0.9)
        for size in large
    ]
    for ours in ("shm", "tcp"):
        worst = min((ratio(other, ours, size), other, size) for other in _OTHERS if other in seconds for size in large)
        rivals = ", ".join(other for other in _OTHERS if other in seconds)
        name = f"{ours} ahead of {rivals} from 1 MB (worst: {worst[1]}, {worst[2]})"
        claims.append(Claim(name, worst[0], "> 1", worst[0] > 1))
    return claims


def _at_least(name: str, value: float, bound: float) -> Claim:
    return Claim(name, value, f">= {bound}", value >= bound)


if __name__ == "__main__":
    sys.exit(alone("transfer", measure))
