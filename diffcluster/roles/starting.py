"""What a role does of itself: loads, computes and grants what can be, after each event. Under the role's machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diffcluster.messages import GenerationParameters
from diffcluster.roles.grants import Granting
from diffcluster.roles.jobs import Job, StartCompute, StartLoad

__all__ = ["Starting"]

_LOAD_AHEAD: Final = 1
"""Requests whose tensors may lie on the device while another one computes."""


class Starting(Granting):
    """Decides what starts. `output_bytes` is the stage's bound; without `overlap`, one thing comes after another."""

    def __init__(
        self,
        receive_bytes: int,
        send_bytes: int,
        quarantine_s: float,
        output_bytes: Callable[[GenerationParameters], int],
        new_token: Callable[[], str],
        grants: int,
        *,
        overlap: bool,
    ) -> None:
        super().__init__(receive_bytes, send_bytes, quarantine_s, grants, new_token)
        self._output_bytes, self._overlap = output_bytes, overlap

    def _advance(self) -> None:
        """Start a computation and a load, if there is one to start and room for it."""
        # In this order: what begins to compute makes room on the device for what is loaded next.
        if not self._is_busy():
            self._advance_compute()
        if self._overlap or not self._is_busy():
            self._advance_load()
        self.advance_grants()

    def _is_busy(self) -> bool:
        """Whether a computation has to wait for another one; without overlap, also for what else is going on."""
        others = () if self._overlap else ("packing", "loading")
        return any(
            job.phase == "computing" or job.phase in others or (job.pushing > 0 and not self._overlap)
            for job in self.jobs.values()
        )

    def _advance_compute(self) -> None:
        for job in [job for job in self.jobs.values() if job.phase == "loaded"]:
            if self._start_compute(job):
                return

    def _advance_load(self) -> None:
        waiting = next((job for job in self.jobs.values() if job.phase == "ready"), None)
        loading = any(job.phase == "loading" for job in self.jobs.values())
        ahead = sum(job.phase == "loaded" and job.ready is not None for job in self.jobs.values())
        if waiting is not None and not loading and ahead < _LOAD_AHEAD:
            self._start_load(waiting)

    def _start_load(self, job: Job) -> None:
        assert job.slot is not None
        assert job.ready is not None
        self.receive.move(job.slot.lease, "loading")
        job.phase = "loading"
        job.queued_s = self.now - job.since
        self.do(StartLoad(job.ready, job.slot))

    def _start_compute(self, job: Job) -> bool:
        """False if the output has no room now: then the request waits until a `Release`."""
        assert job.parameters is not None
        nbytes = self._output_bytes(job.parameters)
        span = None
        if nbytes:
            if not self.send.fits(nbytes):
                reason = f"the output needs {nbytes} bytes, the send region has {self.send.capacity}"
                self.fail(job, "out_of_memory", reason)
                return False
            lease = self.send.lease(nbytes)
            if lease is None:
                return False
            job.output, span = lease.id, (lease.offset, lease.nbytes)
        job.queued_s = max(0.0, self.now - job.since - job.loaded_s)  # two threads measured: the sum may be a hair off
        job.phase = "computing"
        self.do(StartCompute(job.key, job.parameters, job.ready, span))
        return True
