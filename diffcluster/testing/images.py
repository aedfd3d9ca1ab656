"""Families that make images, with CLIP and T5 as text encoders."""

from __future__ import annotations

from typing import Any, Final

import diffusers

from diffcluster.testing import encoders, schedulers, tokenizers, vaes
from diffcluster.testing.encoders import WIDTH
from diffcluster.testing.weights import randomize

__all__ = ["flux", "pixart_sigma", "sd3", "sd15", "sdxl"]

_SAMPLE: Final = 8
"""Default height and width of the latents, where diffusers takes them from the denoiser: 64 pixels."""

_HEADS: Final[dict[str, int]] = {"num_attention_heads": 2, "attention_head_dim": 16}
_AXES: Final = (4, 6, 6)
"""Of a head's rotary embedding: frames, rows, columns."""


def sd15() -> Any:
    """Stable Diffusion 1.5 without safety checker."""
    tokenizer = tokenizers.clip_tokenizer()
    return diffusers.StableDiffusionPipeline(
        tokenizer=tokenizer,
        text_encoder=encoders.clip_text(tokenizer),
        unet=_unet(cross_attention_dim=WIDTH),
        vae=vaes.kl_vae(4, 0.18215),
        scheduler=schedulers.pndm(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl() -> Any:
    """Stable Diffusion XL: two text encoders, whose second pools, and six numbers of size and crop."""
    first, second = tokenizers.clip_tokenizer(), tokenizers.clip_tokenizer()
    unet = _unet(
        cross_attention_dim=2 * WIDTH,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + 6 * 8,
    )
    return diffusers.StableDiffusionXLPipeline(
        tokenizer=first,
        tokenizer_2=second,
        text_encoder=encoders.clip_text(first),
        text_encoder_2=encoders.clip_text(second, projection=True),
        unet=unet,
        vae=vaes.kl_vae(4, 0.13025),
        scheduler=schedulers.euler(),
    )


def _unet(**settings: Any) -> Any:
    """Two levels, not four: with one downsampling, every size that the autoencoder allows stays even or nearly so."""
    return randomize(
        diffusers.UNet2DConditionModel(
            sample_size=_SAMPLE,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            attention_head_dim=4,
            **settings,
        )
    )


def sd3() -> Any:
    """Stable Diffusion 3: two CLIP encoders side by side, as wide together as T5, which follows them."""
    clip, clip_2, t5 = tokenizers.clip_tokenizer(), tokenizers.clip_tokenizer(), tokenizers.t5_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=_SAMPLE,
        num_layers=2,
        **_HEADS,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=32,
    )
    return diffusers.StableDiffusion3Pipeline(
        tokenizer=clip,
        tokenizer_2=clip_2,
        tokenizer_3=t5,
        text_encoder=encoders.clip_text(clip, projection=True),
        text_encoder_2=encoders.clip_text(clip_2, projection=True),
        text_encoder_3=encoders.t5(t5, width=2 * WIDTH),
        transformer=randomize(transformer),
        vae=vaes.kl_vae(16, 1.5305, 0.0609, quantization=False),
        scheduler=schedulers.flow(shift=3.0),
    )


def flux() -> Any:
    """Flux.1 dev: guidance is an input of the transformer."""
    clip, t5 = tokenizers.clip_tokenizer(), tokenizers.t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=1,
        num_single_layers=1,
        **_HEADS,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=_AXES,
    )
    return diffusers.FluxPipeline(
        tokenizer=clip,
        tokenizer_2=t5,
        text_encoder=encoders.clip_text(clip),
        text_encoder_2=encoders.t5(t5),
        transformer=randomize(transformer),
        vae=vaes.kl_vae(16, 0.3611, 0.1159, quantization=False),
        scheduler=schedulers.flow(shift=3.0, dynamic=True),
    )


def pixart_sigma() -> Any:
    """PixArt-Sigma: predicts the variance, too, which the pipeline drops."""
    tokenizer = tokenizers.t5_tokenizer()
    transformer = diffusers.PixArtTransformer2DModel(
        num_layers=2,
        **_HEADS,
        sample_size=_SAMPLE,
        cross_attention_dim=32,
        caption_channels=WIDTH,
        interpolation_scale=1,
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=encoders.t5(tokenizer),
        transformer=randomize(transformer),
        vae=vaes.kl_vae(4, 0.13025),
        scheduler=schedulers.dpm(),
    )
