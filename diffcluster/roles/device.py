"""All that depends on the kind of device: streams, events, pinned memory. One small interface, two implementations.

Copies between a region and the device run on a stream of their own, so that they overlap compute; an event says when
one has really happened. On a CPU a copy has happened when the call returns, and the same code runs with threads alone.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Protocol

import torch

from diffcluster.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["AcceleratorDevice", "CpuDevice", "Device", "open_device"]


class Device(Protocol):
    """Where a role computes. Each copying thread calls `copying` for its own stream."""

    torch_device: torch.device

    def pin(self, region: npt.NDArray[np.uint8]) -> None:
        """Page-lock `region`, so that copies to and from it can run beside compute."""

    def unpin(self, region: npt.NDArray[np.uint8]) -> None:
        """Undo `pin`."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Within it, copies go to a stream of the calling thread that first waits for what compute has queued."""

    def finish(self) -> None:
        """Wait, on the host, until the copies queued within `copying` have happened."""


class CpuDevice:
    """Compute and copies are synchronous; nothing needs pinning."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def pin(self, region: npt.NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def unpin(self, region: npt.NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Nothing to do."""


class AcceleratorDevice:
    """Any device of `torch.accelerator`. One copy stream for each instance of this class."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._stream = torch.Stream(device=device)
        self._compute = torch.accelerator.current_stream(device)

    def pin(self, region: npt.NDArray[np.uint8]) -> None:
        """Register the region with CUDA; other kinds of device copy from pageable memory."""
        if self.torch_device.type == "cuda" and region.nbytes:
            status = torch.cuda.cudart().cudaHostRegister(region.ctypes.data, region.nbytes, 0)  # type: ignore[no-untyped-call]
            if int(status) != 0:
                raise ConfigError("role.receive_bytes", f"cannot page-lock {region.nbytes} bytes: CUDA error {int(status)}")

    def unpin(self, region: npt.NDArray[np.uint8]) -> None:
        """Take the registration back."""
        if self.torch_device.type == "cuda" and region.nbytes:
            torch.cuda.cudart().cudaHostUnregister(region.ctypes.data)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def copying(self) -> Any:
        """Switch to the copy stream, behind what compute has queued."""
        self._stream.wait_stream(self._compute)
        with self._stream:
            yield

    def finish(self) -> None:
        """Wait for an event at the end of the copy stream, not for the whole device."""
        event = torch.Event(device=self.torch_device)
        event.record(self._stream)
        event.synchronize()


def open_device(name: str) -> Device:
    """The device called `name`; `auto` is the accelerator if there is one, else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = accelerator.type if accelerator else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises differs by build
        raise ConfigError("role.device", f"{name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return CpuDevice() if device.type == "cpu" else AcceleratorDevice(device)


def compute_threads(configured: int) -> int:
    """Threads to compute with: what was configured, else OMP_NUM_THREADS, else the cores this process may use."""
    if configured:
        return configured
    from_environment = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(from_environment) if from_environment.isdigit() else len(os.sched_getaffinity(0))
