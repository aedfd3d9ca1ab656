"""The compute loop: runs one request after another on the main thread, and reports each exactly once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from diffcluster.errors import CancelledError, FailureCode, RequestError
from diffcluster.messages import FileInfo, GenerationParameters, Progress
from diffcluster.roles.jobs import Computed, ComputeEnded, ComputeFailed, Key
from diffcluster.roles.stage import Output as StageOutput
from diffcluster.roles.stage import Stage, Task
from diffcluster.roles.staging import Output, Stager
from diffcluster.transport.mailbox import Mailbox

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from diffcluster.roles.device import Device

__all__ = ["ComputeLoop", "ComputeResult", "Work"]

_log = logging.getLogger(__name__)


class Work(Struct):
    """One computation. `target` is where its output goes, None at a last stage."""

    key: Key
    parameters: GenerationParameters
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, float | int | str]
    target: npt.NDArray[np.uint8] | None
    cancelled: threading.Event


class ComputeResult(Struct, frozen=True):
    """How a computation ended, with the files it made."""

    event: Computed | ComputeFailed
    files: tuple[bytes, ...] = ()


class ComputeLoop:
    """Owns the stage and its device. `report` must be a mailbox's post."""

    def __init__(
        self,
        stage: Stage,
        device: Device,
        stager: Stager,
        report: Callable[[ComputeResult | ComputeEnded | Progress], Any],
    ) -> None:
        self._stage, self._device, self._stager, self._report = stage, device, stager, report
        self._inbox: Mailbox[Work | None] = Mailbox()

    def submit(self, work: Work | None) -> None:
        """Compute `work` next; None ends the loop. For any thread."""
        if not self._inbox.post(work) and work is not None:
            self._report(ComputeResult(ComputeFailed(work.key, "worker_error", "too much work is waiting")))

    def run(self) -> None:
        """Compute until told to end."""
        with torch.inference_mode():
            while True:
                for work in self._inbox.take():
                    if work is None:
                        return
                    self._compute(work)

    def close(self) -> None:
        """Give the inbox back, after `run`."""
        self._inbox.close()

    def _compute(self, work: Work) -> None:
        started = time.monotonic()
        try:
            output = self._stage.run(Task(work.parameters, work.tensors, work.scalars, self._progress(work)))
            made = self._device.mark()  # what went wrong on the device may only show here
        except BaseException as error:  # noqa: BLE001 - whatever a model raises ends its request, never the role
            code = _code(error)
            if code not in ("cancelled", "invalid_value"):
                _log.exception("request %s failed", work.key[0])
            self._report(ComputeResult(ComputeFailed(work.key, code, _reason(error))))
            return
        self._hand_on(work, output, made, time.monotonic() - started)

    def _hand_on(self, work: Work, output: StageOutput, made: torch.Event | None, seconds: float) -> None:
        """Files to the control thread; tensors to the staging thread, and go on with the next request."""
        if work.target is None:
            infos = tuple(FileInfo(media_type, len(content)) for media_type, content in output.files)
            event = Computed(work.key, seconds, None, output.scalars, infos)
            self._report(ComputeResult(event, tuple(content for _, content in output.files)))
            return
        self._report(ComputeEnded(work.key))
        self._stager.stage(Output(work.key, output.tensors, output.scalars, work.target, made, seconds))

    def _progress(self, work: Work) -> Callable[[int, int], None]:
        request_id, attempt = work.key

        def report(step: int, steps: int) -> None:
            if work.cancelled.is_set():
                raise CancelledError("cancelled between two steps")
            self._report(Progress(request_id=request_id, attempt=attempt, step=step, steps=steps))

        return report


def _code(error: BaseException) -> FailureCode:
    if isinstance(error, RequestError):
        return error.code
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out_of_memory"
    return "worker_error"


def _reason(error: BaseException) -> str:
    text = str(error)[:1000]
    return text if isinstance(error, RequestError) else f"{type(error).__name__}: {text}"
