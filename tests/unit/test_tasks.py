"""From bodies to parameters: which task, how many frames, what strength; and what is refused, naming the field."""

from __future__ import annotations

from typing import Any

import pytest

from diffcluster.config import RouterConfig
from diffcluster.errors import InvalidRequestError
from diffcluster.messages import GenerationParameters, InputImage, ModelFacts, VideoFacts
from diffcluster.router.http.schemas import EditRequest, ImageRequest, VideoRequest
from diffcluster.router.http.tasks import (
    check_count,
    edit_parameters,
    edit_task,
    image_parameters,
    video_parameters,
    video_task,
)
from tests.support import facts

CONFIG = RouterConfig()
IMAGES = facts(tasks=("text_to_image", "image_to_image", "inpaint"), schedulers=("A", "B"), max_pixels=1 << 20)
VIDEO = VideoFacts(num_frames=9, frame_multiple=4, max_frames=33, fps=8)
VIDEOS = facts(tasks=("text_to_video", "image_to_video"), video=VIDEO)
SOURCE = InputImage("image", 96, 64, 100)


def draw(count: int) -> int:
    return 1000 * count


def edited(model: ModelFacts = IMAGES, source: InputImage = SOURCE, **fields: Any) -> list[GenerationParameters]:
    request = EditRequest(prompt="x", **fields)
    return edit_parameters(request, model, CONFIG, edit_task(model, mask=False), [source], draw)


def video(**fields: Any) -> GenerationParameters:
    return video_parameters(VideoRequest(prompt="x", **fields), VIDEOS, CONFIG, "text_to_video", (), draw)


def refused(param: str, make: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        make(**fields)
    assert caught.value.param == param
    return caught.value.message


def generated(model: ModelFacts = IMAGES, **fields: Any) -> list[GenerationParameters]:
    return image_parameters(ImageRequest(prompt="x", **fields), model, CONFIG, draw)


# ---------------------------------------------------------------- tasks


@pytest.mark.parametrize(
    ("tasks", "mask", "task"),
    [(("image_to_image",), False, "image_to_image"), (("image_to_image", "inpaint"), True, "inpaint"),
     (("edit",), False, "edit"), (("image_to_image", "edit"), False, "edit")],
)  # fmt: skip
def test_what_an_edit_is(tasks: tuple[Any, ...], mask: bool, task: str) -> None:
    assert edit_task(facts(tasks=tasks), mask=mask) == task


@pytest.mark.parametrize(
    ("tasks", "mask", "param", "able"),
    [(("text_to_image",), False, "model", "/v1/images/generations"), (("text_to_image",), True, "model", "generations"),
     (("image_to_image",), True, "mask", "image_to_image (POST /v1/images/edits)"), (("edit",), True, "mask", "edit"),
     (("inpaint",), False, "mask", "with a mask"), (("text_to_video",), False, "model", "/v1/videos")],
)  # fmt: skip
def test_an_edit_that_the_model_cannot_do(tasks: tuple[Any, ...], mask: bool, param: str, able: str) -> None:
    model = facts(tasks=tasks)
    assert able in refused(param, lambda: edit_task(model, mask=mask))


def test_pictures_of_a_model_of_videos_and_videos_of_one_of_pictures() -> None:
    assert "POST /v1/videos" in refused("model", lambda: generated(VIDEOS))
    assert "generations" in refused("model", lambda: video_task(IMAGES, reference=False))
    assert "generations" in refused("model", lambda: video_task(IMAGES, reference=True))


def test_what_a_video_is() -> None:
    assert video_task(VIDEOS, reference=False) == "text_to_video"
    assert video_task(VIDEOS, reference=True) == "image_to_video"
    only_text, only_image = facts(tasks=("text_to_video",)), facts(tasks=("image_to_video",))
    assert "cannot do image_to_video" in refused("input_reference", lambda: video_task(only_text, reference=True))
    assert "cannot do text_to_video" in refused("input_reference", lambda: video_task(only_image, reference=False))


def test_how_many_pictures() -> None:
    check_count("image", 1, IMAGES)
    check_count("image", 3, facts(max_input_images=3))
    assert "required" in refused("image", lambda: check_count("image", 0, IMAGES))
    assert "at most 3" in refused("image", lambda: check_count("image", 4, facts(max_input_images=3)))


# ---------------------------------------------------------------- all


def test_what_all_requests_may_say() -> None:
    (made,) = generated(scheduler="B", priority=-100, deadline_s=5.0, seed=3)
    assert (made.scheduler, made.priority, made.deadline_s, made.task) == ("B", -100, 5.0, "text_to_image")
    (made,) = generated()
    assert (made.scheduler, made.priority, made.deadline_s, made.seed) == ("", 0, None, 1000)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"scheduler": "C"}, "it has A, B"), ({"scheduler": ""}, "A, B"), ({"priority": 101}, "-100..100"),
     ({"priority": -101}, "-100..100"), ({"deadline_s": 0.0}, "deadline_s"), ({"deadline_s": 1e9}, "deadline_s")],
)  # fmt: skip
@pytest.mark.parametrize("make", [generated, edited])
def test_what_none_may_say(make: Any, fields: dict[str, Any], says: str) -> None:
    (param,) = fields
    assert says in refused(param, make, **fields)


def test_a_model_without_other_schedulers() -> None:
    assert "none besides its own" in refused("scheduler", lambda: generated(facts(), scheduler="A"))


# ---------------------------------------------------------------- edits


@pytest.mark.parametrize(
    ("source", "size"),
    [((96, 64), (96, 64)), ((97, 65), (96, 64)), ((100, 64), (96, 64)), ((101, 64), (104, 64)), ((1, 1), (8, 8)),
     ((512, 16), (512, 16)), ((512, 3), (512, 8))],
)  # fmt: skip
def test_without_a_size_the_source_is_rounded(source: tuple[int, int], size: tuple[int, int]) -> None:
    for asked in (None, "auto"):
        (made,) = edited(source=InputImage("image", *source, 1), size=asked)
        assert (made.width, made.height) == size


def test_a_size_that_was_asked_for_is_made() -> None:
    (made,) = edited(size="128x120")
    assert (made.width, made.height) == (128, 120)
    assert made.inputs == (SOURCE,)


def test_a_source_above_the_limit_needs_a_size() -> None:
    large = InputImage("image", 4000, 3000, 1)
    assert "at most 1048576" in refused("size", lambda: edited(source=large))
    assert edited(source=large, size="64x64")


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("strength", [0.01, 0.09, 0.1, 0.25, 0.5, 0.8, 1.0])
def test_strength_leaves_a_step_or_is_refused(strength: float, steps: int) -> None:
    if int(strength * steps) >= 1:
        assert edited(strength=strength, num_inference_steps=steps)[0].strength == strength
        return
    message = refused("strength", edited, strength=strength, num_inference_steps=steps)
    assert str(strength) in message
    assert str(steps) in message


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_strength_that_is_none(strength: float) -> None:
    refused("strength", edited, strength=strength)


def test_the_default_strength_is_the_models() -> None:
    assert edited()[0].strength == IMAGES.strength
    assert "leaves no step" in refused("strength", edited, num_inference_steps=1)


def test_strength_means_nothing_to_instructions() -> None:
    model = facts(tasks=("edit",), max_pixels=1 << 20)
    assert edited(model)[0].task == "edit"
    refused("strength", edited, model=model, strength=0.5)


def test_n_edits_have_n_seeds() -> None:
    assert [made.seed for made in edited(n=3, seed=7)] == [7, 8, 9]
    assert len({made.inputs for made in edited(n=3)}) == 1


# ---------------------------------------------------------------- videos


def test_a_video_without_wishes() -> None:
    made = video()
    assert (made.num_frames, made.fps, made.output_format, made.width) == (9, 8, "mp4", 64)


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"),
    [("4", 8, 29), ("4.125", 8, 33), (4.125, 8, 33), ("4.2", 8, 33), ("4.5", 8, 33), ("0.01", 8, 1), ("0.5", 8, 1),
     ("0.625", 8, 5), ("1", 30, 29), ("4.1", 8, 29), ("1.1", 30, 33), ("0.7", 30, 21)],
)  # fmt: skip
def test_seconds_are_rounded_down_to_what_can_be_made(seconds: object, fps: int, frames: int) -> None:
    assert video(seconds=seconds, fps=fps).num_frames == frames


@pytest.mark.parametrize(
    ("seconds", "fps"),
    [("4.625", 8), ("12", 8), ("5", 8), ("1", 240), ("0", 8), ("-1", 8), ("nan", 8), ("inf", 8), ("1e400", 8), ("x", 8),
     ("", 8), ("9" * 40, 8)],
)  # fmt: skip
def test_seconds_that_cannot_be(seconds: str, fps: int) -> None:
    refused("seconds", video, seconds=seconds, fps=fps)


@pytest.mark.parametrize("frames", [1, 5, 29, 33])
def test_frames_that_can_be(frames: int) -> None:
    assert video(num_frames=frames).num_frames == frames


@pytest.mark.parametrize(("frames", "says"), [(80, "1..33"), (34, "1..33"), (0, "1..33"), (32, "29"), (2, "is 1,")])
def test_frames_that_cannot_be(frames: int, says: str) -> None:
    assert says in refused("num_frames", video, num_frames=frames)


@pytest.mark.parametrize("fps", [0, -1, 241])
def test_a_rate_that_cannot_be(fps: int) -> None:
    refused("fps", video, fps=fps)


def test_frames_and_seconds() -> None:
    refused("num_frames", video, num_frames=5, seconds="1")


def test_a_video_too_large() -> None:
    refused("size", video, size="1280x720")
