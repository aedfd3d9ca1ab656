"""A role process around a stage: starts its threads, computes until it is told to leave."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Final

import torch

from diffcluster.errors import ConfigError, ModelError
from diffcluster.ids import Incarnation, InstanceName, Role
from diffcluster.messages import PROTOCOL_VERSION, EngineKind, Register
from diffcluster.roles.batching import Policy
from diffcluster.roles.compute import ComputeLoop
from diffcluster.roles.control import Control
from diffcluster.roles.device import Device, open_device
from diffcluster.roles.exactness import is_demanded
from diffcluster.roles.machine import RoleMachine
from diffcluster.roles.rules import Leave, new_token
from diffcluster.roles.staging import Stager
from diffcluster.transport.arena import Arena
from diffcluster.transport.device_arena import DeviceArena
from diffcluster.transport.engines import open_receiver
from diffcluster.transport.engines.base import EngineOptions, Receiver
from diffcluster.transport.host import host_id
from diffcluster.transport.packing import Memory, unpack
from diffcluster.transport.prefetch import Prefetcher
from diffcluster.transport.push import Pusher

if TYPE_CHECKING:
    from diffcluster.config import RoleConfig
    from diffcluster.roles.stage import Stage
    from diffcluster.tensors import Manifest

__all__ = ["serve"]

ReceiveArena = Arena | DeviceArena
_log = logging.getLogger(__name__)
_RECEIVES: Final[frozenset[Role]] = frozenset({"denoiser", "decoder"})
_SENDS: Final[frozenset[Role]] = frozenset({"encoder", "denoiser"})
_ENGINES: Final[dict[str, tuple[EngineKind, ...]]] = {
    "auto": ("shm", "tcp"),
    "shm": ("shm",),
    "tcp": ("tcp",),
    "mooncake": ("mooncake",),
}


def serve(role: Role, config: RoleConfig, stage: Stage, device: Device, dtype: torch.dtype) -> int:
    """Serve `stage` as `role` until asked to leave; the exit status. Of the main thread, which computes."""
    if config.quarantine_s <= config.transfer_timeout_s:
        problem = f"must be more than role.transfer_timeout_s, which is {config.transfer_timeout_s}"
        raise ConfigError("role.quarantine_s", f"{problem}, got {config.quarantine_s}")
    receive = _receive_arena(config, device) if role in _RECEIVES else None
    send = Arena(config.send_bytes, shared=False) if role in _SENDS else None
    arenas = [arena for arena in (receive, send) if arena is not None]
    pinned = [arena.array for arena in arenas if isinstance(arena, Arena)]
    receivers: list[Receiver] = []
    try:
        for region in pinned:
            device.pin(region)
        receivers += _open_receivers(config, receive)
        register = _register(role, config, stage, device, dtype, receivers, receive)
        return _run_threads(config, register, stage, device, receive, send, receivers)
    finally:
        for receiver in receivers:
            receiver.stop()
        for region in pinned:
            device.unpin(region)
        for arena in arenas:
            arena.close()


def _run_threads(
    config: RoleConfig,
    register: Register,
    stage: Stage,
    device: Device,
    receive: ReceiveArena | None,
    send: Arena | None,
    receivers: list[Receiver],
) -> int:
    control = Control(config, register, receive, send)
    stager = Stager(open_device(config.device), control.inbox.post, checksum=config.checksum)
    exact = is_demanded(config, device.torch_device)
    policy = Policy(config.max_batch_size, config.batch_delay_s, exact=exact)
    compute = ComputeLoop(stage, device, stager, control.inbox.post, policy)
    prefetcher = Prefetcher(_SlotLoader(config.device), control.inbox.post)
    pusher = Pusher(register.host, config.transfer_timeout_s, config.transfer_window, control.inbox.post)
    _warm_up(compute, config, device)
    control.attach(_machine(config, stage, receive, send), compute, prefetcher, pusher, receivers)
    thread = threading.Thread(target=control.run, name="control")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: control.inbox.post(Leave()))
    gc.freeze()  # what is loaded by now stays: looking through all of it again and again would hold up every thread
    prefetcher.start()
    stager.start()
    thread.start()
    try:
        compute.run()
    finally:
        thread.join()
        stager.stop()
        prefetcher.stop()
        pusher.stop()
        compute.close()
        control.inbox.close()
    if control.failure is not None:
        _log.error("%s", control.failure)
        return 1
    _log.info("%s has left", register.name)
    return 0


def _warm_up(compute: ComputeLoop, config: RoleConfig, device: Device) -> None:
    """Before the role registers: what takes long the first time is not to be a user's time-out."""
    if config.warm_up == "off":
        return
    small = config.warm_up == "small" or (config.warm_up == "auto" and device.torch_device.type == "cpu")
    started = time.monotonic()
    try:
        compute.warm_up(small=small)
    except Exception as error:
        raise ModelError("", f"the first computation failed: {type(error).__name__}: {str(error)[:1000]}") from error
    _log.info("warmed up in %.2f s (%s)", time.monotonic() - started, "small" if small else "full size")


def _receive_arena(config: RoleConfig, device: Device) -> ReceiveArena:
    if config.receive_memory == "host":
        return Arena(config.receive_bytes, shared=True)
    if config.engine != "mooncake":
        raise ConfigError("role.receive_memory", f"`device` works with role.engine mooncake alone, not {config.engine}")
    return DeviceArena(device.allocate(config.receive_bytes))


def _machine(config: RoleConfig, stage: Stage, receive: ReceiveArena | None, send: Arena | None) -> RoleMachine:
    return RoleMachine(
        receive.nbytes if receive else 0,
        send.nbytes if send else 0,
        config.quarantine_s,
        stage.output_bytes,
        new_token,
        config.grants,
        overlap=config.overlap,
        concurrency=config.max_batch_size,
    )


def _open_receivers(config: RoleConfig, receive: ReceiveArena | None) -> list[Receiver]:
    if receive is None:
        return []
    if config.transfer_host in ("0.0.0.0", "::") and not config.advertise_host:  # noqa: S104 - refused, not bound
        raise ConfigError("role.advertise_host", f"must be set when role.transfer_host is {config.transfer_host}")
    options = EngineOptions(config.transfer_host, config.advertise_host, config.transfer_timeout_s)
    return [open_receiver(kind, receive, options) for kind in _ENGINES[config.engine]]


def _register(
    role: Role,
    config: RoleConfig,
    stage: Stage,
    device: Device,
    dtype: torch.dtype,
    receivers: list[Receiver],
    receive: ReceiveArena | None,
) -> Register:
    return Register(
        version=PROTOCOL_VERSION,
        role=role,
        name=InstanceName(config.name or f"{role}-{socket.gethostname().split('.')[0]}-{os.getpid()}"),
        incarnation=Incarnation(uuid.uuid4().hex),
        host=host_id(),
        model=stage.facts,
        components=stage.components,
        device=str(device.torch_device),
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        sessions=tuple(receiver.session() for receiver in receivers),
        slot_bytes=receive.nbytes if receive else 0,
        max_outstanding=config.max_outstanding,
    )


class _SlotLoader:
    """Copies a slot to the device on a stream of the prefetch thread's own."""

    def __init__(self, device_name: str) -> None:
        self._device = open_device(device_name)

    def __call__(self, manifest: Manifest, source: Memory) -> dict[str, torch.Tensor]:
        with torch.inference_mode(), self._device.copying():
            tensors = unpack(manifest, source, self._device.torch_device)
            self._device.finish()
        self._device.hand_over(tensors.values())
        return tensors
