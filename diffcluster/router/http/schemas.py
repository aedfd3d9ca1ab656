"""Bodies of the HTTP API. Field by field as in OpenAI's Images API; our own fields are marked."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

__all__ = ["IGNORED", "Image", "ImageRequest", "ImageResponse", "Model", "ModelList"]

IGNORED: Final = ("quality", "style", "moderation", "user", "safety_identifier")
"""Fields of OpenAI that mean nothing here; any value is taken and has no effect."""


class ImageRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/images/generations. null means the same as leaving a field out."""

    prompt: Annotated[str, Meta(description="What the picture shows; at most 32,000 characters.")]
    model: Annotated[str | None, Meta(description="Which model; may be left out if the cluster serves one.")] = None
    n: Annotated[int | None, Meta(description="How many pictures; picture k has the seed `seed` + k. Default 1.")] = (
        None
    )
    size: Annotated[str | None, Meta(description="`WIDTHxHEIGHT` in pixels, or `auto` for the model's own size.")] = (
        None
    )
    response_format: Annotated[
        Literal["b64_json", "url"] | None, Meta(description="`url` gives a data: URL. Default `b64_json`.")
    ] = None
    output_format: Annotated[Literal["png", "jpeg", "webp"] | None, Meta(description="Default `png`.")] = None
    output_compression: Annotated[int | None, Meta(description="Quality of JPEG and WebP, 0 to 100. Default 100.")] = (
        None
    )
    background: Annotated[
        Literal["transparent", "opaque", "auto"] | None, Meta(description="`transparent` is not supported.")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer by server-sent events, one `completed` per picture.")] = (
        None
    )
    partial_images: Annotated[
        int | None, Meta(description="0 to 3. Previews are not made yet: only `completed` events are sent.")
    ] = None
    negative_prompt: Annotated[str | None, Meta(description="Ours. What to keep away from.")] = None
    seed: Annotated[
        int | None, Meta(description="Ours. 0 to 2^63-1, of which the low 32 bits count. Default: drawn, and returned.")
    ] = None
    num_inference_steps: Annotated[int | None, Meta(description="Ours. Denoising steps. Default: the model's.")] = None
    guidance_scale: Annotated[
        float | None, Meta(description="Ours. Weight of the prompt; up to 1 turns guidance off. Default: the model's.")
    ] = None
    deadline_s: Annotated[float | None, Meta(description="Ours. Give up after so many seconds.")] = None
    extra: Annotated[dict[str, float] | None, Meta(description="Ours. Arguments of the model's own pipeline.")] = None
    quality: Annotated[Any, Meta(description="Ignored.")] = None
    style: Annotated[Any, Meta(description="Ignored.")] = None
    moderation: Annotated[Any, Meta(description="Ignored.")] = None
    user: Annotated[Any, Meta(description="Ignored.")] = None
    safety_identifier: Annotated[Any, Meta(description="Ignored.")] = None


class Image(Struct, kw_only=True, omit_defaults=True):
    """One picture, with the seed that makes it again, and where its time went."""

    b64_json: str | None = None
    url: str | None = None
    seed: int
    timings: dict[str, Any] = field(default_factory=dict)


class ImageResponse(Struct, kw_only=True):
    """Answer of POST /v1/images/generations. `seed` and `timings` are ours."""

    created: int
    data: list[Image]
    model: str
    size: str
    output_format: str
    seed: int
    timings: dict[str, float]


class Model(Struct, kw_only=True):
    """A model that the cluster serves. The fields after `owned_by` are ours: defaults and limits."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "diffcluster"
    pipeline: str
    revision: str
    size: str
    size_multiple: int
    max_pixels: int
    num_inference_steps: int
    max_inference_steps: int
    guidance_scale: float
    extra: dict[str, tuple[float, float]]


class ModelList(Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]
