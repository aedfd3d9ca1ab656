"""The HTTP API as OpenAI's own client sees it, and the pages that say what the cluster is and does."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest

from diffcluster.local import LocalCluster
from tests.process.conftest import GENERATIONS, Early, Server, error_of, eventually, pixels, sha

PROMPT = "a slice of pizza"
COMPONENTS = {
    "encoder": {"tokenizer", "text_encoder", "vae"},
    "denoiser": {"unet", "scheduler"},
    "decoder": {"vae"},
    "monolithic": {"tokenizer", "text_encoder", "unet", "scheduler", "vae"},
}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def content(image: Any) -> bytes:
    return base64.b64decode(image.b64_json)


# ---------------------------------------------------------------- pictures


def test_a_prompt_is_enough(client: openai.OpenAI) -> None:
    answer = client.images.generate(prompt=PROMPT)
    assert answer.data is not None
    (image,) = answer.data
    assert pixels(content(image)).shape == (128, 128, 3)
    assert answer.created > 0
    assert answer.output_format == "png"
    extra = answer.model_extra
    assert extra is not None
    assert extra["seed"] == image.model_extra["seed"]
    assert extra["timings"]["total_s"] > 0
    assert set(image.model_extra["timings"]) == {"total_s", "encoder", "denoiser", "decoder"}
    assert image.model_extra["timings"]["denoiser"]["computed_s"] > 0


def test_the_returned_seed_makes_the_picture_again(client: openai.OpenAI) -> None:
    first = client.images.generate(prompt=PROMPT, extra_body={"num_inference_steps": 2}).data[0]
    seed = first.model_extra["seed"]
    again = client.images.generate(prompt=PROMPT, extra_body={"num_inference_steps": 2, "seed": seed}).data[0]
    assert content(again) == content(first)


def test_drawn_seeds_differ(server: Server) -> None:
    seeds = [image["seed"] for image in server.images(n=10, seed=None, num_inference_steps=1, size="16x16")]
    assert seeds == list(range(seeds[0], seeds[0] + 10))
    drawn = {server.images(seed=None, num_inference_steps=1, size="16x16")[0]["seed"] for _ in range(10)}
    assert len(drawn) == 10
    assert all(0 <= seed < 2**32 for seed in drawn)


def test_picture_k_of_n_is_the_solo_picture_of_seed_plus_k(client: openai.OpenAI) -> None:
    fields = {"num_inference_steps": 3, "negative_prompt": "blurry"}
    several = client.images.generate(prompt=PROMPT, n=3, extra_body=fields | {"seed": 40}).data
    assert [image.model_extra["seed"] for image in several] == [40, 41, 42]
    for k, image in enumerate(several):
        solo = client.images.generate(prompt=PROMPT, extra_body=fields | {"seed": 40 + k}).data[0]
        assert content(solo) == content(image)
    assert len({sha(content(image)) for image in several}) == 3


@pytest.mark.parametrize(
    ("output_format", "magic"),
    [("png", b"\x89PNG\r\n\x1a\n"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")],
)
def test_output_formats(client: openai.OpenAI, output_format: Any, magic: bytes) -> None:
    sizes = []
    for compression in (0, 100):
        answer = client.images.generate(
            prompt=PROMPT,
            output_format=output_format,
            output_compression=compression,
            extra_body={"num_inference_steps": 2, "seed": 1},
        )
        file = content(answer.data[0])
        assert file.startswith(magic)
        assert answer.output_format == output_format
        sizes.append(len(file))
    assert sizes[0] < sizes[1] or output_format == "png"


def test_webp_says_webp(server: Server) -> None:
    assert server.picture(output_format="webp", num_inference_steps=1)[8:12] == b"WEBP"


def test_response_format_url(client: openai.OpenAI, server: Server) -> None:
    fields = {"num_inference_steps": 2, "seed": 7}
    image = client.images.generate(prompt=PROMPT, response_format="url", extra_body=fields).data[0]
    assert image.b64_json is None
    head, _, text = image.url.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(text) == server.picture(prompt=PROMPT, **fields)


def test_streaming(client: openai.OpenAI, server: Server) -> None:
    stream = client.images.generate(
        prompt=PROMPT, stream=True, partial_images=0, n=2, extra_body={"num_inference_steps": 2, "seed": 7}
    )
    with stream:
        events = list(stream)
    assert [event.type for event in events] == ["image_generation.completed"] * 2
    assert content(events[0]) == server.picture(prompt=PROMPT, seed=7)
    assert content(events[1]) == server.picture(prompt=PROMPT, seed=8)
    assert events[0].usage.total_tokens == 0
    assert (events[0].size, events[0].output_format) == ("128x128", "png")


def test_a_stream_says_its_error_in_an_event(client: openai.OpenAI) -> None:
    stream = client.images.generate(
        prompt=PROMPT, stream=True, extra_body={"num_inference_steps": 1000, "deadline_s": 0.5}
    )
    with stream, pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "deadline_exceeded"


def test_a_bad_request_for_a_stream_is_a_plain_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt=PROMPT, stream=True, size="1x1")  # type: ignore[call-overload]
    assert caught.value.param == "size"


# ---------------------------------------------------------------- models and errors


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "diffcluster")
    assert model.created > 0
    again = client.models.retrieve("demo")
    assert again == model
    assert again.model_extra["size_multiple"] == 8
    assert again.model_extra["size"] == "128x128"


@pytest.mark.parametrize("name", ["nope", "DEMO", "owner/name", "a b", "é", "demo/x"])
def test_a_model_that_is_not_there(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve(name)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt=PROMPT, model=name)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"size": "65x64"}, "size"),
        ({"extra_body": {"seed": -1}}, "seed"),
        ({"prompt": ""}, "prompt"),
        ({"extra_body": {"num_inference_steps": "4"}}, "num_inference_steps"),
        ({"background": "transparent"}, "background"),
        ({"output_compression": 101}, "output_compression"),
        ({"extra_body": {"nope": 1}}, "nope"),
    ],
)
def test_bad_requests_are_exceptions_of_the_client(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(**{"prompt": PROMPT} | fields)
    error = caught.value
    assert (error.status_code, error.code, error.param) == (400, "invalid_value", param)
    assert error.type == "invalid_request_error"
    assert error.request_id


def test_a_deadline_is_an_error_that_the_client_does_not_retry(server: Server) -> None:
    before = server.cluster()["ended"].get("deadline_exceeded", 0)
    fields = {"num_inference_steps": 1000, "deadline_s": 0.3}
    retrying = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with retrying as client, pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt=PROMPT, extra_body=fields)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    assert server.cluster()["ended"]["deadline_exceeded"] == before + 1
    eventually(lambda: not any(instance["outstanding"] for instance in server.instances().values()))


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/images", "/v1/requests/nope", f"{GENERATIONS}/x"])
def test_routes_that_are_not_there(server: Server, path: str) -> None:
    assert error_of(server.get(path), 404)["code"] == "not_found"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", GENERATIONS), ("PUT", GENERATIONS), ("DELETE", GENERATIONS), ("POST", "/health"), ("POST", "/v1/models"),
     ("PATCH", "/v1/cluster"), ("DELETE", "/v1/models/demo")],
)  # fmt: skip
def test_methods_that_are_not_there(server: Server, method: str, path: str) -> None:
    with server.client() as client:
        response = client.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert "allow" in response.headers


def test_the_client_learns_of_routes_that_are_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.post("/images/variations", cast_to=object, body={"prompt": PROMPT})
    assert caught.value.code == "not_found"


# ---------------------------------------------------------------- request ids


def test_the_request_id_comes_back(server: Server, client: openai.OpenAI) -> None:
    headers = {"x-request-id": "mine-1"}
    fields = {"prompt": PROMPT, "num_inference_steps": 1}
    assert server.post(fields, headers=headers).headers["x-request-id"] == "mine-1"
    assert server.post({}, headers=headers).headers["x-request-id"] == "mine-1"
    made = {server.post(fields).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="", extra_headers=headers)
    assert caught.value.request_id == "mine-1"


def test_routes_that_are_not_there_have_a_request_id_too(server: Server) -> None:
    with server.client() as client:
        assert client.get("/nope", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"


def test_two_live_requests_of_one_id_are_both_right(server: Server) -> None:
    def ask(seed: int) -> npt.NDArray[np.uint8]:
        fields = {"prompt": PROMPT, "seed": seed, "num_inference_steps": 6}
        response = server.post(fields, headers={"x-request-id": "twice"})
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "twice"
        return pixels(base64.b64decode(response.json()["data"][0]["b64_json"]))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for seed, answer in enumerate(answers):
        np.testing.assert_array_equal(answer, pixels(server.picture(prompt=PROMPT, seed=seed, num_inference_steps=6)))
    assert len({sha(answer.tobytes()) for answer in answers}) == 4


def test_a_request_can_be_watched(server: Server) -> None:
    with server.steps_seen({"prompt": PROMPT, "num_inference_steps": 300}, step=2):
        (picture,) = server.cluster()["requests"]
        assert (picture["stage"], picture["phase"], picture["steps"]) == ("denoiser", "running", 300)
        assert picture["instance"] in ("denoiser-1", "denoiser-2")
        assert server.where(picture["id"])["step"] >= picture["step"] >= 2
        assert server.metric("diffcluster_requests_in_progress", phase="running") == 1
    ended = eventually(lambda: server.where(picture["id"]) if not server.cluster()["requests"] else {})
    assert (ended["phase"], ended["outcome"]) == ("ended", "cancelled")


# ---------------------------------------------------------------- the cluster


def test_health_and_ready(server: Server) -> None:
    instances = {"encoder": 1, "denoiser": 2, "decoder": 1}
    health = server.get("/health").json()
    assert health["status"] == "ok"
    assert health["instances"] == instances
    ready = server.get("/ready")
    assert ready.status_code == 200
    assert ready.json() == {"ready": True, "missing": [], "instances": instances}


def test_before_a_role_is_there(monolithic: tuple[Server, Early]) -> None:
    server, early = monolithic
    assert early.health.status_code == 200
    assert early.health.json()["status"] == "degraded"
    assert early.ready.status_code == 503
    assert early.ready.json()["missing"]
    assert early.ready.headers["retry-after"]
    assert early.models.json()["data"] == []
    assert error_of(early.generation, 503)["code"] == "no_instance"
    assert early.generation.headers["retry-after"]
    assert early.generation.headers["x-should-retry"] == "true"
    assert server.get("/ready").status_code == 200


def test_each_role_holds_its_own_part_of_the_model(server: Server, monolithic_server: Server) -> None:
    whole = monolithic_server.instances()["monolithic-1"]["components"]
    assert set(whole) == COMPONENTS["monolithic"]
    instances = server.instances()
    assert set(instances) == {"encoder-1", "denoiser-1", "denoiser-2", "decoder-1"}
    for instance in instances.values():
        assert set(instance["components"]) == COMPONENTS[instance["role"]]
        halved = {"vae"}  # an encoder or a decoder has no more of it than it runs
        for name, nbytes in instance["components"].items():
            assert 0 < nbytes < whole[name] if name in halved else nbytes == whole[name]
        assert instance["parameter_bytes"] == sum(instance["components"].values()) > 0
        assert instance["model"] == "demo"
        assert instance["engines"] == (["shm", "tcp"] if instance["role"] in ("denoiser", "decoder") else [])
    assert {"text_encoder", "vae"}.isdisjoint(instances["denoiser-1"]["components"])
    parts = [instances[name]["parameter_bytes"] for name in ("encoder-1", "denoiser-1", "decoder-1")]
    assert sum(parts) == sum(whole.values())


def test_weights_that_a_role_does_not_need_are_never_mapped(server: Server) -> None:
    for instance in server.instances().values():
        maps = Path(f"/proc/{instance['pid']}/maps").read_text()
        assert "libtorch" in maps
        mapped = {name for name in COMPONENTS["monolithic"] if f"/models/demo/{name}/" in maps}
        assert mapped <= set(instance["components"])


def test_resident_memory_is_reported(server: Server) -> None:
    for instance in server.instances().values():
        assert eventually(lambda name=instance["name"]: server.instances()[name]["resident_bytes"]) > 50 << 20
        assert server.metric("diffcluster_instance_resident_bytes", instance=instance["name"]) > 50 << 20


def test_idle_instances_hold_nothing(server: Server) -> None:
    server.picture()

    def idle() -> bool:
        instances = server.instances().values()
        return all(
            i["outstanding"] == i["retained"] == 0
            and i["receive_free"] + i["granted_bytes"] == i["slot_bytes"]
            and i["receive_quarantined"] == 0
            and i["last_seen_s"] < 3
            for i in instances
        )

    eventually(idle)


def test_metrics_move(server: Server) -> None:
    names = [
        ("diffcluster_requests_total", {"outcome": "finished"}),
        ("diffcluster_request_duration_seconds_count", {}),
        *(("diffcluster_stage_compute_seconds_count", {"role": role}) for role in ("encoder", "denoiser", "decoder")),
        *(("diffcluster_transfers_total", {"role": role, "engine": "shm"}) for role in ("denoiser", "decoder")),
    ]
    server.picture()
    before = [server.metric(name, **labels) for name, labels in names]
    for _ in range(3):
        server.picture()
    assert [server.metric(name, **labels) for name, labels in names] == [value + 3 for value in before]
    assert server.metric("diffcluster_instances", role="denoiser") == 2
    assert server.metric("diffcluster_transfer_bytes_total", role="decoder") > 0


def test_metrics_are_in_the_text_format(server: Server) -> None:
    response = server.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    lines = response.text.splitlines()
    kinds = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert {"counter", "gauge", "histogram"} == set(kinds.values())
    assert len(kinds) == sum(line.startswith("# HELP") for line in lines)


def test_both_denoisers_are_used(server: Server) -> None:
    used = {server.images(num_inference_steps=1)[0]["timings"]["denoiser"]["instance"] for _ in range(2)}
    assert used == {"denoiser-1", "denoiser-2"}


def test_the_openapi_document(server: Server) -> None:
    response = server.get("/schema/openapi.json")
    assert response.status_code == 200
    document = json.loads(response.text)
    operation = document["paths"]["/v1/images/generations"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["title"] == "ImageRequest"
    assert {"prompt", "seed", "num_inference_steps", "guidance_scale", "negative_prompt"} <= set(schema["properties"])
    assert schema["required"] == ["prompt"]
    assert {"/health", "/ready", "/metrics", "/v1/cluster", "/v1/models"} <= set(document["paths"])
    referred = set(re.findall(r'"\$ref": ?"#/components/schemas/([^"]+)"', response.text))
    assert referred <= set(document["components"]["schemas"])


def test_the_router_holds_no_torch(cluster: LocalCluster, server: Server) -> None:
    server.picture()
    maps = Path(f"/proc/{cluster.pids['router']}/maps").read_text()
    assert "python" in maps
    assert "torch" not in maps
    assert "safetensors" not in maps
