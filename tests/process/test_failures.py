"""Processes are killed, stopped and spoken nonsense to; requests end right, and the cluster heals by itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
import zmq

from diffcluster import codec
from diffcluster.local import LocalCluster, Plan
from diffcluster.messages import BulkPiece, Drain, RoleHeartbeat
from tests.process.conftest import ANY_PORT, QUIET, Server, connected, error_of, eventually, file_of, served

HEARTBEAT_S = 0.5
LOST_S = 3 * HEARTBEAT_S + 15  # with room for a machine that is busy
NAMES = ("encoder-1", "denoiser-1", "denoiser-2", "decoder-1")
LONG: dict[str, Any] = {"prompt": "a slice of pizza", "num_inference_steps": 40, "seed": 7}
HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
ENDLESS = LONG | {"num_inference_steps": 1000}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fragile() -> Iterator[LocalCluster]:
    """A cluster to be harmed."""
    roles = {"encoder": 1, "denoiser": 2, "decoder": 1}
    router = [*ANY_PORT, *QUIET, "--heartbeat-s", str(HEARTBEAT_S)]
    with served(Plan(roles, QUIET, router)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def victim(fragile: LocalCluster) -> Server:
    return Server(fragile.url)


@pytest.fixture(scope="module")
def pictures(victim: Server) -> dict[int, bytes]:
    """What the cluster made while it was whole, by number of steps."""
    return {steps: victim.picture(**LONG | {"num_inference_steps": steps}) for steps in (2, 40)}


def heal(cluster: LocalCluster, server: Server) -> None:
    """Do what `diffcluster up` does all the time, start again what has died, until all are there."""

    def whole() -> bool:
        cluster.check()
        try:
            there = server.pids()
        except httpx.TransportError:  # it is the router that is being started
            return False
        return set(there) == set(NAMES) and there.items() <= cluster.pids.items()

    eventually(whole, timeout=120)


@pytest.fixture(scope="class", autouse=True)
def whole(fragile: LocalCluster, victim: Server, pictures: dict[int, bytes]) -> None:
    """Before a test all processes live. Of a class's scope, so that what it starts is not taken for the test's leak."""
    heal(fragile, victim)


@pytest.fixture
def then_right(victim: Server, pictures: dict[int, bytes]) -> Iterator[None]:
    """After the test the cluster makes the same picture as ever, and nobody holds anything."""
    yield
    eventually(lambda: victim.get("/ready").status_code == 200)
    assert [victim.picture(), victim.picture()] == [pictures[2]] * 2
    eventually(lambda: not victim.cluster()["requests"] and all(map(holds_nothing, victim.instances().values())))


def holds_nothing(instance: dict[str, Any]) -> bool:
    """Of requests. A slot that a peer might still write stays quarantined for a while, rightly."""
    if instance["receive_free"] is None:  # it has registered, but its first heartbeat is still to come
        return False
    unused = instance["receive_free"] + instance["receive_quarantined"] + instance["granted_bytes"]
    return instance["outstanding"] == instance["retained"] == 0 and unused == instance["slot_bytes"]


@contextmanager
def asked(server: Server, fields: dict[str, Any]) -> Iterator[tuple[str, Future[httpx.Response]]]:
    """A request on its way, and the id to find it by."""
    request_id = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        yield request_id, pool.submit(server.post, fields, headers={"x-request-id": request_id})


def in_the_middle(picture: dict[str, Any], name: str) -> bool:
    return (picture["phase"], picture["stage"], picture["instance"]) == ("running", "denoiser", name) and picture[
        "step"
    ] >= 2


def denoising(server: Server, request_id: str, other_than: str = "") -> str:
    """The denoiser that is in the middle of the request, as soon as one is."""

    def look() -> str:
        picture = server.where(request_id)
        name: str = picture.get("instance") or ""
        return name if name != other_than and in_the_middle(picture, name) else ""

    return eventually(look)


# ---------------------------------------------------------------- death, with nothing to do


@pytest.fixture(scope="class", params=["encoder-1", "denoiser-2", "decoder-1"])
def role_death(request: pytest.FixtureRequest, whole: None, fragile: LocalCluster, victim: Server) -> dict[str, Any]:
    """Kills a role, notes what is seen meanwhile, and has it started again."""
    name: str = request.param
    before = fragile.pids
    os.kill(before[name], signal.SIGKILL)
    eventually(lambda: name not in victim.instances(), timeout=LOST_S)
    seen = {"health": victim.get("/health"), "ready": victim.get("/ready")}
    heal(fragile, victim)
    return seen | {"name": name, "before": before}


class TestRoleDies:
    @pytest.mark.usefixtures("then_right")
    def test_it_is_noticed_and_started_again(self, role_death: dict[str, Any], fragile: LocalCluster) -> None:
        name, before = role_death["name"], role_death["before"]
        missing = [] if name == "denoiser-2" else [name.partition("-")[0]]
        assert role_death["health"].status_code == 200
        assert role_death["health"].json()["status"] == ("degraded" if missing else "ok")
        assert role_death["ready"].status_code == (503 if missing else 200)
        assert role_death["ready"].json()["missing"] == missing
        assert {other for other, pid in fragile.pids.items() if before[other] != pid} == {name}


@pytest.fixture(scope="class", params=["idle", "busy"])
def router_death(request: pytest.FixtureRequest, whole: None, fragile: LocalCluster, victim: Server) -> dict[str, int]:
    """Kills the router, once while nothing happens, once in the middle of a request."""
    before = fragile.pids
    if request.param == "idle":
        os.kill(before["router"], signal.SIGKILL)
    else:
        with asked(victim, ENDLESS) as (request_id, future):
            denoising(victim, request_id)
            os.kill(before["router"], signal.SIGKILL)
            assert isinstance(future.exception(timeout=60), httpx.TransportError)
    heal(fragile, victim)
    return before


class TestRouterDies:
    @pytest.mark.usefixtures("then_right")
    def test_roles_register_again_by_themselves(self, router_death: dict[str, int], fragile: LocalCluster) -> None:
        assert {name for name, pid in fragile.pids.items() if router_death[name] != pid} == {"router"}


# ---------------------------------------------------------------- in the middle of a request


@pytest.mark.usefixtures("then_right")
def test_a_denoiser_dies_under_a_request(victim: Server, pictures: dict[int, bytes]) -> None:
    with asked(victim, LONG) as (request_id, future):
        name = denoising(victim, request_id)
        os.kill(victim.pids()[name], signal.SIGKILL)
        assert file_of(future.result(timeout=120)) == pictures[40]
    timings = future.result().json()["data"][0]["timings"]
    assert timings["denoiser"]["instance"] != name


@pytest.mark.usefixtures("then_right")
def test_only_the_requests_of_the_dead_are_done_again(victim: Server, pictures: dict[int, bytes]) -> None:
    before = victim.metric("diffcluster_events_total", event="restarted")
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(victim.post, LONG) for _ in range(8)]
        eventually(lambda: any(in_the_middle(p, "denoiser-1") for p in victim.cluster()["requests"]))
        os.kill(victim.pids()["denoiser-1"], signal.SIGKILL)
        assert [file_of(future.result(timeout=240)) for future in futures] == [pictures[40]] * 8
    assert 1 <= victim.metric("diffcluster_events_total", event="restarted") - before <= 4


def test_a_request_that_kills_twice_is_not_tried_again(victim: Server) -> None:
    with asked(victim, ENDLESS) as (request_id, future):
        first = denoising(victim, request_id)
        os.kill(victim.pids()[first], signal.SIGKILL)
        second = denoising(victim, request_id, other_than=first)
        os.kill(victim.pids()[second], signal.SIGKILL)
        response = future.result(timeout=60)
    error = error_of(response, 500)
    assert error["code"] == "worker_error"
    assert "2 instances died" in error["message"]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.usefixtures("then_right")
def test_a_denoiser_that_is_asked_to_leave_finishes_first(victim: Server, pictures: dict[int, bytes]) -> None:
    with asked(victim, LONG) as (request_id, future):
        name = denoising(victim, request_id)
        process = psutil.Process(victim.pids()[name])
        process.terminate()
        assert file_of(future.result(timeout=120)) == pictures[40]
    assert future.result().json()["data"][0]["timings"]["denoiser"]["instance"] == name
    eventually(lambda: name not in victim.instances() and process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.usefixtures("then_right")
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_instance(victim: Server, stream: bool) -> None:
    cancelled = victim.cluster()["ended"].get("cancelled", 0)
    with victim.steps_seen(ENDLESS | {"stream": stream}, step=2):
        assert sum(instance["outstanding"] for instance in victim.instances().values()) == 1
    eventually(lambda: not any(instance["outstanding"] for instance in victim.instances().values()), timeout=10)
    assert victim.cluster()["ended"]["cancelled"] == cancelled + 1


# ---------------------------------------------------------------- silence


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("then_right")
def test_a_decoder_that_was_stopped_comes_back(victim: Server, pictures: dict[int, bytes]) -> None:
    before = victim.instances()["decoder-1"]
    with asked(victim, LONG) as (request_id, future):
        with stopped(before["pid"]):
            eventually(lambda: "decoder-1" not in victim.instances(), timeout=LOST_S)
            assert victim.get("/ready").json()["missing"] == ["decoder"]
            eventually(lambda: victim.where(request_id).get("phase") in ("waiting", "queued"), timeout=60)
            assert not future.done()
        assert file_of(future.result(timeout=120)) == pictures[40]
    after = eventually(lambda: victim.instances().get("decoder-1"))
    assert (after["pid"], after["incarnation"]) == (before["pid"], before["incarnation"])


@pytest.mark.usefixtures("then_right")
def test_a_denoiser_that_is_stopped_under_a_request(victim: Server, pictures: dict[int, bytes]) -> None:
    with asked(victim, LONG) as (request_id, future):
        name = denoising(victim, request_id)
        with stopped(victim.pids()[name]):
            assert file_of(future.result(timeout=120)) == pictures[40]
            assert future.result().json()["data"][0]["timings"]["denoiser"]["instance"] != name
    eventually(lambda: name in victim.instances())


# ---------------------------------------------------------------- nonsense


def ports_of(pid: int) -> set[int]:
    """TCP ports that the process listens on."""
    return {c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def control_port(cluster: LocalCluster) -> int:
    port: int = Server(cluster.url).cluster()["control_port"]
    return port


def bulk_port(cluster: LocalCluster) -> int:
    (port,) = ports_of(cluster.pids["router"]) - {control_port(cluster), httpx.URL(cluster.url).port}
    return port


@contextmanager
def dealer(port: int, identity: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket_:
        socket_.setsockopt(zmq.LINGER, 5000)
        if identity is not None:
            socket_.setsockopt(zmq.IDENTITY, identity)
        socket_.connect(f"tcp://127.0.0.1:{port}")
        yield socket_


def say(connection: socket.socket, content: bytes) -> None:
    """Send it, and no more. Whoever listens may have hung up by then."""
    with contextlib.suppress(OSError):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)


def nonsense() -> list[list[bytes]]:
    """Messages that are none, whoever sends them, on either port."""
    rng = random.Random(7)
    beat = codec.encode(
        RoleHeartbeat(queued=0, running=0, receive_free=0, receive_quarantined=0, send_free=0, resident_bytes=0)
    )
    piece = codec.encode(BulkPiece(request_id="x", attempt=1, file=0, offset=0))  # type: ignore[arg-type]
    return [
        [b""],
        [b"", b""],
        [b"", b"", b""],
        [rng.randbytes(1000)],
        [rng.randbytes((1 << 20) - 100)],
        [beat[:-3]],
        [beat + b"\x00"],
        [piece[:-3], b"x"],
        [piece.replace(b"offset", b"offsat"), b"x"],
        [b"\x81\xa4type\xa5Nopee"],
        [b"\x81\xa4type\xa5Nopee", b"x"],
        [b"\x90" * 1000],
        [b"\x91" * 100_000],
        [b"\xdf\xff\xff\xff\xff"],
        [pickle.dumps({"x": 1})],
        [HTTP],
        [b"x"] * 1000,
    ]


@pytest.mark.usefixtures("then_right")
@pytest.mark.parametrize("identity", [None, b"x", b"\xff" * 32, b"a" * 32, b"a" * 255], ids=repr)
@pytest.mark.parametrize("port", [control_port, bulk_port])
def test_messages_that_are_none_are_counted_and_no_more(
    fragile: LocalCluster, victim: Server, port: Callable[[LocalCluster], int], identity: bytes | None
) -> None:
    before, pids = victim.metric("diffcluster_bad_frames_total"), fragile.pids
    with dealer(port(fragile), identity) as socket_:
        for frames in nonsense():
            socket_.send_multipart(frames)
    eventually(lambda: victim.metric("diffcluster_bad_frames_total") == before + len(nonsense()))
    assert fragile.pids == pids
    assert victim.pids().items() <= pids.items()
    assert psutil.Process(pids["router"]).is_running()


@pytest.mark.usefixtures("then_right")
def test_messages_of_a_stranger_are_answered_and_no_more(fragile: LocalCluster, victim: Server) -> None:
    before = victim.pids()
    with dealer(control_port(fragile), b"b" * 32) as socket_:
        socket_.setsockopt(zmq.RCVTIMEO, 10_000)
        for _ in range(3):
            socket_.send(codec.encode(Drain()))
            assert codec.decode_from_router(socket_.recv()).again  # type: ignore[union-attr]
    assert victim.pids() == before


@pytest.mark.usefixtures("then_right")
def test_a_message_that_is_too_large_is_not_read(fragile: LocalCluster, victim: Server) -> None:
    resident = psutil.Process(fragile.pids["router"]).memory_info().rss
    for port in (control_port(fragile), bulk_port(fragile)):
        with dealer(port, b"c" * 32) as socket_:
            socket_.setsockopt(zmq.LINGER, 500)
            socket_.send(b"x" * (64 << 20))
    assert psutil.Process(fragile.pids["router"]).memory_info().rss - resident < 64 << 20


@pytest.mark.usefixtures("then_right")
@pytest.mark.parametrize("port", [control_port, bulk_port])
@pytest.mark.parametrize(
    "content",
    [HTTP, b"\x00" * 4096, b"\xff" + b"\x00" * 8 + b"\x7f\x03", random.Random(1).randbytes(4096)],
    ids=["http", "zeros", "greeting", "random"],
)
def test_bytes_that_are_no_zeromq(
    fragile: LocalCluster, victim: Server, port: Callable[[LocalCluster], int], content: bytes
) -> None:
    before = fragile.pids
    with connected(f"http://127.0.0.1:{port(fragile)}") as connection:
        say(connection, content)
    assert victim.pids().items() <= before.items()


@pytest.mark.usefixtures("then_right")
def test_bytes_that_are_no_transfer(fragile: LocalCluster, victim: Server) -> None:
    """On the ports where denoisers and decoders receive tensors."""
    before = victim.pids()
    ports = {port for name, pid in before.items() if name != "encoder-1" for port in ports_of(pid)}
    assert len(ports) == 3
    header = b"DCT1" + b"t" * 16 + (1).to_bytes(8, "big") + (2**63).to_bytes(8, "big")
    for port in ports:
        for content in (b"", HTTP, b"\x00" * 4096, header, header[:20], random.Random(2).randbytes(4096)):
            with connected(f"http://127.0.0.1:{port}") as connection:
                say(connection, content)
    assert victim.pids() == before
