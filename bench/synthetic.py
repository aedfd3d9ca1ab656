"""Role processes with the real runtime around a stage of known cost: so many milliseconds, so many bytes handed on.

    python -m bench.synthetic denoiser --router tcp://127.0.0.1:5550 --compute-ms 20 --payload 1048576

`--work wait` waits, as the host does while an accelerator computes; `--work spin` keeps a core busy. `--trace FILE` has
the times written, on the machine's monotonic clock, at which outputs were staged and inputs became ready.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click
import torch

from diffcluster import logs
from diffcluster.cli.options import config_options, load
from diffcluster.client import Client
from diffcluster.config import RoleConfig
from diffcluster.ids import ROLES, Role
from diffcluster.local import LocalCluster, Plan
from diffcluster.messages import GenerationParameters, ModelFacts, Ready, Staged
from diffcluster.roles import jobs, runtime
from diffcluster.roles.device import CpuDevice
from diffcluster.roles.machine import RoleMachine
from diffcluster.roles.stage import Output, Task

__all__ = ["RoleCost", "SyntheticCluster", "closed_loop", "role_process"]

_FACTS = ModelFacts(
    id="synthetic",
    revision="1",
    pipeline="Synthetic",
    width=64,
    height=64,
    size_multiple=8,
    max_pixels=4096,
    num_inference_steps=1,
    max_inference_steps=1,
    guidance_scale=1.0,
)
_READY_S = 60.0


class SyntheticStage:
    """`payload` bytes go to the next stage; 0 at the last one, which makes a tiny file."""

    def __init__(self, seconds: float, payload: int, work: str) -> None:
        self.facts, self.components = _FACTS, {"synthetic": 0}
        self._seconds, self._work = seconds, work
        self._tensor = torch.ones(payload, dtype=torch.uint8)
        self._matrix = torch.randn(256, 256)
        self._never = threading.Event()

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """The payload."""
        del parameters
        return self._tensor.nbytes

    def warm_up(self, *, small: bool) -> None:
        """There is nothing to warm."""

    def run(self, task: Task) -> Output:
        """Take the time."""
        until = time.monotonic() + self._seconds
        if self._work == "wait":
            self._never.wait(self._seconds)
        while time.monotonic() < until:
            self._matrix @ self._matrix
        task.progress(1, 1)
        if self._tensor.nbytes:
            return Output(tensors={"x": self._tensor})
        return Output(files=[("image/png", b"\x89PNG")])


class _Traced(RoleMachine):
    """Notes when something was staged, and when an input became ready."""

    trace: ClassVar[list[tuple[str, str, float]]] = []

    def step(self, event: jobs.Event, now: float) -> list[jobs.Action]:
        """As ever."""
        if isinstance(event, Ready):
            self.trace.append(("ready", event.request_id, time.monotonic()))
        actions = super().step(event, now)
        for action in actions:
            if isinstance(action, jobs.Send) and isinstance(action.message, Staged):
                self.trace.append(("staged", action.message.request_id, time.monotonic()))
        return actions


@click.command()
@click.argument("role", type=click.Choice(ROLES))
@click.option("--compute-ms", type=float, required=True)
@click.option("--payload", type=int, default=0)
@click.option("--work", type=click.Choice(["wait", "spin"]), default="wait")
@click.option("--trace", type=click.Path(path_type=Path))
@config_options(RoleConfig, "role")
def main(role: Role, compute_ms: float, payload: int, work: str, trace: Path | None, **flags: Any) -> None:
    """Serve until told to leave."""
    config = load(RoleConfig, "role", flags)
    logs.setup(config.log_level, role)
    torch.set_num_threads(1)
    if trace is not None:
        runtime.RoleMachine = _Traced
    stage = SyntheticStage(compute_ms / 1000, payload, work)
    status = runtime.serve(role, config, stage, CpuDevice(), torch.float32)
    if trace is not None:
        trace.write_text(json.dumps(_Traced.trace), encoding="utf-8")
    sys.exit(status)


# ---------------------------------------------------------------- for the benchmarks


@dataclass(frozen=True)
class RoleCost:
    """One instance, and what its stage costs."""

    role: Role
    compute_ms: float
    payload: int = 0
    work: str = "wait"
    trace: Path | None = None


class SyntheticCluster:
    """A router and synthetic roles, each a process. `url` is the router's."""

    def __init__(self, costs: Sequence[RoleCost], flags: Sequence[str] = ()) -> None:
        self._costs, self._flags = costs, flags
        self._stack = ExitStack()

    def __enter__(self) -> SyntheticCluster:
        with ExitStack() as stack:
            router = ("--port", "0", "--control-port", "0", "--log-level", "error")
            cluster = stack.enter_context(LocalCluster(Plan({}, (), router)))
            self.url = cluster.url
            with Client(self.url) as client:
                control = f"tcp://127.0.0.1:{_cluster(client)['control_port']}"
                for cost in self._costs:
                    stack.enter_context(role_process(cost, control, self._flags))
                self._wait_ready(client)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _wait_ready(self, client: Client) -> None:
        """All are there, and have met."""
        senders = {"encoder", "denoiser"} & {cost.role for cost in self._costs}
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            instances = _cluster(client)["instances"]
            met = sum(bool(instance["links"]) for instance in instances)
            if len(instances) == len(self._costs) and met >= len(senders):
                return
            threading.Event().wait(0.05)
        raise RuntimeError(f"the roles were not ready within {_READY_S} s")


def _cluster(client: Client) -> dict[str, Any]:
    state: dict[str, Any] = client.get("/v1/cluster")
    return state


@contextmanager
def role_process(cost: RoleCost, control: str, flags: Sequence[str]) -> Iterator[None]:
    """A synthetic role that dials `control`; ended with the block."""
    command = [sys.executable, "-m", "bench.synthetic", cost.role, "--router", control, "--log-level", "error"]
    command += ["--compute-ms", str(cost.compute_ms), "--payload", str(cost.payload), "--work", cost.work, *flags]
    if cost.trace is not None:
        command += ["--trace", str(cost.trace)]
    with subprocess.Popen(command) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def closed_loop(url: str, requests: int, clients: int) -> float:
    """Have `clients` at a time ask for `requests` pictures; requests per second, the first of each client apart."""

    def ask(count: int) -> None:
        with Client(url) as client:
            for _ in range(count):
                client.generate("x")

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, [1] * clients))
        started = time.monotonic()
        list(pool.map(ask, [requests // clients] * clients))
        return requests // clients * clients / (time.monotonic() - started)


if __name__ == "__main__":
    main()
