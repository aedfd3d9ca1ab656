"""DiffusionServer: the thread that owns the router's sockets and its machine, and performs what the machine says."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from diffcluster import codec
from diffcluster.errors import QueueFullError, WireError, WorkerFailedError, request_error
from diffcluster.ids import Incarnation, RequestId
from diffcluster.messages import Done, GenerationParameters, Refused, Submit
from diffcluster.router import actions, events
from diffcluster.router.files import File, Files
from diffcluster.router.machine import RouterMachine
from diffcluster.router.snapshot import Ended, Snapshot, Totals
from diffcluster.router.state import Limits
from diffcluster.transport.control import RouterLink
from diffcluster.transport.mailbox import Mailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from diffcluster.config import RouterConfig
    from diffcluster.messages import ModelFacts

__all__ = ["DiffusionServer", "File", "Result"]

_log = logging.getLogger(__name__)
_TICK_S: Final = 0.05
_REMEMBERED: Final = 1000
_IDENTITY_BYTES: Final = 32


class Result(Struct, frozen=True):
    """A finished picture."""

    request_id: RequestId
    files: list[File]
    stages: tuple[actions.StageRecord, ...]
    total_s: float


class _Submit(Struct, frozen=True):
    request_id: RequestId
    parameters: GenerationParameters
    deadline: float
    inputs: tuple[bytes, ...]
    future: Future[Result]


class _Cancel(Struct, frozen=True):
    request_id: RequestId
    reason: str


class _Look(Struct, frozen=True):
    future: Future[Snapshot]


class _Stop(Struct, frozen=True):
    pass


class DiffusionServer:
    """For any thread: `submit`, `cancel`, `snapshot`. `on_fatal` is called if the server's own thread ever fails."""

    def __init__(self, config: RouterConfig, on_fatal: Callable[[str], None]) -> None:
        self._config, self._on_fatal = config, on_fatal
        self._inbox: Mailbox[object] = Mailbox(capacity=100_000)
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="diffusion-server")
        self._waiting: dict[RequestId, tuple[Future[Result], float]] = {}
        self._files = Files(config.max_input_bytes, lambda to, *piece: self._link.send_piece(to.encode(), *piece))
        self._ended: OrderedDict[RequestId, Ended] = OrderedDict()
        self._totals = Totals()
        self._unreachable: list[tuple[Incarnation, bool]] = []
        self._told: Counter[bytes] = Counter()
        self.models: Mapping[str, ModelFacts] = {}
        """Replaced, never changed: any thread may read it."""
        self.control_port = 0
        self.bulk_port = 0

    # ------------------------------------------------------------ for any thread

    def start(self) -> None:
        """Bind and serve; raises what binding raises."""
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """End the thread; whoever still waits gets an error."""
        self._inbox.post(_Stop())
        self._thread.join()
        self._inbox.close()

    @property
    def alive(self) -> bool:
        """Whether the server's thread runs."""
        return self._thread.is_alive()

    def submit(
        self, parameters: GenerationParameters, deadline_s: float, inputs: tuple[bytes, ...] = ()
    ) -> tuple[RequestId, Future[Result]]:
        """Ask for a picture. The future ends with a `Result` or a `RequestError`, exactly once.

        `inputs`: the bytes of the pictures that `parameters.inputs` describes. They are kept until the request ends, so
        that it can begin again.
        """
        request_id = RequestId(uuid.uuid4().hex)
        future: Future[Result] = Future()
        item = _Submit(request_id, parameters, time.monotonic() + deadline_s, inputs, future)
        if not self._inbox.post(item):
            raise QueueFullError("the router takes no requests at the moment")
        return request_id, future

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """Give a request up, if it has not ended yet."""
        self._inbox.post(_Cancel(request_id, reason))

    def snapshot(self) -> Future[Snapshot]:
        """The state as it is when the server comes to it."""
        future: Future[Snapshot] = Future()
        if not self._inbox.post(_Look(future)):
            future.set_exception(WorkerFailedError("the router is stopping"))
        return future

    # ------------------------------------------------------------ the server's thread

    def _run(self) -> None:
        try:
            config = self._config
            self._link = RouterLink(config.control_host, config.control_port, config.bulk_port, self._inbox)
        except BaseException as error:  # noqa: BLE001 - it is raised again, where `start` waits
            self._started.set_exception(error)
            return
        self.control_port, self.bulk_port = self._link.control_port, self._link.bulk_port
        self._machine = RouterMachine(Limits(config.heartbeat_s, config.max_losses, self.bulk_port))
        self._started.set_result(None)
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - a bug: all requests end with an error, and so does the process
            _log.exception("the router's thread failed")
            self._on_fatal(f"{type(error).__name__}: {error}")
        finally:
            self._link.close()
            for future, _ in self._waiting.values():
                future.set_exception(WorkerFailedError("the router has stopped"))

    def _serve(self) -> None:
        next_tick = 0.0
        while True:
            self._link.wait(0.0 if self._files.flush() else next_tick - time.monotonic())
            for frames in self._link.control():
                self._control(frames)
            for frames in self._link.bulk():
                self._bulk(frames)
            for item in self._inbox.take_all():
                if isinstance(item, _Stop):
                    return
                self._take(item)
            # Last: after a pause of this process, what was said meanwhile is heard before anyone is taken for lost.
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_S
                self._step(events.Tick(now))
                self._sweep()

    def _take(self, item: object) -> None:
        match item:
            case _Submit():
                self._admit(item)
            case _Cancel():
                self._step(events.GivenUp(item.request_id, item.reason, time.monotonic()))
            case _Look():
                if item.future.set_running_or_notify_cancel():
                    item.future.set_result(self._look())

    def _admit(self, item: _Submit) -> None:
        # From here on nobody else can end the future: a client that leaves is heard of by `_Cancel`.
        if not item.future.set_running_or_notify_cancel():
            return
        if len(self._waiting) >= self._config.max_requests:
            self._totals.ended["queue_full"] += 1
            item.future.set_exception(QueueFullError(f"{len(self._waiting)} requests wait already"))
            return
        if not self._files.keep(item.request_id, item.inputs):
            self._totals.ended["queue_full"] += 1
            item.future.set_exception(QueueFullError("too many bytes of pictures wait to be worked on already"))
            return
        now = time.monotonic()
        self._waiting[item.request_id] = (item.future, now)
        self._step(events.Submitted(item.request_id, item.parameters, item.deadline, now))

    # ------------------------------------------------------------ frames

    def _control(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise WireError(f"a message of {len(frames) - 1} frames")
            sender = _incarnation(frames[0])
            message = codec.decode_from_role(frames[1])
        except WireError as error:
            self._bad_frame(frames[0], error)
            return
        now = time.monotonic()
        if isinstance(message, Done) and not self._files.announced(sender, message, now):
            self._step(events.Announced(sender, now))
        else:
            self._step(events.Heard(sender, message, now))

    def _bulk(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 3:
                raise WireError(f"a piece of {len(frames) - 1} frames")
            sender = _incarnation(frames[0])
            head = codec.decode_bulk(frames[1])
            request = self._machine.cluster.requests.get(head.request_id)
            if request is None or request.key != (head.request_id, head.attempt) or request.holder != sender:
                self._totals.counts["stale", "BulkPiece"] += 1
                return
        except WireError as error:
            self._bad_frame(frames[0], error)
            return
        now = time.monotonic()
        try:
            done = self._files.piece(sender, head, frames[2], now)
        except WireError as error:
            _log.warning("a file from %s is not whole: %s", sender, error)
            self._step(events.Gone(sender, now))
            return
        if done is not None:
            self._step(events.Heard(sender, done, now, announced=True))

    def _bad_frame(self, peer: bytes, error: WireError) -> None:
        """Count it, and log the first of each peer. It is told, so that a mismatch of versions can be seen there."""
        self._totals.bad_frames += 1
        if peer not in self._told:
            if len(self._told) >= _REMEMBERED:
                self._told.clear()
            self._told[peer] = 1
            _log.warning("a peer sent what is no message of ours: %s", error)
            self._link.send(peer, Refused(again=False, reason=str(error)[:4096]))

    # ------------------------------------------------------------ the machine

    def _step(self, event: events.Event) -> None:
        self._perform(self._machine.step(event))
        while self._unreachable:
            lost, full = self._unreachable.pop()
            self._perform(self._machine.step(events.Gone(lost, time.monotonic(), full)))

    def _perform(self, todo: list[actions.Action]) -> None:
        for action in todo:
            match action:
                case actions.Send():
                    self._send(action)
                case actions.Finish():
                    self._finish(action)
                case actions.Fail():
                    self._fail(action)
                case actions.Discard():
                    self._files.discard(action.instance, (action.request_id, action.attempt))
                case actions.Count():
                    self._totals.counts[action.what, action.detail] += 1
                    if action.what == "registered":
                        self.models = dict(self._machine.cluster.models)
                case actions.Note():
                    _log.log(logging.WARNING if action.warning else logging.INFO, "%s", action.text)

    def _send(self, action: actions.Send) -> None:
        if isinstance(action.message, Submit):
            self._files.submit(action.to, action.message)
        sent = self._link.send(action.to.encode(), action.message)
        if sent != "sent":
            self._unreachable.append((action.to, sent == "full"))

    def _finish(self, action: actions.Finish) -> None:
        files = self._files.take(action.instance, (action.request_id, action.attempt))
        future, submitted = self._waiting.pop(action.request_id)
        total = time.monotonic() - submitted
        self._end(action.request_id, Ended("finished", "", action.stages, total))
        self._totals.finished(action.stages, total)
        future.set_result(Result(action.request_id, files, action.stages, total))

    def _fail(self, action: actions.Fail) -> None:
        future, submitted = self._waiting.pop(action.request_id)
        self._end(action.request_id, Ended(action.code, action.message, (), time.monotonic() - submitted))
        self._totals.ended[action.code] += 1
        future.set_exception(request_error(action.code, action.message))

    def _end(self, request_id: RequestId, ended: Ended) -> None:
        self._files.forget(request_id)
        self._ended[request_id] = ended
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _sweep(self) -> None:
        """Drop files of attempts that nobody waits for; give up senders whose files have stopped half-way."""
        if not self._files:
            return
        now = time.monotonic()
        for sender in self._files.stalled(now, self._config.heartbeat_s):
            self._step(events.Gone(sender, now))
        self._files.keep_only(self._machine.cluster.requests.values())

    def _look(self) -> Snapshot:
        cluster = self._machine.cluster
        return Snapshot(
            now=time.monotonic(),
            instances=dict(cluster.instances),
            requests=dict(cluster.requests),
            models=dict(cluster.models),
            queues={role: len(queue) for role, queue in cluster.queues.items()},
            ended=dict(self._ended),
            totals=self._totals.copy(),
        )


def _incarnation(identity: bytes) -> Incarnation:
    """A peer's address as an incarnation; raises `WireError` if it is none."""
    if len(identity) != _IDENTITY_BYTES or not identity.isalnum() or not identity.isascii():
        raise WireError("its address is no incarnation")
    return Incarnation(identity.decode("ascii"))
