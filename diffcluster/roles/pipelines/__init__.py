"""Model families. Each is an adapter over an unmodified diffusers pipeline; the only importers of diffusers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from diffcluster.errors import ModelError

if TYPE_CHECKING:
    import torch

    from diffcluster.ids import Role
    from diffcluster.roles.pipelines.base import Adapter
    from diffcluster.roles.pipelines.directory import ModelDirectory

__all__ = ["FAMILIES", "load_adapter"]

FAMILIES: Final = {"StableDiffusionPipeline": "diffcluster.roles.pipelines.stable_diffusion"}
"""The module of each pipeline class that can be served. A module has `load(directory, role, device, dtype)`."""


def load_adapter(directory: ModelDirectory, role: Role, device: torch.device, dtype: torch.dtype) -> Adapter:
    """Load what `role` needs of the model.

    Raises:
        ModelError: the pipeline's class is none of `FAMILIES`, or a component is missing or broken.
    """
    module = FAMILIES.get(directory.pipeline)
    if module is None:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError("model_index.json", f"{directory.pipeline} cannot be served; supported: {supported}")
    return cast("Adapter", import_module(module).load(directory, role, device, dtype))
