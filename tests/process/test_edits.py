"""POST /v1/images/edits over real processes: what a client sends reaches the first stage whole, or is refused in words.

The roles echo their inputs, so that a picture can be compared to the one that was sent.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socketserver
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import psutil
import pytest
from PIL import Image

from diffcluster.client import ApiError, AsyncClient, Client
from tests.process.conftest import Server, connected, error_of, eventually, file_of, pixels
from tests.process.echo import Echo, echo_cluster

EDITS = "/v1/images/edits"
PROMPT = "a slice of pizza"
HEARTBEAT_S = 0.5
UPLOAD = 8 << 20
Array = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    router = ["--max-upload-bytes", str(UPLOAD), "--max-input-pixels", str(1 << 20)]
    with echo_cluster("echo", ["encoder-1", "denoiser-1", "decoder-1"], router) as server:
        yield server


@pytest.fixture(scope="module")
def alone() -> Iterator[Echo]:
    """One process, of a model that follows instructions."""
    with echo_cluster("echo-edit", ["monolithic-1"], ["--max-pixels", "65536"]) as server:
        yield server


@pytest.fixture(scope="module")
def pair() -> Iterator[Echo]:
    """Two encoders, to be harmed."""
    names = ["encoder-1", "encoder-2", "denoiser-1", "decoder-1"]
    with echo_cluster("echo", names, ["--heartbeat-s", str(HEARTBEAT_S)], step_ms=20) as server:
        yield server


@pytest.fixture
def client(echo: Echo) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def refused(echo: Echo) -> Iterator[None]:
    """Nothing was begun during the test."""
    before = echo.cluster()["ended"]
    yield
    cluster = echo.cluster()
    assert (cluster["requests"], cluster["ended"]) == ([], before)


def noise(width: int = 96, height: int = 64, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(picture: Array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def edit(server: Server, image: Any = None, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "image": text(png(noise())) if image is None else image} | fields
    return server.post(body, path=EDITS)


def sent(server: Server, files: list[tuple[str, Any]], **fields: str) -> httpx.Response:
    with server.client() as client:
        return client.post(EDITS, data={"prompt": PROMPT} | fields, files=files)


def side_by_side(*pictures: Array) -> Array:
    height = max(len(picture) for picture in pictures)
    return np.concatenate([np.pad(p, [(0, height - len(p)), (0, 0), (0, 0)]) for p in pictures], axis=1)


# ---------------------------------------------------------------- what arrives


def test_one_picture(echo: Echo) -> None:
    response = edit(echo, seed=5)
    assert np.array_equal(pixels(file_of(response)), noise())
    body = response.json()
    assert (body["size"], body["seed"], body["model"]) == ("96x64", 5, "echo")
    assert {"encoder", "denoiser", "decoder"} <= set(body["data"][0]["timings"])


def test_one_process_for_all_stages(alone: Echo) -> None:
    assert np.array_equal(pixels(file_of(edit(alone))), noise())


@pytest.mark.parametrize("names", [["image"], ["image[]"], ["image", "image"], ["image[]", "image[]", "image"]])
def test_files_of_all_names_keep_their_order(echo: Echo, names: list[str]) -> None:
    pictures = [noise(40 + 8 * k, 30 + k, k) for k in range(len(names))]
    files = [(name, ("x.bin", png(picture))) for name, picture in zip(names, pictures, strict=True)]
    assert np.array_equal(pixels(file_of(sent(echo, files))), side_by_side(*pictures))


def test_many_pictures_of_several_pieces(echo: Echo) -> None:
    pictures = [noise(360, 300, seed) for seed in range(16)]
    files = [("image[]", ("x", png(picture))) for picture in pictures]
    assert sum(len(file[1][1]) for file in files) > 4 << 20
    assert np.array_equal(pixels(file_of(sent(echo, files))), side_by_side(*pictures))


def test_a_mask_comes_last(echo: Echo) -> None:
    mask = np.zeros((64, 96), np.uint8)
    mask[:20] = 255
    files = [("mask", ("m.png", png(mask))), ("image", ("i.png", png(noise())))]
    expected = side_by_side(noise(), np.repeat(mask[..., None], 3, axis=2))
    assert np.array_equal(pixels(file_of(sent(echo, files))), expected)


def test_json_and_form_say_the_same(echo: Echo) -> None:
    fields = {"n": 2, "seed": 42, "num_inference_steps": 10, "strength": 0.5, "size": "64x64", "priority": -3,
              "output_format": "webp", "output_compression": 80, "scheduler": "DDIMScheduler",
              "stream": False}  # fmt: skip
    by_json = edit(echo, **fields)
    texts = {name: json.dumps(value) if not isinstance(value, str) else value for name, value in fields.items()}
    by_form = sent(echo, [("image", png(noise()))], **texts)
    for response in (by_json, by_form):
        assert response.status_code == 200, response.text
        body = response.json()
        assert (body["size"], body["output_format"]) == ("64x64", "webp")
        assert [image["seed"] for image in body["data"]] == [42, 43]
    assert [i["b64_json"] for i in by_json.json()["data"]] == [i["b64_json"] for i in by_form.json()["data"]]


def test_spellings_of_base64(echo: Echo) -> None:
    plain = text(png(noise()))
    urlsafe = plain.replace("+", "-").replace("/", "_")
    for spelling in (plain, f"data:image/png;base64,{plain}", f"DATA:;BASE64,{urlsafe}", urlsafe.rstrip("="),
                     f" {plain[:70]}\n{plain[70:]}\n"):  # fmt: skip
        assert np.array_equal(pixels(file_of(edit(echo, spelling))), noise())
    body = {"prompt": PROMPT, "images": [{"image_url": f"data:image/png;base64,{plain}"}]}
    assert np.array_equal(pixels(file_of(echo.post(body, path=EDITS))), noise())


@pytest.mark.parametrize(
    ("source", "size", "made"),
    [((97, 65), None, "96x64"), ((97, 65), "auto", "96x64"), ((64, 64), "128x128", "128x128"), ((1, 1), None, "8x8"),
     ((512, 16), None, "512x16")],
)  # fmt: skip
def test_sizes(echo: Echo, source: tuple[int, int], size: str | None, made: str) -> None:
    response = edit(echo, text(png(noise(*source))), size=size)
    assert response.status_code == 200, response.text
    assert response.json()["size"] == made


def test_streaming(echo: Echo, client: openai.OpenAI) -> None:
    with client.images.edit(image=png(noise()), prompt=PROMPT, stream=True, n=2) as stream:
        events = list(stream)
    assert [event.type for event in events] == ["image_edit.completed"] * 2
    assert np.array_equal(pixels(base64.b64decode(events[0].b64_json)), noise())


def test_generations_of_the_same_model(echo: Echo) -> None:
    response = echo.post({"prompt": PROMPT, "seed": 300})
    assert tuple(pixels(file_of(response))[0, 0]) == (44, 1, 7)


# ---------------------------------------------------------------- clients


def test_the_openai_client_sends_one_file(client: openai.OpenAI) -> None:
    answer = client.images.edit(
        image=("имя 🐱.png", png(noise())), prompt="🍕", size="64x64", extra_body={"strength": 0.5, "seed": 9}
    )
    assert answer.data is not None
    assert np.array_equal(pixels(base64.b64decode(answer.data[0].b64_json or "")), noise())
    assert answer.data[0].model_extra == {"seed": 9, "timings": answer.data[0].model_extra["timings"]}


@pytest.mark.parametrize("count", [1, 3])
def test_the_openai_client_sends_a_list(client: openai.OpenAI, count: int) -> None:
    pictures = [noise(40, 40, seed) for seed in range(count)]
    answer = client.images.edit(image=[io.BytesIO(png(picture)) for picture in pictures], prompt=PROMPT, n=2)
    assert answer.data is not None
    assert np.array_equal(pixels(base64.b64decode(answer.data[1].b64_json or "")), side_by_side(*pictures))


def test_the_openai_client_sends_a_mask(client: openai.OpenAI) -> None:
    mask = png(np.full((64, 96), 255, np.uint8))
    answer = client.images.edit(image=png(noise()), mask=mask, prompt=PROMPT)
    assert answer.data is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=png(noise(64, 64)), mask=mask, prompt=PROMPT)
    assert caught.value.param == "mask"


def test_the_openai_client_learns_what_is_no_picture(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.edit(image=b"\x89PNG", prompt=PROMPT)
    assert (caught.value.code, caught.value.param) == ("invalid_image", "image")


def test_our_clients(echo: Echo) -> None:
    with Client(echo.url) as client:
        (made,) = client.edit(PROMPT, [png(noise())], seed=3)
        assert np.array_equal(pixels(made.content), noise())
        with pytest.raises(ApiError) as caught:
            client.edit(PROMPT, [png(noise())], png(noise(8, 8)))
        assert caught.value.param == "mask"

    async def ask() -> bytes:
        async with AsyncClient(echo.url) as client:
            return (await client.edit(PROMPT, [png(noise())], png(noise())))[0].content

    assert pixels(asyncio.run(ask())).shape == (64, 192, 3)


# ---------------------------------------------------------------- what is refused


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"image": None}, "image"), ({"image": []}, "image"), ({"image": 7}, "image"), ({"prompt": " "}, "prompt"),
     ({"image": "!"}, "image"), ({"image": "http://127.0.0.1:1/x.png"}, "image"),
     ({"image": "file:///etc/hostname"}, "image"),
     ({"images": [{"image_url": "https://example.org/x.png"}]}, "images"), ({"strength": 0}, "strength"),
     ({"strength": 0.01, "num_inference_steps": 10}, "strength"), ({"strength": 1.01}, "strength"),
     ({"strength": -0.1}, "strength"), ({"size": "99999x99999"}, "size"), ({"size": "65x64"}, "size"), ({"n": 11}, "n"),
     ({"scheduler": "Nope"}, "scheduler"), ({"priority": 101}, "priority"), ({"style": "vivid"}, "style"),
     ({"mask": "AAAA"}, "mask"), ({"seed": -1}, "seed"), ({"deadline_s": 0}, "deadline_s"), ({"nope": 1}, "nope"),
     ({"output_format": "mp4"}, "output_format")],
    ids=str,
)  # fmt: skip
def test_a_field_that_cannot_be(echo: Echo, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": PROMPT} | ({} if "images" in fields else {"image": text(png(noise()))}) | fields
    assert error_of(echo.post(body, path=EDITS), 400)["param"] == param


@pytest.mark.usefixtures("refused")
def test_both_values_of_a_strength_that_leaves_no_step_are_named(echo: Echo) -> None:
    message = error_of(edit(echo, strength=0.05, num_inference_steps=10), 400)["message"]
    assert "0.05" in message
    assert "10" in message


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    "data",
    [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\x89PNG\r\n\x1a\n" + os.urandom(6 << 20),
     png(noise())[:5000], png(np.zeros((1025, 1025), np.uint8))],
    ids=["empty", "text", "svg", "random", "truncated", "too many pixels"],
)  # fmt: skip
def test_a_file_that_is_no_picture(echo: Echo, data: bytes) -> None:
    started = time.monotonic()
    error = error_of(sent(echo, [("image", ("x.png", data))]), 400)
    assert (error["code"], error["param"]) == ("invalid_image", "image")
    assert time.monotonic() - started < 2


@pytest.mark.usefixtures("refused")
def test_too_many_pictures(echo: Echo) -> None:
    files = [("image[]", ("x", png(noise(8, 8)))) for _ in range(17)]
    assert error_of(sent(echo, files), 400)["param"] == "image"


def test_a_body_that_is_too_large(echo: Echo) -> None:
    large = b"x" * (UPLOAD + 1)
    assert error_of(sent(echo, [("image", ("x", large))]), 413)["code"] == "request_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(UPLOAD // 65_536 + 2):
            yield b" " * 65_536

    with echo.client() as client:
        headers = {"content-type": "application/json"}
        error_of(client.post(EDITS, content=chunks(), headers=headers), 413)
        assert client.post(EDITS, json={"prompt": PROMPT, "image": text(png(noise()))}).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/mixed; boundary=x"])
@pytest.mark.usefixtures("refused")
def test_a_body_of_another_type(echo: Echo, kind: str) -> None:
    with echo.client() as client:
        response = client.post(EDITS, content=b"{}", headers={"content-type": kind})
    assert error_of(response, 415)["code"] == "unsupported_media_type"


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    "content", [b"", b"--x\r\n", b"--x--\r\n", b"--x\r\n\r\n\r\n--x--", os.urandom(1000), b"--x\r\n" * 1000]
)
def test_a_form_that_is_none(echo: Echo, content: bytes) -> None:
    with echo.client() as client:
        response = client.post(EDITS, content=content, headers={"content-type": "multipart/form-data; boundary=x"})
    error_of(response, 400)


@pytest.mark.usefixtures("refused")
def test_a_model_says_what_it_can_do(echo: Echo, alone: Echo) -> None:
    error = error_of(edit(alone, mask=text(png(noise()))), 400)
    assert error["param"] == "mask"
    assert "POST /v1/images/edits" in error["message"]
    assert error_of(alone.post({"prompt": PROMPT}), 400)["param"] == "model"
    assert error_of(edit(alone, strength=0.5), 400)["param"] == "strength"
    assert error_of(sent(alone, [("image", png(noise()))] * 3), 400)["param"] == "image"
    assert error_of(echo.post({"prompt": PROMPT}, path="/v1/videos"), 400)["param"] == "model"
    assert "65536" in error_of(edit(alone, size="512x512"), 400)["message"]


def test_what_a_model_can_do_is_shown(echo: Echo) -> None:
    model = echo.get("/v1/models/echo").json()
    assert model["tasks"] == ["text_to_image", "image_to_image", "inpaint"]
    assert model["schedulers"] == ["EulerDiscreteScheduler", "DDIMScheduler"]
    assert (model["strength"], model["max_input_images"], model["video"]) == (0.5, 16, None)


@pytest.mark.usefixtures("refused")
def test_nothing_is_fetched(echo: Echo) -> None:
    hits: list[object] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            hits.append(self.client_address)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        port = listener.server_address[1]
        for url in (f"http://127.0.0.1:{port}/x.png", f"http://localhost:{port}/x.png"):
            assert error_of(edit(echo, url), 400)["param"] == "image"
            body = {"prompt": PROMPT, "images": [{"image_url": url}]}
            assert error_of(echo.post(body, path=EDITS), 400)["param"] == "images"
        listener.shutdown()
        thread.join()
    assert hits == []


def test_the_router_answers_others_while_it_reads_pictures(echo: Echo) -> None:
    large = text(png(noise(1024, 1000)))
    with ThreadPoolExecutor(6) as pool:
        edits = [pool.submit(edit, echo, large) for _ in range(6)]
        slowest = 0.0
        while not all(future.done() for future in edits):
            started = time.monotonic()
            assert echo.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
        assert all(future.result().status_code == 200 for future in edits)
    assert slowest < 2


# ---------------------------------------------------------------- when things break


@contextmanager
def asked(server: Server, body: dict[str, Any]) -> Iterator[tuple[str, Future[httpx.Response]]]:
    request_id = uuid.uuid4().hex
    with ThreadPoolExecutor(1) as pool:
        yield request_id, pool.submit(server.post, body, path=EDITS, headers={"x-request-id": request_id})


def holder(server: Server, request_id: str, stage: str) -> str:
    """The instance that computes this stage of the request, as soon as one does."""

    def look() -> str:
        picture = server.where(request_id)
        there = (picture.get("phase"), picture.get("stage")) == ("running", stage)
        name: str = picture["instance"] if there else ""
        return name

    return eventually(look)


@pytest.mark.slow
@pytest.mark.parametrize("width", [96, 1000])
def test_an_encoder_that_stops_gets_its_pictures_again_elsewhere(pair: Echo, width: int) -> None:
    """Its socket takes some of the pieces; the rest waits at the router, until the encoder is given up."""
    body = {"prompt": "slow", "image": [text(png(noise(width, 900, k))) for k in range(3)]}
    with asked(pair, body) as (request_id, future):
        name = holder(pair, request_id, "encoder")
        os.kill(pair.processes[name].pid, signal.SIGSTOP)
        other = eventually(lambda: (h := holder(pair, request_id, "encoder")) != name and h)
        expected = side_by_side(*(noise(width, 900, k) for k in range(3)))
        assert np.array_equal(pixels(file_of(future.result(timeout=60))), expected)
        assert future.result().json()["data"][0]["timings"]["encoder"]["instance"] == other
    os.kill(pair.processes[name].pid, signal.SIGCONT)
    eventually(lambda: name in pair.instances())
    assert np.array_equal(pixels(file_of(edit(pair))), noise())


@pytest.mark.slow
def test_a_denoiser_that_is_lost_has_the_encoder_get_the_pictures_again(pair: Echo) -> None:
    before = pair.metric("diffcluster_events_total", event="restarted")
    body = {"prompt": PROMPT, "image": text(png(noise())), "num_inference_steps": 60}
    with asked(pair, body) as (request_id, future):
        name = holder(pair, request_id, "denoiser")
        os.kill(pair.processes[name].pid, signal.SIGSTOP)
        eventually(lambda: name not in pair.instances())
        os.kill(pair.processes[name].pid, signal.SIGCONT)
        assert np.array_equal(pixels(file_of(future.result(timeout=60))), noise())
    assert pair.metric("diffcluster_events_total", event="restarted") == before + 1


@pytest.mark.slow
def test_a_client_that_leaves_takes_its_pictures_with_it(pair: Echo) -> None:
    cancelled = pair.cluster()["ended"].get("cancelled", 0)
    body = json.dumps({"prompt": PROMPT, "image": text(png(noise())), "num_inference_steps": 900}).encode()
    with connected(pair.url) as connection:
        head = (
            f"POST {EDITS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        eventually(lambda: any(picture["step"] >= 2 for picture in pair.cluster()["requests"]))
    eventually(lambda: not pair.cluster()["requests"], timeout=10)
    assert pair.cluster()["ended"]["cancelled"] == cancelled + 1
    eventually(lambda: not any(i["outstanding"] or i["retained"] for i in pair.instances().values()))


@pytest.mark.slow
def test_pictures_of_requests_that_ended_are_not_kept(pair: Echo) -> None:
    router = psutil.Process(pair.router_pid)
    body = {"prompt": PROMPT, "image": text(png(noise(1000, 1000)))}
    for _ in range(3):
        assert pair.post(body, path=EDITS).status_code == 200
    before = router.memory_info().rss
    for _ in range(12):
        assert pair.post(body, path=EDITS).status_code == 200
    assert router.memory_info().rss - before < 24 << 20


@pytest.mark.slow
def test_an_encoder_that_dies_has_its_pictures_sent_to_the_other(pair: Echo) -> None:
    """Last: one encoder is left then."""
    with asked(pair, {"prompt": "slow", "image": text(png(noise())), "n": 2}) as (request_id, future):
        name = holder(pair, request_id, "encoder")
        os.kill(pair.processes[name].pid, signal.SIGKILL)
        response = future.result(timeout=60)
    assert response.status_code == 200, response.text
    for image in response.json()["data"]:
        assert np.array_equal(pixels(base64.b64decode(image["b64_json"])), noise())
        assert image["timings"]["encoder"]["instance"] != name
    pair.processes[name].wait(timeout=10)
    assert name not in pair.instances()
