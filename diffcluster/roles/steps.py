"""Makes calls: several as one, or each alone; and learns what they cost.

If exactness is demanded, the first joined call of each size is also made call by call, and the answers are compared bit
by bit: which kernels compute depends on shapes alone, so what is equal once is equal from then on.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from diffcluster.roles.batching import Decision, Signature
from diffcluster.roles.costs import CostModel
from diffcluster.roles.exactness import FewRowsApart, same_bits
from diffcluster.roles.joining import Call, join, split

if TYPE_CHECKING:
    from diffcluster.roles.device import Device, Stopwatch

__all__ = ["OUT_OF_MEMORY", "StepMaker"]

OUT_OF_MEMORY: Final = (MemoryError, torch.OutOfMemoryError)
_MAX_REASONS: Final = 100
_log = logging.getLogger(__name__)


class StepMaker:
    """Answers calls, and counts. Of the thread that computes."""

    def __init__(self, device: Device, *, exact: bool = False) -> None:
        self._device, self._exact = device, exact
        self._timed: list[tuple[Signature, int, Stopwatch]] = []
        self.costs = CostModel()
        self._totals: Counter[str] = Counter()
        self.totals: Mapping[str, int] = {}
        """Calls made (`calls`), requests in them (`requests`), and decisions by reason (`reason:...`). Replaced, never
        changed: any thread may read it."""

    def count(self, decision: Decision) -> None:
        """Keep account of a decision."""
        for reason in decision.reasons:
            known = f"reason:{reason}" in self._totals or len(self._totals) < _MAX_REASONS
            self._totals[f"reason:{reason}" if known else "reason:other"] += 1

    def forget_counts(self) -> None:
        """Start counting anew; what was learnt of costs stays."""
        self._totals.clear()
        self.totals = {}

    def fitting(self, calls: Sequence[Call]) -> list[Call]:
        """The first of `calls`, and those after it that can be made with it."""
        signature, samples = calls[0].signature, calls[0].samples
        for count, call in enumerate(calls[1:], start=1):
            samples += call.samples
            if signature.alone or call.signature != signature or not self.costs.fits(signature, samples):
                return list(calls[:count])
        return list(calls)

    def make(self, calls: Sequence[Call]) -> None:
        """Answer `calls`, which have one signature, together. If they are too large as one, none is answered."""
        self._learn()
        self._totals["calls"] += 1
        self._totals["requests"] += len(calls)
        self.totals = dict(self._totals)
        if len(calls) == 1:
            self._make_alone(calls[0])
            return
        if self._exact and not self.costs.is_exact(calls[0].signature, calls[0].samples, len(calls)):
            self._make_both(calls)
            return
        answers = self._joined(calls)
        if isinstance(answers, BaseException):
            self._make_each(calls, answers)
        elif answers is not None:
            for call, answer in zip(calls, answers, strict=True):
                call.set_answer(answer)

    def _joined(self, calls: Sequence[Call]) -> list[Any] | BaseException | None:
        """The answer of each; None if they are too large as one, the error if they could not be made as one."""
        try:
            return self._make_as_one(calls)
        except OUT_OF_MEMORY as error:
            reason = str(error)
        except BaseException as error:  # noqa: BLE001 - whose it is shows when each is made alone
            return error
        # Out here nothing holds the frames of the call that failed, nor what they had allocated.
        samples = sum(call.samples for call in calls)
        _log.warning("%d samples at once are too many for %s: %s", samples, calls[0].module, reason)
        self.costs.too_large(calls[0].signature, samples // 2 + 1)
        self._device.free_unused()
        return None

    def _make_as_one(self, calls: Sequence[Call]) -> list[Any]:
        sizes = [call.samples for call in calls]
        args, kwargs = join(calls)
        watch = self._device.stopwatch()
        with FewRowsApart(sizes) if self._exact else contextlib.nullcontext():
            output = calls[0].function(*args, **kwargs)
        watch.stop()
        self._timed.append((calls[0].signature, sum(sizes), watch))
        return split(output, sizes)

    def _make_both(self, calls: Sequence[Call]) -> None:
        """Each call is answered as if it were alone; whether the joined one would have done as well is noted."""
        for call in calls:
            self._make_alone(call)
        if any(call.error for call in calls):
            return
        answers = self._joined(calls)
        if isinstance(answers, BaseException):
            self._do_not_join(calls, answers)
        elif answers is not None:
            equal = all(same_bits(call.answer, answer) for call, answer in zip(calls, answers, strict=True))
            self.costs.compared(calls[0].signature, calls[0].samples, len(calls), equal=equal)

    def _make_each(self, calls: Sequence[Call], error: BaseException) -> None:
        for call in calls:
            self._make_alone(call)
        if not any(call.error for call in calls):  # none fails by itself: it is the joining that does not work
            self._do_not_join(calls, error)

    def _do_not_join(self, calls: Sequence[Call], error: BaseException) -> None:
        _log.warning("%d calls of %s cannot be made as one", len(calls), calls[0].module, exc_info=error)
        self.costs.too_large(calls[0].signature, min(call.samples for call in calls) + 1)

    def _make_alone(self, call: Call) -> None:
        try:
            watch = self._device.stopwatch()
            answer = call.function(*call.args, **call.kwargs)
            watch.stop()
        except BaseException as error:  # noqa: BLE001 - it is raised in the request that made the call
            call.set_error(error)
        else:
            self._timed.append((call.signature, call.samples, watch))
            call.set_answer(answer)
        if isinstance(call.error, OUT_OF_MEMORY):
            call.error.__traceback__ = None  # it holds the frames of the call, and what they had allocated
            self._device.free_unused()

    def _learn(self) -> None:
        """Take the times of calls that the device has finished by now."""
        waiting = []
        for signature, samples, watch in self._timed:
            seconds = watch.seconds()
            if seconds is None:
                waiting.append((signature, samples, watch))
            else:
                self.costs.observe(signature, samples, seconds)
        self._timed = waiting
