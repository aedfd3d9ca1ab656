"""The staging thread: writes a stage's output to its reserved bytes while the compute thread is at its next request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from diffcluster.roles.jobs import Computed, ComputeFailed, Key
from diffcluster.transport.checksum import checksum_of
from diffcluster.transport.mailbox import Mailbox
from diffcluster.transport.packing import manifest_of, pack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from diffcluster.roles.device import Device

__all__ = ["Output", "Stager"]

_log = logging.getLogger(__name__)


class Output(Struct, frozen=True):
    """What a request's stage made, and where it goes. `made`: the event behind which the tensors are complete."""

    key: Key
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, float | int | str]
    target: npt.NDArray[np.uint8]
    made: torch.Event | None
    seconds: float


class Stager:
    """Owns the copy stream outwards. Reports each output once, to `report`, which must be a mailbox's post.

    `checksum`: take one of each output, once it lies in its slot: whatever happens to it from there on is noticed.
    """

    def __init__(self, device: Device, report: Callable[[Computed | ComputeFailed], Any], *, checksum: bool) -> None:
        self._device, self._report, self._checksum = device, report, checksum
        self._inbox: Mailbox[Output | None] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="staging")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stage(self, output: Output) -> None:
        """Write `output` to its target."""
        if not self._inbox.post(output):
            self._report(ComputeFailed(output.key, "worker_error", "too much output is waiting"))

    def stop(self) -> None:
        """Finish what is waiting, and end the thread."""
        self._inbox.post(None)
        self._thread.join()
        self._inbox.close()

    def _run(self) -> None:
        with torch.inference_mode():
            while True:
                for output in self._inbox.take():
                    if output is None:
                        return
                    self._report(self._stage(output))

    def _stage(self, output: Output) -> Computed | ComputeFailed:
        try:
            manifest = manifest_of(output.tensors)
            with self._device.copying(output.made):
                pack(output.tensors, manifest, output.target)
                self._device.finish()
            checksum = checksum_of(output.target[: manifest.nbytes]) if self._checksum else None
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request and not the thread
            _log.exception("staging the output of %s failed", output.key[0])
            return ComputeFailed(output.key, "worker_error", f"{type(error).__name__}: {str(error)[:1000]}")
        return Computed(output.key, output.seconds, manifest, output.scalars, (), checksum)
