"""A role process of a real model: loads its part of it, and serves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch

from diffcluster.roles.device import Device, compute_threads, open_device
from diffcluster.roles.media import check_video_support
from diffcluster.roles.pipelines import Target, load
from diffcluster.roles.pipelines.directory import ModelDirectory, find_model
from diffcluster.roles.pipelines.tuning import keep_compiled
from diffcluster.roles.runtime import serve
from diffcluster.roles.stages import STAGES

if TYPE_CHECKING:
    from diffcluster.config import RoleConfig
    from diffcluster.ids import Role

__all__ = ["run"]

_log = logging.getLogger(__name__)
_MAKES_FILES: Final[frozenset[Role]] = frozenset({"decoder", "monolithic"})


def run(role: Role, config: RoleConfig) -> int:
    """Load the model and serve as `role` until asked to leave; the exit status.

    Raises:
        ConfigError, ModelError, AddressInUseError: it could not start.
    """
    torch.set_num_threads(compute_threads(config.threads))
    keep_compiled(config)
    device = open_device(config.device)
    dtype = _dtype(config.dtype, device)
    directory = ModelDirectory(find_model(config.model), config.model_id)
    _log.info("%s of %s on %s in %s", role, directory.path, device.torch_device, str(dtype).removeprefix("torch."))
    stage = STAGES[role](load(directory, Target(role, device.torch_device, dtype, config)))
    if stage.facts.video is not None and role in _MAKES_FILES:
        check_video_support()
    return serve(role, config, stage, device, dtype)


def _dtype(name: str, device: Device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.torch_device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype
