"""Families that make videos."""

from __future__ import annotations

from typing import Any, Final

import diffusers
from torch import nn
from transformers import CLIPImageProcessorPil

from diffcluster.testing import encoders, schedulers, tokenizers, vaes
from diffcluster.testing.encoders import IMAGE_SIZE, WIDTH
from diffcluster.testing.weights import randomize

__all__ = ["cogvideox", "hunyuan_video", "ltx", "ltx_i2v", "wan21", "wan21_i2v", "wan22"]

_HEADS: Final[dict[str, int]] = {"num_attention_heads": 2, "attention_head_dim": 16}

_SHARPNESS: Final = 8.0


def wan21() -> Any:
    """Wan 2.1, text to video."""
    return diffusers.WanPipeline(**_wan_parts(), transformer=_wan_transformer())


def wan22() -> Any:
    """Wan 2.2 A14B: one transformer for the noisy steps and one for the others."""
    return diffusers.WanPipeline(
        **_wan_parts(), transformer=_wan_transformer(), transformer_2=_wan_transformer(), boundary_ratio=0.875
    )


def wan21_i2v() -> Any:
    """Wan 2.1, image to video: the first frame goes in as latents with a mask, and as an image embedding."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return diffusers.WanImageToVideoPipeline(
        **_wan_parts(),
        transformer=_wan_transformer(in_channels=36, image_dim=WIDTH, added_kv_proj_dim=32),
        image_encoder=encoders.clip_vision(),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=size),
    )


def _wan_parts() -> dict[str, Any]:
    tokenizer = tokenizers.t5_tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": encoders.t5(tokenizer, multilingual=True),
        "vae": vaes.wan_vae(),
        "scheduler": schedulers.unipc_flow(shift=5.0),
    }


def _wan_transformer(**settings: Any) -> Any:
    """With sharp attention to the text: among 512 embeddings, nearly all padding, a mean would drown a prompt."""
    transformer = randomize(
        diffusers.WanTransformer3DModel(
            num_layers=2, **_HEADS, text_dim=WIDTH, freq_dim=32, ffn_dim=64, rope_max_seq_len=128, **settings
        )
    )
    for block in transformer.blocks:
        nn.init.constant_(block.attn2.norm_q.weight, _SHARPNESS)
    return transformer


def ltx() -> Any:
    """LTX-Video 0.9."""
    return diffusers.LTXPipeline(**_ltx_parts())


def ltx_i2v() -> Any:
    """LTX-Video 0.9, image to video: the same weights as text to video."""
    return diffusers.LTXImageToVideoPipeline(**_ltx_parts())


def _ltx_parts() -> dict[str, Any]:
    tokenizer = tokenizers.t5_tokenizer()
    transformer = diffusers.LTXVideoTransformer3DModel(
        num_layers=2, **_HEADS, cross_attention_dim=32, caption_channels=WIDTH
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": encoders.t5(tokenizer),
        "transformer": randomize(transformer),
        "vae": vaes.ltx_vae(),
        "scheduler": schedulers.flow(dynamic=True, shift_terminal=0.1),
    }


def hunyuan_video() -> Any:
    """HunyuanVideo: guidance is an input of the transformer."""
    tokenizer, clip = tokenizers.llama_tokenizer(), tokenizers.clip_tokenizer()
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        **_HEADS,
        text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    return diffusers.HunyuanVideoPipeline(
        tokenizer=tokenizer,
        tokenizer_2=clip,
        text_encoder=encoders.llama(tokenizer),
        text_encoder_2=encoders.clip_text(clip),
        transformer=randomize(transformer),
        vae=vaes.hunyuan_video_vae(),
        scheduler=schedulers.flow(shift=7.0),
    )


def cogvideox() -> Any:
    """CogVideoX 5B, with rotary embeddings, so that every size works; 9 frames of 64 x 64 pixels by default."""
    tokenizer = tokenizers.t5_tokenizer()
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_layers=2,
        **_HEADS,
        time_embed_dim=32,
        text_embed_dim=WIDTH,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        use_rotary_positional_embeddings=True,
    )
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=encoders.t5(tokenizer),
        transformer=randomize(transformer),
        vae=vaes.cogvideox_vae(),
        scheduler=schedulers.cogvideox_ddim(),
    )
