"""What is not a request is refused before any role hears of it; what is unusual but right is served."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from diffcluster.local import LocalCluster
from tests.process.conftest import GENERATIONS, MAX_PIXELS, Server, connected, error_of, pixels, sha

pytestmark = pytest.mark.usefixtures("then_sane")


@pytest.fixture
def refused(server: Server, then_sane: None) -> Iterator[None]:
    """No picture was begun, let alone encoded, during the test."""
    before = server.encoded(), server.cluster()["ended"]
    yield
    cluster = server.cluster()
    assert cluster["requests"] == []
    assert (server.encoded(), cluster["ended"]) == before


def refuse(server: Server, status: int = 400, **fields: Any) -> dict[str, Any]:
    return error_of(server.post({"prompt": "a slice of pizza"} | fields), status)


# ---------------------------------------------------------------- size


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    "size",
    ["1x1", "0x64", "-64x64", "64X64", "64 x 64", "64x", "x64", "64x64x64", "６４x64", "1e2x64", "064x64", "", "x",
     "64", "auto ", "64x64\n", "99999999999999999999x8", "+64x64", "64×64"],
)  # fmt: skip
def test_a_size_that_is_none(server: Server, size: str) -> None:
    error = refuse(server, size=size)
    assert (error["param"], error["code"]) == ("size", "invalid_value")


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("size", "nearest"),
    [("65x64", "64x64"), ("64x65", "64x64"), ("427x640", "424x640"), ("1919x1080", "1920x1080"), ("3x3", "8x8")],
)
def test_a_size_that_the_model_cannot_make_names_the_nearest(server: Server, size: str, nearest: str) -> None:
    error = refuse(server, size=size)
    assert error["param"] == "size"
    assert nearest in error["message"]


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("size", [64, 64.0, ["64x64"], {"width": 64}, True])
def test_a_size_of_another_type(server: Server, size: object) -> None:
    assert refuse(server, size=size)["param"] == "size"


@pytest.mark.parametrize("number", range(16))
def test_every_multiple_of_8_is_made_at_exactly_that_size(server: Server, number: int) -> None:
    """16..136 in both axes: each width and each height once."""
    width, height = 16 + 8 * number, 16 + 8 * (number * 5 % 16)
    response = server.post({"prompt": "a pizza", "num_inference_steps": 1, "size": f"{width}x{height}"})
    assert response.status_code == 200, response.text
    assert response.json()["size"] == f"{width}x{height}"
    content = server.picture(num_inference_steps=1, size=f"{width}x{height}")
    assert pixels(content).shape == (height, width, 3)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("size", ["99999x99999", "999999x999999", "8x999992", "4096x4096"])
def test_a_size_above_the_limit(server: Server, size: str) -> None:
    assert refuse(server, size=size)["param"] == "size"


def test_max_pixels_is_applied(monolithic_server: Server) -> None:
    before = monolithic_server.accepted()
    for size in ("512x512", "264x256", "99999x99999"):
        error = refuse(monolithic_server, size=size)
        assert error["param"] == "size"
        assert str(MAX_PIXELS) in error["message"]
    assert monolithic_server.accepted() == before
    assert pixels(monolithic_server.picture(size="256x256", num_inference_steps=1)).shape == (256, 256, 3)


def test_refusals_do_not_make_the_router_grow(cluster: LocalCluster, server: Server) -> None:
    router = psutil.Process(cluster.pids["router"])
    refuse(server, size="99999x99999")
    before = router.memory_info().rss
    with server.client() as client:
        for _ in range(100):
            error_of(client.post(GENERATIONS, json={"prompt": "x", "size": "99999x99999", "n": 10}), 400)
    assert router.memory_info().rss - before < 20 << 20


# ---------------------------------------------------------------- seed


@pytest.mark.parametrize("seed", [0, 2**31 - 1, 2**31, 4324379876, 2**32 - 1, 2**32, 2**63 - 1])
def test_a_large_seed_is_taken_and_reproducible(server: Server, seed: int) -> None:
    first, second = server.images(seed=seed)[0], server.images(seed=seed)[0]
    assert first["b64_json"] == second["b64_json"]
    assert first["seed"] == seed


def test_large_seeds_differ(server: Server) -> None:
    assert len({sha(server.picture(seed=seed)) for seed in (1, 2**31 - 1, 2**32 - 1)}) == 3


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 10**400, 1.5, "7", True, [7]])
def test_a_seed_that_is_none(server: Server, seed: object) -> None:
    assert refuse(server, seed=seed)["param"] == "seed"


@pytest.mark.usefixtures("refused")
def test_the_last_of_n_seeds_must_fit(server: Server) -> None:
    assert refuse(server, seed=2**63 - 2, n=3)["param"] == "seed"


# ---------------------------------------------------------------- prompt


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("prompt", ["", "   ", "\n\t ", "\u3000", None, [], ["x"], {}, 7, True, "x" * 32_001])
def test_a_prompt_that_is_none(server: Server, prompt: object) -> None:
    assert refuse(server, prompt=prompt)["param"] == "prompt"


@pytest.mark.usefixtures("refused")
def test_a_missing_prompt(server: Server) -> None:
    error = error_of(server.post({"num_inference_steps": 1}), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize(
    "prompt",
    ["x" * 32_000, "🍕🧀", "بيتزا", "ピザ", "a\u0000b", "a\u202eb", "e\u0301", "\ufeffpizza", "<|endoftext|>"],
)
def test_an_unusual_prompt_is_served_and_reproducible(server: Server, prompt: str) -> None:
    assert server.picture(prompt=prompt, num_inference_steps=1) == server.picture(prompt=prompt, num_inference_steps=1)


def test_a_long_negative_prompt(server: Server) -> None:
    assert server.picture(negative_prompt="x" * 32_000, num_inference_steps=1)
    assert refuse(server, negative_prompt="x" * 32_001)["param"] == "negative_prompt"


# ---------------------------------------------------------------- steps and guidance


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps_make_a_picture_that_is_not_uniform(server: Server, steps: int) -> None:
    assert pixels(server.picture(num_inference_steps=steps)).std() > 0


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, 4.0, "4", True, [4]])
def test_steps_that_are_none(server: Server, steps: object) -> None:
    assert refuse(server, num_inference_steps=steps)["param"] == "num_inference_steps"


def test_guidance_zero_is_not_the_default(server: Server) -> None:
    default = server.get("/v1/models/demo").json()["guidance_scale"]
    assert default > 1
    left_out = sha(server.picture())
    assert sha(server.picture(guidance_scale=default)) == left_out
    assert sha(server.picture(guidance_scale=None)) == left_out
    assert sha(server.picture(guidance_scale=0.0)) != left_out
    assert sha(server.picture(guidance_scale=0)) == sha(server.picture(guidance_scale=1.0))


def test_without_guidance_no_negative_prompt_is_encoded(server: Server) -> None:
    def handed_over(**fields: Any) -> int:
        nbytes: int = server.images(**fields)[0]["timings"]["denoiser"]["transferred"]
        return nbytes

    guided = handed_over(guidance_scale=7.5, negative_prompt="blurry")
    assert guided == handed_over(guidance_scale=1.5)
    assert handed_over(guidance_scale=1.0, negative_prompt="blurry") * 2 == guided
    assert handed_over(guidance_scale=0.0) * 2 == guided


def test_an_empty_negative_prompt_is_none(server: Server) -> None:
    plain = sha(server.picture())
    assert sha(server.picture(negative_prompt="")) == plain
    assert sha(server.picture(negative_prompt="a knife and a plate")) != plain
    assert sha(server.picture(guidance_scale=1, negative_prompt="a knife")) == sha(server.picture(guidance_scale=1))


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("guidance", [-0.5, 1001, "7", True, [1], 10**400])
def test_a_guidance_that_is_none(server: Server, guidance: object) -> None:
    assert refuse(server, guidance_scale=guidance)["param"] == "guidance_scale"


# ---------------------------------------------------------------- n


@pytest.mark.parametrize("count", [1, 2, 4, 10])
def test_exactly_n_pictures(server: Server, count: int) -> None:
    assert len(server.images(n=count, num_inference_steps=1)) == count


def test_n_null_is_one(server: Server) -> None:
    assert len(server.images(n=None, num_inference_steps=1)) == 1


def test_n_2_again_and_again(server: Server) -> None:
    with server.client() as client:
        body = {"prompt": "x", "n": 2, "num_inference_steps": 1, "size": "64x64"}
        for _ in range(15):
            response = client.post(GENERATIONS, json=body, timeout=20)
            assert len(response.json()["data"]) == 2


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("count", [0, -1, 11, 10**30, "2", 2.0, True, [2]])
def test_an_n_that_is_none(server: Server, count: object) -> None:
    assert refuse(server, n=count)["param"] == "n"


# ---------------------------------------------------------------- model and other fields


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("model", ["nope", "", "DEMO", "demo ", "models/demo", "../demo", "gpt-image-1", "é"])
def test_a_model_that_is_not_there(server: Server, model: str) -> None:
    error = refuse(server, 404, model=model)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_no_model_is_the_only_one(server: Server) -> None:
    assert sha(server.picture(model=None)) == sha(server.picture(model="demo")) == sha(server.picture())


def test_fields_of_openai_that_mean_nothing_are_ignored(server: Server) -> None:
    ignored = {
        "quality": "hd", "style": "vivid", "moderation": "low", "user": "u1", "safety_identifier": "s",
        "background": "auto", "partial_images": 0,
        "response_format": "b64_json", "output_format": "png", "size": "auto", "stream": False,
    }  # fmt: skip
    assert server.picture(**ignored) == server.picture(**dict.fromkeys(ignored)) == server.picture()


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("field", "value"),
    [("background", "transparent"), ("background", "red"), ("output_format", "gif"), ("output_format", "PNG"),
     ("output_compression", 101), ("output_compression", -1), ("output_compression", "50"), ("response_format", "xml"),
     ("stream", "yes"), ("partial_images", 4), ("partial_images", -1), ("deadline_s", 0), ("deadline_s", -1),
     ("deadline_s", 1e9), ("extra", {"nope": 1}), ("extra", {"eta": 2}), ("extra", {"eta": "x"}), ("extra", [1]),
     ("scheduler", "Nope"), ("scheduler", 7), ("priority", 101), ("priority", "1"), ("strength", 0.5),
     ("negative_prompt", 7), ("nope", 1), ("num_inference_step", 4), ("Seed", 1)],
)  # fmt: skip
def test_a_field_that_cannot_be(server: Server, field: str, value: object) -> None:
    error = refuse(server, **{field: value})
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.usefixtures("refused")
def test_variations_and_jobs_are_not_there(server: Server) -> None:
    for path in ("/v1/images/variations", "/v1/jobs", "/v1/videos/video_x/remix"):
        assert error_of(server.post({"prompt": "x", "size": "99999x99999"}, path=path), 404)["code"] == "not_found"


# ---------------------------------------------------------------- bodies


def raw(server: Server, body: bytes, content_type: str | None = "application/json", **headers: str) -> httpx.Response:
    """Send bytes as they are, over a plain socket."""
    lines = [f"POST {GENERATIONS} HTTP/1.1", "Host: test", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"Content-Type: {content_type}"] if content_type is not None else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return talk(server, "\r\n".join([*lines, "", ""]).encode("latin-1") + body)


def talk(server: Server, request: bytes) -> httpx.Response:
    with connected(server.url) as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        with answer:
            return httpx.Response(answer.status, headers=answer.getheaders(), content=answer.read())


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b" ", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"7", 400),
        (b'"prompt"', 400),
        (b"{", 400),
        (b'{"prompt":"x"', 400),
        (b'{"prompt":"x"}}', 400),
        (b"{'prompt':'x'}", 400),
        (b"[" * 1_000_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"prompt":' + b"[" * 1_000_000, 400),
        (b'{"extra":' + b'{"eta":' * 100_000, 400),
        (b'{"prompt":"pizza \xe9"}', 400),
        (b'\xef\xbb\xbf{"prompt":"x"}', 400),
        ('{"prompt":"x"}'.encode("utf-16"), 400),
        (b'{"prompt":"\\ud800"}', 400),
        (b'{"prompt":"\\udc00\\ud800"}', 400),
        (b'{"prompt":"\xed\xa0\x80"}', 400),
        (b'{"prompt":"x","guidance_scale":NaN}', 400),
        (b'{"prompt":"x","guidance_scale":Infinity}', 400),
        (b'{"prompt":"x","guidance_scale":-Infinity}', 400),
        (b'{"prompt":"x","guidance_scale":1e400}', 400),
        (b'{"prompt":"x","deadline_s":NaN}', 400),
        (b'{"prompt":"x","deadline_s":1e400}', 400),
        (b'{"prompt":"x","extra":{"eta":NaN}}', 400),
        (b'{"prompt":"x","quality":NaN}', 400),
        (b'{"prompt":"x","seed":1e400}', 400),
        (b'{"prompt":"x","user":' + b"[" * 500_000 + b"]" * 500_000 + b"}", 400),
        (b'{"prompt":"x","prompt":""}', 400),
        (b'{"prompt":"' + b"x" * 2_000_000 + b'"}', 413),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else str(value),
)
def test_a_malformed_body(server: Server, body: bytes, status: int) -> None:
    error_of(raw(server, body), status)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "multipart/form-data", "application/xml", "json", "application/jsonp"],
)  # fmt: skip
def test_a_wrong_content_type(server: Server, content_type: str | None) -> None:
    error = error_of(raw(server, b'{"prompt":"x"}', content_type), 415)
    assert error["code"] == "unsupported_media_type"


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", " application/json ;"])
def test_other_spellings_of_the_content_type(server: Server, content_type: str) -> None:
    assert raw(server, b'{"prompt":"x","num_inference_steps":1}', content_type).status_code == 200


@pytest.mark.parametrize("given", ["\xe9\xff", "a b", "", "x" * 10_000, "a\tb", "%0d%0a", "\x7f"])
def test_a_request_id_that_is_unfit_for_a_header_is_replaced(server: Server, given: str) -> None:
    response = raw(server, b'{"prompt":"x","num_inference_steps":1}', X_Request_Id=given)
    assert response.status_code == 200
    assert response.headers["x-request-id"] not in ("", "\xe9\xff", "a b", "x" * 10_000, "a\tb", "\x7f")


@pytest.mark.usefixtures("refused")
def test_a_body_without_its_length_is_bounded_too(server: Server) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt":"'
        for _ in range(40):
            yield b"x" * 65_536

    headers = {"content-type": "application/json"}
    with server.client() as client:
        error_of(client.post(GENERATIONS, content=chunks(), headers=headers), 413)


def test_a_bad_request_leaves_the_connection_usable(server: Server) -> None:
    good = {"prompt": "x", "num_inference_steps": 1, "size": "64x64"}
    with server.client() as client:
        too_large = {"prompt": "z" * 3_000_000}
        for bad in ({"prompt": ""}, {"prompt": "y" * 40_000}, too_large, too_large, {"n": 0}, too_large):
            assert 400 <= client.post(GENERATIONS, json=bad).status_code < 500
            assert client.post(GENERATIONS, json=good).status_code == 200


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    "request_bytes",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\x00" * 1000, b"POST / HTTP/9.9\r\n\r\n",
     b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
     b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: a\r\n\r\n"],
)  # fmt: skip
def test_bytes_that_are_no_http(server: Server, request_bytes: bytes) -> None:
    with connected(server.url) as connection:
        connection.sendall(request_bytes)
        answer = connection.recv(4096)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


@pytest.mark.usefixtures("refused")
def test_a_body_that_never_comes(server: Server) -> None:
    head = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connected(server.url) as connection:
        connection.sendall(head + b'Content-Length: 100\r\n\r\n{"prompt":')
        assert server.get("/health").status_code == 200
    assert json.loads(server.get("/health").text)["status"] == "ok"
