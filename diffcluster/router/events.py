"""What can happen to the router's machine. Time is seconds of one monotonic clock, and comes from outside."""

from __future__ import annotations

from msgspec import Struct

from diffcluster.ids import Incarnation, RequestId
from diffcluster.messages import GenerationParameters, RoleToRouter

__all__ = ["Announced", "Event", "GivenUp", "Gone", "Heard", "Submitted", "Tick"]


class Submitted(Struct, frozen=True):
    """A client asks for a picture. `deadline` is a time, not a duration."""

    request_id: RequestId
    parameters: GenerationParameters
    deadline: float
    now: float


class Heard(Struct, frozen=True):
    """A role said something. A `Done` is heard only when all its files have arrived."""

    sender: Incarnation
    message: RoleToRouter
    now: float
    announced: bool = False


class Announced(Struct, frozen=True):
    """A `Done` has arrived whose files are still under way. It counts as heard now; it is heard when they are here."""

    sender: Incarnation
    now: float


class Gone(Struct, frozen=True):
    """An instance cannot be reached any more. `full`: it is connected, and takes nothing: no fault of its requests."""

    instance: Incarnation
    now: float
    full: bool = False


class GivenUp(Struct, frozen=True):
    """A request was given up: its client left, or a picture of the same request failed."""

    request_id: RequestId
    reason: str
    now: float


class Tick(Struct, frozen=True):
    """Time has passed."""

    now: float


Event = Submitted | Heard | Announced | Gone | GivenUp | Tick
