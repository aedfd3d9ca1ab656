"""What the router must know of a model, read from its pipelines: defaults, limits, tasks. The same in every role."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch

from diffcluster.messages import GenerationParameters, ModelFacts, VideoFacts
from diffcluster.roles.pipelines.directory import ModelDirectory
from diffcluster.roles.pipelines.families import Family, latent_channels, spatial_scale, temporal_scale
from diffcluster.tensors import aligned

__all__ = ["latent_bytes", "model_facts"]

_MAX_PIXELS: Final = 2048 * 2048
_DEFAULT_SIDE: Final = 1024
_DEFAULT_STRENGTH: Final = 0.8
_MAX_EDITED: Final = 4
_SCHEDULERS: Final = (
    "DDIMScheduler", "DDPMScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler", "HeunDiscreteScheduler", "PNDMScheduler",
    "UniPCMultistepScheduler",
)  # fmt: skip
"""Those that a request may ask for, if the model's own is compatible with them."""


def model_facts(directory: ModelDirectory, family: Family, pipelines: dict[Any, Any]) -> ModelFacts:
    """The facts of a model with `pipelines`, by task; the first is the one that defaults are taken from."""
    pipeline = next(iter(pipelines.values()))
    defaults = inspect.signature(type(pipeline).__call__).parameters
    width, height = _default_size(pipeline, family.multiple(pipeline), defaults)
    steps, guidance = defaults["num_inference_steps"].default, defaults[family.guidance].default
    return ModelFacts(
        id=directory.id,
        revision=directory.revision,
        pipeline=directory.pipeline,
        width=width,
        height=height,
        size_multiple=family.multiple(pipeline),
        max_pixels=_MAX_PIXELS,
        num_inference_steps=steps,
        max_inference_steps=int(pipeline.scheduler.config.get("num_train_timesteps", 1000)),
        guidance_scale=float(guidance),
        extras=family.extras,
        tasks=tuple(pipelines),
        strength=_strength(pipelines),
        max_input_images=_MAX_EDITED if family.name.startswith("Flux.2") else 1,
        schedulers=_schedulers(pipeline.scheduler),
        video=_video_facts(pipeline, family, defaults) if family.fps else None,
    )


def latent_bytes(pipeline: Any, parameters: GenerationParameters) -> int:
    """Upper bound of the latents of one sample, as the autoencoder takes them, in float32."""
    channels = latent_channels(pipeline)
    scale, frames = spatial_scale(pipeline), (parameters.num_frames - 1) // temporal_scale(pipeline) + 1
    # Some pipelines pad the frames to whole patches.
    cells = -(-parameters.height // scale) * -(-parameters.width // scale) * (frames + 1 if frames > 1 else 1)
    return aligned(channels * cells * torch.float32.itemsize)


def _default_size(pipeline: Any, multiple: int, defaults: Any) -> tuple[int, int]:
    """(width, height): of the signature, of the denoiser's configuration, of the pipeline."""
    given = [defaults[name].default for name in ("width", "height") if name in defaults]
    if len(given) == 2 and all(isinstance(side, int) for side in given):
        return _up(given[0], multiple), _up(given[1], multiple)
    config = (getattr(pipeline, "unet", None) or pipeline.transformer).config
    sample = config.get("sample_size") or getattr(pipeline, "default_sample_size", None)
    if config.get("sample_height"):
        sample = (config["sample_height"], config["sample_width"])
    if sample is None:
        return _DEFAULT_SIDE, _DEFAULT_SIDE
    rows, columns = sample if isinstance(sample, (list, tuple)) else (sample, sample)
    scale = spatial_scale(pipeline)
    return _up(int(columns) * scale, multiple), _up(int(rows) * scale, multiple)


def _up(side: int, multiple: int) -> int:
    return -(-side // multiple) * multiple


def _strength(pipelines: dict[Any, Any]) -> float:
    for pipeline in pipelines.values():
        parameter = inspect.signature(type(pipeline).__call__).parameters.get("strength")
        if parameter is not None:
            return float(parameter.default)
    return _DEFAULT_STRENGTH


def _schedulers(scheduler: Any) -> tuple[str, ...]:
    compatible = {cls.__name__ for cls in scheduler.compatibles} | {type(scheduler).__name__}
    return tuple(name for name in _SCHEDULERS if name in compatible) or (type(scheduler).__name__,)


def _video_facts(pipeline: Any, family: Family, defaults: Any) -> VideoFacts:
    multiple = temporal_scale(pipeline)
    default = defaults["num_frames"].default or pipeline.transformer.config.get("sample_frames") or 1
    frames = (default - 1) // multiple * multiple + 1
    return VideoFacts(num_frames=frames, frame_multiple=multiple, max_frames=2 * frames - 1, fps=family.fps)
