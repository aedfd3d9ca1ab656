"""What requests share while they run side by side, and a pipeline changes for a moment."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from diffcluster.messages import GenerationParameters, InputImage
from diffcluster.roles.meeting import Fiber
from diffcluster.roles.stage import Task
from tests.pipelines.conftest import Loading
from tests.pipelines.kit import LIBRARIES_WARN

pytestmark = pytest.mark.filterwarnings(*LIBRARIES_WARN)


def task_of(seed: int) -> Task:
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8))
    file = io.BytesIO()
    picture.save(file, "PNG")
    info = InputImage("image", 32, 32, len(file.getvalue()))
    parameters = GenerationParameters(
        model="sdxl", prompt="a cat", width=32, height=32, num_inference_steps=4, guidance_scale=5.0, seed=seed,
        task="image_to_image", strength=0.5, inputs=(info,),
    )  # fmt: skip
    return Task(parameters, {}, {}, lambda *_: None, (file.getvalue(),))


def test_an_autoencoder_that_is_cast_to_encode_is_cast_for_one_request_at_a_time(part_of: Loading) -> None:
    adapter = part_of("sdxl", "encoder", torch.bfloat16)
    with torch.inference_mode():
        alone = [adapter.encode(task_of(seed))[0] for seed in range(3)]
        fibers = [Fiber(lambda seed=seed: adapter.encode(task_of(seed))) for seed in range(3)]
        for fiber in fibers:
            fiber.start()
        while parked := [fiber for fiber in fibers if fiber.call is not None]:
            for fiber in parked:  # in lockstep: each is at the same call before any goes on
                call = fiber.call
                assert call is not None
                fiber.answer(call.function(*call.args, **call.kwargs))
    for fiber, tensors in zip(fibers, alone, strict=True):
        made, _ = fiber.result
        assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
