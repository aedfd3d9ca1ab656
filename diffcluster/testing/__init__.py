"""Tiny models with random weights, one of each family that is served: pipeline directories as diffusers saves them.

For tests, ours and those of whoever builds on this: every family runs end to end in well under a second on one core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

__all__ = ["TINY_MODELS", "make_tiny_model"]

_MODULES: Final = {
    "sd15": "images",
    "sdxl": "images",
    "sd3": "images",
    "flux": "images",
    "qwen-image": "more_images",
    "pixart-sigma": "images",
    "flux2-klein": "more_images",
    "z-image": "more_images",
    "sana": "more_images",
    "qwen-image-edit": "more_images",
    "wan21": "videos",
    "wan22": "videos",
    "wan21-i2v": "videos",
    "ltx": "videos",
    "ltx-i2v": "videos",
    "hunyuan-video": "videos",
    "cogvideox": "videos",
}
"""Where each model is made, by a function of its name. They are imported on use: diffusers takes seconds."""

TINY_MODELS: Final[tuple[str, ...]] = tuple(_MODULES)
"""The names of all models."""


def make_tiny_model(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Write the tiny model `name` to `directory`; the same seed gives the same files. No network is used.

    Returns:
        The directory.

    Raises:
        ValueError: there is no model of this name.
    """
    if name not in _MODULES:
        raise ValueError(f"no tiny model is called {name!r}; there are {', '.join(TINY_MODELS)}")
    import torch

    module: Any = import_module(f"diffcluster.testing.{_MODULES[name]}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the accelerators
        pipeline = getattr(module, name.replace("-", "_"))()
    with _no_progress_bars():
        pipeline.save_pretrained(directory, safe_serialization=True)
    return directory


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
