"""What router and roles say to each other: two closed unions of frozen structs.

Rules of change within a protocol version: fields may be added with a default, never renamed or removed; anything else
raises `PROTOCOL_VERSION`. Nothing here holds tensor bytes. Every message about a request names the request and the
`attempt`, so that what an earlier attempt still says changes nothing. The sender is known from the socket.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from diffcluster.errors import FailureCode
from diffcluster.ids import NAME_PATTERN, HostId, Incarnation, InstanceName, LeaseId, RequestId, Role
from diffcluster.tensors import Manifest
from diffcluster.values import (
    Checksum,
    Count,
    EngineKind,
    ExtraArgument,
    FileInfo,
    GenerationParameters,
    InputImage,
    ModelFacts,
    OutputFormat,
    Peer,
    Seconds,
    Session,
    SlotAddress,
    StageTimings,
    TaskKind,
    Text,
    VideoFacts,
)  # fmt: skip

__all__ = [
    "MISSED_HEARTBEATS", "PROTOCOL_VERSION", "Allocate", "Allocated", "AllocationRefused", "BulkPiece", "Cancel",
    "Cancelled", "Done", "Drain", "Drained", "EngineKind", "Evict", "Evicted", "ExtraArgument", "Failed", "FileInfo",
    "GenerationParameters", "Grant", "InputImage", "Meet", "Met", "ModelFacts", "OutputFormat", "Part", "Peer",
    "Progress", "Push", "PushFailed", "Pushed", "Ready", "Refused", "Register", "Registered", "Release",
    "RoleHeartbeat", "RoleToRouter", "RouterHeartbeat", "RouterToRole", "Session", "SlotAddress", "StageTimings",
    "Staged", "Submit", "TaskKind", "Ungrant", "VideoFacts",
]  # fmt: skip

PROTOCOL_VERSION: Final = 3
MISSED_HEARTBEATS: Final = 3
"""After so many intervals without a word each side takes the other for lost."""


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """Base of all messages: tagged by class name, closed."""


class _OfRequest(_Message, frozen=True):
    """Base of messages about one attempt at one request."""

    request_id: Annotated[RequestId, Meta(min_length=1, max_length=64)]
    attempt: Annotated[int, Meta(ge=1, le=1000)]


# ---------------------------------------------------------------- role to router


class Register(_Message, frozen=True):
    """A role is there, has loaded its model and takes work. Sent again until it is answered."""

    version: int
    role: Role
    name: Annotated[InstanceName, Meta(pattern=NAME_PATTERN)]
    incarnation: Annotated[Incarnation, Meta(pattern=r"^[0-9a-f]{32}$")]
    host: Annotated[HostId, Meta(max_length=256)]
    model: ModelFacts
    components: dict[str, Count]
    """Bytes of parameters and buffers of each component that this role loaded; 0 for those without weights."""
    device: str
    dtype: str
    threads: Count
    pid: Count
    sessions: tuple[Session, ...]
    slot_bytes: Count
    """Size of the region that peers write into; 0 for a role that receives nothing."""
    max_outstanding: Annotated[int, Meta(ge=1, le=10_000)]
    """How many requests the router may have given to this instance at one time."""


class RoleHeartbeat(_Message, frozen=True):
    """An instance lives, and how it is doing. Bytes are of its receive and send regions.

    `said` counts the messages it has sent since it registered afresh, heartbeats apart. A connection that breaks loses
    what was under way, so the router compares it with what it heard. `cut`: the same went wrong in the other direction.
    """

    queued: Count
    running: Count
    receive_free: Count
    receive_quarantined: Count
    send_free: Count
    resident_bytes: Count
    receive_largest: Count = 0
    """Largest free range: together with `receive_free`, how fragmented the region is."""
    granted: Count = 0
    """Slots that were leased ahead and are not used yet."""
    said: Count = 0
    cut: bool = False
    computed: Annotated[dict[str, Count], Meta(max_length=256)] = {}
    """Since it started: module calls made (`calls`), requests in them (`requests`), and why no more requests were in
    them (`reason:...`, see `roles/batching.py`)."""


class Staged(_OfRequest, frozen=True):
    """A stage has finished; its output lies in a send slot and stays there until `Release`."""

    manifest: Manifest
    scalars: dict[str, float | int | str]
    timings: StageTimings
    checksum: Checksum | None = None


class Grant(_Message, frozen=True):
    """A receive slot is leased ahead, for any request whose tensors fit: the router need not ask for one."""

    slot: SlotAddress


class Met(_Message, frozen=True):
    """Answer to `Meet`: transfers to `receiver` go by `engine`; or none works, and `reason` says why."""

    receiver: Annotated[Incarnation, Meta(pattern=r"^[0-9a-f]{32}$")]
    engine: EngineKind | None
    reason: Text = ""


class Allocated(_OfRequest, frozen=True):
    """A receive slot is leased for the request."""

    slot: SlotAddress


class AllocationRefused(_OfRequest, frozen=True):
    """No slot. `permanent` when none of that size can ever be had here."""

    permanent: bool
    reason: Text


class Pushed(_OfRequest, frozen=True):
    """All bytes are in the memory of `receiver`."""

    receiver: Incarnation
    lease: LeaseId
    engine: EngineKind
    nbytes: Count
    seconds: Seconds


class PushFailed(_OfRequest, frozen=True):
    """The bytes are not all there. `settled`: none of them can arrive any more."""

    receiver: Incarnation
    lease: LeaseId
    settled: bool
    reason: Text


class Progress(_OfRequest, frozen=True):
    """`step` of `steps` denoising steps are done."""

    step: Count
    steps: Count


class Done(_OfRequest, frozen=True):
    """The last stage has finished; the files' bytes travel on the bulk connection."""

    files: Annotated[tuple[FileInfo, ...], Meta(max_length=64)]
    timings: StageTimings


class Failed(_OfRequest, frozen=True):
    """A stage gave up; the instance lives on and holds nothing of the request."""

    code: FailureCode
    reason: Text


class Cancelled(_OfRequest, frozen=True):
    """Answer to `Cancel`: the instance holds nothing of the request any more."""


class Evicted(_OfRequest, frozen=True):
    """Answer to `Evict`: the lease is over; its bytes are free, or quarantined until nothing can be written to them."""

    lease: LeaseId
    quarantined: bool


class Drain(_Message, frozen=True):
    """From a role: give me nothing new, I want to leave. To a role: finish, then leave."""


class BulkPiece(_Message, frozen=True):
    """Heads one piece of a finished file on the bulk connection; the bytes are the next frame."""

    request_id: Annotated[RequestId, Meta(min_length=1, max_length=64)]
    attempt: Annotated[int, Meta(ge=1, le=1000)]
    file: Annotated[int, Meta(ge=0, le=63)]
    offset: Count


# ---------------------------------------------------------------- router to role


class Registered(_Message, frozen=True):
    """Accepted. A side that hears nothing for three intervals takes the other for lost.

    `fresh`: the router knows of nothing that this instance holds, so whatever that is, it is to be given up.
    """

    fresh: bool
    heartbeat_s: Annotated[float, Meta(gt=0)]
    bulk_port: Annotated[int, Meta(ge=1, le=65535)]


class Refused(_Message, frozen=True):
    """Not accepted. `again`: register once more, the router does not know you; else leave."""

    again: bool
    reason: Text


class RouterHeartbeat(_Message, frozen=True):
    """The router lives and knows you. `said`: how many messages it has sent you since you registered afresh."""

    said: Count = 0


class Submit(_OfRequest, frozen=True):
    """To the first stage: compute this."""

    parameters: GenerationParameters


class Allocate(_OfRequest, frozen=True):
    """To a receiver: lease a receive slot."""

    nbytes: Count


class Ungrant(_Message, frozen=True):
    """To a receiver: these grants are not needed, and nobody was told of them. Their bytes are free at once."""

    leases: tuple[LeaseId, ...]


class Meet(_Message, frozen=True):
    """To a sender: you will be asked to write to this peer. Connect, and prove that writes arrive, beforehand."""

    peer: Peer


class Part(_Message, frozen=True):
    """To a sender: that peer is gone. Give up the connections to it."""

    receiver: Incarnation


class Push(_OfRequest, frozen=True):
    """To a sender: write the staged bytes into that slot of that peer."""

    peer: Peer
    slot: SlotAddress


class Ready(_OfRequest, frozen=True):
    """To a receiver: the slot holds all bytes; load them and compute."""

    lease: LeaseId
    manifest: Manifest
    scalars: dict[str, float | int | str]
    parameters: GenerationParameters
    checksum: Checksum | None = None


class Release(_OfRequest, frozen=True):
    """To a sender: the staged slot is no longer needed."""


class Evict(_OfRequest, frozen=True):
    """To a receiver: the lease ends without use. `settled`: nobody can be writing into it any more."""

    lease: LeaseId
    settled: bool


class Cancel(_OfRequest, frozen=True):
    """Stop at the next step and forget the request."""


class Drained(_Message, frozen=True):
    """Nothing of yours is needed any more: go."""


RoleToRouter = (
    Register | RoleHeartbeat | Staged | Grant | Met | Allocated | AllocationRefused | Pushed | PushFailed | Progress
    | Done | Failed | Cancelled | Evicted | Drain
)  # fmt: skip

RouterToRole = (
    Registered | Refused | RouterHeartbeat | Submit | Allocate | Ungrant | Meet | Part | Push | Ready | Release | Evict
    | Cancel | Drain | Drained
)  # fmt: skip
