"""What a request asks of a model, and whether it can: from bodies to parameters, for each task. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from diffcluster.errors import InvalidRequestError
from diffcluster.messages import GenerationParameters, InputImage, ModelFacts, TaskKind, VideoFacts
from diffcluster.router.http.schemas import EditRequest, ImageRequest, VideoRequest
from diffcluster.router.http.validate import choose_seed, choose_size, common_parameters, number, within

if TYPE_CHECKING:
    from diffcluster.config import RouterConfig

__all__ = ["check_count", "edit_parameters", "edit_task", "image_parameters", "video_parameters", "video_task"]

_WHERE: Final[dict[TaskKind, str]] = {
    "text_to_image": "POST /v1/images/generations",
    "image_to_image": "POST /v1/images/edits",
    "inpaint": "POST /v1/images/edits with a mask",
    "edit": "POST /v1/images/edits",
    "text_to_video": "POST /v1/videos",
    "image_to_video": "POST /v1/videos with input_reference",
}
_FOLLOW_STRENGTH: Final[frozenset[TaskKind]] = frozenset({"image_to_image", "inpaint"})
_LONGEST_S: Final = 86_400.0
DrawSeed = Callable[[int], int]


def _need(task: TaskKind, facts: ModelFacts, param: str) -> TaskKind:
    """`task`, if the model can do it; else an error that says what it can do."""
    if task not in facts.tasks:
        able = "; ".join(f"{name} ({_WHERE[name]})" for name in facts.tasks)
        raise InvalidRequestError(f"{param}: {facts.id} cannot do {task}; it can do {able}", param=param)
    return task


# ---------------------------------------------------------------- pictures


def image_parameters(
    request: ImageRequest, facts: ModelFacts, config: RouterConfig, draw_seed: DrawSeed
) -> list[GenerationParameters]:
    """The parameters of each picture of `request`. `draw_seed(n)` draws one that leaves room for n - 1 more.

    Raises:
        InvalidRequestError: a field that cannot be; `param` names it.
    """
    task = _need("text_to_image", facts, "model")
    size = choose_size(request.size, facts, config)
    return _images(request, facts, config, task, size, draw_seed)


def edit_task(facts: ModelFacts, *, mask: bool) -> TaskKind:
    """What an edit asks of this model; raises `InvalidRequestError` if that is nothing it can do."""
    if mask:
        return _need("inpaint", facts, "mask" if {"edit", "image_to_image"} & set(facts.tasks) else "model")
    if "edit" in facts.tasks:
        return "edit"
    return _need("image_to_image", facts, "mask" if "inpaint" in facts.tasks else "model")


def check_count(param: str, count: int, facts: ModelFacts) -> None:
    """Raise `InvalidRequestError` unless the model can take so many pictures."""
    if not count:
        raise InvalidRequestError(f"{param}: a picture is required", param=param)
    if count > facts.max_input_images:
        text = f"{param}: {count} pictures; {facts.id} takes at most {facts.max_input_images}"
        raise InvalidRequestError(text, param=param)


def edit_parameters(
    request: EditRequest,
    facts: ModelFacts,
    config: RouterConfig,
    task: TaskKind,
    inputs: Sequence[InputImage],
    draw_seed: DrawSeed,
) -> list[GenerationParameters]:
    """The same for edits of `inputs`, the first of which sets the size if none was asked for."""
    size = choose_size(request.size, facts, config, (inputs[0].width, inputs[0].height))
    made = _images(request, facts, config, task, size, draw_seed)
    strength = _strength(request.strength, facts, task, made[0].num_inference_steps)
    return [replace(parameters, strength=strength, inputs=tuple(inputs)) for parameters in made]


def _images(
    request: ImageRequest | EditRequest,
    facts: ModelFacts,
    config: RouterConfig,
    task: TaskKind,
    size: tuple[int, int],
    draw_seed: DrawSeed,
) -> list[GenerationParameters]:
    count = within("n", request.n, 1, 1, config.max_images)
    if request.background == "transparent":
        raise InvalidRequestError("background: a transparent background is not supported", param="background")
    within("partial_images", request.partial_images, 0, 0, 3)
    seed = choose_seed(request.seed, count, draw_seed)
    first = common_parameters(request, facts, config, task, size, seed)
    first = replace(first, output_format=request.output_format or "png")
    return [replace(first, seed=seed + k) for k in range(count)]


def _strength(requested: float | None, facts: ModelFacts, task: TaskKind, steps: int) -> float:
    """How much is made anew. At least one step must remain: the scheduler begins that far from its end."""
    if task not in _FOLLOW_STRENGTH:
        if requested is not None:
            raise InvalidRequestError(f"strength: means nothing to {task}, which {facts.id} does", param="strength")
        return facts.strength
    strength = number("strength", requested, facts.strength, 0.0, 1.0)
    if int(steps * strength) < 1:
        text = f"strength: {strength} of num_inference_steps {steps} leaves no step to do"
        raise InvalidRequestError(f"{text}; at least {1 / steps:.4g} is needed with so many", param="strength")
    return strength


# ---------------------------------------------------------------- videos


def video_task(facts: ModelFacts, *, reference: bool) -> TaskKind:
    """What a video asks of this model; raises `InvalidRequestError` if that is nothing it can do."""
    videos = {"text_to_video", "image_to_video"} & set(facts.tasks)
    param = "input_reference" if videos else "model"
    return _need("image_to_video" if reference else "text_to_video", facts, param)


def video_parameters(
    request: VideoRequest,
    facts: ModelFacts,
    config: RouterConfig,
    task: TaskKind,
    inputs: Sequence[InputImage],
    draw_seed: DrawSeed,
) -> GenerationParameters:
    """The parameters of a video, which begins with `inputs` if there are any.

    Raises:
        InvalidRequestError: a field that cannot be; `param` names it.
    """
    video = facts.video
    if video is None:
        raise InvalidRequestError(f"model: {facts.id} does not say what videos it makes", param="model")
    fps = within("fps", request.fps, video.fps, 1, 240)
    size = choose_size(request.size, facts, config)
    made = common_parameters(request, facts, config, task, size, choose_seed(request.seed, 1, draw_seed))
    return replace(
        made,
        num_frames=_frames(request, video, fps),
        fps=fps,
        inputs=tuple(inputs),
        output_format=request.output_format or "mp4",
    )


def _frames(request: VideoRequest, video: VideoFacts, fps: int) -> int:
    """How many frames: as many as were asked for, or as fit into the time that was."""
    if request.num_frames is not None and request.seconds is not None:
        raise InvalidRequestError("num_frames: and seconds cannot both be given", param="num_frames")
    if request.seconds is not None:
        seconds = _seconds(request.seconds)
        # A hair more, so that 4.1 s of 10 frames a second are 41.
        frames = _fitting(math.floor(seconds * fps + 1e-6), video)
        if frames > video.max_frames:
            longest = _fitting(video.max_frames, video) / fps
            text = (
                f"seconds: {request.seconds} are {frames} frames at {fps} a second; at most {video.max_frames} are made"
            )
            raise InvalidRequestError(f"{text}, {longest:.6g} s", param="seconds")
        return frames
    frames = within("num_frames", request.num_frames, video.num_frames, 1, video.max_frames)
    if request.num_frames is not None and frames != (nearest := _fitting(frames, video)):
        text = f"num_frames: must be a multiple of {video.frame_multiple}, and one more; the nearest below is {nearest}"
        raise InvalidRequestError(f"{text}, not {frames}", param="num_frames")
    return frames


def _fitting(frames: int, video: VideoFacts) -> int:
    """The most frames that the model can make, of so many; at least one."""
    return max(0, frames - 1) // video.frame_multiple * video.frame_multiple + 1


def _seconds(value: str | float) -> float:
    try:
        seconds = float(value) if len(str(value)) <= 32 else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_S:
        raise InvalidRequestError(f"seconds: {str(value)[:32]!r} is no number above 0", param="seconds")
    return seconds
