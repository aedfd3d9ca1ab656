"""Real clusters for the process tests, and small tools to ask them things.

A cluster takes seconds to start, so each kind of it is started once for the session. A `Server` keeps no connection
between calls: what a test opens, that test closes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from PIL import Image

import diffcluster
from diffcluster.local import LocalCluster, Plan

DEMO = Path(diffcluster.__file__).parent / "models" / "demo"
GENERATIONS = "/v1/images/generations"
QUIET = ("--log-level", "warning")
ROLE = (*QUIET, "--checksum")
"""Flags of all roles: every hand-off is checked, bit by bit."""
ANY_PORT = ("--port", "0", "--control-port", "0")
MAX_PIXELS = 65_536
_NORMAL = {"num_inference_steps": 1, "size": "64x64"}

_Value = TypeVar("_Value")
# Made once: reading the machine's certificates takes longer than a request.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def eventually(predicate: Callable[[], _Value], timeout: float = 30.0, every: float = 0.05) -> _Value:
    """What `predicate` returns as soon as that is true; it is asked again and again until then."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout} s"
        time.sleep(every)
    return value


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def pixels(content: bytes) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def assert_near(made: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8]) -> None:
    """Equal but for rounding: what a request computes together with others differs in the last bits of a float."""
    assert made.shape == expected.shape
    assert np.abs(made.astype(int) - expected.astype(int)).max() <= 1


class Server:
    """A running router as its clients see it."""

    def __init__(self, url: str) -> None:
        self.url = url

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        with httpx.Client(base_url=self.url, timeout=120, trust_env=False, verify=_NO_TLS) as client:
            yield client

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, body: object = None, *, path: str = GENERATIONS, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def images(self, **fields: Any) -> list[dict[str, Any]]:
        """`data` of a request that succeeds; few steps and a fixed seed unless told otherwise."""
        response = self.post({"prompt": "a slice of pizza", "num_inference_steps": 2, "seed": 7} | fields)
        assert response.status_code == 200, response.text
        data: list[dict[str, Any]] = response.json()["data"]
        return data

    def picture(self, **fields: Any) -> bytes:
        """The file of a request for one picture."""
        (image,) = self.images(**fields)
        return base64.b64decode(image["b64_json"])

    def cluster(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("/v1/cluster").json()
        return body

    def instances(self) -> dict[str, dict[str, Any]]:
        return {instance["name"]: instance for instance in self.cluster()["instances"]}

    def pids(self) -> dict[str, int]:
        return {name: instance["pid"] for name, instance in self.instances().items()}

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 while it is not there."""
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name and wanted <= set((match[2] or "").split(",")):
                return float(match[3])
        return 0.0

    def encoded(self) -> float:
        """How many prompts have been encoded for requests that finished."""
        return self.metric("diffcluster_stage_compute_seconds_count", role="encoder")

    def accepted(self) -> int:
        """How many pictures were ever handed to the machine and have ended, however they did."""
        return sum(self.cluster()["ended"].values())

    def where(self, request_id: str) -> dict[str, Any]:
        """The picture of that request as it is now; empty while the router does not know it."""
        response = self.get(f"/v1/requests/{request_id}")
        if response.status_code != 200:
            return {}
        picture: dict[str, Any] = response.json()["pictures"][0]
        return picture

    @contextmanager
    def steps_seen(self, fields: Mapping[str, Any], step: int) -> Iterator[httpx.Client]:
        """Within it a request for many steps is under way, and has done at least `step` of them.

        Its client leaves, without an answer, at the end.
        """
        request_id = uuid.uuid4().hex
        body = json.dumps(dict(fields)).encode()
        head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        head += f"x-request-id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        with self.client() as client, connected(self.url) as connection:
            connection.sendall(head.encode() + body)
            eventually(lambda: self.where(request_id).get("step", 0) >= step)
            yield client


def file_of(response: httpx.Response) -> bytes:
    """The one picture of a response that must be a success."""
    assert response.status_code == 200, response.text
    (image,) = response.json()["data"]
    return base64.b64decode(image["b64_json"])


@contextmanager
def connected(url: str, timeout: float = 60.0) -> Iterator[socket.socket]:
    """A plain TCP connection to the host and port of `url`."""
    where = httpx.URL(url)
    with socket.create_connection((where.host, where.port), timeout=timeout) as connection:
        yield connection


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of `response`, which must have OpenAI's shape and `status`."""

    def strict(constant: str) -> object:
        raise ValueError(f"{constant} is not JSON")

    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.text, parse_constant=strict)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)
    return error


# ---------------------------------------------------------------- the command line


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "diffcluster", *arguments]


@contextmanager
def running(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A `diffcluster` process with its output in pipes. It must have ended, or be ended, by the test."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_all([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])


def run(*arguments: str, timeout: float = 120.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a `diffcluster` command to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, check=False, **options)


def read_until(process: subprocess.Popen[bytes], pattern: str, timeout: float = 120.0) -> re.Match[str]:
    """Read `process`'s output until `pattern` is in it."""
    assert process.stdout is not None
    deadline, text = time.monotonic() + timeout, ""
    while (match := re.search(pattern, text)) is None:
        left = deadline - time.monotonic()
        assert left > 0, f"no {pattern!r} in {text!r} after {timeout} s"
        if select.select([process.stdout], [], [], left)[0]:
            chunk = os.read(process.stdout.fileno(), 4096)
            assert chunk, f"no {pattern!r} in {text!r}, and that was all"
            text += chunk.decode()
    return match


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def marked(mark: str) -> list[psutil.Process]:
    """All processes that have `mark` as a value in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.environ().values():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


# ---------------------------------------------------------------- clusters


@contextmanager
def served(plan: Plan) -> Iterator[LocalCluster]:
    with LocalCluster(plan) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """One encoder, two denoisers, one decoder. None of its processes may be harmed."""
    roles = {"encoder": 1, "denoiser": 2, "decoder": 1}
    with served(Plan(roles, ROLE, [*ANY_PORT, *QUIET])) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def server(cluster: LocalCluster) -> Server:
    return Server(cluster.url)


@pytest.fixture(scope="session")
def tcp_server() -> Iterator[Server]:
    """A cluster whose tensors travel by TCP alone."""
    roles = {"encoder": 1, "denoiser": 1, "decoder": 1}
    with served(Plan(roles, [*ROLE, "--engine", "tcp"], [*ANY_PORT, *QUIET])) as cluster:
        yield Server(cluster.url)


class Early:
    """What the router of a cluster said before any role could be ready."""

    def __init__(self, server: Server) -> None:
        self.health, self.ready = server.get("/health"), server.get("/ready")
        self.models, self.generation = server.get("/v1/models"), server.post({"prompt": "x"})


@pytest.fixture(scope="session")
def monolithic() -> Iterator[tuple[Server, Early]]:
    """One process for all stages, behind a router that makes small pictures only."""
    router = [*ANY_PORT, *QUIET, "--max-pixels", str(MAX_PIXELS)]
    with LocalCluster(Plan({"monolithic": 1}, ROLE, router)) as cluster:
        server = Server(cluster.url)
        early = Early(server)
        cluster.wait_ready()
        yield server, early


@pytest.fixture(scope="session")
def monolithic_server(monolithic: tuple[Server, Early]) -> Server:
    return monolithic[0]


@pytest.fixture(scope="session")
def reference_hash(server: Server) -> str:
    """What a normal request gives, before any test did anything to the cluster."""
    return sha(server.picture(**_NORMAL))


@pytest.fixture
def then_sane(server: Server, reference_hash: str) -> Iterator[None]:
    """After the test a normal request gives the same file as before it, by the same processes."""
    before = server.pids()
    yield
    assert sha(server.picture(**_NORMAL)) == reference_hash
    assert server.pids() == before
