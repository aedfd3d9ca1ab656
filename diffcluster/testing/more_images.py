"""Families that make images, with language models as text encoders; and the one that edits images."""

from __future__ import annotations

from typing import Any, Final

import diffusers
from torch import nn
from transformers import PaddleOCRVLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from diffcluster.testing import encoders, schedulers, tokenizers, vaes
from diffcluster.testing.encoders import PATCH, WIDTH
from diffcluster.testing.weights import randomize

__all__ = ["flux2_klein", "qwen_image", "qwen_image_edit", "sana", "z_image"]

_HEADS: Final[dict[str, int]] = {"num_attention_heads": 2, "attention_head_dim": 16}
_AXES: Final = (4, 6, 6)
"""Of a head's rotary embedding: frames, rows, columns."""

_SHARPNESS: Final = 6.0


def qwen_image() -> Any:
    """Qwen-Image."""
    return diffusers.QwenImagePipeline(**_qwen_parts(tokenizers.qwen_tokenizer(), vaes.qwen_vae()))


def qwen_image_edit() -> Any:
    """Qwen-Image-Edit. The pipeline scales every image to about 1024 x 1024 pixels, whatever size is made of it.

    To stay quick all the same, its autoencoder has factor 32, not 8 (sizes are multiples of 64 pixels), and the image
    encoder sees a small copy: 4 to 16 tokens, not 1,369. The processor is one without a video part: that of the real
    one cannot even be read unless torchvision is installed. What it makes of text and images is the same. In bfloat16,
    encoding the large image takes a core four seconds.
    """
    tokenizer = tokenizers.qwen_tokenizer()
    pixels = (2 * PATCH) ** 2
    images = Qwen2VLImageProcessorPil(min_pixels=4 * pixels, max_pixels=16 * pixels)
    processor = PaddleOCRVLProcessor(image_processor=images, tokenizer=tokenizer)
    vae = vaes.qwen_vae(factor=32, width=4, blocks=0)
    return diffusers.QwenImageEditPipeline(**_qwen_parts(tokenizer, vae), processor=processor)


def _qwen_parts(tokenizer: Any, vae: Any) -> dict[str, Any]:
    """With sharp attention to the text, which would drown among the many tokens of an image to edit."""
    transformer = randomize(
        diffusers.QwenImageTransformer2DModel(num_layers=2, **_HEADS, joint_attention_dim=WIDTH, axes_dims_rope=_AXES)
    )
    for block in transformer.transformer_blocks:
        nn.init.constant_(block.attn.norm_added_k.weight, _SHARPNESS)
    return {
        "tokenizer": tokenizer,
        "text_encoder": encoders.qwen_vl(tokenizer),
        "transformer": transformer,
        "vae": vae,
        "scheduler": schedulers.flow(dynamic=True, shift_terminal=0.02),
    }


def flux2_klein() -> Any:
    """FLUX.2 klein, not distilled: its pipeline takes the hidden states of layers 9, 18 and 27, so there are 28."""
    tokenizer = tokenizers.qwen_tokenizer()
    transformer = diffusers.Flux2Transformer2DModel(
        num_layers=1,
        num_single_layers=1,
        **_HEADS,
        joint_attention_dim=3 * WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    return diffusers.Flux2KleinPipeline(
        tokenizer=tokenizer,
        text_encoder=encoders.qwen3(tokenizer, layers=28, head=True),
        transformer=randomize(transformer),
        vae=vaes.flux2_vae(),
        scheduler=schedulers.flow(shift=3.0, dynamic=True),
    )


def z_image() -> Any:
    """Z-Image."""
    tokenizer = tokenizers.qwen_tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=list(_AXES),
        axes_lens=[1024, 128, 128],
    )
    return diffusers.ZImagePipeline(
        tokenizer=tokenizer,
        text_encoder=encoders.qwen3(tokenizer),
        transformer=randomize(transformer),
        vae=vaes.kl_vae(16, 0.3611, 0.1159, quantization=False),
        scheduler=schedulers.flow(shift=6.0),
    )


def sana() -> Any:
    """Sana. Default size: 1024 x 1024 pixels, which its pipeline does not take from a configuration."""
    tokenizer = tokenizers.gemma_tokenizer()
    transformer = diffusers.SanaTransformer2DModel(
        num_layers=2,
        **_HEADS,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=WIDTH,
    )
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=encoders.gemma(tokenizer),
        transformer=randomize(transformer),
        vae=vaes.dc_vae(),
        scheduler=schedulers.dpm_flow(shift=3.0),
    )
