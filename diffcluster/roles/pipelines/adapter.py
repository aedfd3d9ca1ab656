"""Any family's model as a role runs it. Each method is one role's part of the pipeline's own `__call__`."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import diffusers
import numpy as np
import torch
from PIL import Image

from diffcluster.errors import InvalidRequestError, ModelError, NanOutputError, WorkerFailedError
from diffcluster.ids import Role
from diffcluster.messages import GenerationParameters
from diffcluster.roles.pipelines import bundle
from diffcluster.roles.pipelines.borders import HandOver, Tape, recorded, replayed
from diffcluster.roles.pipelines.bundle import Scalars, Tensors
from diffcluster.roles.pipelines.directory import ModelDirectory
from diffcluster.roles.pipelines.facts import latent_bytes, model_facts
from diffcluster.roles.pipelines.families import Family, family_of
from diffcluster.roles.pipelines.loading import build, load_parts, weight_bytes
from diffcluster.roles.stage import Progressing, Task
from diffcluster.tensors import aligned

__all__ = ["PipelineAdapter", "load"]

_log = logging.getLogger(__name__)
_IMAGE_CALLS: Final = 4
"""How often a pipeline encodes pictures at most: the picture, the masked picture, the last frame."""
_SMALL: Final = 16 << 10
"""Bytes of what is small beside latents and embeds: masks, ids, timesteps."""
_LONG_PROMPT: Final = "a " * 2048


def load(directory: ModelDirectory, role: Role, device: torch.device, dtype: torch.dtype) -> PipelineAdapter:
    """Load what `role` needs.

    Raises:
        ModelError: the pipeline's class is of no known family, or a component is missing or broken.
    """
    family = family_of(directory.pipeline)
    if family is None:
        raise ModelError("model_index.json", f"{directory.pipeline} cannot be served")
    return PipelineAdapter(directory, family, role, device, dtype)


class PipelineAdapter:
    """One role's part of a model. Its calls may run in fibers, many at a time, on one thread."""

    def __init__(
        self, directory: ModelDirectory, family: Family, role: Role, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._family = family
        parts, owned = load_parts(directory, family, role, device, dtype)
        built = {name: build(name, parts, directory.options()) for name in dict.fromkeys(family.pipelines.values())}
        # The tasks of the class that the directory names come first: defaults are read from it.
        tasks = sorted(family.pipelines, key=lambda task: family.pipelines[task] != directory.pipeline)
        self._pipelines = {task: built[family.pipelines[task]] for task in tasks}
        self._any = self._pipelines[tasks[0]]
        self.facts = model_facts(directory, family, self._pipelines)
        self.components = {name: weight_bytes(part) for name, part in owned.items()}
        self._prompt_bytes = self._measure_prompt() if role == "encoder" else 0

    # ------------------------------------------------------------ encoder

    def encoded_bytes(self, parameters: GenerationParameters) -> int:
        """Upper bound of what `encode` returns: embeds of the longest prompt, latents of pictures, the pictures."""
        if not parameters.inputs:
            return self._prompt_bytes
        pictures = sum(aligned(3 * parameters.width * parameters.height) for _ in parameters.inputs)
        return self._prompt_bytes + pictures + _IMAGE_CALLS * 2 * latent_bytes(self._any, parameters)

    def encode(self, task: Task) -> tuple[Tensors, Scalars]:
        """All that the pipeline encodes, and the client's pictures as (height, width, channels) bytes."""
        parameters = task.parameters
        images = [
            _picture(content, info.kind, parameters)
            for content, info in zip(task.inputs, parameters.inputs, strict=True)
        ]
        pipeline, tape = self._copy(parameters), Tape()
        recorded(pipeline, tape)
        self._until_handed_over(pipeline, parameters, images)
        return bundle.pack({"calls": tape.calls, "inputs": [torch.from_numpy(np.array(image)) for image in images]})

    def _measure_prompt(self) -> int:
        """Bytes of the embeds of a prompt longer than any that the model takes, and of a negative one."""
        task = next(iter(self._pipelines))
        facts = self.facts
        sizes: dict[str, Any] = {"width": facts.size_multiple * 4, "height": facts.size_multiple * 4}
        parameters = GenerationParameters(
            model=facts.id, prompt=_LONG_PROMPT, negative_prompt=_LONG_PROMPT if self._takes_negative(task) else "",
            num_inference_steps=2, guidance_scale=max(2.0, facts.guidance_scale), seed=0, task=task, **sizes,
        )  # fmt: skip
        pipeline, tape = self._copy(parameters), Tape()
        recorded(pipeline, tape)
        with torch.inference_mode():
            self._until_handed_over(pipeline, parameters, self._blank_inputs(task, sizes))
        tensors, _ = bundle.pack(tape.calls)
        return sum(aligned(tensor.nbytes) for tensor in tensors.values()) + _SMALL

    def _takes_negative(self, task: Any) -> bool:
        return "negative_prompt" in inspect.signature(type(self._pipelines[task]).__call__).parameters

    def _blank_inputs(self, task: Any, sizes: dict[str, Any]) -> list[Image.Image]:
        needs = inspect.signature(type(self._pipelines[task]).__call__).parameters.get("image")
        wanted = task not in ("text_to_image", "text_to_video") and needs is not None
        return [Image.new("RGB", (sizes["width"], sizes["height"]))] if wanted else []

    # ------------------------------------------------------------ denoiser

    def denoised_bytes(self, parameters: GenerationParameters) -> int:
        """Upper bound of what `denoise` returns: the latents."""
        return latent_bytes(self._any, parameters) + _SMALL

    def denoise(self, task: Task) -> tuple[Tensors, Scalars]:
        """With what the pipeline calls its autoencoder, after its loop."""
        encoded = bundle.unpack(task.tensors, task.scalars)
        images = [Image.fromarray(image.cpu().numpy()) for image in encoded["inputs"]]
        pipeline = self._copy(task.parameters, task.progress)
        replayed(pipeline, Tape(encoded["calls"]))
        border = self._until_handed_over(pipeline, task.parameters, images)
        for tensor in bundle.pack(border.arguments)[0].values():
            _check_finite(tensor, "the latents")
        return bundle.pack(border.arguments)

    # ------------------------------------------------------------ decoder

    def decode(self, task: Task) -> list[Image.Image]:
        """The pictures, or the frames of the video."""
        arguments = bundle.unpack(task.tensors, task.scalars)
        pipeline = self._pipelines[task.parameters.task]
        decoded = pipeline.vae.decode(*arguments["args"], **arguments["kwargs"])
        sample = decoded.sample if hasattr(decoded, "sample") else decoded[0]
        _check_finite(sample, "the picture")
        return self._finish(pipeline, self._family.picture(sample))

    def _finish(self, pipeline: Any, sample: torch.Tensor) -> list[Image.Image]:
        """What pipelines do after they have decoded."""
        if self._family.media == "video":
            return list(pipeline.video_processor.postprocess_video(sample, output_type="pil")[0])
        clean = None
        if getattr(pipeline, "safety_checker", None) is not None:
            sample, flagged = pipeline.run_safety_checker(sample, sample.device, pipeline.safety_checker.dtype)
            clean = None if flagged is None else [not flag for flag in flagged]
        if getattr(pipeline, "watermark", None) is not None:
            sample = pipeline.watermark.apply_watermark(sample)
        options = {} if clean is None else {"do_denormalize": clean}
        return list(pipeline.image_processor.postprocess(sample, output_type="pil", **options))

    # ------------------------------------------------------------ monolithic

    def generate(self, task: Task) -> list[Image.Image]:
        """All three parts at once."""
        parameters = task.parameters
        images = [
            _picture(content, info.kind, parameters)
            for content, info in zip(task.inputs, parameters.inputs, strict=True)
        ]
        pipeline = self._copy(parameters, task.progress)
        vae = pipeline.vae = copy.copy(pipeline.vae)
        vae.decode = _checked(vae.decode)
        output = pipeline(**self._arguments(pipeline, parameters, images))
        return list(output.frames[0] if self._family.media == "video" else output.images)

    # ------------------------------------------------------------ the pipeline's call

    def _copy(self, parameters: GenerationParameters, progress: Progressing | None = None) -> Any:
        """A pipeline of one request's own: the same components, but for the scheduler, which has a state."""
        pipeline = copy.copy(self._pipelines[parameters.task])
        own = pipeline.scheduler
        if parameters.scheduler in ("", type(own).__name__):
            scheduler = copy.deepcopy(own)
        else:
            scheduler = getattr(diffusers, parameters.scheduler).from_config(own.config)
        pipeline.scheduler = scheduler
        if progress is not None:
            scheduler.step = _counted(scheduler.step, pipeline, progress)
        return pipeline

    def _until_handed_over(
        self, pipeline: Any, parameters: GenerationParameters, images: Sequence[Image.Image]
    ) -> HandOver:
        try:
            pipeline(**self._arguments(pipeline, parameters, images))
        except HandOver as border:
            return border
        raise WorkerFailedError(f"{type(pipeline).__name__} ended without calling the next role's component")

    def _arguments(
        self, pipeline: Any, parameters: GenerationParameters, images: Sequence[Image.Image]
    ) -> dict[str, Any]:
        """Of the pipeline's `__call__`: the same in every role."""
        known = inspect.signature(type(pipeline).__call__).parameters
        for name, given in [("negative_prompt", parameters.negative_prompt), *parameters.extra.items()]:
            if given and name not in known:
                raise InvalidRequestError(f"{name}: {type(pipeline).__name__} has no such argument", param=name)
        pictures = [image for image in images if image.mode == "RGB"]
        masks = [image for image in images if image.mode == "L"]
        values: dict[str, Any] = {
            "prompt": parameters.prompt,
            "negative_prompt": parameters.negative_prompt or None,
            "height": parameters.height,
            "width": parameters.width,
            "num_frames": parameters.num_frames,
            "frame_rate": parameters.fps,
            "num_inference_steps": parameters.num_inference_steps,
            self._family.guidance: parameters.guidance_scale,
            "strength": parameters.strength,
            # On the CPU whatever the device: one seed, one picture, everywhere.
            "generator": torch.Generator("cpu").manual_seed(parameters.seed),
            "image": pictures[0] if len(pictures) == 1 else (pictures or None),
            "mask_image": masks[0] if masks else None,
            "output_type": "pil",
            **self._family.fixed,
            **parameters.extra,
        }
        return {name: value for name, value in values.items() if name in known}


def _picture(content: bytes, kind: str, parameters: GenerationParameters) -> Image.Image:
    """A client's picture at the size that was asked for."""
    with Image.open(io.BytesIO(content), formats=["PNG"]) as file:
        image = file.convert("L" if kind == "mask" else "RGB")
    size = (parameters.width, parameters.height)
    if image.size == size:
        return image
    return image.resize(size, Image.Resampling.NEAREST if kind == "mask" else Image.Resampling.LANCZOS)


def _counted(step: Callable[..., Any], pipeline: Any, progress: Progressing) -> Callable[..., Any]:
    """A scheduler's `step` that reports how far the loop has come."""
    done = 0

    @functools.wraps(step)
    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = step(*args, **kwargs)
        done += 1
        every = getattr(pipeline, "_num_timesteps", None) or len(pipeline.scheduler.timesteps)
        progress(done, max(done, every))
        return result

    return counting


def _checked(decode: Callable[..., Any]) -> Callable[..., Any]:
    def checking(*args: Any, **kwargs: Any) -> Any:
        decoded = decode(*args, **kwargs)
        _check_finite(decoded.sample if hasattr(decoded, "sample") else decoded[0], "the picture")
        return decoded

    return checking


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise NanOutputError(f"{what} came out as NaN or infinity; it would have been a black picture")
