"""Which pipelines can be served, and what of each cannot be read from its code or configs.

A family is a kind of model with one or more pipeline classes over the same components, one for each task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from diffcluster.messages import ExtraArgument, TaskKind
from diffcluster.roles.joining import JoinRules

__all__ = ["FAMILIES", "Family", "family_of", "latent_channels", "spatial_scale", "temporal_scale"]


@dataclass(frozen=True)
class Family:
    """`pipelines`: class of each task. `rules`: how its denoiser's calls may be joined. `guidance`: the argument that
    takes `guidance_scale`. `multiple`: what sides are a multiple of, by the pipeline. `fixed`: arguments that are
    always given. `temporal`: latents have a dimension of time, even those of pictures. `fps`: of videos; 0
    if it makes pictures.
    """

    name: str
    pipelines: dict[TaskKind, str]
    rules: JoinRules
    multiple: Callable[[Any], int]
    guidance: str = "guidance_scale"
    extras: tuple[ExtraArgument, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    temporal: bool = False
    fps: int = 0


def spatial_scale(pipeline: Any) -> int:
    """Pixels of a side of one latent."""
    for name in ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio"):
        if hasattr(pipeline, name):
            return int(getattr(pipeline, name))
    raise AttributeError("the pipeline does not say its scale")


def temporal_scale(pipeline: Any) -> int:
    """Frames of one latent; 1 for pictures."""
    for name in ("vae_scale_factor_temporal", "vae_temporal_compression_ratio"):
        if hasattr(pipeline, name):
            return int(getattr(pipeline, name))
    return 1


def latent_channels(pipeline: Any) -> int:
    """Channels of the latents that the autoencoder takes."""
    config = pipeline.vae.config
    return int(config.get("latent_channels") or config["z_dim"])


def _twice_scale(pipeline: Any) -> int:
    return 2 * spatial_scale(pipeline)


def _patched(pipeline: Any) -> int:
    patch = pipeline.transformer.config.patch_size
    spatial = patch[1] if isinstance(patch, (tuple, list)) else patch
    return spatial_scale(pipeline) * int(spatial)


def _ltx(pipeline: Any) -> int:
    return spatial_scale(pipeline) * int(pipeline.transformer_spatial_patch_size)


def _video(
    name: str,
    pipelines: dict[TaskKind, str],
    multiple: Callable[[Any], int],
    fps: int,
    extras: tuple[ExtraArgument, ...] = (),
) -> Family:
    return Family(name, pipelines, _POSITIONS, multiple, extras=extras, temporal=True, fps=fps)


_UNET = JoinRules()
_POSITIONS = JoinRules(shared=frozenset({"img_ids", "txt_ids", "image_rotary_emb"}))
_QWEN = JoinRules(
    per_sample=frozenset({"img_shapes", "txt_seq_lens"}), masks={"encoder_hidden_states": "encoder_hidden_states_mask"}
)
_GUIDANCE_RESCALE = ExtraArgument("guidance_rescale", 0.0, 1.0)
_ETA = ExtraArgument("eta", 0.0, 1.0)
_TRUE_CFG = ExtraArgument("true_cfg_scale", 0.0, 100.0)

FAMILIES: Final = (
    Family(
        "Stable Diffusion 1 and 2",
        {
            "text_to_image": "StableDiffusionPipeline",
            "image_to_image": "StableDiffusionImg2ImgPipeline",
            "inpaint": "StableDiffusionInpaintPipeline",
        },
        _UNET,
        spatial_scale,
        extras=(_ETA, _GUIDANCE_RESCALE),
    ),
    Family(
        "Stable Diffusion XL",
        {
            "text_to_image": "StableDiffusionXLPipeline",
            "image_to_image": "StableDiffusionXLImg2ImgPipeline",
            "inpaint": "StableDiffusionXLInpaintPipeline",
        },
        _UNET,
        spatial_scale,
        extras=(_ETA, _GUIDANCE_RESCALE),
    ),
    Family(
        "Stable Diffusion 3",
        {
            "text_to_image": "StableDiffusion3Pipeline",
            "image_to_image": "StableDiffusion3Img2ImgPipeline",
            "inpaint": "StableDiffusion3InpaintPipeline",
        },
        JoinRules(),
        _patched,
    ),
    Family(
        "Flux.1",
        {
            "text_to_image": "FluxPipeline",
            "image_to_image": "FluxImg2ImgPipeline",
            "inpaint": "FluxInpaintPipeline",
        },
        _POSITIONS,
        _twice_scale,
        extras=(_TRUE_CFG,),
    ),
    Family(
        "Flux.2 klein", {"text_to_image": "Flux2KleinPipeline", "edit": "Flux2KleinPipeline"}, _POSITIONS, _twice_scale
    ),
    Family(
        "Qwen-Image",
        {
            "text_to_image": "QwenImagePipeline",
            "image_to_image": "QwenImageImg2ImgPipeline",
            "inpaint": "QwenImageInpaintPipeline",
        },
        _QWEN,
        _twice_scale,
        guidance="true_cfg_scale",
        temporal=True,
    ),
    Family(
        "Qwen-Image-Edit",
        {"edit": "QwenImageEditPipeline"},
        _QWEN,
        _twice_scale,
        guidance="true_cfg_scale",
        temporal=True,
    ),
    Family(
        "Z-Image",
        {"text_to_image": "ZImagePipeline"},
        JoinRules(per_sample=frozenset({"x", "cap_feats"}), ragged=frozenset({"cap_feats"})),
        _twice_scale,
    ),
    Family(
        "PixArt-Sigma",
        {"text_to_image": "PixArtSigmaPipeline"},
        JoinRules(),
        _patched,
        fixed={"use_resolution_binning": False},
    ),
    Family(
        "Sana",
        {"text_to_image": "SanaPipeline"},
        JoinRules(),
        _patched,
        fixed={"use_resolution_binning": False},
    ),
    _video("Wan", {"text_to_video": "WanPipeline"}, _patched, 16),
    _video("Wan image to video", {"image_to_video": "WanImageToVideoPipeline"}, _patched, 16),
    _video(
        "LTX-Video",
        {"text_to_video": "LTXPipeline", "image_to_video": "LTXImageToVideoPipeline"},
        _ltx,
        25,
        extras=(_GUIDANCE_RESCALE,),
    ),
    _video("HunyuanVideo", {"text_to_video": "HunyuanVideoPipeline"}, _patched, 24),
    _video("CogVideoX", {"text_to_video": "CogVideoXPipeline"}, _patched, 8),
)


def family_of(pipeline: str) -> Family | None:
    """The family that has a class called `pipeline`."""
    return next((family for family in FAMILIES if pipeline in family.pipelines.values()), None)
