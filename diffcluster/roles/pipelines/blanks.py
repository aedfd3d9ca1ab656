"""Blank requests: what a role needs to run once before it is ready, without the roles before it.

A denoiser has no text encoder, so the shapes of what one returns are written here, family by family; a test compares
them with what the encoders really return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from diffcluster.roles.pipelines.borders import Tape
from diffcluster.roles.pipelines.families import latent_channels, spatial_scale, temporal_scale

__all__ = ["BlankTape", "blank_latents"]

_Make = Callable[..., torch.Tensor]


def _sd(config: Any, make: _Make) -> Any:
    embeds = make(1, 77, config.cross_attention_dim)
    return embeds, embeds


def _sdxl(config: Any, make: _Make) -> Any:
    embeds = make(1, 77, config.cross_attention_dim)
    pooled = make(1, config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)
    return embeds, embeds, pooled, pooled


def _sd3(config: Any, make: _Make) -> Any:
    embeds, pooled = make(1, 77 + 256, config.joint_attention_dim), make(1, config.pooled_projection_dim)
    return embeds, embeds, pooled, pooled


def _flux(config: Any, make: _Make) -> Any:
    return make(1, 512, config.joint_attention_dim), make(1, config.pooled_projection_dim), make(512, 3)


def _flux2(config: Any, make: _Make) -> Any:
    return make(1, 512, config.joint_attention_dim), make(1, 512, 4, dtype=torch.int64)


def _qwen(config: Any, make: _Make) -> Any:
    return make(1, 32, config.joint_attention_dim), None


def _z_image(config: Any, make: _Make) -> Any:
    return [make(32, config.cap_feat_dim)], [make(32, config.cap_feat_dim)]


def _captions(config: Any, make: _Make) -> Any:
    embeds, mask = make(1, 300, config.caption_channels), make(1, 300, dtype=torch.int64)
    return embeds, mask, embeds, mask


def _wan(config: Any, make: _Make) -> Any:
    embeds = make(1, 512, config.text_dim)
    return embeds, embeds


def _ltx(config: Any, make: _Make) -> Any:
    embeds, mask = make(1, 128, config.caption_channels), make(1, 128, dtype=torch.bool)
    return embeds, mask, embeds, mask


def _hunyuan(config: Any, make: _Make) -> Any:
    mask = make(1, 256, dtype=torch.int64)
    return make(1, 256, config.text_embed_dim), make(1, config.pooled_projection_dim), mask


def _cogvideox(config: Any, make: _Make) -> Any:
    embeds = make(1, config.max_text_seq_length, config.text_embed_dim)
    return embeds, embeds


_PROMPTS: Final[dict[str, Callable[[Any, _Make], Any]]] = {
    "Stable Diffusion 1 and 2": _sd,
    "Stable Diffusion XL": _sdxl,
    "Stable Diffusion 3": _sd3,
    "Flux.1": _flux,
    "Flux.2 klein": _flux2,
    "Qwen-Image": _qwen,
    "Qwen-Image-Edit": _qwen,
    "Z-Image": _z_image,
    "PixArt-Sigma": _captions,
    "Sana": _captions,
    "Wan": _wan,
    "Wan image to video": _wan,
    "LTX-Video": _ltx,
    "HunyuanVideo": _hunyuan,
    "CogVideoX": _cogvideox,
}
_IMAGE_TOKENS: Final = 257
"""Of CLIP's image encoder, which Wan uses: 16 x 16 patches and one for the whole."""


class BlankTape(Tape):
    """Plays ones wherever a pipeline encodes something: shapes and dtypes are right, the content means nothing."""

    def __init__(self, family: str, pipeline: Any) -> None:
        super().__init__()
        self._pipeline, self._prompt = pipeline, _PROMPTS[family]
        self._denoiser = getattr(pipeline, "unet", None) or pipeline.transformer

    def play(self, name: str, *args: Any) -> Any:
        """What a call of `name` would return, apart from the values."""
        if name == "encode_prompt":
            return self._prompt(self._denoiser.config, self._ones)
        if name == "encode_image":
            return self._ones(1, _IMAGE_TOKENS, self._denoiser.config.image_dim)
        return {"parameters": self._ones(*self._moments(args[0])), "deterministic": False}

    def _moments(self, picture: torch.Tensor) -> tuple[int, ...]:
        """Shape of the mean and log variance of the latents of `picture`, (samples, 3, [frames,] height, width)."""
        batch, _, *frames, height, width = picture.shape
        scale = spatial_scale(self._pipeline)
        times = [(count - 1) // temporal_scale(self._pipeline) + 1 for count in frames]
        return batch, 2 * latent_channels(self._pipeline), *times, height // scale, width // scale

    def _ones(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype or self._denoiser.dtype, device=self._denoiser.device)


def blank_latents(pipeline: Any, width: int, height: int, num_frames: int, *, temporal: bool) -> torch.Tensor:
    """What the autoencoder decodes to that size: (1, channels, [frames,] height, width)."""
    scale = spatial_scale(pipeline)
    times = [(num_frames - 1) // temporal_scale(pipeline) + 1] if temporal else []
    shape = (1, latent_channels(pipeline), *times, height // scale, width // scale)
    return torch.zeros(shape, dtype=pipeline.vae.dtype, device=pipeline.vae.device)
