"""What a joined call costs: seconds by number of samples, learnt from each call, and sizes that did not fit. Pure."""

from __future__ import annotations

from msgspec import Struct, field

from diffcluster.roles.batching import Signature

__all__ = ["CostModel"]

_NEWEST: float = 0.3
"""Weight of the newest measurement in the average."""
_LEAST_GAIN: float = 0.05
"""Of the time that samples take apart: what they must save by coming along, since the others wait for them."""
_LOOK_AGAIN: int = 200
"""A size that was found not worthwhile is tried again after so many refusals: the machine may be freer by now."""
_REMEMBERED: int = 256
"""Signatures; the one unused for the longest time is forgotten."""


class _Known(Struct):
    """Of one signature."""

    seconds: dict[int, float] = field(default_factory=dict)
    too_large: int = 2**31
    refusals: int = 0
    exact: dict[tuple[int, int], bool] = field(default_factory=dict)
    """(samples of each call, calls): whether they were compared, and found equal."""
    inexact_from: dict[int, int] = field(default_factory=dict)
    """By the samples of each call: so many calls, or more, are not tried."""


class CostModel:
    """Learns from `observe` and `too_large`."""

    def __init__(self) -> None:
        self._known: dict[Signature, _Known] = {}

    def observe(self, signature: Signature, samples: int, seconds: float) -> None:
        """A call of `samples` took `seconds`."""
        times = self._of(signature).seconds
        before = times.get(samples)
        times[samples] = seconds if before is None else before + _NEWEST * (seconds - before)

    def too_large(self, signature: Signature, samples: int) -> None:
        """A call of `samples` ran out of memory, or could not be made as one."""
        known = self._of(signature)
        known.too_large = min(known.too_large, samples)

    def compared(self, signature: Signature, samples: int, calls: int, *, equal: bool) -> None:
        """So many calls, each of `samples`, were made both joined and alone."""
        known = self._of(signature)
        known.exact[samples, calls] = equal
        if not equal:
            # Which kernels compute depends on the size alone. What differs at one size mostly does so at larger ones.
            known.inexact_from[samples] = min(known.inexact_from.get(samples, calls), calls // 2 + 1)

    def is_exact(self, signature: Signature, samples: int, calls: int) -> bool:
        """True if they were compared, and were equal."""
        known = self._known.get(signature)
        return known is not None and known.exact.get((samples, calls), False)

    def may_be_exact(self, signature: Signature, samples: int, calls: int) -> bool:
        """True while it is not known: then it is tried."""
        known = self._known.get(signature)
        return known is None or calls < known.inexact_from.get(samples, calls + 1)

    def fits(self, signature: Signature, samples: int) -> bool:
        """False if that many, or fewer, were too large."""
        known = self._known.get(signature)
        return known is None or samples < known.too_large

    def worthwhile(self, signature: Signature, samples: int, more: int) -> bool:
        """True while it is not known: then it is tried."""
        known = self._known.get(signature)
        if known is None:
            return True
        now, then = self.seconds(signature, samples), self.seconds(signature, samples + more)
        apart = self.seconds(signature, more)
        if now is None or then is None or apart is None or then - now < apart * (1 - _LEAST_GAIN):
            return True
        known.refusals += 1
        if known.refusals >= _LOOK_AGAIN:
            known.refusals = 0
            known.seconds = {size: time for size, time in known.seconds.items() if size <= samples}
        return False

    def seconds(self, signature: Signature, samples: int) -> float | None:
        """Expected time of a call: measured, or between two that were; None beyond them."""
        times = self._known[signature].seconds if signature in self._known else {}
        if samples in times:
            return times[samples]
        below = max((size for size in times if size < samples), default=None)
        above = min((size for size in times if size > samples), default=None)
        if below is None or above is None:
            return None
        return times[below] + (times[above] - times[below]) * (samples - below) / (above - below)

    def _of(self, signature: Signature) -> _Known:
        known = self._known.pop(signature, None) or _Known()
        self._known[signature] = known
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return known
