"""Encoder, denoiser and decoder in a row draw what the plain pipeline draws, bit for bit, for every family."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from diffcluster.messages import GenerationParameters
from diffcluster.testing import TINY_MODELS
from tests.pipelines.conftest import Loading
from tests.pipelines.kit import (
    LIBRARIES_WARN,
    PIPELINES,
    arrays,
    crossed,
    plain,
    request,
    same,
    slot_bytes,
    task,
    with_pictures,
)

pytestmark = pytest.mark.filterwarnings(*LIBRARIES_WARN)

FROM_TEXT = tuple(name for name in TINY_MODELS if (name, "edit") not in PIPELINES or name == "flux2-klein")
FROM_TEXT = tuple(name for name in FROM_TEXT if (name, "image_to_video") not in PIPELINES)
IN_BFLOAT16 = ("sd15", "sd3", "qwen-image", "ltx")
"""Some: the code is the same, and the arithmetic of it is slow without an accelerator."""
WITH_GUIDANCE = {"negative_prompt": "blurry, ugly", "seed": 5}
WITHOUT_NEGATIVE = {"seed": 6}
WITHOUT_GUIDANCE = {"guidance_scale": 1.0, "seed": 6}


class Split:
    """The three roles of one model."""

    def __init__(self, name: str, dtype: torch.dtype, path: Path, part_of: Loading) -> None:
        self.name, self.dtype, self.path = name, dtype, path
        self.encoder, self.denoiser, self.decoder, self.monolithic = (
            part_of(name, role, dtype) for role in ("encoder", "denoiser", "decoder", "monolithic")
        )
        self.facts = self.encoder.facts

    def run(self, wanted: GenerationParameters, inputs: tuple[bytes, ...] = ()) -> list[np.ndarray]:
        """One request through all roles; nothing crosses but bytes, and no more than was said before."""
        with torch.inference_mode():
            encoded = self.encoder.encode(task(wanted, inputs=inputs))
            assert slot_bytes(encoded) <= self.encoder.encoded_bytes(wanted)
            denoised = self.denoiser.denoise(task(wanted, crossed(encoded)))
            assert slot_bytes(denoised) <= self.denoiser.denoised_bytes(wanted)
            return arrays(self.decoder.decode(task(wanted, crossed(denoised))))

    def at_once(self, wanted: GenerationParameters, inputs: tuple[bytes, ...] = ()) -> list[np.ndarray]:
        with torch.inference_mode():
            return arrays(self.monolithic.generate(task(wanted, inputs=inputs)))

    def plain(self, wanted: GenerationParameters, images: list[Image.Image]) -> list[np.ndarray]:
        return plain(self.path, wanted, images, self.dtype)


@pytest.fixture
def split(path_of: Callable[[str], Path], part_of: Loading) -> Callable[..., Split]:
    return lambda name, dtype=torch.float32: Split(name, dtype, path_of(name), part_of)


@pytest.mark.parametrize(
    "fields",
    [WITH_GUIDANCE, WITHOUT_NEGATIVE, WITHOUT_GUIDANCE],
    ids=["negative prompt", "guidance", "no guidance"],
)
@pytest.mark.parametrize("name", FROM_TEXT)
def test_the_roles_draw_what_the_pipeline_draws(split: Callable[..., Split], name: str, fields: dict[str, Any]) -> None:
    roles = split(name)
    wanted = request(name, roles.facts, **fields)
    expected = roles.plain(wanted, [])
    assert same(roles.run(wanted), expected)
    assert same(roles.at_once(wanted), expected)


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_they_do_so_in_bfloat16(split: Callable[..., Split], name: str) -> None:
    roles = split(name, torch.bfloat16)
    wanted = request(name, roles.facts, **WITH_GUIDANCE)
    assert same(roles.run(wanted), roles.plain(wanted, []))


@pytest.mark.parametrize("fields", [WITH_GUIDANCE, WITHOUT_GUIDANCE], ids=["with guidance", "without"])
@pytest.mark.parametrize(("name", "kind"), PIPELINES, ids=map(" ".join, PIPELINES))
def test_the_roles_make_of_a_picture_what_the_pipeline_makes(
    split: Callable[..., Split], name: str, kind: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "qwen-image-edit":
        _edit_small_pictures(monkeypatch)
    roles = split(name)
    assert kind in roles.facts.tasks
    size = {"width": 64, "height": 96} if kind == "edit" else {}
    wanted, inputs, images = with_pictures(request(name, roles.facts, task=kind, strength=0.7, **size, **fields))
    expected = roles.plain(wanted, images)
    assert same(roles.run(wanted, inputs), expected)
    assert same(roles.at_once(wanted, inputs), expected)


@pytest.mark.parametrize(
    ("name", "kind"), [("sd15", "inpaint"), ("flux", "image_to_image"), ("ltx-i2v", "image_to_video")]
)
def test_they_do_so_with_a_picture_in_bfloat16(split: Callable[..., Split], name: str, kind: Any) -> None:
    roles = split(name, torch.bfloat16)
    wanted, inputs, images = with_pictures(request(name, roles.facts, task=kind, **WITH_GUIDANCE))
    assert same(roles.run(wanted, inputs), roles.plain(wanted, images))


def _edit_small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline scales what it edits to a million pixels."""
    module = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit")
    scaled = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: scaled(area / 64, ratio))


@pytest.mark.parametrize("name", ["sd15", "sd3", "z-image", "ltx"])
def test_another_seed_and_another_prompt_draw_something_else(split: Callable[..., Split], name: str) -> None:
    """Else all of the above would prove little."""
    roles = split(name)
    wanted = [
        request(name, roles.facts),
        request(name, roles.facts, seed=6),
        request(name, roles.facts, prompt="a cat"),
    ]
    first, *others = (roles.run(each) for each in wanted)
    assert not any(same(first, other) for other in others)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_all_roles_of_a_model_say_the_same_of_it(split: Callable[..., Split], name: str) -> None:
    roles = split(name)
    assert roles.denoiser.facts == roles.decoder.facts == roles.monolithic.facts == roles.facts


@pytest.mark.parametrize("name", TINY_MODELS)
def test_each_component_is_loaded_by_one_role_and_by_none_the_whole_autoencoder(
    split: Callable[..., Split], name: str
) -> None:
    roles = split(name)
    parts = [role.components for role in (roles.encoder, roles.denoiser, roles.decoder)]
    together = {key: sum(part.get(key, 0) for part in parts) for key in roles.monolithic.components}
    whole = dict(roles.monolithic.components)
    del together["vae"]
    vae = whole.pop("vae")
    assert together == whole
    assert all(part.get("vae", 0) < vae for part in parts)


def test_a_prompt_longer_than_any_fits_what_was_said(split: Callable[..., Split]) -> None:
    for name in ("sd15", "qwen-image", "z-image"):
        roles = split(name)
        wanted = request(name, roles.facts, prompt="apple cat " * 3000, negative_prompt="ugly blurry " * 2500)
        with torch.inference_mode():
            assert slot_bytes(roles.encoder.encode(task(wanted))) <= roles.encoder.encoded_bytes(wanted)
