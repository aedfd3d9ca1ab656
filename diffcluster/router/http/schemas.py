"""Bodies of the HTTP API. Field by field as in OpenAI's Images and Videos APIs; our own fields are marked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

__all__ = [
    "Asked",
    "EditRequest",
    "Image",
    "ImageReference",
    "ImageRequest",
    "ImageResponse",
    "Model",
    "ModelList",
    "Video",
    "VideoDeleted",
    "VideoError",
    "VideoList",
    "VideoModel",
    "VideoRequest",
]

_Ignored = Annotated[Any, Meta(description="Ignored.")]


class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """What every request may say. null means the same as leaving a field out."""

    prompt: Annotated[str, Meta(description="What is to be seen; at most 32,000 characters.")]
    model: Annotated[str | None, Meta(description="Which model; may be left out if the cluster serves one.")] = None
    size: Annotated[str | None, Meta(description="`WIDTHxHEIGHT` in pixels, or `auto`.")] = None
    output_compression: Annotated[
        int | None, Meta(description="Quality of JPEG, WebP and MP4, 0 to 100. Default 100.")
    ] = None
    negative_prompt: Annotated[str | None, Meta(description="Ours. What to keep away from.")] = None
    seed: Annotated[
        int | None, Meta(description="Ours. 0 to 2^63-1, of which the low 32 bits count. Default: drawn, and returned.")
    ] = None
    num_inference_steps: Annotated[int | None, Meta(description="Ours. Denoising steps. Default: the model's.")] = None
    guidance_scale: Annotated[
        float | None, Meta(description="Ours. Weight of the prompt; up to 1 turns guidance off. Default: the model's.")
    ] = None
    scheduler: Annotated[
        str | None, Meta(description="Ours. One of the model's schedulers, by class name. Default: its own.")
    ] = None
    priority: Annotated[
        int | None, Meta(description="Ours. -100 to 100; what is higher is computed first. Default 0.")
    ] = None
    deadline_s: Annotated[float | None, Meta(description="Ours. Give up after so many seconds.")] = None
    extra: Annotated[dict[str, float] | None, Meta(description="Ours. Arguments of the model's own pipeline.")] = None
    user: _Ignored = None
    safety_identifier: _Ignored = None


class _AskedImages(Asked, forbid_unknown_fields=True, kw_only=True):
    n: Annotated[int | None, Meta(description="How many pictures; picture k has the seed `seed` + k. Default 1.")] = (
        None
    )
    response_format: Annotated[
        Literal["b64_json", "url"] | None, Meta(description="`url` gives a data: URL. Default `b64_json`.")
    ] = None
    output_format: Annotated[Literal["png", "jpeg", "webp"] | None, Meta(description="Default `png`.")] = None
    background: Annotated[
        Literal["transparent", "opaque", "auto"] | None, Meta(description="`transparent` is not supported.")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer by server-sent events, one `completed` per picture.")] = (
        None
    )
    partial_images: Annotated[
        int | None, Meta(description="0 to 3. Previews are not made yet: only `completed` events are sent.")
    ] = None
    quality: _Ignored = None
    moderation: _Ignored = None


class ImageRequest(_AskedImages, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/images/generations. null means the same as leaving a field out."""

    style: _Ignored = None


class ImageReference(Struct, forbid_unknown_fields=True, kw_only=True):
    """A picture in OpenAI's JSON form. Only data: URLs: the server fetches nothing."""

    image_url: str


class EditRequest(_AskedImages, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/images/edits, as JSON. In a form, `image`, `image[]` and `mask` are files."""

    image: Annotated[
        str | ImageReference | list[str | ImageReference] | None,
        Meta(description="The picture, or several: base64, or a data: URL."),
    ] = None
    images: Annotated[list[str | ImageReference] | None, Meta(description="Another name for several `image`s.")] = None
    mask: Annotated[
        str | ImageReference | None,
        Meta(
            description="As large as the first picture. What is transparent in it, or white if it is opaque, changes."
        ),
    ] = None
    strength: Annotated[
        float | None,
        Meta(description="Ours. How much of the picture is made anew, above 0 to 1. Default: the model's."),
    ] = None
    input_fidelity: _Ignored = None


class VideoRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/videos, as JSON. In a form, `input_reference` is a file."""

    seconds: Annotated[
        str | float | None, Meta(description="Length; rounded down to what the model can make. Default: the model's.")
    ] = None
    num_frames: Annotated[int | None, Meta(description="Ours. Instead of `seconds`; must fit the model's rule.")] = None
    fps: Annotated[int | None, Meta(description="Ours. Frames per second, 1 to 240. Default: the model's.")] = None
    input_reference: Annotated[
        str | ImageReference | None, Meta(description="Picture that the video begins with: base64, or a data: URL.")
    ] = None
    output_format: Annotated[
        Literal["mp4", "png", "webp"] | None, Meta(description="Ours. PNG and WebP are animated. Default `mp4`.")
    ] = None


class Image(Struct, kw_only=True, omit_defaults=True):
    """One picture, with the seed that makes it again, and where its time went."""

    b64_json: str | None = None
    url: str | None = None
    seed: int
    timings: dict[str, Any] = field(default_factory=dict)


class ImageResponse(Struct, kw_only=True):
    """Answer of POST /v1/images/generations and /v1/images/edits. `seed` and `timings` are ours."""

    created: int
    data: list[Image]
    model: str
    size: str
    output_format: str
    seed: int
    timings: dict[str, float]


class VideoModel(Struct, kw_only=True):
    """What a model of videos makes: k * `frame_multiple` + 1 frames, at most `max_frames`."""

    num_frames: int
    frame_multiple: int
    max_frames: int
    fps: int


class Model(Struct, kw_only=True):
    """A model that the cluster serves. The fields after `owned_by` are ours: defaults and limits."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "diffcluster"
    pipeline: str
    revision: str
    tasks: tuple[str, ...]
    size: str
    size_multiple: int
    max_pixels: int
    num_inference_steps: int
    max_inference_steps: int
    guidance_scale: float
    strength: float
    max_input_images: int
    schedulers: tuple[str, ...]
    video: VideoModel | None
    extra: dict[str, tuple[float, float]]


class ModelList(Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class VideoError(Struct, kw_only=True):
    """Why a video failed."""

    code: str
    message: str


class Video(Struct, kw_only=True):
    """A video, made or in the making, as OpenAI's client knows it. The fields after `error` are ours."""

    id: str
    object: Literal["video"] = "video"
    created_at: int
    completed_at: int | None
    expires_at: int | None = None
    model: str
    prompt: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    seconds: str
    size: str
    remixed_from_video_id: str | None = None
    error: VideoError | None
    num_frames: int
    fps: int
    seed: int
    output_format: str
    timings: dict[str, Any]


class VideoList(Struct, kw_only=True):
    """Answer of GET /v1/videos."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(Struct, kw_only=True):
    """Answer of DELETE /v1/videos/{id}."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True
