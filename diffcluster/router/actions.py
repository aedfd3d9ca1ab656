"""What the router's machine wants done."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from diffcluster.errors import FailureCode
from diffcluster.ids import Incarnation, InstanceName, RequestId, Role
from diffcluster.messages import EngineKind, RouterToRole

__all__ = ["Action", "Count", "Discard", "Fail", "Finish", "Note", "Send", "StageRecord"]


class StageRecord(Struct, frozen=True):
    """How one stage of a request went. Seconds; `engine`, `transfer_s` and `transferred` are of the way in."""

    role: Role
    instance: InstanceName
    queued_s: float
    loaded_s: float
    computed_s: float
    engine: EngineKind | None = None
    transfer_s: float = 0.0
    transferred: int = 0


class Send(Struct, frozen=True):
    """Tell an instance."""

    to: Incarnation
    message: RouterToRole


class Finish(Struct, frozen=True):
    """Answer the client with the files that `instance` sent for this attempt."""

    request_id: RequestId
    instance: Incarnation
    attempt: int
    stages: tuple[StageRecord, ...]


class Fail(Struct, frozen=True):
    """Answer the client with an error."""

    request_id: RequestId
    code: FailureCode
    message: str


class Discard(Struct, frozen=True):
    """Drop files that arrived for an attempt that nobody waits for."""

    request_id: RequestId
    instance: Incarnation
    attempt: int


class Count(Struct, frozen=True):
    """Something happened that a metric counts."""

    what: Literal[
        "stale",
        "refused",
        "lost",
        "restarted",
        "registered",
        "push_failed",
        "allocation_refused",
        "grant_used",
        "grant_missed",
    ]
    detail: str = ""


class Note(Struct, frozen=True):
    """Worth a log line."""

    text: str
    warning: bool = False


Action = Send | Finish | Fail | Discard | Count | Note
