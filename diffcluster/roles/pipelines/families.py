"""Which pipelines can be served, and what of each cannot be read from its code or configs.

A family is a kind of model with one or more pipeline classes over the same components, one for each task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from diffcluster.messages import ExtraArgument, TaskKind
from diffcluster.roles.joining import JoinRules

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True)
class Family:
    """`pipelines`: class of each task. `rules`: how its denoiser's calls may be joined. `guidance`: the argument that
    takes `guidance_scale`. `multiple`: what sides are a multiple of, by the pipeline. `fixed`: arguments that are
    always given. `picture`: the picture in what the autoencoder decodes.
    """

    name: str
    pipelines: dict[TaskKind, str]
    rules: JoinRules
    multiple: Callable[[Any], int]
    guidance: str = "guidance_scale"
    extras: tuple[ExtraArgument, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    media: Literal["image", "video"] = "image"
    picture: Callable[[Any], Any] = lambda decoded: decoded
    fps: int = 1


def _scale(pipeline: Any) -> int:
    return int(pipeline.vae_scale_factor)


def _twice_scale(pipeline: Any) -> int:
    return 2 * int(pipeline.vae_scale_factor)


def _patched(pipeline: Any) -> int:
    patch = pipeline.transformer.config.patch_size
    spatial = patch[1] if isinstance(patch, (tuple, list)) else patch
    scale = getattr(pipeline, "vae_scale_factor", None) or getattr(pipeline, "vae_scale_factor_spatial", 8)
    return int(scale) * int(spatial)


def _ltx(pipeline: Any) -> int:
    return int(pipeline.vae_spatial_compression_ratio) * int(pipeline.transformer_spatial_patch_size)


def _first_frame(decoded: Any) -> Any:
    return decoded[:, :, 0]


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
        _scale,
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
        _scale,
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
        picture=_first_frame,
    ),
    Family(
        "Qwen-Image-Edit",
        {"edit": "QwenImageEditPipeline"},
        _QWEN,
        _twice_scale,
        guidance="true_cfg_scale",
        picture=_first_frame,
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
    Family("Wan", {"text_to_video": "WanPipeline"}, _POSITIONS, _patched, media="video", fps=16),
    Family(
        "Wan image to video", {"image_to_video": "WanImageToVideoPipeline"}, _POSITIONS, _patched, media="video", fps=16
    ),
    Family(
        "LTX-Video",
        {"text_to_video": "LTXPipeline", "image_to_video": "LTXImageToVideoPipeline"},
        _POSITIONS,
        _ltx,
        extras=(_GUIDANCE_RESCALE,),
        media="video",
        fps=25,
    ),
    Family("HunyuanVideo", {"text_to_video": "HunyuanVideoPipeline"}, _POSITIONS, _patched, media="video", fps=24),
    Family("CogVideoX", {"text_to_video": "CogVideoXPipeline"}, _POSITIONS, _patched, media="video", fps=8),
)


def family_of(pipeline: str) -> Family | None:
    """The family that has a class called `pipeline`."""
    return next((family for family in FAMILIES if pipeline in family.pipelines.values()), None)
