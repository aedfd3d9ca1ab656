"""Stable Diffusion 1.x and 2.x: `StableDiffusionPipeline`, split after `encode_prompt` and after the loop.

Every role builds the standard pipeline with the others' components left out, and calls the pipeline's own code.
What the pipeline would read from a component that is absent (the autoencoder's scale, the UNet's size) is read from
that component's config file instead.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

import diffusers
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL.Image import Image

from diffcluster.errors import ModelError, NanOutputError
from diffcluster.ids import Role
from diffcluster.messages import ExtraArgument, GenerationParameters, ModelFacts
from diffcluster.roles.pipelines.directory import ModelDirectory
from diffcluster.roles.stage import Progressing
from diffcluster.tensors import aligned

__all__ = ["StableDiffusion", "load"]

_COMPONENTS: Final[dict[Role, tuple[str, ...]]] = {
    "encoder": ("tokenizer", "text_encoder"),
    "denoiser": ("unet", "scheduler"),
    "decoder": ("vae", "safety_checker", "feature_extractor"),
    "monolithic": ("tokenizer", "text_encoder", "unet", "scheduler", "vae", "safety_checker", "feature_extractor"),
}
_OPTIONAL: Final = frozenset({"safety_checker", "feature_extractor"})
_EXTRAS: Final = (ExtraArgument("eta", 0.0, 1.0), ExtraArgument("guidance_rescale", 0.0, 1.0))
_MAX_PIXELS: Final = 2048 * 2048
_PIPELINE_MULTIPLE: Final = 8


def load(directory: ModelDirectory, role: Role, device: torch.device, dtype: torch.dtype) -> StableDiffusion:
    """Load what `role` needs.

    Raises:
        ModelError: a component is missing or broken.
    """
    present = directory.parts()
    wanted = [name for name in _COMPONENTS[role] if name in present or name not in _OPTIONAL]
    loaded = {name: directory.load(name, dtype) for name in wanted}
    modules = {name: part.to(device) if isinstance(part, torch.nn.Module) else part for name, part in loaded.items()}
    return StableDiffusion(directory, modules, dtype)


class StableDiffusion:
    """One role's part of the pipeline."""

    def __init__(self, directory: ModelDirectory, modules: dict[str, Any], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._unet, self._vae = directory.config("unet"), directory.config("vae")
        self._text = directory.config("text_encoder")
        self._tokenizer = directory.config("tokenizer", "tokenizer_config.json")
        self._scale = 2 ** (len(self._vae["block_out_channels"]) - 1)
        self.facts = _facts(directory, self._unet, self._scale)
        self.components = {name: _weight_bytes(part) for name, part in modules.items()}
        self._pipeline = _pipeline(directory, modules, self._scale)

    # ------------------------------------------------------------ encoder

    def encoded_bytes(self, parameters: GenerationParameters) -> int:
        """One row of prompt embeds, and one of negative ones if guidance is on."""
        rows = 2 if self._guided(parameters) else 1
        tokens = min(int(self._tokenizer["model_max_length"]), int(self._text["max_position_embeddings"]))
        return rows * aligned(tokens * int(self._text["hidden_size"]) * self._dtype.itemsize)

    def encode(self, parameters: GenerationParameters) -> dict[str, torch.Tensor]:
        """`prompt_embeds` and, if guidance is on, `negative_prompt_embeds`, each (1, tokens, width)."""
        guided = self._guided(parameters)
        embeds, negative = self._pipeline.encode_prompt(
            prompt=parameters.prompt,
            device=self._pipeline._execution_device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=guided,
            negative_prompt=parameters.negative_prompt or None,
        )
        return {"prompt_embeds": embeds} | ({"negative_prompt_embeds": negative} if guided else {})

    # ------------------------------------------------------------ denoiser

    def denoised_bytes(self, parameters: GenerationParameters) -> int:
        """The latents. Schedulers may widen them to float32."""
        height, width = parameters.height // self._scale, parameters.width // self._scale
        return aligned(int(self._unet["in_channels"]) * height * width * max(4, self._dtype.itemsize))

    def denoise(
        self, parameters: GenerationParameters, encoded: dict[str, torch.Tensor], progress: Progressing
    ) -> dict[str, torch.Tensor]:
        """`latents` (1, channels, height / 8, width / 8), as the pipeline's loop leaves them."""

        def after_step(_: Any, step: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            progress(step + 1, parameters.num_inference_steps)
            return tensors

        latents = self._pipeline(
            prompt_embeds=encoded["prompt_embeds"],
            negative_prompt_embeds=encoded.get("negative_prompt_embeds"),
            height=parameters.height,
            width=parameters.width,
            num_inference_steps=parameters.num_inference_steps,
            guidance_scale=parameters.guidance_scale,
            # On the CPU whatever the device: one seed, one picture, everywhere.
            generator=torch.Generator("cpu").manual_seed(parameters.seed),
            output_type="latent",
            callback_on_step_end=after_step,
            **parameters.extra,
        ).images
        _check_finite(latents, "the latents")
        return {"latents": latents}

    # ------------------------------------------------------------ decoder

    def decode(self, parameters: GenerationParameters, denoised: dict[str, torch.Tensor]) -> list[Image]:
        """What the pipeline does after its loop, in its order."""
        del parameters
        pipeline = self._pipeline
        latents = denoised["latents"]
        image = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor, return_dict=False)[0]
        _check_finite(image, "the picture")
        image, flagged = pipeline.run_safety_checker(image, pipeline._execution_device, self._dtype)
        clean = [True] * len(image) if flagged is None else [not flag for flag in flagged]
        return list(pipeline.image_processor.postprocess(image, output_type="pil", do_denormalize=clean))

    def _guided(self, parameters: GenerationParameters) -> bool:
        """The pipeline's own rule, without its UNet."""
        return parameters.guidance_scale > 1 and self._unet.get("time_cond_proj_dim") is None


def _facts(directory: ModelDirectory, unet: dict[str, Any], scale: int) -> ModelFacts:
    sample = unet["sample_size"]
    height, width = sample if isinstance(sample, list) else (sample, sample)
    scheduler = directory.config("scheduler", "scheduler_config.json")
    defaults = inspect.signature(diffusers.StableDiffusionPipeline.__call__).parameters
    return ModelFacts(
        id=directory.id,
        revision=directory.revision,
        pipeline=directory.pipeline,
        width=width * scale,
        height=height * scale,
        size_multiple=math.lcm(_PIPELINE_MULTIPLE, scale),
        max_pixels=_MAX_PIXELS,
        num_inference_steps=defaults["num_inference_steps"].default,
        max_inference_steps=int(scheduler.get("num_train_timesteps", 1000)),
        guidance_scale=defaults["guidance_scale"].default,
        extras=_EXTRAS,
    )


def _pipeline(directory: ModelDirectory, modules: dict[str, Any], scale: int) -> Any:
    """The standard pipeline with `modules`, and None for all its other components."""
    absent = dict.fromkeys(set(directory.parts()) | _OPTIONAL | {"image_encoder"})
    try:
        pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
            str(directory.path),
            **absent | modules,
            requires_safety_checker="safety_checker" in modules,
            local_files_only=True,
        )
    except Exception as error:  # diffusers raises whatever it meets
        raise ModelError("model_index.json", f"the pipeline cannot be built: {error}") from error
    pipeline.vae_scale_factor = scale
    pipeline.image_processor = VaeImageProcessor(vae_scale_factor=scale)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _weight_bytes(part: Any) -> int:
    if not isinstance(part, torch.nn.Module):
        return 0
    return sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()))


def _check_finite(tensor: torch.Tensor, what: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise NanOutputError(f"{what} came out as NaN or infinity; it would have been a black picture")
