"""One hop of 1 MB between two real roles, by a real router: from the sender's `Staged` to the receiver's `Ready`.

Beside it, in the same run, the round trip of a bare ZeroMQ ROUTER-DEALER pair in two processes: the unit in which the
cost of a hop is told. With a grant in hand a hop is two round trips and one copy; with `Allocate` three.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

from bench.command import alone
from bench.report import Claim, Result
from bench.synthetic import RoleCost, SyntheticCluster, closed_loop

__all__ = ["measure"]

_PAYLOAD = 1 << 20
_MESSAGE = b"x" * 300
_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(b"ready")
while (message := socket.recv()) != b"end":
    socket.send(message)
"""


def measure(quick: bool) -> Result:
    """Times of hops, and the claims of them."""
    requests = 150 if quick else 1000
    rounds = [_round_trip(2000)]
    hops = {}
    for name, flags in (("grant", ["--grants", "4"]), ("allocate", ["--grants", "0"])):
        hops[name] = _hops(requests, flags, "wait", 1)
        rounds.append(_round_trip(2000))
    hops["grant, receiver computing"] = _hops(requests, ["--grants", "4"], "spin", 2)
    rounds.append(_round_trip(2000))
    unit = statistics.median(rounds)
    rows = [("bare round trip", f"{unit * 1e6:.0f}", "", "1.0")]
    rows += [
        (f"hop, {name}", f"{statistics.median(times) * 1e6:.0f}", f"{_p99(times) * 1e6:.0f}", _ratio(times, unit))
        for name, times in hops.items()
    ]
    return Result(("", "median us", "p99 us", "x round trip"), rows, _claims(hops, unit))


def _claims(hops: dict[str, list[float]], unit: float) -> list[Claim]:
    grant = statistics.median(hops["grant"]) / unit
    allocate = statistics.median(hops["allocate"]) / unit
    computing = hops["grant, receiver computing"]
    spread = _p99(computing) / statistics.median(computing)
    return [
        Claim("Staged to Ready with a grant in hand, in bare round trips", grant, "<= 10", grant <= 10),
        Claim("Staged to Ready with Allocate, in bare round trips", allocate, "<= 14", allocate <= 14),
        Claim("p99 against the median while the receiver computes", spread, "<= 3", spread <= 3),
    ]


def _ratio(times: list[float], unit: float) -> str:
    return f"{statistics.median(times) / unit:.1f}"


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * len(times))]


def _hops(requests: int, flags: list[str], work: str, clients: int) -> list[float]:
    """Seconds from `Staged` to `Ready` of the first hop of each request."""
    with tempfile.TemporaryDirectory() as folder:
        sent, received = Path(folder) / "encoder.json", Path(folder) / "denoiser.json"
        roles = [
            RoleCost("encoder", 1, _PAYLOAD, trace=sent),
            RoleCost("denoiser", 5, 1024, work, trace=received),
            RoleCost("decoder", 0),
        ]
        with SyntheticCluster(roles, flags) as cluster:
            closed_loop(cluster.url, requests, clients)
        staged = {key: at for kind, key, at in json.loads(sent.read_text(encoding="utf-8")) if kind == "staged"}
        ready = {key: at for kind, key, at in json.loads(received.read_text(encoding="utf-8")) if kind == "ready"}
    hops = [ready[key] - at for key, at in staged.items() if key in ready]
    return hops[clients * 3 :]  # the first ones warm up


def _round_trip(count: int) -> float:
    """Median seconds of a bare ROUTER-DEALER round trip between two processes."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with subprocess.Popen([sys.executable, "-c", _ECHO, f"tcp://127.0.0.1:{port}"]):
        peer, _ = socket.recv_multipart()
        times = []
        for _ in range(count):
            started = time.perf_counter()
            socket.send_multipart([peer, _MESSAGE])
            socket.recv_multipart()
            times.append(time.perf_counter() - started)
        socket.send_multipart([peer, b"end"])
    socket.close()
    context.term()
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(alone("handoff", measure))
