"""Whether transfers hide behind compute: the throughput of three stages against that of the slowest stage alone.

Stages wait, as the host does while an accelerator computes, so that the cores are free for what is measured: staging,
pushing and loading. The payload of the slowest stage's input and output is chosen such that moving it takes about a
quarter, half, and all of the stage's time. Without overlap the same cluster must be visibly slower: else this would
prove nothing.
"""

from __future__ import annotations

import statistics
import sys

from bench.command import alone
from bench.report import Claim, Result
from bench.synthetic import RoleCost, SyntheticCluster, closed_loop
from diffcluster.client import Client

__all__ = ["measure"]

_CLIENTS = 4
_MB = 1 << 20


def measure(quick: bool) -> Result:
    """Throughputs and their ratios."""
    requests = 40 if quick else 160
    compute_ms = 100.0
    move_ms = _move_ms(64 * _MB, compute_ms)
    rows, ratios, without = [], [], []
    for share in (0.25, 0.5, 1.0):
        payload = int(64 * _MB * share * compute_ms / move_ms) // 4096 * 4096
        alone_ = _throughput([RoleCost("monolithic", compute_ms)], requests, [])
        roles = _roles(compute_ms, payload)
        flags = ["--receive-bytes", str(6 * payload), "--send-bytes", str(6 * payload)]
        together = _throughput(roles, requests, flags)
        apart = _throughput(roles, requests, [*flags, "--no-overlap"])
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


def _roles(compute_ms: float, payload: int) -> list[RoleCost]:
    return [
        RoleCost("encoder", compute_ms / 2, payload),
        RoleCost("denoiser", compute_ms, payload),
        RoleCost("decoder", compute_ms / 2),
    ]


def _throughput(roles: list[RoleCost], requests: int, flags: list[str]) -> float:
    with SyntheticCluster(roles, flags) as cluster:
        return closed_loop(cluster.url, requests, _CLIENTS)


def _move_ms(payload: int, compute_ms: float) -> float:
    """How long it takes to get `payload` bytes from one stage to the next: written to the slot, and loaded from it."""
    flags = ["--receive-bytes", str(4 * payload), "--send-bytes", str(4 * payload)]
    moves = []
    with SyntheticCluster(_roles(compute_ms / 4, payload), flags) as cluster, Client(cluster.url) as client:
        for _ in range(12):
            stage = client.generate("x")[0].timings["denoiser"]
            moves.append(1000 * (stage["transfer_s"] + stage["loaded_s"]))
    return statistics.median(moves)


if __name__ == "__main__":
    sys.exit(alone("overlap", measure))
