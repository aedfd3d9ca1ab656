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
    """Decides what starts. `output_bytes` is the stage's bound; `concurrency`: how many may compute at one time;
    without `overlap`, one thing comes after another.
    """

    def __init__(
        self,
        receive_bytes: int,
        send_bytes: int,
        quarantine_s: float,
        output_bytes: Callable[[GenerationParameters], int],
        new_token: Callable[[], str],
        grants: int,
        overlap: bool,
        concurrency: int,
    ) -> None:
        super().__init__(receive_bytes, send_bytes, quarantine_s, grants, new_token)
        self._output_bytes, self._overlap, self._concurrency = output_bytes, overlap, concurrency

    def _advance(self) -> None:
        """Start computations and a load, if there is something to start and room for it."""
        # In this order: what begins to compute makes room on the device for what is loaded next.
        while self._start_next():
            continue
        if self._overlap or not self._others_busy(computing=True):
            self._advance_load()
        self.advance_grants()

    def _others_busy(self, *, computing: bool) -> bool:
        """Whether something is going on that, without overlap, has to end first."""
        phases = ("packing", "loading", "computing") if computing else ("packing", "loading")
        return any(job.phase in phases or job.pushing > 0 for job in self.jobs.values())

    def _start_next(self) -> bool:
        """Have the first request compute that may, the most urgent before the others; False if none can start."""
        if not self._overlap and self._others_busy(computing=False):
            return False
        loaded = [job for job in self.jobs.values() if job.phase == "loaded"]
        return any(self._may_compute(job) and self._start_compute(job) for job in sorted(loaded, key=_urgency))

    def _may_compute(self, job: Job) -> bool:
        """Only those that are as urgent take part in the count: what is more urgent pushes the others aside."""
        ahead = sum(other.phase == "computing" and _urgency(other) <= _urgency(job) for other in self.jobs.values())
        return ahead < self._concurrency

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


def _urgency(job: Job) -> int:
    """Less is more urgent."""
    return -job.parameters.priority if job.parameters is not None else 0
