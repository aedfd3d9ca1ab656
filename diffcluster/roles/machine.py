"""What a role does next: the life of each request in it, as a pure state machine.

    receiver:  Allocate -> LEASED -Ready-> READY -> LOADING -> LOADED -> COMPUTING -> ...
    granted:   ... --------------- Ready-> READY -> ...
    first:     Submit ---------------------------------------> LOADED -> COMPUTING -> ...
    then:      ... -> PACKING -> STAGED (-Push-> a transfer, -> STAGED) -Release-> gone
    last:      ... -> Done, gone

`step(event, now)` takes a message of the router or a report of a worker thread, and returns what to do. So many
requests compute side by side; the next one is loaded meanwhile; transfers run beside both. Three rules are never
broken:
a request is computed only when the bytes of its output are already reserved; a receive slot is free as soon as its
tensors are on the device; a slot that someone may still write or read is quarantined, not freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from diffcluster.errors import ManifestError
from diffcluster.messages import (
    Allocate,
    Allocated,
    AllocationRefused,
    Cancel,
    Cancelled,
    Done,
    Evict,
    Evicted,
    GenerationParameters,
    Push,
    PushFailed,
    Ready,
    Release,
    RoleHeartbeat,
    Staged,
    StageTimings,
    Submit,
    Ungrant,
)  # fmt: skip
from diffcluster.roles.jobs import (
    Action,
    CancelCompute,
    CloseWindow,
    Computed,
    ComputeEnded,
    ComputeFailed,
    Event,
    Forget,
    Job,
    Joined,
    Loaded,
    LoadFailed,
    PushEnded,
    SealWindow,
    Send,
    StartPush,
    Tick,
    WindowClosed,
)  # fmt: skip
from diffcluster.roles.starting import Starting
from diffcluster.tensors import check

__all__ = ["RoleMachine"]


class RoleMachine(Starting):
    """All requests of one role. `output_bytes` is the stage's bound; `new_token` draws a slot's capability.

    `concurrency`: how many may compute at one time. Without `overlap`, load, compute and push come one after another:
    to see what it is worth.
    """

    def __init__(
        self,
        receive_bytes: int,
        send_bytes: int,
        quarantine_s: float,
        output_bytes: Callable[[GenerationParameters], int],
        new_token: Callable[[], str],
        grants: int = 0,
        *,
        overlap: bool = True,
        concurrency: int = 1,
    ) -> None:
        super().__init__(receive_bytes, send_bytes, quarantine_s, output_bytes, new_token, grants, overlap, concurrency)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Submit: self._on_submit, Allocate: self._on_allocate, Ready: self._on_ready, Push: self._on_push,
            Release: self._on_release, Evict: self._on_evict, Cancel: self._on_cancel,
            Loaded: self._on_loaded, LoadFailed: self._on_load_failed, ComputeEnded: self._on_compute_ended,
            Computed: self._on_computed, ComputeFailed: self._on_compute_failed, PushEnded: self._on_push_ended,
            WindowClosed: self._on_window_closed, Tick: self._on_tick, Ungrant: self.on_ungrant, Joined: self.on_joined,
        }  # fmt: skip

    # ------------------------------------------------------------ the interface

    def step(self, event: Event, now: float) -> list[Action]:
        """Take `event` at time `now` (seconds, monotonic); what is stale changes nothing."""
        self.now, self.actions = now, []
        self._handlers[type(event)](event)
        self._advance()
        return self.actions

    def reset(self, now: float) -> list[Action]:
        """The router knows nothing of us any more: give up every request, and say nothing of it, now or later."""
        self.now, self.actions = now, []
        for request_id, attempt in list(self.jobs):
            self._on_cancel(Cancel(request_id=request_id, attempt=attempt))
        self.void_grants()
        self._advance()
        unsaid = [action for action in self.actions if not isinstance(action, Send)]
        return [replace(action, key=None) if isinstance(action, CloseWindow) else action for action in unsaid]

    def heartbeat(self, resident_bytes: int) -> RoleHeartbeat:
        """How this role is doing."""
        receive = self.receive.bytes_by_state()
        phases = [job.phase for job in self.jobs.values()]
        return RoleHeartbeat(
            queued=sum(phase in ("ready", "loading", "loaded") for phase in phases),
            running=phases.count("computing"),
            receive_free=receive["free"],
            receive_quarantined=receive["quarantined"],
            send_free=self.send.bytes_by_state()["free"],
            resident_bytes=resident_bytes,
            receive_largest=self.receive.largest_free(),
            granted=len(self.grants),
        )

    # ------------------------------------------------------------ messages of the router

    def _on_submit(self, event: Submit) -> None:
        key = (event.request_id, event.attempt)
        if key not in self.jobs:
            self.jobs[key] = Job(key, "loaded", self.now, parameters=event.parameters)

    def _on_allocate(self, event: Allocate) -> None:
        key = (event.request_id, event.attempt)
        if key in self.jobs:
            return
        if not self.receive.fits(event.nbytes):
            reason = f"{event.nbytes} bytes are more than the receive region's {self.receive.capacity}"
            self.say(AllocationRefused(request_id=key[0], attempt=key[1], permanent=True, reason=reason))
            return
        slot = self.open_slot(event.nbytes)
        self.note_size(event.nbytes, refused=slot is None)
        if slot is None:
            self.say(AllocationRefused(request_id=key[0], attempt=key[1], permanent=False, reason="no free slot"))
            return
        self.jobs[key] = Job(key, "leased", self.now, slot=slot)
        self.say(Allocated(request_id=key[0], attempt=key[1], slot=slot))

    def _on_ready(self, event: Ready) -> None:
        job = self.job(event) or self.claim(event)
        if job is None or job.phase != "leased" or job.slot is None or job.slot.lease != event.lease:
            return
        self.do(SealWindow(job.slot))
        try:
            check(event.manifest, job.slot.nbytes)
        except ManifestError as error:
            self.fail(job, "transfer_failed", str(error))
            return
        self.receive.move(event.lease, "full")
        job.phase, job.ready, job.parameters, job.since = "ready", event, event.parameters, self.now

    def _on_push(self, event: Push) -> None:
        job = self.job(event)
        manifest = self.staged.get((event.request_id, event.attempt))
        if job is None or job.phase != "staged" or manifest is None or job.output is None or job.gone:
            failed = PushFailed(
                request_id=event.request_id,
                attempt=event.attempt,
                receiver=event.peer.incarnation,
                lease=event.slot.lease,
                settled=True,
                reason="nothing is staged for this request",
            )
            self.say(failed)
            return
        if job.pushing == 0:
            self.send.move(job.output, "writing")
        job.pushing += 1
        lease = self.send.get(job.output)
        assert lease is not None, "a staged job holds its output"
        self.do(StartPush(event, lease.offset, manifest.nbytes))

    def _on_release(self, event: Release) -> None:
        job = self.job(event)
        if job is not None and job.phase == "staged":
            job.gone = True
            self.end_if_unused(job)

    def _on_evict(self, event: Evict) -> None:
        lease = self.receive.get(event.lease)
        if lease is None:
            return
        if lease.state == "quarantined":
            if event.settled:
                self.take_back("receive", event.lease)
            return
        if self.evict_grant(event):
            return
        job = self.job(event)
        if job is not None and job.phase == "leased" and job.slot is not None and job.slot.lease == event.lease:
            self.close_window(job, settled=event.settled)

    def _on_cancel(self, event: Cancel) -> None:
        job = self.job(event)
        if job is None:
            self.say(Cancelled(request_id=event.request_id, attempt=event.attempt))
        elif job.phase == "leased":
            self.close_window(job, settled=False)
            self.say(Cancelled(request_id=event.request_id, attempt=event.attempt))
        elif job.phase == "computing":
            job.gone = True
            self.do(CancelCompute(job.key))
        elif job.phase in ("loading", "packing"):
            job.gone = True
        elif job.phase == "staged":
            job.gone = True
            self.say(Cancelled(request_id=event.request_id, attempt=event.attempt))
            self.end_if_unused(job)
        else:
            self.drop(job)
            self.say(Cancelled(request_id=event.request_id, attempt=event.attempt))

    # ------------------------------------------------------------ reports of the threads

    def _on_loaded(self, event: Loaded) -> None:
        job = self.jobs[event.key]
        self.free_slot(job)
        job.phase, job.loaded_s = "loaded", event.seconds
        if job.gone:
            self.drop(job)
            self.say(Cancelled(request_id=job.key[0], attempt=job.key[1]))

    def _on_load_failed(self, event: LoadFailed) -> None:
        job = self.jobs[event.key]
        if job.gone:
            self.drop(job)
            self.say(Cancelled(request_id=job.key[0], attempt=job.key[1]))
        else:
            self.fail(job, event.code, event.reason)

    def _on_compute_ended(self, event: ComputeEnded) -> None:
        self.jobs[event.key].phase = "packing"

    def _on_computed(self, event: Computed) -> None:
        job = self.jobs[event.key]
        request_id, attempt = job.key
        timings = StageTimings(job.queued_s, job.loaded_s, event.seconds)
        if job.gone:
            self.drop(job)
            self.say(Cancelled(request_id=request_id, attempt=attempt))
        elif event.manifest is not None and job.output is not None:
            self.send.move(job.output, "full")
            self.staged[job.key] = event.manifest
            job.phase = "staged"
            self.do(Forget(job.key))
            staged = Staged(
                request_id=request_id, attempt=attempt, manifest=event.manifest, scalars=event.scalars, timings=timings,
                checksum=event.checksum,
            )  # fmt: skip
            self.say(staged)
        else:
            self.drop(job)
            self.say(Done(request_id=request_id, attempt=attempt, files=event.files, timings=timings))

    def _on_compute_failed(self, event: ComputeFailed) -> None:
        job = self.jobs[event.key]
        if job.gone:
            self.drop(job)
            self.say(Cancelled(request_id=job.key[0], attempt=job.key[1]))
        else:
            self.fail(job, event.code, event.reason)

    def _on_push_ended(self, event: PushEnded) -> None:
        job = self.jobs[(event.push.request_id, event.push.attempt)]
        job.pushing -= 1
        # An engine that has not let go may still read these bytes: they are not reused when the job ends.
        job.source_held = job.source_held or event.source_held
        if job.pushing == 0 and job.output is not None:
            self.send.move(job.output, "full")
        self.say(event.answer)
        self.end_if_unused(job)

    def _on_window_closed(self, event: WindowClosed) -> None:
        if event.fenced:
            self.receive.free(event.lease)
        else:
            self.put_aside("receive", event.lease)
        if event.key is not None:
            request_id, attempt = event.key
            evicted = Evicted(request_id=request_id, attempt=attempt, lease=event.lease, quarantined=not event.fenced)
            self.say(evicted)

    def _on_tick(self, event: Tick) -> None:
        self.review_quarantine(event.writers)
