"""What tests of several modules share: valid examples of the structs that travel, and a way to break one guard."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from diffcluster.ids import HostId, Incarnation, InstanceName, LeaseId, RequestId, Role
from diffcluster.messages import (
    PROTOCOL_VERSION,
    GenerationParameters,
    ModelFacts,
    Register,
    Session,
    SlotAddress,
    StageTimings,
)
from diffcluster.tensors import Manifest, plan

TOKEN = "0" * 32
TIMINGS = StageTimings(0.0, 0.0, 0.0)
REQUEST = RequestId("r1")


def incarnation(number: int) -> Incarnation:
    """A well-formed incarnation; equal numbers give equal ones."""
    return Incarnation(f"{number:032x}")


def facts(**fields: Any) -> ModelFacts:
    """Facts of a model called `m`."""
    values: dict[str, Any] = {
        "id": "m", "revision": "", "pipeline": "P", "width": 64, "height": 64, "size_multiple": 8, "max_pixels": 4096,
        "num_inference_steps": 4, "max_inference_steps": 100, "guidance_scale": 1.0,
    }  # fmt: skip
    return ModelFacts(**{**values, **fields})


def parameters(**fields: Any) -> GenerationParameters:
    """One small picture of model `m`."""
    values: dict[str, Any] = {
        "model": "m", "prompt": "a", "width": 64, "height": 64, "num_inference_steps": 4, "guidance_scale": 1.0,
        "seed": 0,
    }  # fmt: skip
    return GenerationParameters(**{**values, **fields})


def register(role: Role = "encoder", number: int = 1, **fields: Any) -> Register:
    """What instance `number` says of itself; its name is the role and the number."""
    values: dict[str, Any] = {
        "version": PROTOCOL_VERSION, "role": role, "name": InstanceName(f"{role}-{number}"),
        "incarnation": incarnation(number), "host": HostId("host"), "model": facts(), "components": {}, "device": "cpu",
        "dtype": "float32", "threads": 1, "pid": 1, "sessions": (Session("tcp", "127.0.0.1:1"),), "slot_bytes": 65536,
        "max_outstanding": 4,
    }  # fmt: skip
    return Register(**{**values, **fields})


def slot(lease: int = 1, nbytes: int = 4096, offset: int = 0) -> SlotAddress:
    """A leased receive slot."""
    return SlotAddress(LeaseId(lease), offset, nbytes, TOKEN)


def manifest(nbytes: int = 4096) -> Manifest:
    """One tensor of `nbytes`, a multiple of the alignment."""
    return plan([("x", "uint8", (nbytes,))])


def mutant(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """`function` with one piece of its source replaced, to see whether the tests notice."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    scope: dict[str, Any] = {}
    code = compile(
        "from __future__ import annotations\n" + source.replace(old, new), f"<mutant of {function.__name__}>", "exec"
    )
    exec(code, function.__globals__ | {}, scope)
    made: Callable[..., Any] = scope[function.__name__]
    return made
