"""What a role holds: its jobs, the leases of its two regions, what of them is quarantined. Under the role's machine."""

from __future__ import annotations

from diffcluster.errors import FailureCode
from diffcluster.ids import LeaseId
from diffcluster.messages import (
    Allocate,
    Cancel,
    Evict,
    Failed,
    Push,
    Ready,
    Release,
    RoleToRouter,
    SlotAddress,
    Submit,
)  # fmt: skip
from diffcluster.roles.jobs import Action, CloseWindow, Forget, Job, Key, Send
from diffcluster.tensors import Manifest
from diffcluster.transport.slots import Ledger

__all__ = ["Holdings"]


class Holdings:
    """`now` is the time of the event being handled, `actions` what it has led to so far."""

    def __init__(self, receive_bytes: int, send_bytes: int, quarantine_s: float) -> None:
        self.receive, self.send = Ledger(receive_bytes), Ledger(send_bytes)
        self.jobs: dict[Key, Job] = {}
        self.staged: dict[Key, Manifest] = {}
        self.grants: dict[LeaseId, SlotAddress] = {}
        """Slots that were leased ahead, and that no request is known to use."""
        self.quarantine: dict[tuple[str, LeaseId], float] = {}
        """When each quarantined lease of ("receive" | "send") may be freed at the latest."""
        self._quarantine_s = quarantine_s
        self.actions: list[Action] = []
        self.now = 0.0

    def job(self, event: Submit | Allocate | Ready | Push | Release | Evict | Cancel) -> Job | None:
        """The job that a message is about."""
        return self.jobs.get((event.request_id, event.attempt))

    def fail(self, job: Job, code: FailureCode, reason: str) -> None:
        """Give a job up, and tell the router why."""
        self.drop(job)
        self.say(Failed(request_id=job.key[0], attempt=job.key[1], code=code, reason=reason[:4096]))

    def drop(self, job: Job) -> None:
        """Forget a job that no thread uses, with all that it holds."""
        if job.slot is not None:
            self.free_slot(job)
        if job.output is not None and job.source_held:
            self.put_aside("send", job.output)
        elif job.output is not None:
            self.send.free(job.output)
        self.staged.pop(job.key, None)
        del self.jobs[job.key]
        self.do(Forget(job.key))

    def end_if_unused(self, job: Job) -> None:
        """Drop a job that nobody needs, unless it is still being pushed."""
        if job.gone and job.pushing == 0:
            self.drop(job)

    def free_slot(self, job: Job) -> None:
        """Give a job's receive slot back."""
        assert job.slot is not None
        self.receive.free(job.slot.lease)
        job.slot = None

    def close_window(self, job: Job, *, settled: bool) -> None:
        """The slot is no longer the job's; what becomes of it is decided when the engine has answered."""
        assert job.slot is not None
        self.do(CloseWindow(job.key, job.slot, settled))
        job.slot = None
        self.drop(job)

    def put_aside(self, region: str, lease: LeaseId) -> None:
        """Quarantine a lease of the "receive" or the "send" region."""
        (self.receive if region == "receive" else self.send).move(lease, "quarantined")
        self.quarantine[(region, lease)] = self.now + self._quarantine_s

    def review_quarantine(self, writers: dict[LeaseId, bool]) -> None:
        """Free what nobody can touch any more; `writers` as in `Tick`. An engine that knows better overrules the time:
        a peer that was stopped in the middle of a write goes on with it however much later.
        """
        for (region, lease), until in list(self.quarantine.items()):
            known = writers.get(lease) if region == "receive" else None
            if known is False or (known is None and until <= self.now):
                self.take_back(region, lease)

    def take_back(self, region: str, lease: LeaseId) -> None:
        """Free a lease that was quarantined."""
        (self.receive if region == "receive" else self.send).free(lease)
        del self.quarantine[(region, lease)]

    def say(self, message: RoleToRouter) -> None:
        """Tell the router."""
        self.do(Send(message))

    def do(self, action: Action) -> None:
        """Want something done."""
        self.actions.append(action)
