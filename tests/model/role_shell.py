"""A role without threads, sockets or memory: notes what the machine wants done, and completes it when told.

After each step it checks what must always hold. `outcomes` counts how each request ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from diffcluster.errors import FailureCode
from diffcluster.ids import HostId, InstanceName, LeaseId, RequestId
from diffcluster.messages import (
    Allocate,
    AllocationRefused,
    Cancel,
    Cancelled,
    Done,
    Evict,
    Evicted,
    Failed,
    FileInfo,
    Peer,
    Push,
    Pushed,
    PushFailed,
    Ready,
    Release,
    Submit,
    Ungrant,
)  # fmt: skip
from diffcluster.roles import jobs
from diffcluster.roles.jobs import Key
from diffcluster.roles.machine import RoleMachine
from diffcluster.transport.slots import GRANULE, Ledger
from tests.support import TOKEN, incarnation, manifest, parameters, slot

QUARANTINE_S = 10.0
ENDS = (Done, Failed, AllocationRefused, Evicted)


class RoleShell:
    """`fences` is what the engine answers when a window is closed."""

    def __init__(self, receive: int = 8, send: int = 8, grants: int = 0, *, overlap: bool = True) -> None:
        self.machine = RoleMachine(
            receive * GRANULE, send * GRANULE, QUARANTINE_S, lambda wanted: wanted.seed * GRANULE, lambda: TOKEN,
            grants, overlap=overlap,
        )  # fmt: skip
        self.now = 0.0
        self.fences = True
        self.sent: list[Any] = []
        self.loads: list[jobs.StartLoad] = []
        self.computes: list[jobs.StartCompute] = []
        self.packs: list[jobs.StartCompute] = []
        self.pushes: list[jobs.StartPush] = []
        self.cancelled: set[Key] = set()
        self.tensors: set[Key] = set()
        self.windows: set[LeaseId] = set()
        self.outcomes: defaultdict[Key, Counter[str]] = defaultdict(Counter)
        self.read_later: dict[LeaseId, float] = {}
        """Send leases that an engine may still read, and until when."""
        self.written_later: dict[LeaseId, float] = {}
        """Receive leases that a peer may still write, and until when."""

    # ------------------------------------------------------------ the machine

    def step(self, event: Any) -> list[Any]:
        """Give `event` to the machine and perform what it wants; the messages that it sent."""
        before = len(self.sent)
        self._perform(self.machine.step(event, self.now))
        self.check()
        return self.sent[before:]

    def _perform(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case jobs.Send():
                    self._note(action.message)
                case jobs.OpenWindow():
                    assert action.slot.lease not in self.windows
                    self.windows.add(action.slot.lease)
                case jobs.CloseWindow():
                    self.windows.remove(action.slot.lease)
                    fenced = self.fences or action.settled
                    if not fenced:
                        self.written_later[action.slot.lease] = self.now + QUARANTINE_S
                    closed = jobs.WindowClosed(action.key, action.slot.lease, fenced)
                    self._perform(self.machine.step(closed, self.now))
                case jobs.SealWindow():
                    self.windows.remove(action.slot.lease)
                case jobs.StartLoad():
                    self.loads.append(action)
                case jobs.StartCompute():
                    self.tensors.discard(action.key)
                    self.computes.append(action)
                case jobs.CancelCompute():
                    assert action.key == self.computes[0].key
                    self.cancelled.add(action.key)
                case jobs.StartPush():
                    self.pushes.append(action)
                case jobs.Forget():
                    self.tensors.discard(action.key)

    def _note(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, (*ENDS, Cancelled)):
            self.outcomes[message.request_id, message.attempt][type(message).__name__] += 1

    # ------------------------------------------------------------ messages of the router

    def submit(self, name: str, output: int = 1) -> list[Any]:
        """Compute something whose output takes `output` granules; 0 means files."""
        wanted = parameters(seed=output)
        return self.step(Submit(request_id=RequestId(name), attempt=1, parameters=wanted))

    def allocate(self, name: str, granules: int = 1) -> list[Any]:
        return self.step(Allocate(request_id=RequestId(name), attempt=1, nbytes=granules * GRANULE))

    def ready(self, name: str, output: int = 1, nbytes: int = GRANULE, lease: int | None = None) -> list[Any]:
        job = self.machine.jobs.get((RequestId(name), 1))
        own = job.slot.lease if job is not None and job.slot is not None else LeaseId(0)
        message = Ready(
            request_id=RequestId(name), attempt=1, lease=own if lease is None else LeaseId(lease),
            manifest=manifest(nbytes), scalars={}, parameters=parameters(seed=output),
        )  # fmt: skip
        return self.step(message)

    def push(self, name: str, lease: int = 1) -> list[Any]:
        message = Push(
            request_id=RequestId(name), attempt=1, peer=Peer(InstanceName("peer"), incarnation(9), HostId("h"), ()),
            slot=slot(lease),
        )  # fmt: skip
        return self.step(message)

    def release(self, name: str) -> list[Any]:
        key = (RequestId(name), 1)
        job = self.machine.jobs.get(key)
        if job is not None and job.phase == "staged" and not job.gone:
            self.outcomes[key]["Released"] += 1
        return self.step(Release(request_id=key[0], attempt=1))

    def cancel(self, name: str) -> list[Any]:
        return self.step(Cancel(request_id=RequestId(name), attempt=1))

    def evict(self, name: str, lease: int, *, settled: bool) -> list[Any]:
        if settled:
            self.written_later.pop(LeaseId(lease), None)
        return self.step(Evict(request_id=RequestId(name), attempt=1, lease=LeaseId(lease), settled=settled))

    def ungrant(self, *leases: int) -> list[Any]:
        return self.step(Ungrant(leases=tuple(map(LeaseId, leases))))

    def joined(self) -> list[Any]:
        return self.step(jobs.Joined())

    def reset(self) -> list[Any]:
        """The router knows of nothing any more; what is said all the same."""
        before = len(self.sent)
        actions = self.machine.reset(self.now)
        assert not any(isinstance(action, jobs.Send) for action in actions)
        self._perform(actions)
        self.check()
        return self.sent[before:]

    def after(self, seconds: float, writers: dict[int, bool] | None = None) -> list[Any]:
        """Let time pass. `writers`: what engines know of those who may still write."""
        self.now += seconds
        for later in (self.read_later, self.written_later):
            for lease in [lease for lease, until in later.items() if until <= self.now]:
                del later[lease]
        for lease, writes in (writers or {}).items():
            if writes:
                self.written_later[LeaseId(lease)] = self.now + QUARANTINE_S
            else:
                self.written_later.pop(LeaseId(lease), None)
        return self.step(jobs.Tick({LeaseId(lease): writes for lease, writes in (writers or {}).items()}))

    # ------------------------------------------------------------ the threads finish something

    def loaded(self, index: int = 0) -> list[Any]:
        ready = self.loads.pop(index).ready
        key = (ready.request_id, ready.attempt)
        self.tensors.add(key)
        return self.step(jobs.Loaded(key, 0.0))

    def load_failed(self, code: FailureCode = "worker_error") -> list[Any]:
        ready = self.loads.pop().ready
        return self.step(jobs.LoadFailed((ready.request_id, ready.attempt), code, "no"))

    def compute_ended(self) -> list[Any]:
        """The output is still to be written to its lease, by another thread."""
        self.packs.append(self.computes.pop())
        return self.step(jobs.ComputeEnded(self.packs[-1].key))

    def packed(self) -> list[Any]:
        return self._computed(self.packs.pop(0))

    def computed(self) -> list[Any]:
        return self._computed(self.computes.pop())

    def _computed(self, work: jobs.StartCompute) -> list[Any]:
        if work.output is None:
            event = jobs.Computed(work.key, 0.0, None, {}, (FileInfo("image/png", 1),))
        else:
            event = jobs.Computed(work.key, 0.0, manifest(work.output[1]), {}, ())
        return self.step(event)

    def compute_failed(self) -> list[Any]:
        return self.step(jobs.ComputeFailed(self.computes.pop().key, "nan_output", "NaN"))

    def pushed(self, index: int = 0) -> list[Any]:
        push = self.pushes.pop(index).push
        answer = Pushed(
            request_id=push.request_id, attempt=push.attempt, receiver=push.peer.incarnation, lease=push.slot.lease,
            engine="tcp", nbytes=1, seconds=0.0,
        )  # fmt: skip
        return self.step(jobs.PushEnded(push, answer, False))

    def push_failed(self, index: int = 0, *, settled: bool) -> list[Any]:
        push = self.pushes.pop(index).push
        if not settled:
            output = self.machine.jobs[push.request_id, push.attempt].output
            assert output is not None
            self.read_later[output] = self.now + QUARANTINE_S
        answer = PushFailed(
            request_id=push.request_id, attempt=push.attempt, receiver=push.peer.incarnation, lease=push.slot.lease,
            settled=settled, reason="no",
        )  # fmt: skip
        return self.step(jobs.PushEnded(push, answer, not settled))

    # ------------------------------------------------------------ what must always hold

    def check(self) -> None:
        """All invariants."""
        machine = self.machine
        slots = {job.slot.lease for job in machine.jobs.values() if job.slot is not None}
        outputs = {job.output for job in machine.jobs.values() if job.output is not None}
        assert not slots & set(machine.grants), "a grant is a job's slot"
        self._check_ledger(machine.receive, slots | set(machine.grants), "receive")
        self._check_ledger(machine.send, outputs, "send")
        self._check_threads()
        self._check_idle()
        leased = {job.slot.lease for job in machine.jobs.values() if job.phase == "leased" and job.slot is not None}
        problem = "peers may write into a slot exactly while it is leased or granted"
        assert self.windows == leased | set(machine.grants), problem
        for job in machine.jobs.values():
            assert (job.slot is not None) == (job.phase in ("leased", "ready", "loading")), "a slot is free once loaded"
        for key, counts in self.outcomes.items():
            # A refusal ends nothing: the same attempt may come again, in a slot that was granted when there was room.
            ends = sum(counts.values()) - counts["Cancelled"] - counts["AllocationRefused"]
            assert ends <= 1, f"{key} ended as {counts}"

    def _check_ledger(self, ledger: Ledger, held: set[LeaseId], region: str) -> None:
        """Bytes add up, and each lease is a job's or quarantined: nothing leaks."""
        assert sum(ledger.bytes_by_state().values()) == ledger.capacity
        quarantined = {lease for place, lease in self.machine.quarantine if place == region}
        assert not held & quarantined
        assert set(ledger._leases) == held | quarantined
        for lease in ledger._leases.values():
            assert (lease.state == "quarantined") == (lease.id in quarantined)

    def _check_threads(self) -> None:
        """What a thread works on is held, in the state that says so, and there is room for what it makes."""
        machine = self.machine
        assert len(self.loads) <= 1
        assert len(self.computes) <= 1
        assert len(self.tensors) <= 1
        for load in self.loads:
            held = machine.receive.get(load.slot.lease)
            assert held is not None
            assert held.state == "loading"
        for work in (*self.computes, *self.packs):
            output = machine.jobs[work.key].output
            lease = machine.send.get(output) if output is not None else None
            assert (lease is None) == (work.output is None) == (work.parameters.seed == 0)
            assert lease is None or (lease.state, lease.offset, lease.nbytes) == ("leased", *(work.output or ()))
        for push in self.pushes:
            output = machine.jobs[push.push.request_id, push.push.attempt].output
            lease = machine.send.get(output) if output is not None else None
            assert lease is not None
            assert (lease.state, lease.offset) == ("writing", push.offset)
            assert push.nbytes <= lease.nbytes
        for output in self.read_later:
            assert machine.send.get(output) is not None, "a slot that an engine may still read was freed"
        for lease_id in self.written_later:
            assert machine.receive.get(lease_id) is not None, "a slot that a peer may still write was freed"

    def _check_idle(self) -> None:
        """Whatever could start has started."""
        phases = Counter(job.phase for job in self.machine.jobs.values())
        assert phases["computing"] == len(self.computes)
        assert phases["packing"] == len(self.packs)
        assert phases["loading"] == len(self.loads)
        if not self.machine._overlap and (self.packs or self.loads or self.pushes):
            return
        if not self.computes:
            for job in self.machine.jobs.values():
                if job.phase == "loaded":
                    assert job.parameters is not None
                    assert self.machine.send.largest_free() < job.parameters.seed * GRANULE
        if phases["ready"] and not self.loads:
            assert self.tensors or (self.computes and not self.machine._overlap)

    # ------------------------------------------------------------ the end

    def _without_grants(self) -> list[Any]:
        """Void the grants alone, and make no new ones."""
        self.machine.actions = []
        self.machine.void_grants()
        return self.machine.actions

    def finish(self) -> None:
        """Complete all work, give everything back, and see that nothing is left."""
        self._perform(self._without_grants())
        for _ in range(1000):
            if not self.machine.jobs:
                break
            for name, job in [(key[0], job) for key, job in self.machine.jobs.items()]:
                if job.phase == "leased":
                    self.evict(name, job.slot.lease if job.slot else 0, settled=True)
                elif job.phase == "staged":
                    self.release(name)
            for complete, work in (
                (self.loaded, self.loads),
                (self.computed, self.computes),
                (self.packed, self.packs),
                (self.pushed, self.pushes),
            ):
                if work:
                    complete()
            self.after(QUARANTINE_S)  # what waits for room may wait for a quarantine to end
        self.after(QUARANTINE_S)
        assert not self.machine.jobs
        for ledger in (self.machine.receive, self.machine.send):
            assert ledger.largest_free() == ledger.capacity
        assert not self.machine.staged
        assert not self.tensors
        assert not self.windows
