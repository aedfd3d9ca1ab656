"""The pictures of a cluster are, pixel for pixel, those of the plain pipeline in one process."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.process.conftest import DEMO, Server, pixels, sha

CASES: list[dict[str, Any]] = [
    {"prompt": "a slice of pizza", "seed": 0, "num_inference_steps": 4},
    {"prompt": "a slice of pizza", "seed": 1, "num_inference_steps": 1},
    {"prompt": "a red fish", "seed": 7, "num_inference_steps": 9, "guidance_scale": 3.5},
    {"prompt": "a house at night", "seed": 42, "num_inference_steps": 5, "guidance_scale": 1.0},
    {"prompt": "a house at night", "seed": 42, "num_inference_steps": 5, "guidance_scale": 0.0},
    {"prompt": "a cat", "seed": 2**32 - 1, "num_inference_steps": 6, "negative_prompt": "a dog, blurry"},
    {"prompt": "a tree " * 60, "seed": 4324379876, "num_inference_steps": 3, "negative_prompt": "leaves " * 60},
    {"prompt": "🍕 pizza בית", "seed": 3, "num_inference_steps": 3, "width": 64, "height": 160},
    {"prompt": "a boat", "seed": 5, "num_inference_steps": 4, "width": 136, "height": 72},
    {"prompt": "a star", "seed": 6, "num_inference_steps": 6, "eta": 0.7},
    {"prompt": "a star", "seed": 6, "num_inference_steps": 4, "guidance_rescale": 0.5},
]


def request(case: dict[str, Any]) -> dict[str, Any]:
    """The pipeline's arguments as the body of a request."""
    fields = dict(case)
    if "width" in fields:
        fields["size"] = f"{fields.pop('width')}x{fields.pop('height')}"
    extra = {name: fields.pop(name) for name in ("eta", "guidance_rescale") if name in fields}
    return fields | ({"extra": extra} if extra else {})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[npt.NDArray[np.uint8]]:
    """The pictures of plain diffusers, by case."""
    folder = tmp_path_factory.mktemp("plain")
    cases = folder / "cases.json"
    cases.write_text(json.dumps(CASES))
    script = Path(__file__).with_name("plain_pipeline.py")
    subprocess.run([sys.executable, script, DEMO, cases, folder], check=True, timeout=240, cwd=folder)
    return [np.load(folder / f"{number}.npy") for number in range(len(CASES))]


def names(case: dict[str, Any]) -> str:
    return " ".join(f"{name}={str(value)[:16]}" for name, value in case.items())


@pytest.mark.parametrize("number", range(len(CASES)), ids=[names(case) for case in CASES])
class TestPixels:
    def test_over_shared_memory(self, server: Server, plain: list[npt.NDArray[np.uint8]], number: int) -> None:
        assert self.transfers(server, number, plain) == {"shm"}

    def test_over_tcp(self, tcp_server: Server, plain: list[npt.NDArray[np.uint8]], number: int) -> None:
        assert self.transfers(tcp_server, number, plain) == {"tcp"}

    def test_monolithic(self, monolithic_server: Server, plain: list[npt.NDArray[np.uint8]], number: int) -> None:
        assert self.transfers(monolithic_server, number, plain) == set()

    @staticmethod
    def transfers(server: Server, number: int, plain: list[npt.NDArray[np.uint8]]) -> set[str]:
        """Compare the pictures; the engines that its tensors travelled by."""
        (image,) = server.images(**request(CASES[number]))
        made = pixels(base64.b64decode(image["b64_json"]))
        assert made.std() > 0
        np.testing.assert_array_equal(made, plain[number])
        stages = [value for value in image["timings"].values() if isinstance(value, dict)]
        return {stage["engine"] for stage in stages if stage["engine"]}


def test_the_cases_are_different_pictures(plain: list[npt.NDArray[np.uint8]]) -> None:
    distinct = {sha(picture.tobytes()) for picture in plain}
    assert len(distinct) == len(CASES) - 1  # guidance of 0 and of 1 both mean none


def test_requests_side_by_side_do_not_mix(server: Server, plain: list[npt.NDArray[np.uint8]]) -> None:
    """Different prompts, seeds, steps and sizes at one time, more than the roles take at once."""
    numbers = [number for number in range(len(CASES)) for _ in range(2)]
    with ThreadPoolExecutor(len(numbers)) as pool:
        answers = list(pool.map(lambda number: server.picture(**request(CASES[number])), numbers))
    for number, answer in zip(numbers, answers, strict=True):
        np.testing.assert_array_equal(pixels(answer), plain[number])
