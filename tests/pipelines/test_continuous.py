"""Real pipelines side by side in one compute loop: each request's result is the one that it has alone."""

from __future__ import annotations

import io
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from diffcluster.ids import RequestId, Role
from diffcluster.messages import GenerationParameters, Progress
from diffcluster.roles.batching import Policy
from diffcluster.roles.compute import ComputeLoop, Work
from diffcluster.roles.costs import CostModel
from diffcluster.roles.device import CpuDevice
from diffcluster.roles.pipelines import PipelineAdapter
from diffcluster.roles.stages import STAGES
from diffcluster.testing import TINY_MODELS
from tests.pipelines.conftest import Loading
from tests.pipelines.kit import LIBRARIES_WARN, PIPELINES, Bundle, arrays, request, task, with_pictures

pytestmark = pytest.mark.filterwarnings(*LIBRARIES_WARN)

CLOSE = 1e-4
"""How far a result may be from the one alone, of its largest value: other sizes of matrices, other roundings."""
PROMPTS = ("a red apple", "a cat on a table", "a blue rocket over the sea", "a house")
JOINED_ENCODERS = (
    "sd15", "sdxl", "sd3", "flux", "pixart-sigma", "wan21", "wan22", "wan21-i2v", "ltx", "ltx-i2v", "cogvideox",
)  # fmt: skip
"""Models whose text encoders are of classes that are known to be joinable."""
SLOW = ("qwen-image-edit",)


class Eager(CostModel):
    """Measured times would decide who is joined, differently each time."""

    def worthwhile(self, *_: Any) -> bool:
        return True


class Side:
    """A role's stage in a loop. `every`: a request more comes after so many reports of progress; 0: all at once."""

    def __init__(self, adapter: PipelineAdapter, role: Role, every: int = 0) -> None:
        self._loop = ComputeLoop(STAGES[role](adapter), CpuDevice(), self, self._note, Policy(max_size=16))
        self._loop.steps.costs = Eager()
        self._every, self._reports, self._later = every, 0, []
        self.outputs: dict[str, Any] = {}

    def stage(self, output: Any) -> None:
        """As a stager."""
        self.outputs[output.key[0]] = output

    def _note(self, report: Any) -> None:
        if isinstance(report, Progress):
            self._reports += 1
            if self._later and self._reports % self._every == 0:
                self._loop.submit(self._later.pop(0))
        elif hasattr(report, "event"):
            self.outputs[report.event.key[0]] = report

    def run(self, wanted: list[GenerationParameters], bundles: list[Bundle], inputs: Any = None) -> list[Any]:
        """What came of each."""
        works = [
            Work((RequestId(f"r{number}"), 1), one, dict(tensors), scalars, self._target(), threading.Event(), files)
            for number, (one, (tensors, scalars), files) in enumerate(
                zip(wanted, bundles, inputs or [()] * len(wanted), strict=True)
            )
        ]
        first = works[:1] if self._every else works
        self._later = works[len(first) :]
        for work in (*first, None):
            self._loop.submit(work)
        self._loop.run()
        self._loop.close()
        assert not self._later
        return [self.outputs[work.key[0]] for work in works]

    def _target(self) -> np.ndarray | None:
        return None if self._loop._stage.output_bytes(request_of_nothing) == 0 else np.zeros(1, np.uint8)

    @property
    def calls(self) -> int:
        return self._loop.steps.totals["calls"]

    @property
    def parts(self) -> int:
        """Calls that there would have been without joining."""
        return self._loop.steps.totals["requests"]


request_of_nothing = GenerationParameters(
    model="", prompt="", width=64, height=64, num_inference_steps=1, guidance_scale=1.0, seed=0
)


def mixed(name: str, adapter: PipelineAdapter) -> tuple[list[GenerationParameters], list[Any]]:
    """Four requests of which nothing is equal, and the pictures that they start from."""
    guidance = max(2.0, adapter.facts.guidance_scale)
    values = zip(PROMPTS, (5, 6, 8, 4), (guidance, guidance + 0.5, 1.0, guidance + 1), strict=True)
    wanted = [
        request(
            name, adapter.facts, prompt=prompt, num_inference_steps=steps, guidance_scale=scale, seed=5 + number,
            negative_prompt="ugly" if number % 2 else "",
        )
        for number, (prompt, steps, scale) in enumerate(values)
    ]  # fmt: skip
    files = [()] * len(wanted)
    if any((name, kind) in PIPELINES for kind in ("edit", "image_to_video")) and name != "flux2-klein":
        wanted, files = zip(*[with_pictures(one)[:2] for one in wanted], strict=True)
    return list(wanted), list(files)


def encoded(adapter: PipelineAdapter, wanted: list[GenerationParameters], files: list[Any]) -> list[Bundle]:
    with torch.inference_mode():
        return [adapter.encode(task(one, inputs=content)) for one, content in zip(wanted, files, strict=True)]


def denoised(adapter: PipelineAdapter, wanted: list[GenerationParameters], bundles: list[Bundle]) -> list[Bundle]:
    """Each alone."""
    with torch.inference_mode():
        return [adapter.denoise(task(one, made)) for one, made in zip(wanted, bundles, strict=True)]


def distance(output: Any, alone: Bundle) -> float:
    """Of the two results, measured by the largest value."""
    tensors, scalars = alone
    assert output.scalars == scalars
    assert output.tensors.keys() == tensors.keys()
    furthest = 0.0
    for name, tensor in tensors.items():
        assert output.tensors[name].shape == tensor.shape
        scale = tensor.double().abs().max().item() or 1.0
        furthest = max(furthest, (output.tensors[name].double() - tensor.double()).abs().max().item() / scale)
    return furthest


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name not in SLOW])
def test_requests_that_come_at_different_steps_are_denoised_as_if_each_were_alone(part_of: Loading, name: str) -> None:
    wanted, files = mixed(name, part_of(name, "encoder"))
    bundles = encoded(part_of(name, "encoder"), wanted, files)
    denoiser = part_of(name, "denoiser")
    alone = denoised(denoiser, wanted, bundles)
    side = Side(denoiser, "denoiser", every=2)
    outputs = side.run(wanted, bundles)
    assert max(map(distance, outputs, alone)) < CLOSE
    assert min(distance(output, alone[0]) for output in outputs[1:]) > 100 * CLOSE, "they are not to be told apart"
    assert side.calls < side.parts


@pytest.mark.parametrize("name", ["sd15", "flux", "qwen-image", "z-image", "wan22", "ltx-i2v", "demo"])
def test_a_lone_request_is_denoised_bit_for_bit_as_without_a_loop(part_of: Loading, name: str) -> None:
    wanted, files = mixed(name, part_of(name, "encoder"))
    bundles = encoded(part_of(name, "encoder"), wanted[:1], files[:1])
    [alone] = denoised(part_of(name, "denoiser"), wanted[:1], bundles)
    [output] = Side(part_of(name, "denoiser"), "denoiser").run(wanted[:1], bundles)
    assert output.tensors.keys() == alone[0].keys()
    assert all(torch.equal(output.tensors[key], alone[0][key]) for key in alone[0])


def test_requests_with_different_schedulers_are_denoised_together(part_of: Loading) -> None:
    encoder, denoiser = part_of("sd15", "encoder"), part_of("sd15", "denoiser")
    schedulers = encoder.facts.schedulers
    assert len(schedulers) >= 8
    wanted = [request("sd15", encoder.facts, scheduler=name, num_inference_steps=4) for name in schedulers]
    bundles = encoded(encoder, wanted, [()] * len(wanted))
    alone = denoised(denoiser, wanted, bundles)
    side = Side(denoiser, "denoiser")
    outputs = side.run(wanted, bundles)
    for name, output, expected in zip(schedulers, outputs, alone, strict=True):
        assert distance(output, expected) < CLOSE, name
    assert side.calls <= side.parts / 4


def test_pictures_of_two_sizes_are_denoised_side_by_side(part_of: Loading) -> None:
    encoder, denoiser = part_of("sd15", "encoder"), part_of("sd15", "denoiser")
    wanted = [request("sd15", encoder.facts, width=32 + 16 * (number % 2), seed=number) for number in range(4)]
    bundles = encoded(encoder, wanted, [()] * 4)
    side = Side(denoiser, "denoiser")
    outputs = side.run(wanted, bundles)
    assert max(map(distance, outputs, denoised(denoiser, wanted, bundles))) < CLOSE
    assert side.calls == side.parts / 2


@pytest.mark.parametrize("kind", ["image_to_image", "inpaint"])
def test_pictures_and_prompts_start_side_by_side(part_of: Loading, kind: Any) -> None:
    encoder, denoiser = part_of("sd15", "encoder"), part_of("sd15", "denoiser")
    fields = [{"task": kind, "strength": 0.6, "seed": 1}, {"task": kind, "seed": 2}]
    made = [with_pictures(request("sd15", encoder.facts, num_inference_steps=6, **each))[:2] for each in fields]
    made.append((request("sd15", encoder.facts, seed=3), ()))
    wanted, files = map(list, zip(*made, strict=True))
    bundles = encoded(encoder, wanted, files)
    side = Side(denoiser, "denoiser")
    outputs = side.run(wanted, bundles)
    assert max(map(distance, outputs, denoised(denoiser, wanted, bundles))) < CLOSE
    assert side.calls < side.parts


def test_sixteen_requests_of_the_embedded_model_share_their_steps(part_of: Loading) -> None:
    encoder, denoiser = part_of("demo", "encoder"), part_of("demo", "denoiser")
    wanted = [
        request(
            "demo",
            encoder.facts,
            prompt=PROMPTS[number % 4],
            num_inference_steps=2 + number // 2,
            seed=number,
            guidance_scale=1.0 + 2 * (number % 2),
        )
        for number in range(16)
    ]
    bundles = encoded(encoder, wanted, [()] * 16)
    alone = denoised(denoiser, wanted, bundles)
    side = Side(denoiser, "denoiser", every=1)
    assert max(map(distance, side.run(wanted, bundles), alone)) < CLOSE
    assert side.calls < side.parts / 3


def test_five_at_once_with_one_prompt_give_five_right_pictures(part_of: Loading) -> None:
    encoder, denoiser, decoder = (part_of("demo", role) for role in ("encoder", "denoiser", "decoder"))
    wanted = [request("demo", encoder.facts, prompt="a red circle", seed=number) for number in range(5)]
    together = Side(encoder, "encoder").run(wanted, [({}, {})] * 5)
    latents = Side(denoiser, "denoiser").run(wanted, [(made.tensors, made.scalars) for made in together])
    alone = denoised(denoiser, wanted, encoded(encoder, wanted, [()] * 5))
    with torch.inference_mode():
        right = [arrays(decoder.decode(task(one, made)))[0] for one, made in zip(wanted, alone, strict=True)]
        made = [arrays(decoder.decode(task(wanted[0], (each.tensors, each.scalars))))[0] for each in latents]
    assert len({picture.tobytes() for picture in right}) == 5
    for picture, expected in zip(made, right, strict=True):
        assert np.abs(picture.astype(int) - expected).max() <= 1


@pytest.mark.parametrize("name", [name for name in TINY_MODELS if name not in SLOW])
def test_requests_are_encoded_side_by_side_as_if_each_were_alone(part_of: Loading, name: str) -> None:
    encoder = part_of(name, "encoder")
    wanted, files = mixed(name, encoder)
    side = Side(encoder, "encoder")
    outputs = side.run(wanted, [({}, {})] * 4, files)
    assert max(map(distance, outputs, encoded(encoder, wanted, files))) < CLOSE
    if name in JOINED_ENCODERS:
        assert side.calls < side.parts


@pytest.mark.parametrize("name", ["sd15", "sd3", "qwen-image", "wan21", "demo"])
def test_requests_are_decoded_together_as_if_each_were_alone(part_of: Loading, name: str) -> None:
    wanted, files = mixed(name, part_of(name, "encoder"))
    latents = denoised(part_of(name, "denoiser"), wanted, encoded(part_of(name, "encoder"), wanted, files))
    decoder = part_of(name, "decoder")
    side = Side(decoder, "decoder")
    results = side.run([msgspec.structs.replace(one, output_format="png") for one in wanted], latents)
    assert (side.calls, side.parts) == (1, 4)
    with torch.inference_mode():
        alone = [decoder.decode(task(one, made)) for one, made in zip(wanted, latents, strict=True)]
    for result, frames in zip(results, alone, strict=True):
        assert _close(result.files[0], arrays(frames))


def _close(file: bytes, frames: list[np.ndarray]) -> bool:
    """Whether `file` shows `frames`, each channel of them within one step."""
    with Image.open(io.BytesIO(file)) as image:
        shown = [np.array(frame.convert("RGB")).astype(int) for frame in ImageSequence.Iterator(image)]
    return len(shown) == len(frames) and all(
        np.abs(one - other).max() <= 1 for one, other in zip(shown, frames, strict=True)
    )
