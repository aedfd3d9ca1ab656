"""Where a role's part of a pipeline ends: calls that are recorded here, replayed there, or that lead out of the role.

Every role runs the pipeline's own `__call__`, unmodified, with the same arguments. What the encoder computes is
recorded at the border (`Tape`), and the denoiser's pipeline is given it back in place of the calls; so each draws the
same random numbers in the same order as a pipeline that has all its components. A role's part ends at the first call
of a component that the next role has: `HandOver`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch

from diffcluster.errors import WorkerFailedError

__all__ = ["HandOver", "Tape", "leads_out", "recorded", "replayed"]

_PIPELINE_CALLS: Final = ("encode_prompt", "encode_image")


class HandOver(Exception):  # noqa: N818 - not an error: the role's part is done
    """The pipeline has come to a call of a component of the next role: with these arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the next role has this component")
        self.arguments = {"args": list(args), "kwargs": kwargs}


class Tape:
    """What was called, and what it returned, in order."""

    def __init__(self, calls: list[list[Any]] | None = None) -> None:
        self.calls = calls if calls is not None else []
        self._next = 0

    def record(self, name: str, value: Any) -> None:
        """`name` returned `value`."""
        self.calls.append([name, value])

    def play(self, name: str, *args: Any) -> Any:
        """What the next call, which must be one of `name`, returned for `args`."""
        del args
        if self._next >= len(self.calls) or self.calls[self._next][0] != name:
            raise WorkerFailedError(f"the encoder handed over no result of {name} here: is its model another one?")
        value = self.calls[self._next][1]
        self._next += 1
        return value


def leads_out(*args: Any, **kwargs: Any) -> Any:
    """Stands for a function of a component of the next role."""
    # A generator is for autoencoders that sample; it cannot travel, and none of ours decodes at random.
    raise HandOver(args, {name: value for name, value in kwargs.items() if not isinstance(value, torch.Generator)})


def recorded(pipeline: Any, tape: Tape) -> None:
    """Have `pipeline`, which is one request's copy, write what it encodes to `tape`."""
    for name in _PIPELINE_CALLS:
        if hasattr(pipeline, name):
            setattr(pipeline, name, _recording(name, getattr(pipeline, name), tape))
    vae = pipeline.vae = copy.copy(pipeline.vae)
    vae.encode = _recording_latents(vae.encode, tape)


def replayed(pipeline: Any, tape: Tape) -> None:
    """Have `pipeline`, which is one request's copy, take what it encodes from `tape`, and end at the decoder's part."""
    for name in _PIPELINE_CALLS:
        if hasattr(pipeline, name):
            setattr(pipeline, name, _playing(name, tape))
    # Where a pipeline casts its autoencoder to another dtype, it must be its own.
    vae = pipeline.vae = copy.deepcopy(pipeline.vae) if _is_cast(pipeline.vae) else copy.copy(pipeline.vae)
    vae.encode = _playing_latents(tape)
    vae.decode = leads_out


def _is_cast(vae: Any) -> bool:
    return vae.dtype == torch.float16 and bool(vae.config.get("force_upcast"))


def _recording(name: str, function: Callable[..., Any], tape: Tape) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        tape.record(name, value)
        return value

    return call


def _playing(name: str, tape: Tape) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        return tape.play(name)

    return call


def _recording_latents(function: Callable[..., Any], tape: Tape) -> Callable[..., Any]:
    def encode(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        first = output[0]  # also without `return_dict` it is the first
        if isinstance(first, torch.Tensor):
            tape.record("vae.encode", {"latents": first})
        else:  # the distribution that the pipeline draws from, with its own generator
            tape.record("vae.encode", {"parameters": first.parameters, "deterministic": first.deterministic})
        return output

    return encode


def _playing_latents(tape: Tape) -> Callable[..., Any]:
    from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.models.modeling_outputs import AutoencoderKLOutput

    def encode(*args: Any, return_dict: bool = True, **_: Any) -> Any:
        value = tape.play("vae.encode", *args)
        if "latents" in value:
            return AutoencoderTinyOutput(latents=value["latents"]) if return_dict else (value["latents"],)
        distribution = DiagonalGaussianDistribution(value["parameters"], deterministic=value["deterministic"])
        return AutoencoderKLOutput(latent_dist=distribution) if return_dict else (distribution,)

    return encode
