"""What the split costs: one picture after another by plain diffusers, by the monolithic role, and by three roles.

All run in one go, in turns, so that whatever else the machine does meets each alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from bench.report import Claim, Result
from diffcluster.client import Client
from diffcluster.local import LocalCluster, Plan

__all__ = ["measure"]

_PROMPT = "a slice of pizza"
_STEPS = 20
_PLAIN = """
import sys
import torch
from diffusers import StableDiffusionPipeline
from diffcluster.roles.pipelines.directory import find_model
pipeline = StableDiffusionPipeline.from_pretrained(find_model("demo"))
pipeline.set_progress_bar_config(disable=True)
print("ready", flush=True)
for line in sys.stdin:
    pipeline(sys.argv[1], num_inference_steps=int(sys.argv[2]), generator=torch.Generator().manual_seed(int(line)))
    print("done", flush=True)
"""


class _Plain:
    """Plain diffusers in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _PLAIN, _PROMPT, str(_STEPS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> _Plain:
        self._read()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def picture(self, seed: int) -> None:
        """Make one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        self._read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("plain diffusers has ended")


def measure(quick: bool) -> Result:
    """Seconds per picture, and their ratio to plain diffusers."""
    rounds = 5 if quick else 25
    with ExitStack() as stack:
        makers: dict[str, Callable[[int], object]] = {"plain diffusers": stack.enter_context(_Plain()).picture}
        makers["monolithic"] = _cluster(stack, Plan({"monolithic": 1}, ["--log-level", "error"], _ROUTER))
        for engine in ("shm", "tcp"):
            plan = Plan(
                {"encoder": 1, "denoiser": 1, "decoder": 1}, ["--engine", engine, "--log-level", "error"], _ROUTER
            )
            makers[f"three roles, {engine}"] = _cluster(stack, plan)
        seconds = _in_turns(makers, rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    plain = medians["plain diffusers"]
    rows = [(name, f"{median:.3f}", f"{median / plain:.2f}") for name, median in medians.items()]
    worst = max(median / plain for name, median in medians.items() if name.startswith("three"))
    claim = Claim("three roles against plain diffusers, one picture at a time", worst, "<= 1.25", worst <= 1.25)
    return Result(("", "median s", "x plain"), rows, [claim])


_ROUTER = ("--port", "0", "--control-port", "0", "--log-level", "error")


def _cluster(stack: ExitStack, plan: Plan) -> Callable[[int], object]:
    cluster = stack.enter_context(LocalCluster(plan))
    cluster.wait_ready()
    client = stack.enter_context(Client(cluster.url))
    return lambda seed: client.generate(_PROMPT, seed=seed, num_inference_steps=_STEPS)


def _in_turns(makers: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for turn in range(-1, rounds):
        for name, make in makers.items():
            started = time.monotonic()
            make(turn + 1)
            if turn >= 0:  # the first round warms up
                seconds[name].append(time.monotonic() - started)
    return seconds
