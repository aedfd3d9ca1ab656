"""Random weights that make a small network a useful stand-in for a trained one.

The initial values of the libraries are chosen for training: output layers of zero, text layers of standard deviation
0.02. A pipeline made of those draws one grey picture whatever it is asked for, and a test of it proves nothing. So
every layer keeps the variance of what goes through it.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import nn

__all__ = ["calibrate", "randomize"]

_BIAS: Final = 0.1
_CONTRAST: Final = 0.4
"""Standard deviation of a decoded picture; pixels go from -1 to 1."""


def randomize(module: Any) -> Any:
    """Draw all weights of `module` from the global generator, so large that layers keep the variance.

    Returns:
        The module, in evaluation mode: dropout would make one process disagree with another.
    """
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                layer.weight.normal_(std=1 / math.sqrt(layer.weight[0].numel()))
                if layer.bias is not None:
                    layer.bias.normal_(std=_BIAS)
            elif isinstance(layer, nn.Embedding):
                layer.weight.normal_()
    return module.eval()


def calibrate(vae: Any, *size: int) -> Any:
    """Random weights for `vae`, with a decoder that turns noise of `size` (frames, height, width) into fair contrast.

    The last layer is scaled by a power of two, so that rounding differences between machines don't change the weights;
    its weights have no sum, so that pictures are neither dark nor bright on the whole.
    """
    randomize(vae)
    last = vae.decoder.conv_out
    last = getattr(last, "conv", last)
    channels = getattr(vae.config, "latent_channels", None) or vae.config.z_dim
    with torch.no_grad():
        last.bias.zero_()
        last.weight -= last.weight.mean(dim=tuple(range(1, last.weight.ndim)), keepdim=True)
        last.weight /= 16  # several decoders clamp their pixels: measure well inside
        pixels = vae.decode(torch.randn(1, channels, *size), return_dict=False)[0]
        last.weight *= 2.0 ** round(math.log2(_CONTRAST / pixels.std().item()))
    return vae
