"""A receive region in the memory of an accelerator: peers write to it directly (GPUDirect), without the host's memory.

Only an engine whose hardware can reach that memory may be used with it: Mooncake by RDMA. `CONTROL_BYTES` for the
engine's own use lie in host memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from diffcluster.transport.arena import CONTROL_BYTES

__all__ = ["DeviceArena"]


class DeviceArena:
    """Slots in `memory`, which is uint8, contiguous, and of one accelerator."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory: torch.Tensor | None = memory
        self.nbytes = memory.nbytes
        self.address = memory.data_ptr()
        self.control: npt.NDArray[np.uint8] = np.zeros(CONTROL_BYTES, np.uint8)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes offset .. offset + nbytes of the slots; raises ValueError if they are not all inside."""
        if self._memory is None or offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} are outside an arena of {self.nbytes}")
        return self._memory[offset : offset + nbytes]

    def close(self) -> None:
        """Give the memory back, with the last view of it."""
        self._memory = None
