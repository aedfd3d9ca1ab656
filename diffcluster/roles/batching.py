"""Who computes together: which of the calls that wait are made as one. Pure.

The request that leads is the one of the highest priority; of those, the one whose client waits for the shortest time
still; of those, the oldest. A priority rises with the time that a request was not served, so that nobody starves. All
calls that can be made together with the leader's come along, in the same order, as long as there is room and as long
as more samples are worth more time (`costs`). Every decision is counted under its reason:

    max_size          no more requests may compute together
    cost              one more would have taken as long as by itself, and the others would have waited for it
    memory            one more would not have fitted, as an earlier batch of that size did not
    inexact           so many together do not give each the same bits as alone (only if the policy demands it)
    incompatible:F    the next request's argument F differs
    alone:WHY         the module's calls are never joined
    delay             the leader waited for company, and none is left to come
    ready             all that waited came along
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

__all__ = ["Candidate", "Costs", "Decision", "Policy", "Signature", "choose", "difference"]


class Signature(Struct, frozen=True):
    """What must be equal in calls that are joined: the module, and (argument, kind) of each leaf."""

    module: str
    fields: tuple[tuple[str, object], ...]
    alone: str = ""


class Candidate(Struct, frozen=True):
    """A request whose call waits. Times are monotonic seconds; `waits_since` begins when its last call was answered."""

    key: object
    signature: Signature
    samples: int
    units: int
    started: float
    waits_since: float
    priority: int = 0
    due: float = float("inf")


class Policy(Struct, frozen=True):
    """Settings. `delay_s`: how long a first call may wait for company. `aging_s`: after each such time without being
    served a request's priority rises by one. `exact`: calls are joined only where that changes no bit of any answer.
    """

    max_size: int = 8
    delay_s: float = 0.0
    aging_s: float = 10.0
    exact: bool = False


class Costs(Protocol):
    """What is known of the time and memory of joined calls."""

    def fits(self, signature: Signature, samples: int) -> bool:
        """False if that many did not fit before."""

    def worthwhile(self, signature: Signature, samples: int, more: int) -> bool:
        """Whether `more` samples take less time if they come along with `samples` than apart."""

    def may_be_exact(self, signature: Signature, samples: int, calls: int) -> bool:
        """False if so many calls, each of `samples`, are known to give other bits than each alone."""


class Decision(Struct, frozen=True):
    """Make the calls of `keys` together; none if the best is to wait until `wait_until`. `reasons`: why not more."""

    keys: tuple[object, ...]
    reasons: tuple[str, ...]
    wait_until: float | None = None


def choose(candidates: Sequence[Candidate], policy: Policy, costs: Costs, now: float, running: int) -> Decision:
    """What to do next. `candidates` must not be empty; `running` counts all requests that this role computes now."""
    ranked = sorted(candidates, key=lambda candidate: _rank(candidate, policy, now))
    leader = ranked[0]
    batch, reasons = [leader], []
    samples = leader.samples
    for other in ranked[1:]:
        reason = _objection(leader, other, len(batch), samples, policy, costs)
        if reason is None:
            batch.append(other)
            samples += other.samples
        else:
            reasons.append(reason)
            if reason == "max_size":
                break
    wait_until = leader.waits_since + policy.delay_s
    if policy.delay_s and not leader.signature.alone and running == len(batch) < policy.max_size:
        if now < wait_until:
            return Decision((), (), wait_until)
        reasons.append("delay")
    return Decision(tuple(candidate.key for candidate in batch), tuple(reasons) or ("ready",))


def difference(one: Signature, other: Signature) -> str:
    """The first argument in which two signatures differ."""
    if one.module != other.module:
        return "module"
    for (name, kind), (other_name, other_kind) in zip(one.fields, other.fields, strict=False):
        if (name, kind) != (other_name, other_kind):
            return name
    return "arguments"


def _rank(candidate: Candidate, policy: Policy, now: float) -> tuple[float, float, float]:
    aged = (now - candidate.waits_since) // policy.aging_s
    return -(candidate.priority + aged), candidate.due, candidate.started


def _objection(
    leader: Candidate, other: Candidate, size: int, samples: int, policy: Policy, costs: Costs
) -> str | None:
    """Why `other` does not come along; None if it does."""
    if leader.signature.alone:
        return f"alone:{leader.signature.alone}"
    if other.signature != leader.signature:
        return f"incompatible:{difference(leader.signature, other.signature)}"
    if size >= policy.max_size:
        return "max_size"
    if policy.exact and other.samples != leader.samples:
        return "incompatible:samples"
    if policy.exact and not costs.may_be_exact(leader.signature, leader.samples, size + 1):
        return "inexact"
    if not costs.fits(leader.signature, samples + other.samples):
        return "memory"
    return None if costs.worthwhile(leader.signature, samples, other.samples) else "cost"
