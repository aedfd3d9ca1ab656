"""Requests that fit a tiny model, the way of tensors from role to role, and the plain pipeline to compare with."""

from __future__ import annotations

import functools
import inspect
import io
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import numpy as np
import torch
from PIL import Image

from diffcluster.messages import GenerationParameters, InputImage, ModelFacts
from diffcluster.roles.stage import Task
from diffcluster.transport.packing import manifest_of, pack, unpack

PIPELINES = {
    ("sd15", "image_to_image"): "StableDiffusionImg2ImgPipeline",
    ("sd15", "inpaint"): "StableDiffusionInpaintPipeline",
    ("sdxl", "image_to_image"): "StableDiffusionXLImg2ImgPipeline",
    ("sdxl", "inpaint"): "StableDiffusionXLInpaintPipeline",
    ("sd3", "image_to_image"): "StableDiffusion3Img2ImgPipeline",
    ("sd3", "inpaint"): "StableDiffusion3InpaintPipeline",
    ("flux", "image_to_image"): "FluxImg2ImgPipeline",
    ("flux", "inpaint"): "FluxInpaintPipeline",
    ("qwen-image", "image_to_image"): "QwenImageImg2ImgPipeline",
    ("qwen-image", "inpaint"): "QwenImageInpaintPipeline",
    ("flux2-klein", "edit"): "Flux2KleinPipeline",
    ("qwen-image-edit", "edit"): "QwenImageEditPipeline",
    ("wan21-i2v", "image_to_video"): "WanImageToVideoPipeline",
    ("ltx-i2v", "image_to_video"): "LTXImageToVideoPipeline",
}
"""Class of each model's tasks that start from pictures."""

LIBRARIES_WARN = ("ignore:__array__ implementation:DeprecationWarning", "ignore:__array_wrap__:DeprecationWarning")
"""Filters for what diffusers' schedulers make numpy say."""

Bundle = tuple[dict[str, torch.Tensor], dict[str, Any]]


def request(name: str, facts: ModelFacts, **fields: Any) -> GenerationParameters:
    """A small request to the model called `name`; a negative prompt only where the pipeline takes one."""
    step = facts.size_multiple
    sides = max(2 * step, 32) // step * step, max(3 * step, 32) // step * step
    width, height = (facts.width, facts.height) if name in ("cogvideox", "demo") else sides
    values: dict[str, Any] = {
        "model": facts.id, "prompt": "a red apple", "num_inference_steps": 3, "seed": 5, "task": facts.tasks[0],
        "guidance_scale": max(2.0, facts.guidance_scale), "width": width, "height": height,
        **({"num_frames": 9, "fps": facts.video.fps} if facts.video else {}), **fields,
    }  # fmt: skip
    if not takes_negative(facts.pipeline):
        values["negative_prompt"] = ""
    return GenerationParameters(**values)


def takes_negative(pipeline: str) -> bool:
    return "negative_prompt" in inspect.signature(getattr(diffusers, pipeline).__call__).parameters


def with_pictures(wanted: GenerationParameters) -> tuple[GenerationParameters, tuple[bytes, ...], list[Image.Image]]:
    """`wanted` with the pictures that its task takes, as files and as what they show."""
    random, size = np.random.default_rng(0), (wanted.height, wanted.width)
    images = [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8))]
    if wanted.task == "inpaint":
        mask = np.zeros(size, dtype=np.uint8)
        mask[: size[0] // 2] = 255
        images.append(Image.fromarray(mask))
    files = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    infos = [
        InputImage("mask" if image.mode == "L" else "image", *image.size, len(content))
        for image, content in zip(images, files, strict=True)
    ]
    return msgspec.structs.replace(wanted, inputs=tuple(infos)), tuple(files), images


def crossed(bundle: Bundle) -> Bundle:
    """What the next role gets of `bundle`: from bytes of a slot and bytes of a message alone."""
    tensors, scalars = bundle
    manifest = manifest_of(tensors)
    slot = np.zeros(manifest.nbytes, dtype=np.uint8)
    pack(tensors, manifest, slot)
    arrived = np.frombuffer(bytearray(slot.tobytes()), dtype=np.uint8)
    message = msgspec.json.decode(msgspec.json.encode(scalars))
    return unpack(manifest, arrived, torch.device("cpu")), message


def slot_bytes(bundle: Bundle) -> int:
    return manifest_of(bundle[0]).nbytes


def task(wanted: GenerationParameters, bundle: Bundle = ({}, {}), inputs: tuple[bytes, ...] = ()) -> Task:
    return Task(wanted, *bundle, lambda *_: None, inputs)


@functools.lru_cache(maxsize=2)
def _whole(path: Path, cls: str, dtype: torch.dtype) -> Any:
    pipeline = getattr(diffusers, cls).from_pretrained(str(path), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def plain(path: Path, wanted: GenerationParameters, images: list[Image.Image], dtype: torch.dtype) -> list[np.ndarray]:
    """Pictures or frames of the pipeline as anybody would call it: one process, nothing of ours."""
    whole = _whole(path, PIPELINES.get((path.name, wanted.task), "DiffusionPipeline"), dtype)
    known = inspect.signature(type(whole).__call__).parameters
    guidance = "true_cfg_scale" if type(whole).__name__.startswith("Qwen") else "guidance_scale"
    values: dict[str, Any] = {
        "prompt": wanted.prompt, "num_inference_steps": wanted.num_inference_steps, guidance: wanted.guidance_scale,
        "generator": torch.Generator().manual_seed(wanted.seed), "width": wanted.width, "height": wanted.height,
        "output_type": "pil",
    }  # fmt: skip
    optional = {"num_frames": wanted.num_frames, "frame_rate": wanted.fps, "use_resolution_binning": False}
    if images:
        optional |= {"image": images[0], "mask_image": images[-1], "strength": wanted.strength}
    if wanted.negative_prompt:
        values["negative_prompt"] = wanted.negative_prompt
    values |= {name: value for name, value in optional.items() if name in known}
    output = whole(**{name: value for name, value in values.items() if name in known})
    return arrays(output.frames[0] if "frames" in output else output.images)


def arrays(images: Any) -> list[np.ndarray]:
    return [np.array(image) for image in images]


def same(ones: list[np.ndarray], others: list[np.ndarray]) -> bool:
    """Bit for bit, and pictures of something."""
    assert all(one.dtype == np.uint8 and one.std() > 5 for one in ones)
    return len(ones) == len(others) and all(map(np.array_equal, ones, others))
