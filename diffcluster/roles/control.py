"""The control thread of a role: owns the link to the router and the machine, and performs what the machine says."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil

from diffcluster import codec
from diffcluster.errors import DiffclusterError, WireError
from diffcluster.messages import (
    MISSED_HEARTBEATS,
    Allocate,
    BulkPiece,
    Cancel,
    Drain,
    Drained,
    Evict,
    Meet,
    Met,
    Part,
    Progress,
    Push,
    Ready,
    Refused,
    Register,
    Registered,
    Release,
    RoleToRouter,
    RouterHeartbeat,
    RouterToRole,
    Submit,
    Ungrant,
)  # fmt: skip
from diffcluster.roles import jobs
from diffcluster.roles.compute import ComputeLoop, ComputeResult, Work
from diffcluster.roles.inputs import Inputs
from diffcluster.roles.jobs import Key
from diffcluster.roles.machine import RoleMachine
from diffcluster.roles.rules import Leave, check_quarantine, load_ended, push_ended
from diffcluster.roles.windows import Windows
from diffcluster.transport.control import RoleLink
from diffcluster.transport.mailbox import Mailbox
from diffcluster.transport.prefetch import LoadResult, Prefetcher
from diffcluster.transport.push import Pusher, PushResult

if TYPE_CHECKING:
    import torch

    from diffcluster.config import RoleConfig
    from diffcluster.transport.arena import Arena
    from diffcluster.transport.device_arena import DeviceArena
    from diffcluster.transport.engines.base import Receiver

__all__ = ["Control"]

_log = logging.getLogger(__name__)
_Work = Submit | Allocate | Ungrant | Push | Ready | Release | Evict | Cancel | Meet | Part
_OFFER_AGAIN_S: Final = 0.02
_GOODBYE_S: Final = 2.0


class Control:
    """Created on the main thread, lives on its own. `failure` says why the role must exit non-zero, if it must."""

    def __init__(
        self, config: RoleConfig, register: Register, receive: Arena | DeviceArena | None, send: Arena | None
    ) -> None:
        self.inbox: Mailbox[object] = Mailbox()
        self.failure: str | None = None
        self._config, self._register = config, register
        self._receive, self._send = receive, send
        self._tensors: dict[Key, dict[str, torch.Tensor]] = {}
        self._cancels: dict[Key, threading.Event] = {}
        self._inputs = Inputs()
        self._outbox: deque[RoleToRouter] = deque()
        self._held: deque[_Work] = deque()
        # What was said and heard since the last fresh registration: a difference shows that a connection lost some.
        self._said, self._got, self._cut = 0, 0, False
        self._registered = False
        self._heartbeat_s, self._heard = 1.0, 0.0
        self._leave_by: float | None = None
        self._stopped = False
        self._process = psutil.Process()

    def attach(
        self,
        machine: RoleMachine,
        compute: ComputeLoop,
        prefetcher: Prefetcher,
        pusher: Pusher,
        receivers: list[Receiver],
    ) -> None:
        """Give it what it works with; before `run`."""
        self._machine, self._compute, self._prefetcher, self._pusher = machine, compute, prefetcher, pusher
        self._windows = Windows(receivers)

    def run(self) -> None:
        """The thread. However it ends, the compute loop ends with it."""
        try:
            self._run()
        except DiffclusterError as error:
            self.failure = str(error)
        except Exception as error:  # noqa: BLE001 - a bug: the process ends with status 1, and says why
            _log.exception("the control thread failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            for event in self._cancels.values():
                event.set()
            self._compute.submit(None)

    def _run(self) -> None:
        self._link = RoleLink(self._config.router, self._register.incarnation, self.inbox)
        _log.info("waiting for the router at %s", self._config.router)
        next_beat = 0.0
        try:
            while not self._stopped:
                now = time.monotonic()
                if now >= next_beat:
                    self._beat(now)
                    next_beat = now + self._heartbeat_s
                self._flush()
                # What a full link did not take is offered again soon: nothing says when there is room.
                self._link.wait(min(next_beat - now, _OFFER_AGAIN_S if self._outbox else math.inf))
                if time.monotonic() - now > (1 + MISSED_HEARTBEATS) * self._heartbeat_s:
                    # This process was stopped. Until the router has said whether it still counts on us, what lies in
                    # the socket is not acted upon: a push of then could hit a slot that is somebody else's now.
                    _log.warning("this process was stopped for a while; registering again")
                    self._registered, next_beat = False, 0.0
                for frames in self._link.control():
                    if not self._stopped:
                        self._receive_frames(frames)
                self._receive_pieces()
                for item in self.inbox.take_all():
                    self._take(item)
        finally:
            self._link.close(_GOODBYE_S)

    # ------------------------------------------------------------ heartbeats and registration

    def _beat(self, now: float) -> None:
        self._perform(self._machine.step(self._windows.tick(self._machine.quarantine), now))
        self._receive_pieces()  # those that lie in the socket are not late
        for failed in self._inputs.lost(now, self._heartbeat_s):
            self._say(failed)
        if self._leave_by is not None and now >= self._leave_by:
            _log.warning("leaving with work unfinished: %s s to drain are over", self._config.drain_s)
            self._stopped = True
        if self._registered and now - self._heard > MISSED_HEARTBEATS * self._heartbeat_s:
            _log.warning("the router has been silent for %d heartbeats; registering again", MISSED_HEARTBEATS)
            self._registered = False
        if self._leave_by is not None and not self._registered:
            self._stopped = True  # there is nobody to finish anything for
        if self._registered:
            beat = self._machine.heartbeat(self._process.memory_info().rss)
            computed = dict(self._compute.steps.totals)
            self._link.send(msgspec.structs.replace(beat, said=self._said, cut=self._cut, computed=computed))
        else:
            self._link.send(self._register)

    def _receive_frames(self, frames: list[bytes]) -> None:
        self._heard = time.monotonic()
        try:
            if len(frames) != 1:
                raise WireError(f"a message of {len(frames)} frames")
            message = codec.decode_from_router(frames[0])
        except WireError as error:
            _log.error("from the router: %s", error)
            return
        self._take_message(message)

    def _receive_pieces(self) -> None:
        """Take what has arrived of the clients' pictures; what becomes complete by it is computed."""
        for frames in self._link.bulk():
            now = time.monotonic()
            try:
                complete = self._inputs.frames(frames, now)
            except WireError as error:
                _log.error("from the router: %s", error)
                continue
            if complete is not None:
                self._perform(self._machine.step(complete, now))

    def _take_message(self, message: RouterToRole) -> None:
        match message:
            case Registered():
                self._accepted(message)
            case Refused(again=True):
                _log.warning("the router does not count on this instance any more; registering again")
                self._registered = False
                self._give_up()
                self._link.send(self._register)
            case Refused():
                raise DiffclusterError(f"the router refused this instance: {message.reason}")
            case RouterHeartbeat():
                self._cut = self._cut or message.said != self._got
            case Drained():
                self._stopped = True
            case Drain():
                self._leave()
            case _:
                self._got += 1
                self._held.append(message)
                self._work()

    def _accepted(self, message: Registered) -> None:
        if not self._registered:
            _log.info("registered with the router as %s", self._register.name)
        check_quarantine(self._config, self._register.sessions, message.heartbeat_s)
        self._registered = True
        if message.fresh:
            self._give_up()
            self._said, self._got, self._cut = 0, 0, False
            self._perform(self._machine.step(jobs.Joined(), time.monotonic()))
        self._heartbeat_s = message.heartbeat_s
        self._link.connect_bulk(message.bulk_port)
        if self._leave_by is not None:  # it may have forgotten
            self._say(Drain())
        self._work()

    def _work(self) -> None:
        """Act upon what the router has said, if it counts on us."""
        while self._registered and self._held:
            message = self._held.popleft()
            match message:
                case Meet():
                    self._pusher.meet(message.peer)
                case Part():
                    self._pusher.part(message.receiver)
                case Submit() if not self._inputs.submit(message, time.monotonic()):
                    continue  # until its pictures are there
                case _:
                    if isinstance(message, Cancel):
                        self._inputs.forget((message.request_id, message.attempt))
                    self._perform(self._machine.step(message, time.monotonic()))

    def _give_up(self) -> None:
        """Whatever the router gave us, and whatever we still had to say of it, is void."""
        self._outbox.clear()
        self._held.clear()
        self._pusher.part_all()
        self._inputs.clear()
        self._perform(self._machine.reset(time.monotonic()))

    def _leave(self) -> None:
        if self._leave_by is None:
            self._leave_by = time.monotonic() + self._config.drain_s
            if self._registered:
                self._say(Drain())
            else:
                self._stopped = True
        else:
            _log.warning("asked to leave a second time: leaving at once")
            self._stopped = True

    # ------------------------------------------------------------ reports of the threads

    def _take(self, item: object) -> None:
        now = time.monotonic()
        match item:
            case Leave():
                self._leave()
            case Progress() | Met():
                self._say(item)
            case LoadResult():
                event = load_ended(item)
                if item.tensors is not None:
                    self._tensors[event.key] = item.tensors
                self._perform(self._machine.step(event, now))
            case PushResult():
                self._perform(self._machine.step(push_ended(item), now))
            case ComputeResult():
                self._computed(item, now)
            case jobs.Computed() | jobs.ComputeFailed():  # of the staging thread
                self._computed(ComputeResult(item), now)
            case jobs.ComputeEnded():
                self._perform(self._machine.step(item, now))
            case _:
                raise TypeError(f"nobody should post {item!r}")

    def _computed(self, result: ComputeResult, now: float) -> None:
        self._cancels.pop(result.event.key, None)
        if result.files:
            request_id, attempt = result.event.key
            self._link.send_files(BulkPiece(request_id=request_id, attempt=attempt, file=0, offset=0), result.files)
        self._perform(self._machine.step(result.event, now))

    # ------------------------------------------------------------ actions

    def _perform(self, actions: list[jobs.Action]) -> None:
        for action in actions:
            self._performers[type(action)](self, action)

    def _start_load(self, action: jobs.StartLoad) -> None:
        assert self._receive is not None
        self._prefetcher.load(action.ready, self._receive.view(action.slot.offset, action.slot.nbytes))

    def _start_compute(self, action: jobs.StartCompute) -> None:
        target = None
        if action.output is not None:
            assert self._send is not None
            target = self._send.view(*action.output)
        cancelled = self._cancels[action.key] = threading.Event()
        scalars = action.ready.scalars if isinstance(action.ready, Ready) else {}
        tensors = self._tensors.pop(action.key, {})
        inputs = self._inputs.take(action.key)
        self._compute.submit(Work(action.key, action.parameters, tensors, scalars, target, cancelled, inputs))

    def _start_push(self, action: jobs.StartPush) -> None:
        assert self._send is not None
        self._pusher.push(action.push, self._send.view(action.offset, action.nbytes))

    def _close_window(self, action: jobs.CloseWindow) -> None:
        self._windows.close(action.slot)
        fenced = action.settled or self._windows.writers(action.slot.lease) is False
        event = jobs.WindowClosed(action.key, action.slot.lease, fenced)
        self._perform(self._machine.step(event, time.monotonic()))

    def _say(self, message: RoleToRouter) -> None:
        self._outbox.append(message)
        self._flush()

    def _flush(self) -> None:
        """Send what waits, in order. While the router does not count on us it waits on, and may become void."""
        while self._registered and self._outbox and self._link.send(self._outbox[0]):
            self._outbox.popleft()
            self._said += 1

    def _forget(self, action: jobs.Forget) -> None:
        self._tensors.pop(action.key, None)
        self._inputs.forget(action.key)

    _performers: Final[dict[type, Callable[[Control, Any], None]]] = {
        jobs.Send: lambda self, action: self._say(action.message),
        jobs.OpenWindow: lambda self, action: self._windows.open(action.slot),
        jobs.CloseWindow: _close_window,
        jobs.SealWindow: lambda self, action: self._windows.close(action.slot),
        jobs.StartLoad: _start_load,
        jobs.StartCompute: _start_compute,
        jobs.StartPush: _start_push,
        jobs.CancelCompute: lambda self, action: self._cancels[action.key].set(),
        jobs.Forget: _forget,
    }
