"""How a pipeline is called: on a copy of one request's own, with the same arguments in every role."""

from __future__ import annotations

import copy
import functools
import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import diffusers
import torch
from diffusers.configuration_utils import FrozenDict
from PIL import Image

from diffcluster.errors import InvalidRequestError, NanOutputError, WorkerFailedError
from diffcluster.messages import GenerationParameters
from diffcluster.roles.pipelines.borders import HandOver
from diffcluster.roles.pipelines.families import Family
from diffcluster.roles.stage import Progressing

__all__ = ["INPAINT_CHANNELS", "arguments", "check_finite", "checked", "own_copy", "pictures", "until_handed_over"]


INPAINT_CHANNELS: Final = 9
"""Of UNets that take latents, a mask, and the latents of the masked picture."""
_PLAIN_CHANNELS: Final = 4


def own_copy(pipeline: Any, parameters: GenerationParameters, progress: Progressing | None = None) -> Any:
    """A pipeline of one request's own: the same components, but for the scheduler, which has a state."""
    own = copy.copy(pipeline)
    if parameters.task == "inpaint" and hasattr(own, "unet") and own.unet.config.in_channels != INPAINT_CHANNELS:
        # Pipelines blend outside of the mask for UNets of 4 channels, and refuse others, which could do as well.
        own.unet = copy.copy(own.unet)
        own.unet._internal_dict = FrozenDict({**own.unet.config, "in_channels": _PLAIN_CHANNELS})
    if parameters.scheduler in ("", type(pipeline.scheduler).__name__):
        own.scheduler = copy.deepcopy(pipeline.scheduler)
    else:
        own.scheduler = getattr(diffusers, parameters.scheduler).from_config(pipeline.scheduler.config)
    if progress is not None:
        own.scheduler.step = _counted(own.scheduler.step, own, progress)
    return own


def arguments(
    family: Family, pipeline: Any, parameters: GenerationParameters, images: Sequence[Image.Image]
) -> dict[str, Any]:
    """Of the pipeline's `__call__`.

    Raises:
        InvalidRequestError: it has no argument for something that was asked for.
    """
    known = inspect.signature(type(pipeline).__call__).parameters
    for name, given in [("negative_prompt", parameters.negative_prompt), *parameters.extra.items()]:
        if given and name not in known:
            raise InvalidRequestError(f"{name}: {type(pipeline).__name__} has no such argument", param=name)
    pictures = [image for image in images if image.mode == "RGB"]
    masks = [image for image in images if image.mode == "L"]
    values: dict[str, Any] = {
        "prompt": parameters.prompt,
        "height": parameters.height,
        "width": parameters.width,
        "num_frames": parameters.num_frames,
        "frame_rate": parameters.fps,
        "num_inference_steps": parameters.num_inference_steps,
        family.guidance: parameters.guidance_scale,
        "strength": parameters.strength,
        # On the CPU whatever the device: one seed, one picture, everywhere.
        "generator": torch.Generator("cpu").manual_seed(parameters.seed),
        "image": pictures[0] if len(pictures) == 1 else (pictures or None),
        "mask_image": masks[0] if masks else None,
        "output_type": "pil",
        **family.fixed,
        **parameters.extra,
    }
    if parameters.negative_prompt:  # else the pipeline's own default, which for some is no None
        values["negative_prompt"] = parameters.negative_prompt
    return {name: value for name, value in values.items() if name in known}


def until_handed_over(
    family: Family, pipeline: Any, parameters: GenerationParameters, images: Sequence[Image.Image]
) -> HandOver:
    """Call `pipeline`, up to the call that belongs to the next role."""
    try:
        pipeline(**arguments(family, pipeline, parameters, images))
    except HandOver as border:
        _forget_steps(pipeline)
        return border
    raise WorkerFailedError(f"{type(pipeline).__name__} ended without calling the next role's component")


def _forget_steps(pipeline: Any) -> None:
    """Empty step caches, as the pipeline does at its end."""
    for name in ("unet", "transformer", "transformer_2"):
        if getattr(getattr(pipeline, name, None), "is_cache_enabled", False):
            getattr(pipeline, name)._reset_stateful_cache()


def pictures(contents: Sequence[bytes], parameters: GenerationParameters) -> list[Image.Image]:
    """The client's pictures, at the size that was asked for."""
    size = (parameters.width, parameters.height)
    images = []
    for content, info in zip(contents, parameters.inputs, strict=True):
        with Image.open(io.BytesIO(content), formats=["PNG"]) as file:
            image = file.convert("L" if info.kind == "mask" else "RGB")
        how = Image.Resampling.NEAREST if info.kind == "mask" else Image.Resampling.LANCZOS
        images.append(image if image.size == size else image.resize(size, how))
    return images


def checked(decode: Callable[..., Any]) -> Callable[..., Any]:
    """An autoencoder's `decode` that refuses to return NaN."""

    def checking(*args: Any, **kwargs: Any) -> Any:
        decoded = decode(*args, **kwargs)
        check_finite(decoded.sample if hasattr(decoded, "sample") else decoded[0], "the picture")
        return decoded

    return checking


def check_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise `NanOutputError` if there is a NaN or an infinity in `tensor`."""
    if not bool(torch.isfinite(tensor).all()):
        raise NanOutputError(f"{what} came out as NaN or infinity; it would have been a black picture")


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
