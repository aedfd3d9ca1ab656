"""Image and video autoencoders with the scale factors, latent channels and latent statistics of the real families."""

from __future__ import annotations

from typing import Any, Final

import diffusers
import torch

from diffcluster.testing.weights import calibrate

__all__ = ["cogvideox_vae", "dc_vae", "flux2_vae", "hunyuan_video_vae", "kl_vae", "ltx_vae", "qwen_vae", "wan_vae"]

_CHANNELS: Final = (8, 8, 8, 8)
_PIXELS: Final = 64
"""Default height and width, where the autoencoder's configuration has one."""

_LATENTS: Final = (4, 4)
_VIDEO: Final = (2, 4, 4)


def kl_vae(latent_channels: int, scaling: float, shift: float | None = None, *, quantization: bool = True) -> Any:
    """Of Stable Diffusion and its descendants: factor 8."""
    vae = diffusers.AutoencoderKL(
        **_blocks("DownEncoderBlock2D", "UpDecoderBlock2D"),
        sample_size=_PIXELS,
        latent_channels=latent_channels,
        scaling_factor=scaling,
        shift_factor=shift,
        use_quant_conv=quantization,
        use_post_quant_conv=quantization,
    )
    return calibrate(vae, *_LATENTS)


def flux2_vae() -> Any:
    """Factor 8, 32 channels in patches of 2 x 2, which a batch norm without weights of its own normalises."""
    vae = diffusers.AutoencoderKLFlux2(
        **_blocks("DownEncoderBlock2D", "UpDecoderBlock2D"), sample_size=_PIXELS, latent_channels=32
    )
    vae.bn.running_mean.normal_(std=0.5)
    vae.bn.running_var.uniform_(0.5, 2.0)
    return calibrate(vae, *_LATENTS)


def qwen_vae(factor: int = 8, *, width: int = 8, blocks: int = 1) -> Any:
    """That of Wan for single images; the mean and standard deviation of each channel are the real ones.

    Without residual blocks, the encoder has but one convolution at full size.
    """
    downsamplings = factor.bit_length() - 1
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=width,
        dim_mult=[1] * (downsamplings + 1),
        num_res_blocks=blocks,
        temperal_downsample=[False] * downsamplings,
    )
    return calibrate(vae, 1, *_LATENTS)


def wan_vae() -> Any:
    """Factors 8 and 4 (frames); the mean and standard deviation of each channel are the real ones."""
    return calibrate(diffusers.AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1), *_VIDEO)


def dc_vae() -> Any:
    """Factor 32, 32 channels, which the deepest block must share: an image of 32 x 32 pixels is one latent pixel."""
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    scales: tuple[tuple[int, ...], ...] = ((), (), (), (5,), (5,), (5,))
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("block_types", blocks),
            ("block_out_channels", (8, 8, 8, 8, 8, 32)),
            ("layers_per_block", (1,) * 6),
            ("qkv_multiscales", scales),
        )
    }
    vae = diffusers.AutoencoderDC(latent_channels=32, attention_head_dim=4, scaling_factor=0.41407, **sides)
    return calibrate(vae, *_LATENTS)


def ltx_vae() -> Any:
    """Factors 32 and 8 (frames), 128 channels; the statistics of the latents are buffers in the weights file."""
    vae = diffusers.AutoencoderKLLTXVideo(
        block_out_channels=_CHANNELS,
        decoder_block_out_channels=_CHANNELS,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
    )
    torch.nn.init.normal_(vae.latents_mean, std=0.5)
    torch.nn.init.uniform_(vae.latents_std, 0.5, 2.0)
    return calibrate(vae, *_VIDEO)


def hunyuan_video_vae() -> Any:
    """Factors 8 and 4 (frames)."""
    vae = diffusers.AutoencoderKLHunyuanVideo(**_blocks("HunyuanVideoDownBlock3D", "HunyuanVideoUpBlock3D"))
    return calibrate(vae, *_VIDEO)


def cogvideox_vae() -> Any:
    """Factors 8 and 4 (frames)."""
    vae = diffusers.AutoencoderKLCogVideoX(
        **_blocks("CogVideoXDownBlock3D", "CogVideoXUpBlock3D"),
        sample_height=_PIXELS,
        sample_width=_PIXELS,
        scaling_factor=0.7,
    )
    return calibrate(vae, *_VIDEO)


def _blocks(down: str, up: str) -> dict[str, Any]:
    return {
        "down_block_types": (down,) * 4,
        "up_block_types": (up,) * 4,
        "block_out_channels": _CHANNELS,
        "layers_per_block": 1,
        "norm_num_groups": 4,
    }
