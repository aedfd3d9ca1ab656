"""Engines: ways to put bytes into a peer's slot. Opened by name, so that each is imported only where it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from diffcluster.messages import EngineKind
    from diffcluster.transport.arena import Arena
    from diffcluster.transport.device_arena import DeviceArena
    from diffcluster.transport.engines.base import EngineOptions, Receiver, Sender

__all__ = ["open_receiver", "open_sender"]


def open_receiver(kind: EngineKind, arena: Arena | DeviceArena, options: EngineOptions) -> Receiver:
    """The receiving half of an engine: lets peers write into `arena`. Only Mooncake reaches a `DeviceArena`."""
    module = import_module(f"diffcluster.transport.engines.{kind}")
    return cast("Receiver", module.open_receiver(arena, options))


def open_sender(kind: EngineKind) -> Sender:
    """The sending half of an engine."""
    return cast("Sender", import_module(f"diffcluster.transport.engines.{kind}").open_sender())
