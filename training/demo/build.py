"""Makes the untrained parts of the embedded model, as plain diffusers and transformers classes.

Autoencoder: an `AutoencoderTiny` whose encoder is not learnt. It is a linear map that convolutions express exactly:
mean of 2x2 pixels, then 4x4 blocks of those, projected onto their principal components. So pictures of
(3, H, W) become latents of (8, H/8, W/8), one latent pixel per 8x8 pixels, and no training time is spent on it.
UNet: text enters every ResNet block through the time embedding (`addition_embed_type="text"`), and the middle by
attention.
"""

from __future__ import annotations

import json

import numpy as np
import torch
from diffusers import AutoencoderTiny, DDIMScheduler, UNet2DConditionModel
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

__all__ = ["LATENT_CHANNELS", "MAX_TOKENS", "autoencoder", "scheduler", "text_encoder", "tokenizer", "unet"]

LATENT_CHANNELS = 8
MAX_TOKENS = 48
_BOS, _EOS = "<|startoftext|>", "<|endoftext|>"
_SCALING_FACTOR = 2.0  # halves what the decoder sees, where its tanh clamp is nearly linear
_BLOCK = 4
_FLAT = _BLOCK * _BLOCK * 3


def autoencoder(images: np.ndarray, width: int = 32) -> AutoencoderTiny:
    """Encoder fitted to `images` (uint8, N x H x W x 3); decoder of `width` channels, random."""
    vae = AutoencoderTiny(
        encoder_block_out_channels=(_FLAT,) * 4,
        num_encoder_blocks=(0, 0, 0, 0),
        decoder_block_out_channels=(width,) * 4,
        num_decoder_blocks=(3, 3, 2, 1),
        latent_channels=LATENT_CHANNELS,
        scaling_factor=_SCALING_FACTOR,
    )
    projection, bias = _principal_components(images)
    _write_encoder(vae, projection / _SCALING_FACTOR, bias / _SCALING_FACTOR)
    return vae


def _patches(images: np.ndarray) -> np.ndarray:
    """Means of 2x2 pixels in blocks of 4x4: float64 (count, 48), channel-last within a block, in 0..1."""
    n, h, w, _ = images.shape
    half = images.astype(np.float32).reshape(n, h // 2, 2, w // 2, 2, 3).mean((2, 4)) / 255
    blocks = half.reshape(n, h // 8, _BLOCK, w // 8, _BLOCK, 3).transpose(0, 1, 3, 2, 4, 5)
    return blocks.reshape(-1, _FLAT).astype(np.float64)


def _principal_components(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(8, 48) projection and its bias: latents of mean 0 and, over all channels, variance 1."""
    flat = _patches(images)
    mean = flat.mean(0)
    values, vectors = np.linalg.eigh(np.cov(flat - mean, rowvar=False))
    order = np.argsort(values)[::-1][:LATENT_CHANNELS]
    deviation = np.sqrt(values[order])
    # Whitening by the square root of the deviation keeps strong components stronger, but not by their full ratio.
    projection = vectors[:, order].T / np.sqrt(deviation)[:, None]
    projection /= np.sqrt(((flat - mean) @ projection.T).var())
    return projection, -projection @ mean


def _write_encoder(vae: AutoencoderTiny, projection: np.ndarray, bias: np.ndarray) -> None:
    identity, mean, pairs, quads, last = (layer for layer in vae.encoder.layers)
    with torch.no_grad():
        for layer in (identity, mean, pairs, quads, last):
            layer.weight.zero_()
            if layer.bias is not None:
                layer.bias.zero_()
        for colour in range(3):
            identity.weight[colour, colour, 1, 1] = 1
            mean.weight[colour, colour, 1:, 1:] = 0.25
        _space_to_depth(pairs.weight, 3)
        _space_to_depth(quads.weight, 12)
        last.weight[:, :, 1, 1] = torch.from_numpy(projection[:, _channel_order()]).float()
        last.bias.copy_(torch.from_numpy(bias))


def _space_to_depth(weight: torch.Tensor, channels: int) -> None:
    """Make a stride-2 3x3 kernel copy each 2x2 block of `channels` into 4 x `channels` channels."""
    for dy in range(2):
        for dx in range(2):
            for channel in range(channels):
                weight[(dy * 2 + dx) * channels + channel, channel, 1 + dy, 1 + dx] = 1


def _channel_order() -> list[int]:
    """For each channel after two space-to-depth steps, its place in a 4x4x3 patch."""
    order = []
    for outer in range(4):
        for inner in range(4):
            # The second step groups by its own offset; within it lies the first step's offset.
            y, x = (inner // 2) + 2 * (outer // 2), (inner % 2) + 2 * (outer % 2)
            order += [(y * _BLOCK + x) * 3 + colour for colour in range(3)]
    return order


def tokenizer(corpus: list[str]) -> CLIPTokenizer:
    """Byte-level BPE in CLIP's form, learnt from `corpus` so that its frequent words are single tokens."""
    learner = CLIPTokenizer(vocab={_EOS: 0}, merges=[]).backend_tokenizer
    trainer = BpeTrainer(
        vocab_size=2600,
        min_frequency=8,
        end_of_word_suffix="</w>",
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(corpus, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    alphabet = sorted(ByteLevel.alphabet())
    # Each byte has a token inside a word and one at its end, so no text whatever is unknown.
    words = [*alphabet, *(letter + "</w>" for letter in alphabet), *("".join(pair) for pair in merges), _BOS, _EOS]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def text_encoder(vocabulary: int, eos_token_id: int, width: int = 128) -> CLIPTextModel:
    """A CLIP text model of two layers; output (batch, 48, 128)."""
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=eos_token_id - 1,
        pad_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
    return CLIPTextModel(config)


def unet(width: int = 128) -> UNet2DConditionModel:
    """The denoiser: latents (batch, 8, 16, 16), prompt embeds (batch, 48, 128)."""
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        down_block_types=("DownBlock2D",) * 4,
        up_block_types=("UpBlock2D",) * 4,
        mid_block_type="UNetMidBlock2DCrossAttn",
        block_out_channels=(64, 128, 128, 128),
        layers_per_block=1,
        cross_attention_dim=width,
        attention_head_dim=4,
        norm_num_groups=16,
        addition_embed_type="text",
        addition_embed_type_num_heads=4,
        resnet_time_scale_shift="scale_shift",
    )


def scheduler() -> DDIMScheduler:
    """DDIM with v-prediction and zero terminal SNR: its first step sees pure noise, as inference does."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )
