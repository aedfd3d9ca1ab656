"""Pictures and videos of several families, over HTTP and real processes: to the last bit those of the plain pipeline.

All models are served by one router at one time.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from diffcluster.client import Client
from diffcluster.local import LocalCluster, Plan
from diffcluster.messages import GenerationParameters, ModelFacts, TaskKind
from diffcluster.roles.pipelines import Target, load
from diffcluster.roles.pipelines.directory import ModelDirectory
from diffcluster.testing import make_tiny_model
from tests.pipelines.kit import LIBRARIES_WARN, plain, request, same, with_pictures
from tests.process.conftest import ANY_PORT, QUIET, ROLE, Server, eventually
from tests.process.forked import forked_roles

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*LIBRARIES_WARN)]

ROLES = ("encoder", "denoiser", "decoder")
CASES: dict[str, tuple[str, TaskKind, dict[str, Any]]] = {
    "sdxl": ("sdxl", "text_to_image", {"negative_prompt": "blurry, ugly"}),
    "sdxl without guidance": ("sdxl", "text_to_image", {"guidance_scale": 1.0}),
    "flux": ("flux", "text_to_image", {}),
    "sd15 from a picture": ("sd15", "image_to_image", {"strength": 0.7}),
    "sd15 inpaints": ("sd15", "inpaint", {"strength": 0.8, "negative_prompt": "ugly"}),
    "wan21": ("wan21", "text_to_video", {"negative_prompt": "blurry"}),
    "ltx from a picture": ("ltx-i2v", "image_to_video", {}),
}
"""Model, task, and what is asked of it besides."""
MODELS = tuple(dict.fromkeys(model for model, _, _ in CASES.values()))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the roles are told: with others the last bits may differ."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the models are, or will be."""
    folder = tmp_path_factory.mktemp("models")
    return {name: folder / name for name in MODELS}


@pytest.fixture(scope="module")
def families(paths: dict[str, Path]) -> Iterator[Server]:
    """An encoder, a denoiser and a decoder of each model."""
    with LocalCluster(Plan({}, (), [*ANY_PORT, *QUIET])) as cluster, forked_roles() as start:
        for name, path in paths.items():
            make_tiny_model(name, path)
        server = Server(cluster.url)
        control = f"tcp://127.0.0.1:{server.cluster()['control_port']}"
        common = ("--router", control, "--threads", "1", *ROLE)
        lines = {
            f"{role}-{name}": [role, *common, "--model", str(path), "--name", f"{role}-{name}"]
            for name, path in paths.items()
            for role in ROLES
        }
        start(list(lines.values()))
        eventually(lambda: server.instances().keys() == lines.keys(), timeout=120)
        yield server


@pytest.fixture(scope="module")
def facts(families: Server, paths: dict[str, Path]) -> dict[str, ModelFacts]:
    """What each model says of itself."""
    target = Target("decoder", torch.device("cpu"), torch.float32)
    return {name: load(ModelDirectory(path), target).facts for name, path in paths.items()}


def asked(case: str, facts: dict[str, ModelFacts], **fields: Any) -> tuple[GenerationParameters, Any, Any]:
    """The request, its pictures as files, and as they are."""
    model, kind, special = CASES[case]
    wanted = request(model, facts[model], task=kind, output_format="png", **special, **fields)
    return (wanted, (), []) if kind.startswith("text") else with_pictures(wanted)


def made(server: Server, wanted: GenerationParameters, files: tuple[bytes, ...]) -> list[np.ndarray]:
    """The picture, or the frames of the video."""
    names = ["model", "seed", "num_inference_steps", "guidance_scale", "output_format"]
    names += ["negative_prompt"] if wanted.negative_prompt else []
    names += ["strength"] if wanted.task in ("image_to_image", "inpaint") else []
    names += ["num_frames"] if wanted.task.endswith("video") else []
    fields = {name: getattr(wanted, name) for name in names} | {"size": f"{wanted.width}x{wanted.height}"}
    with Client(server.url) as client:
        if wanted.task.endswith("video"):
            return frames(client.video(wanted.prompt, *files, **fields).content)
        images = (
            client.edit(wanted.prompt, files[:1], *files[1:], **fields)
            if files
            else client.generate(wanted.prompt, **fields)
        )
    return frames(images[0].content)


def frames(content: bytes) -> list[np.ndarray]:
    with Image.open(io.BytesIO(content)) as image:
        return [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


@pytest.mark.parametrize("case", CASES)
def test_a_cluster_draws_what_the_pipeline_draws(
    families: Server, paths: dict[str, Path], facts: dict[str, ModelFacts], case: str
) -> None:
    wanted, files, images = asked(case, facts)
    drawn = made(families, wanted, files)
    assert len(drawn) == wanted.num_frames
    assert same(drawn, plain(paths[wanted.model], wanted, images, torch.float32))


def test_all_at_once_and_each_twice(families: Server, paths: dict[str, Path], facts: dict[str, ModelFacts]) -> None:
    requests = [asked(case, facts, seed=40 + k) for case in CASES for k in range(2)]
    with ThreadPoolExecutor(len(requests)) as pool:
        drawn = list(pool.map(lambda one: made(families, *one[:2]), requests))
    for (wanted, _, images), pictures in zip(requests, drawn, strict=True):
        assert same(pictures, plain(paths[wanted.model], wanted, images, torch.float32)), wanted


def test_another_seed_is_another_picture(families: Server, facts: dict[str, ModelFacts]) -> None:
    """Else all of the above would prove little."""
    for case in CASES:
        one, other = (made(families, *asked(case, facts, seed=seed)[:2]) for seed in (40, 41))
        assert not same(one, other), case


def test_every_model_says_what_it_can_do(families: Server, facts: dict[str, ModelFacts]) -> None:
    said = {model["id"]: tuple(model["tasks"]) for model in families.get("/v1/models").json()["data"]}
    assert said == {name: each.tasks for name, each in facts.items()}
