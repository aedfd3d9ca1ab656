"""Links that hold next to nothing, requests that fail again and again, clients that read next to nothing."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.process.conftest import GENERATIONS, Server, connected, error_of, eventually, file_of
from tests.process.small import LARGE_BYTES, SCRATCH_BYTES, SmallCluster, picture, small_cluster

REGION = 4 << 20
ROOM = ["--receive-bytes", str(REGION), "--send-bytes", str(REGION)]

pytestmark = pytest.mark.slow


def ask(server: Server, seed: int, prompt: str = "x") -> httpx.Response:
    return server.post({"prompt": prompt, "seed": seed})


# ---------------------------------------------------------------- links that are full

PATIENT_S = 30.0
"""Heartbeats are this far apart: an instance that is struck off within a test was not struck off for its silence."""
DEADLINE_S = 20
LONG_PROMPT = "x " * 15_000
BURST = 96
"""A third of it is more than the link of an instance that does not read takes."""


@pytest.fixture(scope="module")
def tight() -> Iterator[SmallCluster]:
    roles = {"encoder": 3, "denoiser": 3, "decoder": 3}
    router = ["--heartbeat-s", str(PATIENT_S), "--request-timeout-s", str(DEADLINE_S)]
    with small_cluster(roles, [*ROOM, "--max-outstanding", str(BURST)], router, tight=True) as cluster:
        cluster.wait_registered()
        yield cluster


@pytest.mark.parametrize("name", ["encoder-1", "denoiser-1"])
def test_what_a_full_link_does_not_take_is_not_lost(tight: SmallCluster, name: str) -> None:
    """The role is stopped; soon neither its queue nor the kernel takes another message to it."""
    server, before = tight.server, tight.server.instances()
    with tight.stopped(name), ThreadPoolExecutor(BURST) as pool:
        answers = [pool.submit(ask, server, seed, LONG_PROMPT) for seed in range(BURST)]
        for seed, answer in enumerate(answers):
            response = answer.result(timeout=3 * DEADLINE_S)
            # 504: of what the stopped role's link had taken, before it was full, nothing is heard until its time is up.
            if response.status_code not in (503, 504):
                assert file_of(response) == picture(seed)
    eventually(lambda: name in server.instances())
    after = server.instances()
    assert {key: value["pid"] for key, value in after.items()} == {key: value["pid"] for key, value in before.items()}
    assert [file_of(ask(server, seed)) for seed in range(8)] == [picture(seed) for seed in range(8)]
    assert not server.cluster()["requests"]


# ---------------------------------------------------------------- requests that fail

FAILURES = 30


@pytest.fixture(scope="module")
def ordinary() -> Iterator[SmallCluster]:
    with small_cluster({"encoder": 1, "denoiser": 1, "decoder": 1}, ROOM, ["--heartbeat-s", "0.5"]) as cluster:
        cluster.wait_registered()
        yield cluster


def resident(cluster: SmallCluster, name: str) -> int:
    return int(cluster.process(name).memory_info().rss)


def sending(server: Server) -> dict[str, int]:
    """What is free of each region for results."""
    return {name: instance["send_free"] for name, instance in server.instances().items()}


@pytest.mark.parametrize("role", ["encoder", "denoiser", "decoder"])
def test_requests_that_fail_leave_nothing_behind(ordinary: SmallCluster, role: str) -> None:
    server, name = ordinary.server, f"{role}-1"

    def fail(times: int) -> None:
        for seed in range(times):
            assert error_of(ask(server, seed, f"fail-{role}"), 500)["code"] == "worker_error"
        ordinary.wait_free()

    whole = {key: 0 if key == "decoder-1" else REGION for key in server.instances()}
    eventually(lambda: sending(server) == whole)
    assert file_of(ask(server, 1)) == picture(1)
    fail(3)  # what is allocated once is there
    memory, before = resident(ordinary, name), server.pids()
    fail(FAILURES)
    assert resident(ordinary, name) - memory < SCRATCH_BYTES / 2  # a request that stayed would be twice that
    eventually(lambda: sending(server) == whole)  # the next heartbeat says so
    assert file_of(ask(server, 2)) == picture(2)
    assert server.pids() == before


# ---------------------------------------------------------------- clients that read slowly

READERS = 4
POLLS = 25
ROUNDS = 4


@contextmanager
def slow_reader(server: Server) -> Iterator[socket.socket]:
    """A client whose large answer has begun to come, and is as good as never read."""
    body = json.dumps({"prompt": "large", "seed": 7}).encode()
    head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    head += f"x-request-id: {uuid.uuid4().hex}\r\nContent-Length: {len(body)}\r\n\r\n"
    with connected(server.url) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(1) == b"H"
        yield connection


def poll(server: Server) -> set[int]:
    return {server.get(path).status_code for path in ("/v1/cluster", "/metrics", "/health") for _ in range(POLLS)}


def with_slow_readers(cluster: SmallCluster) -> int:
    """Others are served while the readers read a byte at a time; the router's memory meanwhile."""
    server = cluster.server
    with ExitStack() as stack, ThreadPoolExecutor(READERS) as pool:
        readers = [stack.enter_context(slow_reader(server)) for _ in range(READERS)]
        polls = [pool.submit(poll, server) for _ in range(READERS)]
        for seed in range(10):
            assert file_of(ask(server, seed)) == picture(seed)
            assert [len(reader.recv(1)) for reader in readers] == [1] * READERS
        assert [future.result(timeout=60) for future in polls] == [{200}] * READERS
        return resident(cluster, "router")


def test_slow_readers_hold_up_nobody_and_cost_a_bounded_amount(ordinary: SmallCluster) -> None:
    server, router = ordinary.server, ordinary.process("router")
    assert file_of(ask(server, 7, "large")) == picture(7, LARGE_BYTES)
    ordinary.wait_free()
    descriptors, memory = router.num_fds(), resident(ordinary, "router")
    peaks = []
    for _ in range(ROUNDS):
        peaks.append(with_slow_readers(ordinary))
        eventually(lambda: router.num_fds() <= descriptors)
    # A file, its base64, the body made of it, and what of that waits to be sent; and nothing of those who have left.
    assert max(peaks) - memory < READERS * 6 * LARGE_BYTES
    assert file_of(ask(server, 7, "large")) == picture(7, LARGE_BYTES)
    ordinary.wait_free()
