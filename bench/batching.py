"""What continuous batching is worth: the embedded model's denoiser under three ways to serve the same requests.

    python -m bench.batching [--quick] [--json FILE]

one after another   as most servers do
batch at start      requests of one step count that wait at the same time are one call of the plain pipeline
continuous          ours: each request is a call of its own, and they meet at every step

First 16 requests wait together. Then requests of mixed step counts arrive at random (Poisson), somewhat faster than
one after another can serve them; the arrivals are the same for all three. All pictures' latents are compared with those
of requests that ran alone.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bench.command import alone
from bench.report import Claim, Result
from diffcluster.messages import GenerationParameters
from diffcluster.roles.batching import Policy
from diffcluster.roles.compute import ComputeLoop, Work
from diffcluster.roles.costs import CostModel
from diffcluster.roles.device import CpuDevice
from diffcluster.roles.pipelines import PipelineAdapter, Target, bundle, load
from diffcluster.roles.pipelines.directory import ModelDirectory, find_model
from diffcluster.roles.stage import Task
from diffcluster.roles.stages import DenoiserStage
from diffcluster.roles.staging import Output
from diffcluster.transport.mailbox import Mailbox

__all__ = ["measure"]

_WAITING = 16
_STEPS = (4, 8, 12, 16, 20, 24)
_PROMPTS = ("a slice of pizza", "a red apple", "a cat", "a rocket", "a sunflower", "a panda")
_LEARNT = (2, 3, 4, 5, 6, 8, 12, 16)
"""Sizes of batches that a role has met, and compared with lone calls, before it is measured."""
_LOAD = 1.3
"""Requests arrive so many times faster than one after another serves them."""


@dataclass
class _Request:
    """What is asked, when, and what came of it; seconds from the start."""

    parameters: GenerationParameters
    encoded: tuple[dict[str, torch.Tensor], dict[str, Any]]
    at: float = 0.0
    ended: float = 0.0
    latents: torch.Tensor = field(default_factory=lambda: torch.empty(0))


_Serve = Callable[[Sequence[_Request]], None]


def measure(quick: bool) -> Result:
    """Throughputs and latencies, side by side."""
    target = Target("denoiser", torch.device("cpu"), torch.float32)
    directory = ModelDirectory(find_model("demo"))
    denoiser = load(directory, target)
    encoder = load(directory, Target("encoder", target.device, target.dtype))
    learnt = CostModel()  # as in a role that has been up for a while
    ways: dict[str, _Serve] = {
        "one after another": lambda requests: _continuous(denoiser, requests, Policy(1), CostModel()),
        "batch at start": lambda requests: _at_start(denoiser, requests),
        "continuous": lambda requests: _continuous(denoiser, requests, Policy(_WAITING, exact=True), learnt),
    }
    rows: list[tuple[str, ...]] = []
    with torch.inference_mode():
        for count in (1, *_LEARNT):
            for serve in ways.values() if count == 1 else [ways["continuous"]]:
                serve([_request(encoder, index, 1) for index in range(count)])
        steps, mix = (6, _STEPS[:3]) if quick else (20, _STEPS)
        together = [_request(encoder, index, steps) for index in range(_WAITING)]
        waiting = {name: _best(serve, together, 1 if quick else 3) for name, serve in ways.items()}
        pace = waiting["one after another"][0] * steps / statistics.mean(mix)
        arriving = _arrivals(encoder, mix, 12 if quick else 96, pace * _LOAD)
        poisson = {name: _best(serve, arriving, 1) for name, serve in ways.items()}
        worst = _worst_difference(denoiser, arriving)
    for load_name, results in (
        (f"16 waiting, {steps} steps", waiting),
        (f"Poisson, {mix[0]} to {mix[-1]} steps", poisson),
    ):
        rows += [
            (load_name, name, f"{rate:.2f}", *(f"{value:.2f}" for value in times))
            for name, (rate, times) in results.items()
        ]
    return Result(("load", "way", "requests/s", "p50 s", "p95 s", "p99 s"), rows, _claims(waiting, poisson, worst))


_Measured = tuple[float, tuple[float, float, float]]
"""Requests per second, and the percentiles of their latencies."""


def _claims(waiting: dict[str, _Measured], poisson: dict[str, _Measured], worst: float) -> list[Claim]:
    gain = waiting["continuous"][0] / waiting["one after another"][0]
    ahead = poisson["continuous"][0] / poisson["batch at start"][0]
    p95 = {name: times[1] for name, (_, times) in poisson.items()}
    slower = p95["continuous"] / min(p95["one after another"], p95["batch at start"])
    return [
        Claim("16 waiting: throughput against one after another", gain, ">= 2.3", gain >= 2.3),
        Claim("Poisson: throughput against batch at start", ahead, "> 1", ahead > 1),
        Claim("Poisson: p95 latency against the better of both", slower, "< 1", slower < 1),
        Claim("difference from requests alone, of the largest latent", worst, "0", worst == 0),
    ]


def _request(encoder: PipelineAdapter, index: int, steps: int, at: float = 0.0) -> _Request:
    facts = encoder.facts
    parameters = GenerationParameters(
        model=facts.id, prompt=_PROMPTS[index % len(_PROMPTS)], width=facts.width, height=facts.height,
        num_inference_steps=steps, guidance_scale=2.0, seed=index,
    )  # fmt: skip
    return _Request(parameters, encoder.encode(Task(parameters, {}, {}, lambda *_: None)), at)


def _arrivals(encoder: PipelineAdapter, mix: Sequence[int], count: int, rate: float) -> list[_Request]:
    rng = random.Random(1)  # noqa: S311 - the same arrivals in every run
    at, requests = 0.0, []
    for index in range(count):
        requests.append(_request(encoder, index, rng.choice(mix), at))
        at += rng.expovariate(rate)
    return requests


def _best(serve: _Serve, requests: Sequence[_Request], rounds: int) -> _Measured:
    """The round with the median throughput."""
    measured = []
    for _ in range(rounds):
        serve(requests)
        latencies = sorted(request.ended - request.at for request in requests)
        cuts = [float(np.percentile(latencies, percent)) for percent in (50, 95, 99)]
        measured.append((len(requests) / max(request.ended for request in requests), (cuts[0], cuts[1], cuts[2])))
    return sorted(measured)[rounds // 2]


class _Arrivals:
    """Hands requests over when their time has come, on a thread of its own."""

    def __init__(self, requests: Sequence[_Request], post: Callable[[_Request | None], object]) -> None:
        self.started = time.monotonic()
        self._requests, self._post, self._pause = requests, post, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for request in self._requests:
            self._pause.wait(max(0.0, self.started + request.at - time.monotonic()))
            self._post(request)
        self._post(None)

    def ended(self, request: _Request, latents: torch.Tensor) -> None:
        """Note when, and what."""
        request.ended, request.latents = time.monotonic() - self.started, latents

    def join(self) -> None:
        """All have arrived."""
        self._thread.join()


def _continuous(denoiser: PipelineAdapter, requests: Sequence[_Request], policy: Policy, costs: CostModel) -> None:
    """By the compute loop of a role."""
    by_key = {(str(index), 1): request for index, request in enumerate(requests)}
    keys = {id(request): key for key, request in by_key.items()}

    class Ends:
        def stage(self, output: Output) -> None:
            arrivals.ended(by_key[output.key], next(iter(output.tensors.values())))

    loop = ComputeLoop(DenoiserStage(denoiser), CpuDevice(), Ends(), lambda _: None, policy)  # type: ignore[arg-type]
    loop.steps.costs = costs

    def post(request: _Request | None) -> None:
        if request is None:
            loop.submit(None)
            return
        target, (tensors, scalars) = np.zeros(1, np.uint8), request.encoded
        loop.submit(Work(keys[id(request)], request.parameters, tensors, scalars, target, threading.Event()))  # type: ignore[arg-type]

    arrivals = _Arrivals(requests, post)
    loop.run()
    arrivals.join()
    loop.close()


def _at_start(denoiser: PipelineAdapter, requests: Sequence[_Request]) -> None:
    """The oldest that waits, and those like it: one call of the plain pipeline."""
    inbox: Mailbox[_Request | None] = Mailbox()
    arrivals = _Arrivals(requests, inbox.post)
    waiting: list[_Request] = []
    open_ = True
    while open_ or waiting:
        for request in inbox.take() if open_ and not waiting else inbox.take_all():
            if request is None:
                open_ = False
            else:
                waiting.append(request)
        if waiting:
            steps = waiting[0].parameters.num_inference_steps
            batch = [request for request in waiting if request.parameters.num_inference_steps == steps][:_WAITING]
            for request, latents in zip(batch, _plain(denoiser, batch), strict=True):
                arrivals.ended(request, latents[None])
            waiting = [request for request in waiting if request not in batch]
    arrivals.join()
    inbox.close()


def _plain(denoiser: PipelineAdapter, batch: Sequence[_Request]) -> torch.Tensor:
    """Latents, as the autoencoder takes them, of one call of diffusers for several prompts."""
    embeds, negative = (torch.cat(parts) for parts in zip(*(_embeds(request) for request in batch), strict=True))
    first = batch[0].parameters
    pipeline = denoiser.pipeline("text_to_image")
    latents: torch.Tensor = pipeline(
        prompt_embeds=embeds,
        negative_prompt_embeds=negative,
        width=first.width,
        height=first.height,
        num_inference_steps=first.num_inference_steps,
        guidance_scale=first.guidance_scale,
        generator=[torch.Generator("cpu").manual_seed(request.parameters.seed) for request in batch],
        output_type="latent",
    ).images
    return latents / pipeline.vae.config.scaling_factor


def _embeds(request: _Request) -> tuple[torch.Tensor, torch.Tensor]:
    calls = bundle.unpack(*request.encoded)["calls"]
    embeds, negative = calls[0][1]
    return embeds, negative


def _worst_difference(denoiser: PipelineAdapter, requests: Sequence[_Request]) -> float:
    """Of the latents of the last run, which was ours, from those of each request alone; by the largest latent."""
    worst = 0.0
    for request in requests:
        tensors, _ = denoiser.denoise(Task(request.parameters, *request.encoded, lambda *_: None))
        lone = next(iter(tensors.values()))
        worst = max(worst, float((request.latents - lone).abs().max() / lone.abs().max()))
    return worst


if __name__ == "__main__":
    sys.exit(alone("batching", measure))
