"""Requests that compute together over real processes: each gets its own picture, whatever happens to the others.

Pictures are compared by hash: on a CPU joined requests are, to the last bit, what they are alone.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from diffcluster.client import Client
from diffcluster.local import LocalCluster, Plan
from tests.process.conftest import (
    ANY_PORT,
    QUIET,
    ROLE,
    Server,
    error_of,
    eventually,
    file_of,
    run,
    served,
    sha,
)

pytestmark = pytest.mark.slow

MANY = 16
SIZES = ("--max-batch-size", str(MANY), "--max-outstanding", "32")
HEARTBEAT = ("--heartbeat-s", "0.5")
"""Counts come with heartbeats."""
PROMPTS = ("a slice of pizza", "a red fish", "a house at night", "a cat", "a boat", "a star", "a tree", "a rocket")
MODEL = "demo"
SMALL = {"size": "72x64"}
"""Smaller ones are never joined: so few pixels are computed by other kernels when there are more of them."""


class Cold:
    """What was said while the denoiser still warmed up, and what came of the same request afterwards."""

    def __init__(self, server: Server) -> None:
        self.ready, self.health = server.get("/ready"), server.get("/health")
        self.answer = server.post(ASKED | {"deadline_s": 1})


class Joined(Server):
    """One encoder, one denoiser whose steps are noted, one decoder."""

    def __init__(self, url: str, steps_to: Path) -> None:
        super().__init__(url)
        self._steps_to = steps_to
        self._alone: dict[str, str] = {}
        self.cold: Cold

    def alone(self, **fields: Any) -> str:
        """Hash of the picture when nothing else is computed."""
        key = repr(sorted(fields.items()))
        if key not in self._alone:
            eventually(lambda: not self.cluster()["requests"])
            self._alone[key] = sha(self.picture(**fields))
        return self._alone[key]

    def together(self, wanted: Sequence[dict[str, Any]]) -> list[httpx.Response]:
        """All at once, each on a connection of its own."""
        with ThreadPoolExecutor(len(wanted)) as pool:
            return list(pool.map(self.post, wanted))

    def steps(self) -> list[tuple[int, int]]:
        """(seed, step) of all steps so far, in order."""
        lines = self._steps_to.read_text().splitlines()
        return [(int(seed), int(step)) for seed, step in map(str.split, lines)]

    def last_step(self, seed: int) -> int:
        """The furthest that the request of that seed has come."""
        return max((step for one, step in self.steps() if one == seed), default=0)

    def settle(self) -> None:
        """Nothing is computed any more, and all that was is counted: the denoiser has sent heartbeats since."""
        eventually(lambda: not self.cluster()["requests"])
        for _ in range(2):  # the first may be something else that it had to say
            before = self._heard()
            eventually(lambda before=before: self._heard() > before + 0.01)

    def _heard(self) -> float:
        """When the denoiser was last heard of, in seconds since it registered."""
        denoiser = self.instances()["denoiser-1"]
        return float(denoiser["uptime_s"] - denoiser["last_seen_s"])

    def saved(self) -> float:
        """How many calls of the denoiser were spared, because they were made together with others."""
        requests = self.metric("diffcluster_module_call_requests_total", role="denoiser")
        return requests - self.metric("diffcluster_module_calls_total", role="denoiser")

    def reasons(self) -> set[str]:
        """Why there were no more requests in calls of the denoiser."""
        return set(re.findall(r'batch_decisions_total\{.*reason="(.*?)",role="denoiser"', self.get("/metrics").text))


ASKED: dict[str, Any] = {"prompt": PROMPTS[0], "num_inference_steps": 2, "seed": 7, **SMALL}


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    steps_to = tmp_path_factory.mktemp("steps") / "steps"
    steps_to.touch()
    with ExitStack() as stack:
        plan = Plan({"encoder": 1, "decoder": 1}, [*ROLE, *SIZES], [*ANY_PORT, *QUIET, *HEARTBEAT])
        cluster = stack.enter_context(LocalCluster(plan))
        server = Joined(cluster.url, steps_to)
        port = server.cluster()["control_port"]
        denoiser = stack.enter_context(_denoiser(port, steps_to))
        cluster.wait_ready()
        assert denoiser.stdout is not None
        assert denoiser.stdin is not None
        assert denoiser.stdout.readline() == b"warm\n"
        server.cold = Cold(server)
        denoiser.stdin.write(b"\n")
        denoiser.stdin.flush()
        eventually(lambda: server.get("/ready").status_code == 200)
        yield server


@contextmanager
def _denoiser(port: int, steps_to: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.process.poisoned", "--steps-to", str(steps_to), "--name", "denoiser-1"]
    command += ["--router", f"tcp://127.0.0.1:{port}", "--log-level", "error", "--checksum", *SIZES]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def spared(joined: Joined) -> Iterator[None]:
    """During the test calls of several requests were made as one."""
    joined.settle()
    before = joined.saved()
    yield
    eventually(lambda: joined.saved() > before)


@contextmanager
def company(server: Joined, wanted: Sequence[dict[str, Any]]) -> Iterator[list[Future[httpx.Response]]]:
    """Within it those requests are being denoised; by its end each has got the picture that it gets alone."""
    expected = [server.alone(**one) for one in wanted]
    start = len(server.steps())
    with ThreadPoolExecutor(len(wanted)) as pool:
        futures = [pool.submit(server.post, one) for one in wanted]
        seeds = {one["seed"] for one in wanted}
        eventually(lambda: {seed for seed, step in server.steps()[start:] if step >= 2} == seeds)
        yield futures
    assert [sha(file_of(future.result())) for future in futures] == expected


# ---------------------------------------------------------------- a role that is not there yet


def test_while_a_role_warms_up_it_is_named_and_nobody_is_told_of_a_time_out(joined: Joined) -> None:
    assert joined.cold.ready.status_code == 503
    assert joined.cold.ready.json()["missing"] == ["denoiser"]
    assert joined.cold.health.json()["status"] == "degraded"
    assert error_of(joined.cold.answer, 503)["code"] == "no_instance"
    assert joined.cold.answer.headers["x-should-retry"] == "true"


def test_once_it_is_there_the_same_request_works(joined: Joined) -> None:
    assert sha(file_of(joined.post(ASKED | {"deadline_s": 60}))) == joined.alone(**ASKED)


# ---------------------------------------------------------------- together as alone


@pytest.mark.usefixtures("spared")
def test_requests_of_different_steps_guidance_and_schedulers(joined: Joined) -> None:
    schedulers = joined.get(f"/v1/models/{MODEL}").json()["schedulers"]
    assert len(schedulers) >= 8
    wanted = [
        {
            "prompt": PROMPTS[k % len(PROMPTS)], "seed": 100 + k, "num_inference_steps": 2 + k % 8, **SMALL,
            "guidance_scale": 1.0 + k % 3 * 2.5, "scheduler": schedulers[k % len(schedulers)],
        }
        for k in range(MANY)
    ]  # fmt: skip
    alone = [joined.alone(**one) for one in wanted]
    assert len(set(alone)) == MANY
    assert [sha(file_of(answer)) for answer in joined.together(wanted)] == alone


@pytest.mark.usefixtures("spared")
def test_five_that_are_the_same(joined: Joined) -> None:
    same = ASKED | {"num_inference_steps": 16}
    assert {sha(file_of(answer)) for answer in joined.together([same] * 5)} == {joined.alone(**same)}


@pytest.mark.usefixtures("spared")
def test_nobody_gets_the_picture_of_somebody_else(joined: Joined) -> None:
    wanted = [
        ASKED | {"prompt": PROMPTS[k % len(PROMPTS)], "seed": 200 + k // 4, "num_inference_steps": 1}
        for k in range(2 * MANY)
    ]
    alone = [joined.alone(**one) for one in wanted]
    assert len(set(alone)) == len(wanted)
    assert [sha(file_of(answer)) for answer in joined.together(wanted)] == alone


@pytest.mark.usefixtures("spared")
def test_prompts_of_different_lengths(joined: Joined) -> None:
    prompts = ("x", "a slice of pizza", "a red fish in the deep blue sea " * 2, "🍕" * 20, "leaves " * 90)
    wanted = [ASKED | {"prompt": prompt, "num_inference_steps": 4} for prompt in prompts]
    alone = [joined.alone(**one) for one in wanted]
    assert [sha(file_of(answer)) for answer in joined.together(wanted)] == alone


@pytest.mark.usefixtures("spared")
def test_pictures_of_two_sizes_keep_apart(joined: Joined) -> None:
    wanted = [ASKED | {"seed": k, "size": ("72x64", "64x72")[k % 2], "num_inference_steps": 8} for k in range(4)]
    alone = [joined.alone(**one) for one in wanted]
    assert [sha(file_of(answer)) for answer in joined.together(wanted)] == alone
    eventually(lambda: "incompatible:sample" in joined.reasons())
    assert "ready" in joined.reasons()


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("n", [2, 4])
def test_picture_k_has_the_seed_plus_k(joined: Joined, n: int) -> None:
    images = joined.images(**ASKED | {"n": n, "seed": 50})
    assert [image["seed"] for image in images] == list(range(50, 50 + n))
    made = [sha(base64.b64decode(image["b64_json"])) for image in images]
    assert made == [joined.alone(**ASKED | {"seed": 50 + k}) for k in range(n)]


def test_a_seed_that_was_left_out_is_told_and_makes_the_picture_again(joined: Joined) -> None:
    (image,) = joined.images(**ASKED | {"seed": None})
    assert sha(base64.b64decode(image["b64_json"])) == joined.alone(**ASKED | {"seed": image["seed"]})


def test_seeds_that_were_left_out_differ(joined: Joined) -> None:
    answers = joined.together([ASKED | {"seed": None, "num_inference_steps": 1}] * 20)
    assert len({answer.json()["seed"] for answer in answers}) == 20
    assert len({sha(file_of(answer)) for answer in answers}) == 20


# ---------------------------------------------------------------- one request, by every way in


def _by_command(server: Server, fields: dict[str, Any], folder: Path) -> bytes:
    out = folder / "picture.png"
    flags = ["--seed", fields["seed"], "--steps", fields["num_inference_steps"], "--size", fields["size"]]
    flags += ["--guidance", fields["guidance_scale"], "--negative-prompt", fields["negative_prompt"]]
    done = run("generate", fields["prompt"], "--url", server.url, "--out", str(out), *map(str, flags))
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


def _by_openai(server: Server, fields: dict[str, Any], folder: Path) -> bytes:
    extra = {name: value for name, value in fields.items() if name not in ("prompt", "size")}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.images.generate(prompt=fields["prompt"], size=fields["size"], extra_body=extra)
    assert answer.data is not None
    return base64.b64decode(answer.data[0].b64_json or "")


def _by_client(server: Server, fields: dict[str, Any], folder: Path) -> bytes:
    with Client(server.url) as client:
        return client.generate(**fields)[0].content


@pytest.mark.parametrize("way", [_by_command, _by_openai, _by_client], ids=["command", "openai", "client"])
def test_every_way_in_makes_the_same_picture(joined: Joined, way: Callable[..., bytes], tmp_path: Path) -> None:
    fields = ASKED | {"guidance_scale": 3.5, "negative_prompt": "a dog", "num_inference_steps": 3, "seed": 42}
    assert sha(way(joined, fields, tmp_path)) == joined.alone(**fields)


# ---------------------------------------------------------------- one that fails among others


FAILURES = {
    "nan": "nan_output",
    "late-nan": "nan_output",
    "step-error": "worker_error",
    "step-memory": "out_of_memory",
    "call-error": "worker_error",
    "call-memory": "out_of_memory",
}
"""What the word makes of a request."""


@pytest.mark.usefixtures("spared")
@pytest.mark.parametrize("word", FAILURES)
def test_what_goes_wrong_with_one_request_ends_no_other(joined: Joined, word: str) -> None:
    # A batch that did not fit is never tried again, so it must be of a size that no other test has.
    size = {"size": "80x72"} if word == "call-memory" else SMALL
    others = [ASKED | size | {"seed": 300 + k, "num_inference_steps": 10} for k in range(2)]
    bad = ASKED | size | {"prompt": f"{PROMPTS[0]} {word}", "seed": 310, "num_inference_steps": 2}
    with company(joined, others):
        answers = [joined.post(bad) for _ in range(2)]
    assert [error_of(answer, 500)["code"] for answer in answers] == [FAILURES[word]] * 2
    assert {answer.headers["x-should-retry"] for answer in answers} == {"false"}
    assert sha(file_of(joined.post(others[0]))) == joined.alone(**others[0])


def test_after_a_nan_others_are_joined_as_before(joined: Joined) -> None:
    size = {"size": "64x120"}
    others = [ASKED | size | {"seed": 320 + k, "num_inference_steps": 10} for k in range(2)]
    bad = ASKED | size | {"prompt": f"{PROMPTS[0]} nan", "seed": 330, "num_inference_steps": 3}
    with company(joined, others[:1]):
        error_of(joined.post(bad), 500)
    joined.settle()
    before = joined.saved()
    with company(joined, others):
        pass
    joined.settle()
    assert joined.saved() > before


# ---------------------------------------------------------------- who leaves, and who comes first


@pytest.mark.usefixtures("spared")
def test_a_client_that_leaves_a_batch(joined: Joined) -> None:
    size = {"size": "128x128"}
    others = [ASKED | size | {"seed": 400 + k, "num_inference_steps": 20} for k in range(2)]
    long = ASKED | size | {"seed": 410, "num_inference_steps": 200}
    cancelled = joined.cluster()["ended"].get("cancelled", 0)
    new = ASKED | size | {"seed": 420}
    joined.alone(**new)
    with company(joined, others) as futures:
        with joined.steps_seen(long, step=3):
            before = joined.last_step(long["seed"])
        eventually(lambda: joined.cluster()["ended"].get("cancelled", 0) == cancelled + 1)
        assert sha(file_of(joined.post(new))) == joined.alone(**new)
        assert not any(future.done() for future in futures)
    assert joined.last_step(long["seed"]) <= before + 2
    assert joined.steps()[-1][0] != long["seed"]


def test_who_is_urgent_comes_first() -> None:
    long = ASKED | {"num_inference_steps": 1000}
    plan = Plan({"monolithic": 1}, [*ROLE, "--max-batch-size", "1"], [*ANY_PORT, *QUIET])
    with served(plan) as cluster, ThreadPoolExecutor(1) as pool:
        server = Server(cluster.url)
        alone = sha(server.picture(**ASKED))
        with server.steps_seen(long, step=2):
            usual = pool.submit(server.post, ASKED)
            eventually(lambda: len(server.cluster()["requests"]) == 2)
            assert sha(file_of(server.post(ASKED | {"priority": 10}))) == alone
            assert not usual.done()
            first, _ = server.cluster()["requests"]
            assert 2 <= first["step"] < first["steps"] == 1000
        assert sha(file_of(usual.result())) == alone
