"""What messages carry: models, parameters, addresses, timings. Values with bounds, checked when a frame is decoded."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from diffcluster.ids import NAME_PATTERN, HostId, Incarnation, InstanceName, LeaseId

__all__ = [
    "Checksum", "Count", "EngineKind", "ExtraArgument", "FileInfo", "GenerationParameters", "InputImage", "ModelFacts",
    "OutputFormat", "Peer", "Seconds", "Session", "SlotAddress", "StageTimings", "TaskKind", "Text", "VideoFacts",
]  # fmt: skip

Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Text = Annotated[str, Meta(max_length=4096)]
Token = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
Checksum = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
"""XXH3-64 of all bytes that are handed over, padding included, as hexadecimal digits."""
EngineKind = Literal["inprocess", "shm", "tcp", "mooncake"]
OutputFormat = Literal["png", "jpeg", "webp", "mp4"]
"""Of a video: `mp4` (H.264), or `png` and `webp`, which are animated; PNG loses nothing."""
TaskKind = Literal["text_to_image", "image_to_image", "inpaint", "edit", "text_to_video", "image_to_video"]
"""What is asked of a model. `edit` follows an instruction; `image_to_image` starts from the picture and `strength`."""


class ExtraArgument(Struct, frozen=True, forbid_unknown_fields=True):
    """A pipeline argument of its own that a model takes in `extra`. Always a number in minimum..maximum."""

    name: Name
    minimum: float
    maximum: float


class VideoFacts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a model of videos makes: k * `frame_multiple` + 1 frames, at most `max_frames`."""

    num_frames: Annotated[int, Meta(ge=1)]
    frame_multiple: Annotated[int, Meta(ge=1)]
    max_frames: Annotated[int, Meta(ge=1)]
    fps: Annotated[int, Meta(ge=1, le=240)]


class ModelFacts(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the router must know of a model to refuse early and to fill in what was left out.

    Read from the model's configs, so that all roles of one model say the same. Sizes in pixels. `tasks` are those that
    it can do, `schedulers` the class names that a request may ask for instead of the model's own.
    """

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    revision: Annotated[str, Meta(max_length=128)]
    pipeline: str
    width: Annotated[int, Meta(ge=1)]
    height: Annotated[int, Meta(ge=1)]
    size_multiple: Annotated[int, Meta(ge=1)]
    max_pixels: Annotated[int, Meta(ge=1)]
    num_inference_steps: Annotated[int, Meta(ge=1)]
    max_inference_steps: Annotated[int, Meta(ge=1)]
    guidance_scale: float
    extras: tuple[ExtraArgument, ...] = ()
    tasks: Annotated[tuple[TaskKind, ...], Meta(min_length=1)] = ("text_to_image",)
    strength: Annotated[float, Meta(ge=0, le=1)] = 0.8
    """Default of image_to_image and inpaint."""
    max_input_images: Count = 1
    schedulers: tuple[str, ...] = ()
    video: VideoFacts | None = None


class InputImage(Struct, frozen=True, forbid_unknown_fields=True):
    """A picture that the client sent: an 8-bit PNG, `RGB` or, if it is a mask, `L`. Its bytes travel apart."""

    kind: Literal["image", "mask"]
    width: Annotated[int, Meta(ge=1, le=16384)]
    height: Annotated[int, Meta(ge=1, le=16384)]
    nbytes: Count


class GenerationParameters(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One picture or video to make; every field is decided by the router, so that all stages and retries agree.

    `guidance_scale` <= 1 means no negative pass. The noise comes from a CPU generator seeded with `seed`,
    of which torch uses the low 32 bits.
    `extra` holds arguments that the model's facts declare. Of two requests the one with the higher `priority` computes
    first. `deadline_s`: seconds from its start after which nobody waits for it any more.
    """

    model: str
    prompt: Annotated[str, Meta(max_length=32_000)]
    negative_prompt: Annotated[str, Meta(max_length=32_000)] = ""
    width: Annotated[int, Meta(ge=1)]
    height: Annotated[int, Meta(ge=1)]
    num_inference_steps: Annotated[int, Meta(ge=1)]
    guidance_scale: float
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    output_format: OutputFormat = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100)] = 100
    extra: dict[str, float] = {}
    task: TaskKind = "text_to_image"
    strength: Annotated[float, Meta(ge=0, le=1)] = 0.8
    num_frames: Annotated[int, Meta(ge=1)] = 1
    fps: Annotated[int, Meta(ge=1, le=240)] = 1
    scheduler: Annotated[str, Meta(max_length=64)] = ""
    """Class name of the scheduler; empty for the model's own."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    inputs: Annotated[tuple[InputImage, ...], Meta(max_length=17)] = ()


class Session(Struct, frozen=True, forbid_unknown_fields=True):
    """How an instance can be written to by one kind of engine. `address` is the engine's own form."""

    kind: EngineKind
    address: Annotated[str, Meta(max_length=512)]


class SlotAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """A leased receive slot. `token` is the capability to write into it, good for this lease alone."""

    lease: LeaseId
    offset: Count
    nbytes: Count
    token: Token


class Peer(Struct, frozen=True, forbid_unknown_fields=True):
    """A receiver as senders need to know it."""

    name: Annotated[InstanceName, Meta(pattern=NAME_PATTERN)]
    incarnation: Annotated[Incarnation, Meta(pattern=r"^[0-9a-f]{32}$")]
    host: Annotated[HostId, Meta(max_length=256)]
    sessions: tuple[Session, ...]


class StageTimings(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that one stage spent on one request: waiting, loading its input, computing."""

    queued_s: Seconds
    loaded_s: Seconds
    computed_s: Seconds


class FileInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """A finished file, whose bytes follow on the bulk connection."""

    media_type: Annotated[str, Meta(max_length=64)]
    nbytes: Count
