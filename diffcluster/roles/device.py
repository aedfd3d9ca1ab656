"""All that depends on the kind of device: streams, events, pinned memory. One small interface, two implementations.

Copies between a region and the device run on a stream of their own, so that they overlap compute; an event says when
one has really happened. On a CPU a copy has happened when the call returns, and the same code runs with threads alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from diffcluster.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    import numpy.typing as npt

__all__ = ["AcceleratorDevice", "CpuDevice", "Device", "Stopwatch", "open_device"]


class Stopwatch(Protocol):
    """Started when it is made."""

    def stop(self) -> None:
        """What is queued from here on is not measured."""

    def seconds(self) -> float | None:
        """How long the device took; None as long as it is not done."""


class Device(Protocol):
    """Where a role computes. A thread that copies has an instance, and so a stream, of its own."""

    torch_device: torch.device

    def pin(self, region: npt.NDArray[np.uint8]) -> None:
        """Page-lock `region`, so that copies to and from it can run beside compute."""

    def unpin(self, region: npt.NDArray[np.uint8]) -> None:
        """Undo `pin`."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """`nbytes` of the device's memory, uint8. Raises `ConfigError` if it has none of its own."""

    def mark(self) -> torch.Event | None:
        """What compute has queued so far. For the thread that computes."""

    def stopwatch(self) -> Stopwatch:
        """Measures what compute queues from now on. For the thread that computes."""

    def free_unused(self) -> None:
        """Give memory that nothing uses back to the device, after an allocation has failed."""

    def copying(self, after: torch.Event | None = None) -> contextlib.AbstractContextManager[Any]:
        """Within it, copies go to this instance's stream, behind `after`, and not behind what compute queues later."""

    def finish(self) -> None:
        """Wait, on the host, until the copies queued within `copying` have happened."""

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors made within `copying` will be used by compute: their memory is not reused before it has done so."""


class CpuDevice:
    """Compute and copies are synchronous; nothing needs pinning."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def pin(self, region: npt.NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def unpin(self, region: npt.NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """There is no memory but the host's."""
        raise ConfigError(
            "role.receive_memory", f"`device` needs an accelerator, for its {nbytes} bytes; this is a CPU"
        )

    def mark(self) -> torch.Event | None:
        """Compute has happened when its call returns."""
        return None

    def stopwatch(self) -> Stopwatch:
        """The time of calls."""
        return _Clock()

    def free_unused(self) -> None:
        """Nothing to do."""

    def copying(self, after: torch.Event | None = None) -> contextlib.AbstractContextManager[Any]:
        """Nothing to do."""
        del after
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Nothing to do."""

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do."""


class AcceleratorDevice:
    """Any device of `torch.accelerator`. One copy stream for each instance of this class."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._stream = torch.Stream(device=device)
        self._compute = torch.accelerator.current_stream(device)

    def pin(self, region: npt.NDArray[np.uint8]) -> None:
        """Register the region with CUDA; other kinds of device copy from pageable memory."""
        if self.torch_device.type != "cuda" or not region.nbytes:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(region.ctypes.data, region.nbytes, 0))
        if status != 0:
            raise ConfigError("role.receive_bytes", f"cannot page-lock {region.nbytes} bytes: CUDA error {status}")

    def unpin(self, region: npt.NDArray[np.uint8]) -> None:
        """Take the registration back."""
        if self.torch_device.type == "cuda" and region.nbytes:
            torch.cuda.cudart().cudaHostUnregister(region.ctypes.data)  # type: ignore[no-untyped-call]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Taken once, and touched, so that it is there."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def mark(self) -> torch.Event | None:
        """An event at the end of the compute stream."""
        event = torch.Event(device=self.torch_device)
        event.record(self._compute)
        return event

    def stopwatch(self) -> Stopwatch:
        """Two events on the compute stream."""
        return _Events(self.torch_device, self._compute)

    def free_unused(self) -> None:
        """Empty the allocator's cache."""
        torch.accelerator.empty_cache()

    @contextlib.contextmanager
    def copying(self, after: torch.Event | None = None) -> Iterator[None]:
        """Switch to the copy stream, joined to compute by `after`."""
        if after is not None:
            self._stream.wait_event(after)
        with self._stream:
            yield

    def finish(self) -> None:
        """Wait for an event at the end of the copy stream, not for the whole device."""
        event = torch.Event(device=self.torch_device)
        event.record(self._stream)
        event.synchronize()

    def hand_over(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tell the allocator about the second stream."""
        for tensor in tensors:
            tensor.record_stream(self._compute)


class _Clock:
    """Of a device whose work is done when the call returns."""

    def __init__(self) -> None:
        self._started, self._seconds = time.perf_counter(), 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._started

    def seconds(self) -> float | None:
        return self._seconds


class _Events:
    """Of a device whose work is queued."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._stream = stream
        self._begin, self._end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        self._begin.record(stream)

    def stop(self) -> None:
        self._end.record(self._stream)

    def seconds(self) -> float | None:
        return self._begin.elapsed_time(self._end) / 1000 if self._end.query() else None


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
