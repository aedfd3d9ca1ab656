"""Small rules of a role's control thread, as functions."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from diffcluster.errors import ConfigError
from diffcluster.messages import MISSED_HEARTBEATS, Pushed, PushFailed, Session
from diffcluster.roles import jobs

if TYPE_CHECKING:
    from diffcluster.config import RoleConfig
    from diffcluster.transport.prefetch import LoadResult
    from diffcluster.transport.push import PushResult

__all__ = ["Leave", "check_quarantine", "load_ended", "new_token", "push_ended"]


class Leave:
    """Posted to the control thread when the process was asked to end."""


def check_quarantine(config: RoleConfig, sessions: Sequence[Session], heartbeat_s: float) -> None:
    """Raise `ConfigError` if a slot could be used again before an engine that cannot be fenced has let go of it.

    A sender that was struck off may act upon a `Push` until it notices, and then for as long as a transfer may take.
    """
    needed = config.transfer_timeout_s + (1 + MISSED_HEARTBEATS) * heartbeat_s
    if any(session.kind == "mooncake" for session in sessions) and config.quarantine_s <= needed:
        problem = f"must be more than a transfer's time-out and {1 + MISSED_HEARTBEATS} heartbeats, {needed} s in all"
        raise ConfigError("role.quarantine_s", f"{problem}, got {config.quarantine_s}")


def new_token() -> str:
    """An unguessable capability for one slot."""
    return secrets.token_hex(16)


def load_ended(result: LoadResult) -> jobs.Loaded | jobs.LoadFailed:
    """What the machine hears of a load."""
    key = (result.ready.request_id, result.ready.attempt)
    if result.tensors is None:
        return jobs.LoadFailed(key, result.code, result.error)
    return jobs.Loaded(key, result.seconds)


def push_ended(result: PushResult) -> jobs.PushEnded:
    """What the machine and the router hear of a push."""
    push = result.push
    answer: Pushed | PushFailed
    if result.error or result.engine is None:
        answer = PushFailed(
            request_id=push.request_id,
            attempt=push.attempt,
            receiver=push.peer.incarnation,
            lease=push.slot.lease,
            settled=result.settled,
            reason=result.error[:4096],
        )
    else:
        answer = Pushed(
            request_id=push.request_id,
            attempt=push.attempt,
            receiver=push.peer.incarnation,
            lease=push.slot.lease,
            engine=result.engine,
            nbytes=result.nbytes,
            seconds=result.seconds,
        )
    return jobs.PushEnded(push, answer, result.source_held)
