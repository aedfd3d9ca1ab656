"""Any family's model as a role runs it. Each method is one role's part of the pipeline's own `__call__`."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from diffcluster.errors import ModelError
from diffcluster.ids import Role
from diffcluster.messages import GenerationParameters, TaskKind
from diffcluster.roles.pipelines import bundle
from diffcluster.roles.pipelines.blanks import BlankTape, blank_latents
from diffcluster.roles.pipelines.borders import Tape, recorded, replayed
from diffcluster.roles.pipelines.bundle import Scalars, Tensors
from diffcluster.roles.pipelines.calling import (
    INPAINT_CHANNELS,
    arguments,
    check_finite,
    checked,
    own_copy,
    pictures,
    until_handed_over,
)
from diffcluster.roles.pipelines.directory import ModelDirectory
from diffcluster.roles.pipelines.facts import latent_bytes, model_facts
from diffcluster.roles.pipelines.families import FAMILIES, Family, family_of, latent_channels
from diffcluster.roles.pipelines.loading import Target, build, load_parts, weight_bytes
from diffcluster.roles.stage import Task
from diffcluster.roles.steps import OUT_OF_MEMORY
from diffcluster.tensors import aligned

__all__ = ["PipelineAdapter", "load"]

_log = logging.getLogger(__name__)
_IMAGE_CALLS: Final = 4
"""How often a pipeline encodes pictures at most: the picture, the masked picture, the last frame."""
_SMALL: Final = 16 << 10
"""Bytes of what is small beside latents and embeds: masks, ids, timesteps."""
_LONG_PROMPT: Final = "a " * 2048


def load(directory: ModelDirectory, target: Target) -> PipelineAdapter:
    """Load what a role needs.

    Raises:
        ModelError: the pipeline's class is of no known family, or a component is missing or broken.
        ConfigError: something that `target.config` asks for cannot be had.
    """
    family = family_of(directory.pipeline)
    if family is None:
        supported = ", ".join(sorted({name for known in FAMILIES for name in known.pipelines.values()}))
        raise ModelError("model_index.json", f"{directory.pipeline} cannot be served; supported: {supported}")
    return PipelineAdapter(directory, family, target)


def _can_do(task: TaskKind, pipeline: Any) -> bool:
    """A UNet that was made for inpainting has channels for the mask, too; others take the latents alone."""
    unet = getattr(pipeline, "unet", None)
    if unet is None:
        return True
    channels, plain = int(unet.config.in_channels), latent_channels(pipeline)
    return channels == plain or (task == "inpaint" and channels == INPAINT_CHANNELS)


class PipelineAdapter:
    """One role's part of a model. Its calls may run in fibers, many at a time, on one thread."""

    def __init__(self, directory: ModelDirectory, family: Family, target: Target) -> None:
        self._family = family
        parts, owned = load_parts(directory, family, target)
        built = {name: build(name, parts, directory.options()) for name in dict.fromkeys(family.pipelines.values())}
        # The tasks of the class that the directory names come first: defaults are read from it.
        tasks = sorted(family.pipelines, key=lambda task: family.pipelines[task] != directory.pipeline)
        tasks = [task for task in tasks if _can_do(task, built[family.pipelines[task]])]
        self._pipelines = {task: built[family.pipelines[task]] for task in tasks}
        self._any = self._pipelines[tasks[0]]
        self.facts = model_facts(directory, family, self._pipelines)
        self.components = {name: weight_bytes(part) for name, part in owned.items()}
        self._prompt_bytes = self._measure_prompt() if target.role == "encoder" else 0

    def pipeline(self, task: TaskKind) -> Any:
        """The diffusers pipeline that does `task`, with this role's components and shells of the others'."""
        return self._pipelines[task]

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
        images = pictures(task.inputs, parameters)
        pipeline, tape = own_copy(self._pipelines[parameters.task], parameters), Tape()
        recorded(pipeline, tape)
        until_handed_over(self._family, pipeline, parameters, images)
        return bundle.pack({"calls": tape.calls, "inputs": [torch.from_numpy(np.array(image)) for image in images]})

    def _measure_prompt(self) -> int:
        """Bytes of the embeds of a prompt longer than any that the model takes, and of a negative one."""
        parameters = self._blank(_LONG_PROMPT, small=True)
        pipeline, tape = own_copy(self._pipelines[parameters.task], parameters), Tape()
        recorded(pipeline, tape)
        with torch.inference_mode():
            until_handed_over(self._family, pipeline, parameters, self._blank_images(parameters))
        prompts = [value for name, value in tape.calls if name == "encode_prompt"]
        return sum(aligned(tensor.nbytes) for tensor in bundle.pack(prompts)[0].values()) + _SMALL

    # ------------------------------------------------------------ denoiser

    def denoised_bytes(self, parameters: GenerationParameters) -> int:
        """Upper bound of what `denoise` returns: the latents."""
        return latent_bytes(self._any, parameters) + _SMALL

    def denoise(self, task: Task) -> tuple[Tensors, Scalars]:
        """With what the pipeline calls its autoencoder, after its loop."""
        encoded = bundle.unpack(task.tensors, task.scalars)
        images = [Image.fromarray(image.cpu().numpy()) for image in encoded["inputs"]]
        return self._denoise(task, Tape(encoded["calls"]), images)

    def _denoise(self, task: Task, tape: Tape, images: list[Image.Image]) -> tuple[Tensors, Scalars]:
        pipeline = own_copy(self._pipelines[task.parameters.task], task.parameters, task.progress)
        replayed(pipeline, tape)
        border = until_handed_over(self._family, pipeline, task.parameters, images)
        tensors, scalars = bundle.pack(border.arguments)
        for tensor in tensors.values():
            check_finite(tensor, "the latents")
        return tensors, scalars

    # ------------------------------------------------------------ decoder

    def decode(self, task: Task) -> list[Image.Image]:
        """The pictures, or the frames of the video."""
        call = bundle.unpack(task.tensors, task.scalars)
        pipeline = self._pipelines[task.parameters.task]
        sample = self._decode(pipeline.vae, call["args"], call["kwargs"])
        check_finite(sample, "the picture")
        return self._finish(pipeline, sample)

    def _decode(self, vae: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """What does not fit in one piece is decoded in tiles, by the autoencoder's own switch, from then on."""
        if vae.dtype != args[0].dtype:  # some pipelines decode in float32 what was denoised in float16
            vae.to(args[0].dtype)
        try:
            decoded = vae.decode(*args, **kwargs)
        except OUT_OF_MEMORY:
            if not hasattr(vae, "enable_tiling") or getattr(vae, "use_tiling", False):
                raise
            _log.warning("a decode of %s does not fit: from now on large ones are made in tiles", tuple(args[0].shape))
            vae.enable_tiling()
            decoded = vae.decode(*args, **kwargs)
        sample: torch.Tensor = decoded.sample if hasattr(decoded, "sample") else decoded[0]
        return sample

    def _finish(self, pipeline: Any, sample: torch.Tensor) -> list[Image.Image]:
        """What pipelines do after they have decoded."""
        if self._family.fps:
            return list(pipeline.video_processor.postprocess_video(sample, output_type="pil")[0])
        if self._family.temporal:
            sample = sample[:, :, 0]
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
        pipeline = own_copy(self._pipelines[parameters.task], parameters, task.progress)
        vae = pipeline.vae = copy.copy(pipeline.vae)
        vae.decode = checked(vae.decode)
        output = pipeline(**arguments(self._family, pipeline, parameters, pictures(task.inputs, parameters)))
        return list(output.frames[0] if self._family.fps else output.images)

    # ------------------------------------------------------------ before the first request

    def warm_up(self, role: Role, *, small: bool) -> None:
        """Run a role's part once, with blank inputs, at the model's own size or a small one. May run in a fiber."""
        parameters = self._blank("a", small=small)
        task = Task(parameters, {}, {}, lambda *_: None)
        pipeline = self._pipelines[parameters.task]
        images = self._blank_images(parameters)
        if role == "encoder":
            pipeline = own_copy(pipeline, parameters)
            recorded(pipeline, Tape())
            until_handed_over(self._family, pipeline, parameters, images)
        elif role == "denoiser":
            self._denoise(task, BlankTape(self._family.name, pipeline), images)
        elif role == "decoder":
            shape = parameters.width, parameters.height, parameters.num_frames
            self._decode(pipeline.vae, [blank_latents(pipeline, *shape, temporal=self._family.temporal)], {})
        else:
            own = own_copy(pipeline, parameters)
            own(**arguments(self._family, own, parameters, images))

    def _blank(self, prompt: str, *, small: bool) -> GenerationParameters:
        facts = self.facts
        known = inspect.signature(type(self._any).__call__).parameters
        side = 4 * facts.size_multiple
        frames = 1 if facts.video is None else facts.video.frame_multiple + 1 if small else facts.video.num_frames
        return GenerationParameters(
            model=facts.id, prompt=prompt, negative_prompt=prompt if "negative_prompt" in known else "",
            width=side if small else facts.width, height=side if small else facts.height, num_frames=frames,
            num_inference_steps=2, guidance_scale=max(2.0, facts.guidance_scale), seed=0, task=facts.tasks[0],
        )  # fmt: skip

    @staticmethod
    def _blank_images(parameters: GenerationParameters) -> list[Image.Image]:
        wanted = parameters.task not in ("text_to_image", "text_to_video")
        return [Image.new("RGB", (parameters.width, parameters.height))] if wanted else []
