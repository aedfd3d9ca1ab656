"""How a model is made to run faster or in less memory: diffusers' own switches, by diffusers' own names.

None of them is on unless a user asks for it: most change the last bits of a picture.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import diffusers
import torch

from diffcluster.errors import ConfigError

if TYPE_CHECKING:
    from diffcluster.config import RoleConfig

__all__ = ["keep_compiled", "quantization", "tune"]

_log = logging.getLogger(__name__)
_DENOISERS: Final = ("unet", "transformer", "transformer_2")
_COMPILED: Final = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def quantization(config: RoleConfig, component: str) -> Any | None:
    """The configuration with which a component's weights are loaded; None for those that stay as they are.

    Raises:
        ConfigError: diffusers has no such backend, or refuses the arguments.
    """
    if not config.quantization:
        return None
    name, options = _named("role.quantization", config.quantization)
    components = options.pop("components", _DENOISERS)
    if component not in components:
        return None
    try:
        whole = diffusers.PipelineQuantizationConfig(
            quant_backend=name, quant_kwargs=options, components_to_quantize=list(components)
        )
        return whole._resolve_quant_config(is_diffusers=component in (*_DENOISERS, "vae"), module_name=component)
    except Exception as error:  # whatever diffusers raises for what it does not know
        raise ConfigError("role.quantization", f"{config.quantization!r}: {error}") from error


def tune(parts: dict[str, Any], config: RoleConfig, device: torch.device) -> None:
    """Switch on what `config` asks for. The autoencoder, which is small, stays as it is.

    Raises:
        ConfigError: something that was asked for cannot be had.
    """
    for name, part in parts.items():
        if name in _DENOISERS and config.attention_backend:
            _switch("role.attention_backend", config.attention_backend, part.set_attention_backend)
        if name in _DENOISERS and config.step_cache:
            _enable_cache(part, config)
        if config.offload and name != "vae" and isinstance(part, torch.nn.Module):
            _offload(part, config, device)
        if name in _DENOISERS and config.compile:
            part.forward = torch.compile(part.forward, mode=config.compile)


def keep_compiled(config: RoleConfig) -> None:
    """Have compiled code kept from one start to the next, unless the user has said where. Before torch compiles."""
    if not config.compile:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diffcluster"
    try:
        home.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=home).close()
    except OSError as error:
        _log.warning("compiled code is not kept: %s cannot be written: %s", home, error)
        return
    for variable in _COMPILED:
        os.environ.setdefault(variable, str(home / variable.lower()))


def _enable_cache(part: Any, config: RoleConfig) -> None:
    name, options = _named("role.step_cache", config.step_cache)
    cls = getattr(diffusers, name, None)
    if cls is None or not name.endswith("Config"):
        raise ConfigError("role.step_cache", f"diffusers has no cache configuration {name!r}")
    _switch("role.step_cache", config.step_cache, lambda _: part.enable_cache(cls(**options)))


def _offload(part: Any, config: RoleConfig, device: torch.device) -> None:
    options: dict[str, Any] = {"block_level": {"num_blocks_per_group": 1}, "leaf_level": {}}[config.offload]
    _switch(
        "role.offload",
        config.offload,
        lambda kind: diffusers.hooks.apply_group_offloading(
            part, onload_device=device, offload_device=torch.device("cpu"), offload_type=kind, **options
        ),
    )


def _switch(setting: str, value: str, act: Any) -> None:
    try:
        act(value)
    except Exception as error:  # whatever diffusers raises for what it does not know or has not installed
        raise ConfigError(setting, f"{value!r}: {type(error).__name__}: {error}") from error
    _log.info("%s = %s", setting, value)


def _named(setting: str, text: str) -> tuple[str, dict[str, Any]]:
    """`NAME` or `NAME {"argument": value}`."""
    name, _, options = text.partition(" ")
    try:
        values = json.loads(options) if options.strip() else {}
    except ValueError as error:
        raise ConfigError(setting, f"{text!r}: what follows the name is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(setting, f"{text!r}: what follows the name is no JSON object")
    return name, values
