"""The tiny models: each loads by its plain class, and its pictures depend on all that pictures should depend on."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from diffcluster.testing import TINY_MODELS, make_tiny_model
from diffcluster.testing.__main__ import main

GREY = 1 / 255
FRAMES = 9


@dataclass(frozen=True)
class Family:
    """How one family is called."""

    pipeline: str
    guidance: dict[str, Any]
    size: tuple[int, int] = (32, 32)
    other_size: tuple[int, int] = (32, 48)
    video: bool = False
    image: bool = False
    negative: bool = True
    more: dict[str, Any] = field(default_factory=dict)


OWN_SIZE = {"use_resolution_binning": False}
video = partial(Family, video=True)

FAMILIES = {
    "sd15": Family("StableDiffusionPipeline", {"guidance_scale": 7.5}, other_size=(40, 64)),
    "sdxl": Family("StableDiffusionXLPipeline", {"guidance_scale": 5.0}, other_size=(40, 64)),
    "sd3": Family("StableDiffusion3Pipeline", {"guidance_scale": 5.0}),
    "flux": Family("FluxPipeline", {"true_cfg_scale": 3.0}),
    "flux2-klein": Family(
        "Flux2KleinPipeline", {"guidance_scale": 4.0}, negative=False, more={"max_sequence_length": 64}
    ),
    "qwen-image": Family("QwenImagePipeline", {"true_cfg_scale": 4.0}),
    "z-image": Family("ZImagePipeline", {"guidance_scale": 5.0}),
    "pixart-sigma": Family("PixArtSigmaPipeline", {"guidance_scale": 4.5}, more=OWN_SIZE | {"clean_caption": False}),
    "sana": Family("SanaPipeline", {"guidance_scale": 4.5}, (64, 64), (32, 64), more=OWN_SIZE),
    "wan21": video("WanPipeline", {"guidance_scale": 5.0}),
    "wan22": video("WanPipeline", {"guidance_scale": 4.0, "guidance_scale_2": 3.0}),
    "ltx": video("LTXPipeline", {"guidance_scale": 3.0}, (64, 64), (32, 64)),
    "hunyuan-video": video("HunyuanVideoPipeline", {"true_cfg_scale": 3.0}),
    "cogvideox": video("CogVideoXPipeline", {"guidance_scale": 6.0}),
    "qwen-image-edit": Family("QwenImageEditPipeline", {"true_cfg_scale": 4.0}, (64, 64), (64, 128), image=True),
    "wan21-i2v": video("WanImageToVideoPipeline", {"guidance_scale": 5.0}, image=True),
    "ltx-i2v": video("LTXImageToVideoPipeline", {"guidance_scale": 3.0}, (64, 64), (32, 64), image=True),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def third_party() -> Iterator[None]:
    """Warnings of the libraries about themselves."""
    with warnings.catch_warnings():
        for module in ("diffusers", "transformers", "torch", "huggingface_hub", "accelerate"):
            warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")
        yield


def load(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    import diffusers

    with third_party():
        pipeline = getattr(diffusers, FAMILIES[name].pipeline).from_pretrained(directory, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((64, 64))


def draw(name: str, pipeline: Any, **changes: Any) -> torch.Tensor:
    family = FAMILIES[name]
    height, width = changes.pop("size", family.size)
    generator = torch.Generator().manual_seed(changes.pop("seed", 0))
    arguments = {"prompt": "a photo of a red cat", "num_inference_steps": 2, "output_type": "pt"}
    arguments |= {"height": height, "width": width, "generator": generator} | family.guidance | family.more
    arguments |= {"num_frames": FRAMES} if family.video else {}
    arguments |= {"image": picture(0)} if family.image else {}
    arguments |= {"negative_prompt": "blurry"} if family.negative else {}
    with third_party():
        result = pipeline(**(arguments | changes))
    made: torch.Tensor = (result.frames if family.video else result.images)[0].float()
    return made


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean, in grey levels of 255."""
    return ((one - other).abs().mean() / GREY).item()


def shape(family: Family, size: tuple[int, int]) -> tuple[int, ...]:
    return (FRAMES, 3, *size) if family.video else (3, *size)


def is_picture(made: torch.Tensor, expected: tuple[int, ...]) -> bool:
    return made.shape == expected and bool(made.isfinite().all()) and made.std().item() > 15 * GREY


@pytest.mark.parametrize("name", TINY_MODELS)
def test_pictures_depend_on_prompt_and_seed(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    directory = make_tiny_model(name, tmp_path / name)
    assert sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) < 3e6

    pipeline = load(name, directory)
    made = draw(name, pipeline)
    assert is_picture(made, shape(family, family.size))
    assert torch.equal(draw(name, pipeline), made)
    changes: list[dict[str, Any]] = [{"prompt": "a blue dog"}, {"seed": 1}]
    changes += [{"negative_prompt": "a castle"}] if family.negative else []
    changes += [{"image": picture(1)}] if family.image else []
    for change in changes:
        assert difference(draw(name, pipeline, **change), made) > 1, change
    assert is_picture(draw(name, pipeline, size=family.other_size), shape(family, family.other_size))

    assert is_picture(draw(name, load(name, directory, torch.bfloat16)), shape(family, family.size))


def digests(directory: Path) -> dict[str, str]:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("name", ["sdxl", "hunyuan-video"])
def test_a_seed_gives_the_same_files(name: str, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first = digests(make_tiny_model(name, tmp_path / "first"))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    assert digests(make_tiny_model(name, tmp_path / "second")) == first
    other = digests(make_tiny_model(name, tmp_path / "other", seed=1))
    weights = {file for file in first if file.endswith(".safetensors")}
    assert {file for file in first if other[file] != first[file]} == weights
    assert not [file for file in first if file.endswith((".bin", ".pt", ".pkl"))]


@pytest.mark.parametrize("call", [make_tiny_model, partial(make_tiny_model, seed=3)])
def test_an_unknown_name_is_refused(call: Callable[[str, Path], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'sd14'.*sd15, sdxl"):
        call("sd14", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_wan22_uses_both_transformers(tmp_path: Path) -> None:
    pipeline = load("wan22", make_tiny_model("wan22", tmp_path))
    used = set()
    for part in ("transformer", "transformer_2"):
        getattr(pipeline, part).register_forward_hook(lambda *_, part=part: used.add(part))
    draw("wan22", pipeline)
    assert used == {"transformer", "transformer_2"}


def test_prompts_are_not_cut_off_with_their_templates(tmp_path: Path) -> None:
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video as hunyuan

    from diffcluster.testing import tokenizers

    template = hunyuan.DEFAULT_PROMPT_TEMPLATE
    tokenizer = tokenizers.llama_tokenizer()
    kept = tokenizer(template["template"].format("cat")).input_ids[template["crop_start"] :]
    assert "cat" in tokenizer.decode(kept)
    for name, start in (("qwen-image", "cat"), ("qwen-image-edit", "<|vision_start|>")):
        pipeline = load(name, make_tiny_model(name, tmp_path / name))
        text = pipeline.prompt_template_encode.format("cat")
        kept = pipeline.tokenizer(text).input_ids[pipeline.prompt_template_encode_start_idx :]
        assert pipeline.tokenizer.decode(kept).startswith(start)


def test_the_command_writes_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["ltx", str(tmp_path / "model"), "--seed", "2"])
    assert (result.exit_code, result.output) == (0, f"{tmp_path / 'model'}\n")
    assert json.loads((tmp_path / "model" / "model_index.json").read_text())["_class_name"] == "LTXPipeline"
    assert digests(tmp_path / "model") == digests(make_tiny_model("ltx", tmp_path / "again", seed=2))
