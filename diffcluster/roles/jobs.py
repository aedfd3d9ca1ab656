"""The vocabulary of a role's state machine: its jobs, what can happen to them, and what can be done about it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from diffcluster.errors import FailureCode
from diffcluster.ids import LeaseId, RequestId
from diffcluster.messages import (
    Allocate,
    Cancel,
    Evict,
    FileInfo,
    GenerationParameters,
    Push,
    Pushed,
    PushFailed,
    Ready,
    Release,
    RoleToRouter,
    SlotAddress,
    Submit,
    Ungrant,
)  # fmt: skip
from diffcluster.tensors import Manifest

__all__ = [
    "Action",
    "CancelCompute",
    "CloseWindow",
    "ComputeEnded",
    "ComputeFailed",
    "Computed",
    "Event",
    "Forget",
    "Job",
    "Joined",
    "Key",
    "LoadFailed",
    "Loaded",
    "OpenWindow",
    "Phase",
    "PushEnded",
    "SealWindow",
    "Send",
    "StartCompute",
    "StartLoad",
    "StartPush",
    "Tick",
    "WindowClosed",
]  # fmt: skip

Key = tuple[RequestId, int]
"""A request and which attempt at it."""

Phase = Literal["leased", "ready", "loading", "loaded", "computing", "packing", "staged"]


class Job(Struct):
    """One request in this role. `output` is its send lease, `slot` its receive slot."""

    key: Key
    phase: Phase
    since: float
    slot: SlotAddress | None = None
    ready: Ready | None = None
    parameters: GenerationParameters | None = None
    output: LeaseId | None = None
    pushing: int = 0
    source_held: bool = False
    """Whether an engine may still read `output` after a push that failed."""
    gone: bool = False
    """Cancelled or released while a thread still uses something of it."""
    queued_s: float = 0.0
    loaded_s: float = 0.0


# ---------------------------------------------------------------- events: reports of the worker threads


class Loaded(Struct, frozen=True):
    """The prefetch thread has copied a request's tensors to the device."""

    key: Key
    seconds: float


class LoadFailed(Struct, frozen=True):
    """The prefetch thread could not. `code` is `transfer_failed` if the bytes are not those that were sent."""

    key: Key
    code: FailureCode
    reason: str


class ComputeEnded(Struct, frozen=True):
    """The compute thread is free for the next request, while this one's output is being written to its lease."""

    key: Key


class Computed(Struct, frozen=True):
    """The output is in its lease (`manifest`), or files were made. `seconds` were spent computing."""

    key: Key
    seconds: float
    manifest: Manifest | None
    scalars: dict[str, float | int | str]
    files: tuple[FileInfo, ...]
    checksum: str | None = None


class ComputeFailed(Struct, frozen=True):
    """The compute thread gave up on a request; `code` is `cancelled` if it was told to."""

    key: Key
    code: FailureCode
    reason: str


class PushEnded(Struct, frozen=True):
    """The push thread has finished with a transfer. `source_held`: its engine may still read the output."""

    push: Push
    answer: Pushed | PushFailed
    source_held: bool


class WindowClosed(Struct, frozen=True):
    """Peers are locked out of a receive slot. `fenced`: nobody can be writing into it any more.

    `key` is None if the router need not hear of it.
    """

    key: Key | None
    lease: LeaseId
    fenced: bool


class Tick(Struct, frozen=True):
    """Time has passed. `writers` says of quarantined receive slots what their engines know: False that nobody can be
    writing any more, True that somebody may be; of one that is not named, only its time tells.
    """

    writers: dict[LeaseId, bool] = {}


class Joined(Struct, frozen=True):
    """The router has taken this instance in, and knows of nothing that it holds."""


Event = (
    Submit | Allocate | Ungrant | Push | Ready | Release | Evict | Cancel
    | Loaded | LoadFailed | Computed | ComputeEnded | ComputeFailed | PushEnded | WindowClosed | Tick | Joined
)  # fmt: skip


# ---------------------------------------------------------------- actions


class Send(Struct, frozen=True):
    """Tell the router."""

    message: RoleToRouter


class OpenWindow(Struct, frozen=True):
    """Let peers write into a receive slot."""

    slot: SlotAddress


class CloseWindow(Struct, frozen=True):
    """Lock peers out, and report `WindowClosed`. `settled`: the router knows that nobody writes."""

    key: Key | None
    slot: SlotAddress
    settled: bool


class SealWindow(Struct, frozen=True):
    """Lock peers out of a slot whose content is complete."""

    slot: SlotAddress


class StartLoad(Struct, frozen=True):
    """Prefetch thread: load the slot."""

    ready: Ready
    slot: SlotAddress


class StartCompute(Struct, frozen=True):
    """Compute thread: run, and write the output to `output`."""

    key: Key
    parameters: GenerationParameters
    ready: Ready | None
    output: tuple[int, int] | None
    """Offset and size of the reserved send lease."""


class CancelCompute(Struct, frozen=True):
    """Compute thread: stop at the next step."""

    key: Key


class StartPush(Struct, frozen=True):
    """Push thread: write the bytes at offset .. offset + nbytes of the send region."""

    push: Push
    offset: int
    nbytes: int


class Forget(Struct, frozen=True):
    """Drop the tensors that were loaded for a request."""

    key: Key


Action = Send | OpenWindow | CloseWindow | SealWindow | StartLoad | StartCompute | CancelCompute | StartPush | Forget
