"""Devices: the CPU here, an accelerator where there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diffcluster.errors import ConfigError
from diffcluster.roles.device import AcceleratorDevice, CpuDevice, Device, compute_threads, open_device
from diffcluster.transport.checksum import checksum_of
from diffcluster.transport.device_arena import DeviceArena
from diffcluster.transport.engines import open_receiver
from diffcluster.transport.engines.base import EngineOptions
from diffcluster.transport.packing import manifest_of, pack, unpack


def round_trip(device: Device) -> None:
    """Pack from the device into a pinned region, and unpack from it, each on the copy stream."""
    region = np.zeros(1 << 20, np.uint8)
    device.pin(region)
    try:
        sent = {
            "a": torch.randn(100, 7, device=device.torch_device).T,
            "b": torch.arange(5, device=device.torch_device),
        }
        manifest = manifest_of(sent)
        with device.copying(device.mark()):
            pack(sent, manifest, region)
            device.finish()
        with device.copying():
            got = unpack(manifest, region, device.torch_device)
            device.finish()
        device.hand_over(got.values())
        assert all(torch.equal(got[name], sent[name]) for name in sent)
    finally:
        device.unpin(region)


def test_the_cpu_device() -> None:
    device = open_device("cpu")
    assert isinstance(device, CpuDevice)
    round_trip(device)


@pytest.mark.gpu
def test_the_accelerator_device() -> None:
    device = open_device("auto")
    assert isinstance(device, AcceleratorDevice)
    round_trip(device)


@pytest.mark.gpu
def test_copies_wait_for_what_compute_has_queued() -> None:
    device = open_device("auto")
    region = np.zeros(64 << 20, np.uint8)
    device.pin(region)
    try:
        for value in range(20):
            big = torch.full((4096, 4096), float(value), device=device.torch_device)
            sent = {"x": (big @ torch.eye(4096, device=device.torch_device))[:1024]}
            manifest = manifest_of(sent)
            with device.copying(device.mark()):
                pack(sent, manifest, region)
                device.finish()
            assert bool((region[: manifest.nbytes].view(np.float32) == value).all())
    finally:
        device.unpin(region)


@pytest.mark.gpu
def test_copies_do_not_wait_for_what_compute_queues_later() -> None:
    """A copy that waited for all of compute would end after it; so it is seen to end while compute still runs."""
    device = open_device("auto")
    region = np.zeros(1 << 20, np.uint8)
    device.pin(region)
    try:
        sent = {"x": torch.ones(1000, device=device.torch_device)}
        manifest = manifest_of(sent)
        matrix = torch.randn(8192, 8192, device=device.torch_device)
        made = device.mark()
        for _ in range(50):
            matrix = torch.tanh(matrix @ matrix)
        later = device.mark()
        with device.copying(made):
            pack(sent, manifest, region)
            device.finish()
        assert later is not None
        assert not later.query()
    finally:
        torch.accelerator.synchronize()
        device.unpin(region)


@pytest.mark.gpu
def test_tensors_are_loaded_from_a_region_of_the_device() -> None:
    device = open_device("auto")
    arena = DeviceArena(device.allocate(1 << 20))
    sent = {"a": torch.randn(100, 7).T, "b": torch.arange(5)}
    manifest = manifest_of(sent)
    host = np.zeros(manifest.nbytes, np.uint8)
    pack(sent, manifest, host)
    arena.view(4096, manifest.nbytes).copy_(torch.from_numpy(host))
    source = arena.view(4096, manifest.nbytes)
    assert checksum_of(source) == checksum_of(host)
    got = unpack(manifest, source, device.torch_device)
    assert all(torch.equal(got[name].cpu(), sent[name]) for name in sent)
    arena.close()


@pytest.mark.gpu
def test_a_region_of_the_device_is_registered_with_mooncake_or_that_is_an_error() -> None:
    """GPUDirect needs an RDMA adapter: without one the engine refuses, and nothing else is taken instead."""
    if not any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("there is no RDMA adapter here")
    arena = DeviceArena(open_device("auto").allocate(1 << 20))
    receiver = open_receiver("mooncake", arena, EngineOptions("127.0.0.1", "", 5.0))
    receiver.stop()
    arena.close()


def test_a_cpu_has_no_memory_of_its_own_to_receive_into() -> None:
    with pytest.raises(ConfigError, match=r"role\.receive_memory"):
        open_device("cpu").allocate(4096)


@pytest.mark.parametrize("name", ["nonsense", "cuda:999"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"role.device: {name!r}"):
        open_device(name)


def test_threads_come_from_the_setting_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert compute_threads(5) == 5
    assert compute_threads(0) == 3
