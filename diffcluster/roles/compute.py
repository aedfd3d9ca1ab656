"""The compute loop: all requests of a role, side by side on the main thread, step by step; each is reported once.

Each request runs its stage in a fiber, and parks at every call of a module. In each turn the loop lets new requests in
and cancelled ones go, has the policy choose which calls to make together (`batching`), makes them, and lets those
requests go on. So a request joins a running batch at any step, and leaves it when it is done, whatever the others do.

An error belongs to one request. If a joined call fails, each of its calls is made alone, and only those that fail
again end their requests; a joined call that ran out of memory is made in two halves, and never again as large.
"""

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
from diffcluster.roles.batching import Candidate, Policy, choose
from diffcluster.roles.jobs import Computed, ComputeEnded, ComputeFailed, Key
from diffcluster.roles.meeting import Fiber
from diffcluster.roles.stage import Output as StageOutput
from diffcluster.roles.stage import Stage, Task
from diffcluster.roles.staging import Output, Stager
from diffcluster.roles.steps import StepMaker
from diffcluster.transport.mailbox import Mailbox

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from diffcluster.roles.device import Device

__all__ = ["ComputeLoop", "ComputeResult", "Work"]

_log = logging.getLogger(__name__)


class Work(Struct):
    """One computation. `target` is where its output goes, None at a last stage; `inputs` the client's pictures."""

    key: Key
    parameters: GenerationParameters
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, float | int | str]
    target: npt.NDArray[np.uint8] | None
    cancelled: threading.Event
    inputs: tuple[bytes, ...] = ()


class ComputeResult(Struct, frozen=True):
    """How a computation ended, with the files it made."""

    event: Computed | ComputeFailed
    files: tuple[bytes, ...] = ()


class _Running:
    """A request that is being computed."""

    def __init__(self, work: Work, fiber: Fiber, now: float) -> None:
        self.work, self.fiber, self.started, self.waits_since = work, fiber, now, now
        within = work.parameters.deadline_s
        self.due = float("inf") if within is None else now + within

    def candidate(self) -> Candidate:
        """As the policy sees it."""
        call = self.fiber.call
        assert call is not None, "a request that runs is parked whenever the loop looks at it"
        priority = self.work.parameters.priority
        return Candidate(
            self.work.key, call.signature, call.samples, call.units, self.started, self.waits_since, priority, self.due
        )


class ComputeLoop:
    """Owns the stage and its device. `report` must be a mailbox's post."""

    def __init__(
        self,
        stage: Stage,
        device: Device,
        stager: Stager,
        report: Callable[[ComputeResult | ComputeEnded | Progress], Any],
        policy: Policy | None = None,
    ) -> None:
        self._stage, self._device, self._stager, self._report = stage, device, stager, report
        self._policy = policy or Policy()
        self._inbox: Mailbox[Work | None] = Mailbox()
        self._running: dict[object, _Running] = {}
        self._wait_until: float | None = None
        self.steps = StepMaker(device, exact=self._policy.exact)

    def submit(self, work: Work | None) -> None:
        """Compute `work`; None ends the loop, once what runs has ended. For any thread."""
        if not self._inbox.post(work) and work is not None:
            self._report(ComputeResult(ComputeFailed(work.key, "worker_error", "too much work is waiting")))

    def warm_up(self, *, small: bool) -> None:
        """Run blank requests before the first real one, so that none waits for compilation; raises what they raise.

        At the model's own size also so many side by side as may be later: what they cost, and how many fit, is learnt.
        """
        with torch.inference_mode():
            for size in range(1, 2 if small else self._policy.max_size + 1):
                if size & (size - 1) == 0:
                    self._run_blank(size, small=small)
        self.steps.forget_counts()

    def _run_blank(self, size: int, *, small: bool) -> None:
        fibers = [Fiber(lambda: self._stage.warm_up(small=small)) for _ in range(size)]
        for fiber in fibers:
            fiber.start()
        while parked := [fiber for fiber in fibers if fiber.call is not None]:
            calls = self.steps.fitting([fiber.call for fiber in parked if fiber.call is not None])
            self.steps.make(calls)
            for fiber, call in zip(parked, calls, strict=False):
                if call.answered:
                    (_raising(fiber, call.error) if call.error else _answering(fiber, call.answer))()

    def run(self) -> None:
        """Compute until told to end."""
        with torch.inference_mode():
            ending = False
            while not ending or self._running:
                for work in self._arrivals():
                    if work is None:
                        ending = True
                    else:
                        self._start(work)
                self._step()

    def close(self) -> None:
        """Give the inbox back, after `run`."""
        self._inbox.close()

    def _arrivals(self) -> list[Work | None]:
        """What has come; waits for it if there is nothing else to do."""
        if not self._running:
            return self._inbox.take()
        if self._wait_until is not None:
            return self._inbox.take(max(0.0, self._wait_until - time.monotonic()))
        return self._inbox.take_all()

    def _start(self, work: Work) -> None:
        task = Task(work.parameters, work.tensors, work.scalars, self._progress(work), work.inputs)
        running = _Running(work, Fiber(lambda: self._stage.run(task)), time.monotonic())
        self._running[work.key] = running
        if work.cancelled.is_set():
            self._fail(running, CancelledError("cancelled before it was computed"))
        else:
            self._go_on(running, running.fiber.start)

    def _step(self) -> None:
        """Make one call, of one request or of several."""
        for running in list(self._running.values()):
            if running.work.cancelled.is_set():
                self._go_on(running, _raising(running.fiber, CancelledError("cancelled between two steps")))
        if not self._running:
            return
        candidates = [running.candidate() for running in self._running.values()]
        decision = choose(candidates, self._policy, self.steps.costs, time.monotonic(), len(self._running))
        self._wait_until = decision.wait_until
        if decision.keys:
            self.steps.count(decision)
            batch = [self._running[key] for key in decision.keys]
            self.steps.make([running.fiber.call for running in batch if running.fiber.call is not None])
            self._resume(batch)

    def _resume(self, batch: list[_Running]) -> None:
        """Let the requests whose calls were answered go on; those of a batch that was too large stay parked."""
        now = time.monotonic()
        for running in batch:
            call = running.fiber.call
            assert call is not None
            if call.answered:
                running.waits_since = now
                act = _raising(running.fiber, call.error) if call.error else _answering(running.fiber, call.answer)
                self._go_on(running, act)

    def _go_on(self, running: _Running, act: Callable[[], None]) -> None:
        """Let a request run until it parks again, or ends."""
        try:
            act()
            if not running.fiber.ended:
                return
            made = self._device.mark()  # what went wrong on the device may only show here
        except BaseException as error:  # noqa: BLE001 - whatever a model raises ends its request, never the role
            self._fail(running, error)
            return
        del self._running[running.work.key]
        self._hand_on(running.work, running.fiber.result, made, time.monotonic() - running.started)

    def _fail(self, running: _Running, error: BaseException) -> None:
        del self._running[running.work.key]
        code = _code(error)
        if code not in ("cancelled", "invalid_value"):
            _log.error("request %s failed", running.work.key[0], exc_info=error)
        self._report(ComputeResult(ComputeFailed(running.work.key, code, _reason(error))))

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


def _answering(fiber: Fiber, value: Any) -> Callable[[], None]:
    return lambda: fiber.answer(value)


def _raising(fiber: Fiber, error: BaseException) -> Callable[[], None]:
    return lambda: fiber.throw(error)


def _code(error: BaseException) -> FailureCode:
    if isinstance(error, RequestError):
        return error.code
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "out_of_memory"
    return "worker_error"


def _reason(error: BaseException) -> str:
    text = str(error)[:1000]
    return text if isinstance(error, RequestError) else f"{type(error).__name__}: {text}"
