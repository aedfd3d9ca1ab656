"""Whether transfers hide behind compute: the throughput of three stages against that of the slowest stage alone.

Stages wait, as the host does while an accelerator computes, so that the cores are free for what is measured: staging,
pushing and loading. The payload of the slowest stage's input is chosen such that moving it takes about a quarter, half,
and all of the stage's time. Without overlap the same cluster must be visibly slower: else this would
prove nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np

from bench.command import alone
from bench.report import Claim, Result
from bench.rivals import Ours
from bench.synthetic import RoleCost, SyntheticCluster, closed_loop

__all__ = ["measure"]

_CLIENTS = 4
_MB = 1 << 20


def measure(quick: bool) -> Result:
    """Throughputs and their ratios."""
    requests = 40 if quick else 160
    compute_ms = 40.0
    move_ms = _move_ms(64 * _MB)
    rows, ratios, without = [], [], []
    for share in (1.0,) if quick else (0.25, 0.5, 1.0):
        payload = int(64 * _MB * share * compute_ms / move_ms) // 4096 * 4096
        alone_, together, apart = _throughputs(compute_ms, payload, requests)
        ratios.append(together / alone_)
        without.append(apart / alone_)
        row = (f"{share:.0%}", f"{payload / _MB:.0f}", f"{alone_:.2f}", f"{together:.2f}", f"{apart:.2f}")
        rows.append((*row, f"{ratios[-1]:.3f}", f"{without[-1]:.3f}"))
    columns = (
        "transfer / compute",
        "MB",
        "slowest alone /s",
        "three stages /s",
        "no overlap /s",
        "ratio",
        "no overlap",
    )
    claims = [
        Claim("three stages against the slowest alone, worst", min(ratios), ">= 0.95", min(ratios) >= 0.95),
        Claim("the same without overlap, transfers as long as compute", without[-1], "< 0.8", without[-1] < 0.8),
    ]
    return Result(columns, rows, claims)


def _throughputs(compute_ms: float, payload: int, requests: int) -> tuple[float, ...]:
    """Of the slowest stage alone, of three stages, and of three without overlap. The clusters start together."""
    room = ["--receive-bytes", str(4 * payload), "--send-bytes", str(4 * payload)]
    with ExitStack() as stack:
        clusters = [
            SyntheticCluster([RoleCost("monolithic", compute_ms)]),
            SyntheticCluster(_roles(compute_ms, payload), room),
            SyntheticCluster(_roles(compute_ms, payload), [*room, "--no-overlap"]),
        ]
        with ThreadPoolExecutor(len(clusters)) as pool:
            list(pool.map(stack.enter_context, clusters))
        return tuple(closed_loop(cluster.url, requests, _CLIENTS) for cluster in clusters)


def _roles(compute_ms: float, payload: int) -> list[RoleCost]:
    return [
        RoleCost("encoder", compute_ms / 2, payload),
        RoleCost("denoiser", compute_ms, 4096),
        RoleCost("decoder", compute_ms / 2),
    ]


def _move_ms(payload: int) -> float:
    """How long it takes to get `payload` bytes from one stage to the next: staged, written to the slot, loaded."""
    source, staged = np.ones(payload, np.uint8), np.ones(payload, np.uint8)
    engine = Ours("shm", payload)
    moves = []
    for _ in range(8):
        engine.prepare(payload)
        started = time.perf_counter()
        np.copyto(staged, source)
        engine.send(staged)
        staged.copy()  # loading makes new tensors
        moves.append(1000 * (time.perf_counter() - started))
    engine.close()
    return statistics.median(moves)


if __name__ == "__main__":
    sys.exit(alone("overlap", measure))
