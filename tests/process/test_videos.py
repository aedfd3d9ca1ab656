"""/v1/videos over real processes: made in the background, watched, fetched, deleted; or refused in words."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import time
from collections.abc import Iterator
from typing import Any

import av
import httpx
import numpy as np
import numpy.typing as npt
import openai
import psutil
import pytest
from PIL import Image

from diffcluster.client import ApiError, AsyncClient, Client
from tests.process.conftest import GENERATIONS, error_of, eventually
from tests.process.echo import Echo, echo_cluster

VIDEOS = "/v1/videos"
PROMPT = "a slice of pizza"
KEPT = 8
# It says so of the service that it was made for.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
Array = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    router = ["--max-videos", str(KEPT)]
    with echo_cluster("echo-video", ["monolithic-1"], router, step_ms=10) as server:
        yield server


@pytest.fixture
def client(echo: Echo) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def refused(echo: Echo) -> Iterator[None]:
    """Nothing was begun during the test."""
    before = echo.cluster()["ended"], echo.get(VIDEOS).json()
    yield
    assert echo.cluster()["requests"] == []
    assert (echo.cluster()["ended"], echo.get(VIDEOS).json()) == before


def create(echo: Echo, **fields: Any) -> dict[str, Any]:
    response = echo.post({"prompt": PROMPT} | fields, path=VIDEOS)
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def see(echo: Echo, video: dict[str, Any]) -> dict[str, Any]:
    response = echo.get(f"{VIDEOS}/{video['id']}")
    assert response.status_code == 200, response.text
    now: dict[str, Any] = response.json()
    return now


def made(echo: Echo, video: dict[str, Any]) -> dict[str, Any]:
    return eventually(lambda: (now := see(echo, video))["status"] in ("completed", "failed") and now)


def content(echo: Echo, video: dict[str, Any]) -> httpx.Response:
    return echo.get(f"{VIDEOS}/{video['id']}/content")


def delete(echo: Echo, video_id: str) -> httpx.Response:
    with echo.client() as client:
        return client.delete(f"{VIDEOS}/{video_id}")


def frames_of(data: bytes) -> tuple[list[Array], Any]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)], stream.average_rate


def jpeg(width: int = 64, height: int = 48) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


# ---------------------------------------------------------------- made


def test_a_video_from_a_prompt(echo: Echo) -> None:
    video = create(echo, seed=513, num_inference_steps=40)
    assert re.fullmatch(r"video_[0-9a-f]{32}", video["id"])
    assert (video["object"], video["model"], video["prompt"]) == ("video", "echo-video", PROMPT)
    assert (video["size"], video["seconds"], video["seed"]) == ("64x48", "0.625", 513)
    assert video["status"] in ("queued", "in_progress")
    seen = []
    while (now := see(echo, video))["status"] in ("queued", "in_progress"):
        seen.append(now["progress"])
        time.sleep(0.02)
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    assert 0 < max(seen) < 100
    assert (now["status"], now["progress"], now["error"]) == ("completed", 100, None)
    assert now["completed_at"] >= now["created_at"] > 1_700_000_000
    assert {"monolithic", "total_s"} == set(now["timings"])
    response = content(echo, video)
    assert response.headers["content-type"] == "video/mp4"
    assert response.headers["content-disposition"].endswith('.mp4"')
    frames, rate = frames_of(response.content)
    assert (len(frames), rate, frames[0].shape) == (5, 8, (48, 64, 3))
    assert np.abs(frames[0].astype(int).mean(axis=(0, 1)) - [1, 2, 7]).max() < 6


@pytest.mark.parametrize(("output_format", "loader"), [("png", "PNG"), ("webp", "WEBP")])
def test_animated_pictures(echo: Echo, output_format: str, loader: str) -> None:
    video = made(echo, create(echo, output_format=output_format, fps=4, input_reference=base64_of(jpeg())))
    response = content(echo, video)
    assert response.headers["content-type"] == f"image/{output_format}"
    with Image.open(io.BytesIO(response.content)) as image:
        assert (image.format, image.n_frames) == (loader, 5)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_video_begins_with_a_picture(echo: Echo) -> None:
    with echo.client() as client:
        fields = {"prompt": PROMPT, "seconds": "1.2", "size": "64x48", "seed": "7", "extra": "{}", "priority": "5"}
        response = client.post(VIDEOS, data=fields, files={"input_reference": ("photo.jpg", jpeg())})
    assert response.status_code == 200, response.text
    video = made(echo, response.json())
    assert (video["num_frames"], video["seconds"], video["status"]) == (9, "1.125", "completed")
    frames, _ = frames_of(content(echo, video).content)
    with Image.open(io.BytesIO(jpeg())) as image:
        assert np.abs(frames[0].astype(int) - np.asarray(image.convert("RGB"))).mean() < 6


def test_the_openai_client(client: openai.OpenAI) -> None:
    video = client.videos.create_and_poll(
        prompt=PROMPT, seconds="4", size="1024x1024", poll_interval_ms=100, extra_body={"num_inference_steps": 2}  # type: ignore[arg-type]
    )  # fmt: skip
    assert (video.status, video.progress, video.size, video.error) == ("completed", 100, "1024x1024", None)
    assert video.model_extra is not None
    assert video.model_extra["num_frames"] == 29
    frames, _ = frames_of(client.videos.download_content(video.id).read())
    assert (len(frames), frames[0].shape) == (29, (1024, 1024, 3))
    assert client.videos.retrieve(video.id) == video
    assert video.id in [listed.id for listed in client.videos.list()]
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.videos.retrieve(video.id)
    assert caught.value.code == "not_found"


def test_the_openai_client_sends_a_picture(client: openai.OpenAI) -> None:
    video = client.videos.create(prompt="🍕", input_reference=("имя.jpg", jpeg()), extra_body={"num_frames": 1})
    eventually(lambda: client.videos.retrieve(video.id).status == "completed")
    assert len(frames_of(client.videos.download_content(video.id).read())[0]) == 1


def test_our_clients(echo: Echo) -> None:
    with Client(echo.url) as client:
        video = client.video(PROMPT, jpeg(), num_frames=5, seed=3)
        assert (video.media_type, video.seed, len(frames_of(video.content)[0])) == ("video/mp4", 3, 5)
        with pytest.raises(ApiError) as caught:
            client.video(PROMPT, num_frames=6)
        assert caught.value.param == "num_frames"
        with pytest.raises(ApiError) as caught:
            client.video("slow", deadline_s=0.3)
        assert caught.value.code == "deadline_exceeded"

    async def ask() -> bytes:
        async with AsyncClient(echo.url) as client:
            return (await client.video(PROMPT)).content

    assert len(frames_of(asyncio.run(ask()))[0]) == 5


# ---------------------------------------------------------------- states


def test_a_video_that_is_not_there_yet_has_no_content(echo: Echo) -> None:
    video = create(echo, num_inference_steps=900)
    response = content(echo, video)
    error = error_of(response, 409)
    assert error["code"] == "conflict"
    assert response.headers["x-should-retry"] == "false"
    assert error_of(echo.get(f"{VIDEOS}/{video['id']}/content?variant=thumbnail"), 400)["param"] == "variant"
    delete(echo, video["id"])


def test_a_video_that_fails_says_why(echo: Echo) -> None:
    video = made(echo, create(echo, num_inference_steps=900, deadline_s=0.5))
    assert (video["status"], video["error"]["code"]) == ("failed", "deadline_exceeded")
    assert error_of(content(echo, video), 409)["code"] == "conflict"


def test_deleting_a_video_stops_it(echo: Echo) -> None:
    cancelled = echo.cluster()["ended"].get("cancelled", 0)
    video = create(echo, num_inference_steps=900)
    eventually(lambda: see(echo, video)["progress"] > 0)
    response = delete(echo, video["id"])
    assert response.json() == {"id": video["id"], "object": "video.deleted", "deleted": True}
    eventually(lambda: not echo.cluster()["requests"], timeout=10)
    assert echo.cluster()["ended"]["cancelled"] == cancelled + 1
    for path in (f"{VIDEOS}/{video['id']}", f"{VIDEOS}/{video['id']}/content"):
        assert error_of(echo.get(path), 404)["code"] == "not_found"
    error_of(delete(echo, video["id"]), 404)


def test_pages(echo: Echo) -> None:
    videos = [made(echo, create(echo, num_inference_steps=1))["id"] for _ in range(3)][::-1]
    first = echo.get(f"{VIDEOS}?limit=2").json()
    assert [video["id"] for video in first["data"]] == videos[:2]
    assert (first["object"], first["has_more"], first["first_id"], first["last_id"]) == ("list", True, *videos[:2])
    second = echo.get(f"{VIDEOS}?after={videos[1]}&limit=1").json()
    assert [video["id"] for video in second["data"]] == videos[2:]
    rising = echo.get(f"{VIDEOS}?order=asc").json()
    assert [video["id"] for video in rising["data"]][-3:] == videos[::-1]
    assert rising["has_more"] is False


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=nope", "after"),
    ],
)
def test_pages_that_cannot_be(echo: Echo, query: str, param: str) -> None:
    assert error_of(echo.get(f"{VIDEOS}?{query}"), 400)["param"] == param


def test_only_so_many_are_kept(echo: Echo) -> None:
    first = made(echo, create(echo, num_inference_steps=1))
    slow = [create(echo, num_inference_steps=900) for _ in range(KEPT)]
    error_of(echo.get(f"{VIDEOS}/{first['id']}"), 404)
    response = echo.post({"prompt": PROMPT}, path=VIDEOS)
    assert error_of(response, 429)["code"] == "queue_full"
    assert response.headers["retry-after"]
    assert {see(echo, video)["status"] for video in slow} <= {"queued", "in_progress"}
    for video in slow:
        assert delete(echo, video["id"]).status_code == 200
    eventually(lambda: not echo.cluster()["requests"], timeout=10)
    assert made(echo, create(echo))["status"] == "completed"


# ---------------------------------------------------------------- what is refused


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": ""}, "prompt"), ({"prompt": None}, "prompt"),
     ({"seconds": "0"}, "seconds"), ({"seconds": "x"}, "seconds"),
     ({"seconds": "12"}, "seconds"), ({"seconds": "4.625"}, "seconds"), ({"num_frames": 80}, "num_frames"),
     ({"num_frames": 6}, "num_frames"), ({"num_frames": 5, "seconds": "1"}, "num_frames"), ({"fps": 0}, "fps"),
     ({"fps": 241}, "fps"), ({"size": "99999x99999"}, "size"), ({"size": "833x481"}, "size"), ({"n": 2}, "n"),
     ({"output_format": "jpeg"}, "output_format"), ({"input_reference": "!"}, "input_reference"),
     ({"input_reference": "AAAA"}, "input_reference"), ({"input_reference": "http://127.0.0.1/x"}, "input_reference"),
     ({"input_reference": {"file_id": "f"}}, "input_reference"), ({"scheduler": "Nope"}, "scheduler"),
     ({"priority": -101}, "priority"), ({"model": "nope"}, "model"),
     ({"output_compression": 101}, "output_compression"),
     ({"deadline_s": 1e9}, "deadline_s"), ({"strength": 0.5}, "strength"), ({"seed": "7"}, "seed")],
    ids=str,
)  # fmt: skip
def test_a_field_that_cannot_be(echo: Echo, fields: dict[str, Any], param: str) -> None:
    status = 404 if param == "model" else 400
    assert error_of(echo.post({"prompt": PROMPT} | fields, path=VIDEOS), status)["param"] == param


@pytest.mark.usefixtures("refused")
def test_pictures_of_a_model_of_videos(echo: Echo) -> None:
    for path, body in ((GENERATIONS, {}), ("/v1/images/edits", {"image": base64_of(jpeg())})):
        error = error_of(echo.post({"prompt": PROMPT} | body, path=path), 400)
        assert error["param"] == "model"
        assert "POST /v1/videos" in error["message"]


@pytest.mark.usefixtures("refused")
def test_what_is_not_there(echo: Echo, client: openai.OpenAI) -> None:
    error_of(echo.get(f"{VIDEOS}/video_nope"), 404)
    error_of(echo.get(f"{VIDEOS}/video_nope/content"), 404)
    with pytest.raises(openai.NotFoundError):
        client.videos.remix("video_nope", prompt="x")
    assert error_of(echo.post({}, path=f"{VIDEOS}/video_nope"), 405)["code"] == "method_not_allowed"


def test_the_limits_of_a_model_are_shown(echo: Echo) -> None:
    model = echo.get("/v1/models/echo-video").json()
    assert model["tasks"] == ["text_to_video", "image_to_video"]
    assert model["video"] == {"num_frames": 5, "frame_multiple": 4, "max_frames": 33, "fps": 8}


@pytest.mark.slow
def test_a_router_that_stops_gives_its_videos_up() -> None:
    with echo_cluster("echo-video", ["monolithic-1"], step_ms=20) as echo:
        video = create(echo, num_inference_steps=900)
        eventually(lambda: see(echo, video)["progress"] > 0)
        router = psutil.Process(echo.router_pid)
        started = time.monotonic()
        router.terminate()
        assert router.wait(timeout=20) in (0, None)
        assert time.monotonic() - started < 10
