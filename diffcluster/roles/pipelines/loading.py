"""A role's part of a model: its own components with their weights, shells of those that other roles have.

A shell is a component of the right class and configuration on torch's meta device, without memory. So a pipeline can be
built whole in every role, and whatever it reads of a component (scale factors, statistics, dtype) is there and right.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, Final

import diffusers
import torch
from safetensors import safe_open

from diffcluster.config import RoleConfig
from diffcluster.errors import ModelError
from diffcluster.ids import Role
from diffcluster.roles.exactness import is_demanded
from diffcluster.roles.joining import JoinRules
from diffcluster.roles.meeting import meeting
from diffcluster.roles.pipelines.borders import leads_out
from diffcluster.roles.pipelines.directory import ModelDirectory
from diffcluster.roles.pipelines.families import Family
from diffcluster.roles.pipelines.tuning import quantization, tune

__all__ = ["Parts", "Target", "build", "load_parts", "weight_bytes"]

Parts = dict[str, Any]
"""Component by name; None for those that only other roles use."""

_DENOISERS: Final = ("unet", "transformer", "transformer_2")
_DECODERS: Final = ("vae", "safety_checker", "feature_extractor")
_ENCODES: Final = ("tokenizer", "text_encoder", "image_encoder", "image_processor", "processor")
_JOINABLE_ENCODERS: Final = ("CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel", "UMT5EncoderModel")
_IMAGE_TASKS: Final = frozenset({"image_to_image", "inpaint", "edit", "image_to_video"})


@dataclass(frozen=True)
class Target:
    """For which role a model is loaded, where to, and how."""

    role: Role
    device: torch.device
    dtype: torch.dtype
    config: RoleConfig = field(default_factory=RoleConfig)


def load_parts(directory: ModelDirectory, family: Family, target: Target) -> tuple[Parts, Parts]:
    """All components for a role, and of these the ones that it loaded.

    Raises:
        ModelError: one is missing, broken, or of a kind that is not known.
        ConfigError: something that `target.config` asks for cannot be had.
    """
    parts: Parts = {}
    owned: Parts = {}
    for name in directory.parts():
        if _is_needed(name, target.role, family):
            parts[name] = owned[name] = _load(directory, name, target)
        elif name == "scheduler":  # without weights, and every role's pipeline sets its timesteps
            parts[name] = directory.load(name, target.dtype)
        elif name in _DENOISERS or name == "vae":
            parts[name] = _shell(directory, name, target.device, target.dtype)
        else:
            parts[name] = None
    tune(owned, target.config, target.device)
    # A step cache keeps what it saw of one request, so a request that has begun is not left for another.
    if not (target.config.step_cache and target.role in ("denoiser", "monolithic")):
        rules = family.rules
        if is_demanded(target.config, target.device):  # what is padded is computed in other pieces
            rules = replace(rules, masks={}, ragged=frozenset())
        for name, part in owned.items():
            _wrap(name, part, rules, target)
    for name in _DENOISERS:
        if name in parts and name not in owned:
            parts[name].forward = leads_out
    return parts, owned


def build(class_name: str, parts: Parts, options: dict[str, Any]) -> Any:
    """The pipeline of that class with `parts`. `options` are settings of model_index.json.

    Raises:
        ModelError: the class is not there, or refuses.
    """
    cls = getattr(diffusers, class_name, None)
    if cls is None:
        raise ModelError("model_index.json", f"the installed diffusers has no {class_name}")
    parameters = inspect.signature(cls.__init__).parameters
    taken = {name: parameter for name, parameter in parameters.items() if name != "self"}
    for name in (*_DENOISERS, "vae", "scheduler"):
        if name in taken and taken[name].default is inspect.Parameter.empty and name not in parts:
            raise ModelError("model_index.json", f"{class_name} needs a {name}, and there is none")
    values = {name: parts.get(name) for name, p in taken.items() if p.default is p.empty or name in parts}
    values |= {name: value for name, value in options.items() if name in taken}
    if "requires_safety_checker" in taken and values.get("safety_checker") is None:
        values["requires_safety_checker"] = False
    try:
        pipeline = cls(**values)
    except Exception as error:  # diffusers raises whatever it meets
        raise ModelError("model_index.json", f"the pipeline cannot be built: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def weight_bytes(part: Any) -> int:
    """Bytes of the parameters and buffers of a component; 0 for one without weights."""
    if not isinstance(part, torch.nn.Module):
        return 0
    return sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers()) if not tensor.is_meta)


def _is_needed(name: str, role: Role, family: Family) -> bool:
    if role == "monolithic":
        return True
    if name in _DENOISERS or name == "scheduler":
        return role == "denoiser"
    if name == "vae" and role == "encoder":
        return not _IMAGE_TASKS.isdisjoint(family.pipelines)
    if name in _DECODERS:
        return role == "decoder"
    if name.startswith(_ENCODES):
        return role == "encoder"
    raise ModelError(name, f"no role of {family.name} is known to use such a component")


def _load(directory: ModelDirectory, name: str, target: Target) -> Any:
    role, device, dtype = target.role, target.device, target.dtype
    quantized = quantization(target.config, name)
    part = directory.load(name, dtype, quantized)
    if not isinstance(part, torch.nn.Module):
        return part
    offloaded = target.config.offload and name != "vae"
    if not offloaded and quantized is None:  # both see to it themselves
        part = part.to(device)
    if name == "vae" and role in ("encoder", "decoder"):  # each has but one half of it to run
        getattr(part, "decoder" if role == "encoder" else "encoder").to("meta")
        _say_device(part, device)
    return part


def _shell(directory: ModelDirectory, name: str, device: torch.device, dtype: torch.dtype) -> Any:
    cls = directory.class_of(name)
    try:
        with torch.device("meta"):
            shell = cls.from_config(directory.config(name)).eval().to(dtype)
    except Exception as error:  # whatever a class makes of a configuration that is not its own
        raise ModelError(name, f"its configuration does not fit {cls.__name__}: {error}") from error
    _say_device(shell, device)
    _fill_buffers(shell, directory, name, device, dtype)
    return shell


def _say_device(part: Any, device: torch.device) -> None:
    """Pipelines ask their components where they compute; what lies on the meta device would say so."""
    cls = type(part)
    part.__class__ = type(cls.__name__, (cls,), {"device": property(lambda _: device)})


def _fill_buffers(shell: Any, directory: ModelDirectory, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Statistics of latents and the like are few, and pipelines compute with them."""
    buffers = dict(shell.named_buffers())
    for path in sorted((directory.path / name).glob("*.safetensors")) if buffers else ():
        with safe_open(str(path), framework="pt") as file:
            for key in buffers.keys() & set(file.keys()):
                tensor = file.get_tensor(key)
                owner = shell.get_submodule(key.rpartition(".")[0])
                owner.register_buffer(
                    key.rpartition(".")[2], tensor.to(device, dtype if tensor.is_floating_point() else None)
                )


def _wrap(name: str, part: Any, rules: JoinRules, target: Target) -> None:
    """Let calls of different requests meet at `part`; `rules` are those of a denoiser."""
    if name in _DENOISERS:
        names = tuple(inspect.signature(part.forward).parameters)
        part.forward = meeting(name, part.forward, replace(rules, names=names))
    elif name == "vae":
        # Pipelines cast it to another dtype, encode, and cast it back: nobody else may come in between. The same holds
        # for decoding in float16, but in a decoder, where no pipeline is at work.
        if target.role == "decoder" or target.dtype != torch.float16:
            part.decode = meeting("vae.decode", part.decode, JoinRules())
    elif isinstance(part, torch.nn.Module):
        why = "" if type(part).__name__ in _JOINABLE_ENCODERS else "not known to be joinable"
        names = tuple(inspect.signature(part.forward).parameters)
        part.forward = meeting(name, part.forward, JoinRules(names, alone=why))
