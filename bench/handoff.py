"""One hop of 1 MB between two real roles, by a real router: from the sender's `Staged` to the receiver's `Ready`.

Beside it, in the same run, the round trip of a bare ZeroMQ ROUTER-DEALER pair in two processes: the unit in which the
cost of a hop is told. With a grant in hand a hop is two round trips and one copy; with `Allocate` three. One request is
under way at a time, as in the bare pair, and comes right after the one before; a second unit, with pauses between the
round trips, shows how much of a hop's time is that of waking an idle processor.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import zmq

from bench.command import alone
from bench.report import Claim, Result
from bench.synthetic import RoleCost, role_process
from diffcluster.config import RouterConfig
from diffcluster.messages import GenerationParameters
from diffcluster.router.server import DiffusionServer

__all__ = ["measure"]

_PAYLOAD = 1 << 20
_MESSAGE = b"x" * 300
_WARM_UP, _A_TURN = 20, 20
_PARAMETERS = GenerationParameters(
    model="synthetic", prompt="x", width=64, height=64, num_inference_steps=1, guidance_scale=1.0, seed=1
)
_ECHO = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(b"ready")
while (message := socket.recv()) != b"end":
    socket.send(message)
"""

_CLUSTERS = {
    "grant": (4, RoleCost("denoiser", 0, 1024)),
    "allocate": (0, RoleCost("denoiser", 0, 1024)),
    "grant, receiver computing": (4, RoleCost("denoiser", 5, 1024, "spin")),
}
"""Grants to keep out, and the receiver."""


def measure(quick: bool) -> Result:
    """Times of hops, and the claims of them. All clusters run at once and are asked in turns, as is the bare pair."""
    turns = 8 if quick else 40
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        pair = stack.enter_context(_BarePair())
        clusters = {name: _Cluster(Path(folder) / name, *spec) for name, spec in _CLUSTERS.items()}
        for cluster in clusters.values():
            stack.enter_context(cluster)
        for cluster in clusters.values():
            cluster.wait_until_met()
        rounds = [pair.round_trip(_WARM_UP)]
        for turn in range(turns):
            for cluster in clusters.values():
                cluster.ask(_WARM_UP if turn == 0 else _A_TURN)
            rounds.append(pair.round_trip(300))
        rare = pair.round_trip(100, pause_s=0.01)
        hops = {name: cluster.hops()[_WARM_UP:] for name, cluster in clusters.items()}
    unit = statistics.median(rounds[1:])
    rows = [("bare round trip", f"{unit * 1e6:.0f}", "", "1.0")]
    rows += [("bare round trip, every 10 ms", f"{rare * 1e6:.0f}", "", f"{rare / unit:.1f}")]
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


class _Cluster:
    """This process is the router; sender and receiver are processes of their own."""

    def __init__(self, folder: Path, grants: int, denoiser: RoleCost) -> None:
        self._folder, self._flags, self._denoiser = folder, ["--grants", str(grants)], denoiser
        self._traces = [folder / "sender.json", folder / "receiver.json"]
        self._server = DiffusionServer(RouterConfig(control_port=0), _fail)
        self._stack = ExitStack()

    def __enter__(self) -> _Cluster:
        self._folder.mkdir()
        self._server.start()
        self._stack.callback(self._server.stop)
        for cost in (
            RoleCost("encoder", 0, _PAYLOAD, trace=self._traces[0]),
            dataclasses.replace(self._denoiser, trace=self._traces[1]),
            RoleCost("decoder", 0),
        ):
            self._stack.enter_context(role_process(cost, f"tcp://127.0.0.1:{self._server.control_port}", self._flags))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_until_met(self) -> None:
        """All roles are there, and those that hand on have met those that receive."""
        for _ in range(600):
            links = [instance.links for instance in self._server.snapshot().result().instances.values()]
            if sum(map(bool, links)) == 2:
                return
            threading.Event().wait(0.1)
        raise RuntimeError("the roles were not ready within a minute")

    def ask(self, requests: int) -> None:
        """One request after the other."""
        for _ in range(requests):
            self._server.submit(_PARAMETERS, 60.0)[1].result()

    def hops(self) -> list[float]:
        """Seconds from `Staged` to `Ready` of the first hop of each request; ends the cluster."""
        self._stack.close()  # the roles write their traces when they leave
        staged, ready = (
            {key: at for kind, key, at in json.loads(trace.read_text(encoding="utf-8")) if kind == wanted}
            for trace, wanted in zip(self._traces, ("staged", "ready"), strict=True)
        )
        return [ready[key] - at for key, at in staged.items() if key in ready]


def _fail(reason: str) -> None:
    raise RuntimeError(reason)


class _BarePair:
    """A ROUTER here and a DEALER in another process."""

    def __enter__(self) -> _BarePair:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._process = subprocess.Popen([sys.executable, "-c", _ECHO, f"tcp://127.0.0.1:{port}"])
        self._peer, _ = self._socket.recv_multipart()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.send_multipart([self._peer, b"end"])
        self._process.wait()
        self._socket.close()
        self._context.term()

    def round_trip(self, count: int, pause_s: float = 0.0) -> float:
        """Median seconds."""
        times = []
        for _ in range(count):
            threading.Event().wait(pause_s)
            started = time.perf_counter()
            self._socket.send_multipart([self._peer, _MESSAGE])
            self._socket.recv_multipart()
            times.append(time.perf_counter() - started)
        return statistics.median(times)


if __name__ == "__main__":
    sys.exit(alone("handoff", measure))
