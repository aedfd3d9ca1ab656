"""The first requests of a cluster that has only just started: all pairs of its roles meet under load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.process.conftest import GENERATIONS, Server, file_of
from tests.process.small import picture, small_cluster

ROOM = ["--receive-bytes", str(4 << 20), "--send-bytes", str(4 << 20), "--checksum"]
EACH = 4
REQUESTS = 64

pytestmark = pytest.mark.slow


def at_once(server: Server, requests: int) -> list[httpx.Response]:
    """That many requests, each on a connection of its own and with a seed of its own, sent together."""
    together = threading.Barrier(requests)

    def ask(seed: int) -> httpx.Response:
        with server.client() as client:
            together.wait()
            return client.post(GENERATIONS, json={"prompt": "x", "seed": seed})

    with ThreadPoolExecutor(requests) as pool:
        return list(pool.map(ask, range(requests)))


@pytest.mark.parametrize("engine", ["tcp"])
def test_64_first_requests_at_once_through_4_encoders_4_denoisers_4_decoders(engine: str) -> None:
    roles = {"encoder": EACH, "denoiser": EACH, "decoder": EACH}
    with small_cluster(roles, [*ROOM, "--engine", engine]) as cluster:
        cluster.wait_registered()
        before = cluster.server.pids()
        answers = at_once(cluster.server, REQUESTS)
        assert [file_of(answer) for answer in answers] == [picture(seed) for seed in range(REQUESTS)]
        cluster.wait_free()
        assert cluster.server.pids() == before
        counts = {
            event: cluster.server.metric("diffcluster_events_total", event=event) for event in ("lost", "restarted")
        }
        assert counts == {"lost": 0, "restarted": 0}
        # Nobody was left out for want of a link.
        served = {answer.json()["data"][0]["timings"][role]["instance"] for answer in answers for role in roles}
        assert served == before.keys()
