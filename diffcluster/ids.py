"""Names of things that travel between processes. Each is its own type, so that one is never passed for another."""

from __future__ import annotations

import re
from typing import Final, Literal, NewType, get_args

__all__ = [
    "NAME_PATTERN",
    "PIPELINE_ROUTE",
    "ROLES",
    "HostId",
    "Incarnation",
    "InstanceName",
    "LeaseId",
    "RequestId",
    "Role",
    "is_name",
]

RequestId = NewType("RequestId", str)
"""Chosen by the router for each picture asked for; unique for ever."""

InstanceName = NewType("InstanceName", str)
"""What a person calls a role process, such as `denoiser-1`. Survives a restart."""

Incarnation = NewType("Incarnation", str)
"""One life of an instance: 32 hex digits drawn when its process starts. Also its address on the control plane."""

HostId = NewType("HostId", str)
"""Equal for two processes exactly when they can reach each other by shared memory."""

LeaseId = NewType("LeaseId", int)
"""One holding of one slot. Never used twice by a process, so an old one names nothing."""

Role = Literal["encoder", "denoiser", "decoder", "monolithic"]
"""A kind of worker process, and the name of its pool."""

ROLES: Final[tuple[Role, ...]] = get_args(Role)

PIPELINE_ROUTE: Final[tuple[Role, ...]] = ("encoder", "denoiser", "decoder")
"""The pools that a request visits when no monolithic instance serves it."""

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


def is_name(text: str) -> bool:
    """Whether `text` may name an instance or a model."""
    return re.match(NAME_PATTERN, text) is not None
