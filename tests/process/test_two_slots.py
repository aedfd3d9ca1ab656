"""Hand-offs with next to no room: two slots a region, and clients that leave at any moment."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from diffcluster.local import Plan
from diffcluster.transport.slots import GRANULE
from tests.process.conftest import ANY_PORT, GENERATIONS, QUIET, ROLE, Server, eventually, served, sha

REQUESTS = 500
CLIENTS = 8
ABORTED = 0.4
BODIES: list[dict[str, Any]] = [
    {"prompt": prompt, "seed": seed, "num_inference_steps": 1, "guidance_scale": guidance}
    for seed, (prompt, guidance) in enumerate([("a cat", 1.0), ("a rocket", 3.0), ("a sunflower", 1.0), ("a bee", 3.0)])
]
# The embeds of a prompt and of a negative prompt, 48 x 128 floats each, are the largest input.
SLOT = 12 * GRANULE


@pytest.fixture(scope="module", params=["shm", "tcp"])
def narrow(request: pytest.FixtureRequest) -> Iterator[Server]:
    room = ["--receive-bytes", str(2 * SLOT), "--send-bytes", str(2 * SLOT), "--quarantine-s", "3"]
    flags = [*ROLE, *room, "--transfer-timeout-s", "2", "--engine", request.param]
    plan = Plan({"encoder": 1, "denoiser": 1, "decoder": 1}, flags, [*ANY_PORT, *QUIET])
    with served(plan) as cluster:
        yield Server(cluster.url)


async def _load(url: str, expected: list[str], seed: int, requests: int) -> dict[str, int]:
    """How many requests were answered, and how many were given up; each answer must be the right one."""
    rng = random.Random(seed)
    counts = {"right": 0, "aborted": 0}
    turns = iter(range(requests))

    async def ask(client: httpx.AsyncClient) -> None:
        for turn in turns:
            which = turn % len(BODIES)
            patience = rng.uniform(0, 0.3) if rng.random() < ABORTED else None
            try:
                response = await asyncio.wait_for(client.post(GENERATIONS, json=BODIES[which]), patience)
            except TimeoutError:
                counts["aborted"] += 1
                continue
            assert response.status_code == 200, response.text
            assert sha(base64.b64decode(response.json()["data"][0]["b64_json"])) == expected[which]
            counts["right"] += 1

    client = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, verify=False)
    async with client, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(ask(client))
    return counts


def _descriptors(server: Server) -> dict[str, int]:
    return {name: psutil.Process(pid).num_fds() for name, pid in server.pids().items()}


def _is_all_free(server: Server) -> bool:
    """Nothing is held, and what is leased ahead is the same in the eyes of the role and of the router."""
    state = server.cluster()
    held = [instance["outstanding"] + instance["retained"] for instance in state["instances"]]
    free = all(
        instance["receive_free"] is not None  # None until its first heartbeat
        and instance["receive_quarantined"] == 0
        and instance["receive_free"] + instance["granted_bytes"] == instance["slot_bytes"]
        for instance in state["instances"]
    )
    return not state["requests"] and not any(held) and free


def test_every_survivor_of_500_is_right_and_nothing_is_left(narrow: Server) -> None:
    expected = [sha(narrow.picture(**body)) for body in BODIES]
    eventually(lambda: _is_all_free(narrow))
    # All threads and connections that there will be are made by the first requests at once.
    asyncio.run(_load(narrow.url, expected, seed=2, requests=50))
    eventually(lambda: _is_all_free(narrow))
    before = _descriptors(narrow)
    counts = asyncio.run(_load(narrow.url, expected, seed=1, requests=REQUESTS))
    assert sum(counts.values()) == REQUESTS
    assert counts["right"] > REQUESTS / 4
    assert counts["aborted"] > REQUESTS / 20
    eventually(lambda: _is_all_free(narrow))
    # A connection more or less of a lane that is seldom needed may be there; a descriptor for each request may not.
    eventually(lambda: all(count <= before[name] + 3 for name, count in _descriptors(narrow).items()))
    assert narrow.metric("diffcluster_events_total", event="grant_used") > 0
