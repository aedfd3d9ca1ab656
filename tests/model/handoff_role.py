"""A role process in the world of handoffs: the real control thread's object and the real machine, without threads.

What its threads have to do lies in lists until the world lets them finish. Memory is a table of what lies in each
lease: which attempt at which request. Reading something else than what was to be read there is a violation.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

from diffcluster.ids import HostId, Incarnation, InstanceName, LeaseId, RequestId, Role
from diffcluster.messages import Peer, Push, Ready, SlotAddress
from diffcluster.roles.compute import ComputeResult, Work
from diffcluster.roles.control import Control
from diffcluster.roles.jobs import Computed, ComputeEnded, Key
from diffcluster.roles.machine import RoleMachine
from diffcluster.transport.prefetch import LoadResult
from diffcluster.transport.push import PushResult
from diffcluster.transport.slots import GRANULE, Ledger
from tests.model.world import ViolationError
from tests.support import TOKEN, manifest, register, slot

SENDER: Role = "encoder"
RECEIVER: Role = "decoder"
MANIFEST = manifest(GRANULE)
_QUARANTINE_S = 1e6
_CONFIG: Any = SimpleNamespace(drain_s=1.0, transfer_timeout_s=1.0, quarantine_s=100.0)
_REGION: Any = SimpleNamespace(view=lambda offset, nbytes: (offset, nbytes))
_PROCESS: Any = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=0))


def demand(condition: object, problem: str) -> None:
    if not condition:
        raise ViolationError(problem)


class Write(NamedTuple):
    """A transfer. asked, begun; ghost: reported as failed, and may land; again: reported as done, and is repeated."""

    sender: Incarnation
    request_id: RequestId
    attempt: int
    receiver: Incarnation
    lease: LeaseId
    offset: int
    source: LeaseId
    phase: str

    @property
    def key(self) -> Key:
        return (self.request_id, self.attempt)

    def end(self, region: str) -> tuple[Incarnation, LeaseId]:
        """The slot that it writes ("receive") or reads ("send")."""
        return (self.receiver, self.lease) if region == "receive" else (self.sender, self.source)

    def push(self) -> Push:
        """What it was asked for by."""
        peer = Peer(InstanceName("peer"), self.receiver, HostId("h"), ())
        to = slot(self.lease, GRANULE, self.offset)
        return Push(request_id=self.request_id, attempt=self.attempt, peer=peer, slot=to)


class Setup(NamedTuple):
    """How the roles of a world are. `fences`: a closed window keeps writes out, and the engine knows who writes; else
    neither, and what failed may still be read at its source. `packs`: outputs are written by a thread of their own.
    `contacts`: senders report how their first contact went.
    """

    slots: int = 2
    send_slots: int = 2
    grants: int = 0
    fences: bool = True
    packs: bool = False
    overlap: bool = True
    contacts: bool = False


class Process:
    """Stands in for the link, the engine and the worker threads of its control thread. `world`: while a step lasts."""

    world: Any = None

    def __init__(self, setup: Setup, role: Role, incarnation: Incarnation, number: int) -> None:
        self.setup, self.role, self.incarnation, self.number = setup, role, incarnation, number
        self.alive, self.crashed = True, False
        self.loads: list[Ready] = []
        self.computes: list[Work] = []
        self.packs: list[Work] = []
        self.windows: set[LeaseId] = set()
        self.received: dict[LeaseId, Key] = {}
        self.outputs: dict[LeaseId, Key] = {}
        self.met: set[Incarnation] = set()
        self.contacts: list[Incarnation] = []
        self.sent: list[Any] = []
        receives = role == RECEIVER
        said = register(
            role, number, incarnation=incarnation, slot_bytes=setup.slots * GRANULE if receives else 0
        )  # fmt: skip
        self.machine = RoleMachine(
            said.slot_bytes, 0 if receives else setup.send_slots * GRANULE, _QUARANTINE_S,
            lambda _: 0 if receives else GRANULE, lambda: TOKEN, setup.grants if receives else 0, overlap=setup.overlap,
        )  # fmt: skip
        self.control = Control(_CONFIG, said, _REGION, _REGION)
        self.control._process = _PROCESS
        self.control.inbox.close()  # there are no threads that would post to it
        self._attach()

    def _attach(self) -> None:
        me: Any = self
        self.control.attach(self.machine, me, me, me, [me])
        self.control._link = me

    def copy(self) -> Process:
        """One that can be changed without changing this one."""
        new = object.__new__(Process)
        new.__dict__.update(self.__dict__)
        new.loads, new.computes, new.packs = list(self.loads), list(self.computes), list(self.packs)
        new.contacts = list(self.contacts)
        new.windows, new.met = set(self.windows), set(self.met)
        new.received, new.outputs, new.sent = dict(self.received), dict(self.outputs), []
        new.machine = _copy_machine(self.machine)
        control = new.control = object.__new__(Control)
        control.__dict__.update(self.control.__dict__)
        control._outbox, control._held = deque(control._outbox), deque(control._held)
        control._tensors, control._cancels = dict(control._tensors), dict(control._cancels)
        new._attach()
        return new

    def end(self) -> None:
        """The process is gone, and its memory."""
        self.alive = False
        self.loads, self.computes, self.packs, self.contacts = [], [], [], []
        self.windows, self.received, self.outputs, self.met = set(), {}, {}, set()

    # ------------------------------------------------------------ the link

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    def connect_bulk(self, port: int) -> None:
        pass

    def bulk(self) -> tuple[()]:
        return ()

    # ------------------------------------------------------------ the compute loop's counts

    steps = SimpleNamespace(totals={})

    # ------------------------------------------------------------ the push threads

    def meet(self, peer: Peer) -> None:
        self.met.add(peer.incarnation)
        if self.setup.contacts:
            self.contacts.append(peer.incarnation)

    def part(self, peer: Incarnation) -> None:
        self.met.discard(peer)
        self.contacts = [other for other in self.contacts if other != peer]

    def part_all(self) -> None:
        self.met.clear()
        self.contacts.clear()

    def push(self, push: Push, source: Any) -> None:
        # If the introduction was lost, the push begins the lane; until the router notices, and all lanes end.
        known = push.peer.incarnation in self.met or self.world.was_cut
        demand(known, "a push to somebody whom the sender has not met, or has parted from")
        self.met.add(push.peer.incarnation)
        output = self.machine.jobs[push.request_id, push.attempt].output
        assert output is not None
        phase = "asked" if self.setup.fences else "begun"
        self.world.writes += (
            Write(self.incarnation, push.request_id, push.attempt, push.peer.incarnation, push.slot.lease,
                  push.slot.offset, output, phase),
        )  # fmt: skip

    def pushed(self, write: Write, *, works: bool, settled: bool = True, held: bool = False) -> None:
        """A transfer has ended."""
        result = PushResult(write.push(), "tcp", GRANULE, 0.0, "" if works else "no", settled, held)
        self.control._take(result)

    def check_source(self, write: Write) -> None:
        """Somebody reads the bytes that `write` transfers."""
        problem = "a push read a source that is not its request's output any more"
        held = self.machine.send.get(write.source) is not None
        demand(held and self.outputs.get(write.source) == write.key, problem)

    # ------------------------------------------------------------ the receiving half of the engine

    def open(self, slot: SlotAddress) -> None:
        self.windows.add(slot.lease)
        self.received.pop(slot.lease, None)

    def close(self, slot: SlotAddress) -> None:
        self.windows.discard(slot.lease)

    def settled(self, lease: LeaseId) -> bool | None:
        return not self.world.is_written(self.incarnation, lease) if self.setup.fences else None

    def land(self, write: Write) -> None:
        """The bytes of `write` arrive in memory."""
        leases = self.machine.receive._leases.values()
        for lease in leases:
            apart = write.offset + GRANULE <= lease.offset or lease.offset + lease.nbytes <= write.offset
            demand(apart or lease.id == write.lease, "a write landed in a slot of somebody else")
        lease = self.machine.receive.get(write.lease)
        demand(lease is not None, "a slot was freed that may still be written")
        assert lease is not None
        demand(lease.state in ("leased", "quarantined"), "a write landed in a slot whose content was complete")
        self.received[write.lease] = write.key

    # ------------------------------------------------------------ the prefetch and compute threads

    def load(self, ready: Ready, source: Any) -> None:
        self._check_loading(ready)
        self.loads.append(ready)

    def loaded(self, *, works: bool) -> None:
        ready = self.loads.pop(0)
        self._check_loading(ready)
        if works:
            tensors: Any = {"of": (ready.request_id, ready.attempt)}
            self.control._take(LoadResult(ready, 0.0, tensors))
        else:
            self.control._take(LoadResult(ready, 0.0, None, "another checksum", "transfer_failed"))

    def _check_loading(self, ready: Ready) -> None:
        lease = self.machine.receive.get(ready.lease)
        demand(lease is not None and lease.state == "loading", "a slot was given away while it was loaded")
        problem = "a slot was loaded that does not hold what was staged for its request"
        demand(self.received.get(ready.lease) == (ready.request_id, ready.attempt), problem)

    def submit(self, work: Work | None) -> None:
        assert work is not None
        if self.role == RECEIVER:
            tensors: Any = work.tensors
            demand(tensors.get("of") == work.key, "a request was computed on something else than its input")
        elif (output := self.machine.jobs[work.key].output) is not None:
            self.outputs.pop(output, None)
        self.computes.append(work)

    def computed(self) -> None:
        work = self.computes.pop(0)
        if self.setup.packs and self.role == SENDER:
            self.packs.append(work)
            self.control._take(ComputeEnded(work.key))
        else:
            self._made(work)

    def packed(self) -> None:
        self._made(self.packs.pop(0))

    def _made(self, work: Work) -> None:
        output = self.machine.jobs[work.key].output
        if output is None:
            self.control._take(ComputeResult(Computed(work.key, 0.0, None, {}, ())))
            return
        self.outputs[output] = work.key
        self.control._take(ComputeResult(Computed(work.key, 0.0, MANIFEST, {}, ())))

    # ------------------------------------------------------------ what must always hold

    def check(self) -> None:
        """The bytes of each region add up, and each lease is a job's, granted or quarantined: nothing leaks."""
        machine = self.machine
        slots = {job.slot.lease for job in machine.jobs.values() if job.slot is not None}
        outputs = {job.output for job in machine.jobs.values() if job.output is not None}
        for region, ledger, held in (
            ("receive", machine.receive, slots | set(machine.grants)), ("send", machine.send, outputs)
        ):  # fmt: skip
            demand(sum(ledger.bytes_by_state().values()) == ledger.capacity, f"the bytes to {region} do not add up")
            aside = {lease for place, lease in machine.quarantine if place == region}
            demand(not held & aside, "a slot is in use and quarantined")
            demand(set(ledger._leases) == held | aside, f"a slot of the {region} region is nobody's, or not leased")
        for table, ledger in ((self.received, machine.receive), (self.outputs, machine.send)):
            for lease in [lease for lease in table if ledger.get(lease) is None]:
                del table[lease]


def _copy_machine(old: RoleMachine) -> RoleMachine:
    new = object.__new__(RoleMachine)
    new.__dict__.update(old.__dict__)
    new.jobs = {key: copy(job) for key, job in old.jobs.items()}
    new.staged, new.grants, new.quarantine = dict(old.staged), dict(old.grants), dict(old.quarantine)
    new._sizes = copy(old._sizes)
    new.receive, new.send = _copy_ledger(old.receive), _copy_ledger(old.send)
    new._handlers = {event: MethodType(handler.__func__, new) for event, handler in old._handlers.items()}  # type: ignore[attr-defined]
    return new


def _copy_ledger(old: Ledger) -> Ledger:
    new = object.__new__(Ledger)
    new.capacity, new._next, new._leases = old.capacity, old._next, dict(old._leases)
    new._by_offset, new._by_size = list(old._by_offset), list(old._by_size)
    return new
