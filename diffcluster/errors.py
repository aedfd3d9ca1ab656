"""Every failure that diffcluster knows, as one tree.

    DiffclusterError
    ├── ConfigError            a setting is wrong; names its dotted path            (whoever started the process)
    ├── ModelError             a model directory is missing, incomplete, unsupported (whoever started the process)
    ├── AddressInUseError      a port is taken; names it                              (whoever started the process)
    ├── WireError              a frame is not one of ours: counted, the peer refused  (the peer)
    │   └── ManifestError      a manifest does not describe what its slot can hold    (the peer)
    ├── LedgerError            we used a lease in a way its state forbids: a bug      (this process)
    ├── TransferError          bytes did not reach a peer; says whether they still may (the link)
    └── RequestError           ends one request, and nothing else; has an HTTP face
        ├── InvalidRequestError     400  the client's fault; names the field
        ├── InvalidImageError       400  a picture that the client sent cannot be read; names the field
        ├── ModelNotFoundError      404
        ├── NotFoundError           404
        ├── ConflictError           409  not as things are
        ├── QueueFullError          429
        ├── WorkerFailedError       500  a role could not compute it
        ├── TransferFailedError  500  its tensors did not reach the next stage whole, however often it was tried
        ├── NanOutputError          500  the computation gave values that are no picture
        ├── OutOfMemoryError        500
        ├── NoInstanceError         503
        ├── DeadlineError           504
        └── CancelledError          499  nobody waits for it any more

Who owns a failure, and what follows from it, is the table in docs/protocol.md.
"""

from __future__ import annotations

from typing import ClassVar, Literal

__all__ = [
    "AddressInUseError",
    "CancelledError",
    "ConfigError",
    "ConflictError",
    "DeadlineError",
    "DiffclusterError",
    "FailureCode",
    "InvalidImageError",
    "InvalidRequestError",
    "LedgerError",
    "ManifestError",
    "ModelError",
    "ModelNotFoundError",
    "NanOutputError",
    "NoInstanceError",
    "NotFoundError",
    "OutOfMemoryError",
    "QueueFullError",
    "RequestError",
    "TransferError",
    "TransferFailedError",
    "WireError",
    "WorkerFailedError",
    "request_error",
]

FailureCode = Literal[
    "invalid_value",
    "invalid_image",
    "model_not_found",
    "not_found",
    "conflict",
    "queue_full",
    "worker_error",
    "transfer_failed",
    "nan_output",
    "out_of_memory",
    "no_instance",
    "deadline_exceeded",
    "cancelled",
]


class DiffclusterError(Exception):
    """Root of all our errors."""


class ConfigError(DiffclusterError):
    """A setting is wrong. `path` is where it stands, such as `router.http_port`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class ModelError(DiffclusterError):
    """A model directory cannot be served. `component` is the part that is wrong, or "" for the whole."""

    def __init__(self, component: str, problem: str) -> None:
        super().__init__(f"{component}: {problem}" if component else problem)
        self.component = component


class AddressInUseError(DiffclusterError):
    """Something else listens at an address that we were told to take."""


class WireError(DiffclusterError):
    """Bytes from a peer are not a message of this protocol version."""


class ManifestError(WireError):
    """A manifest contradicts itself, or the slot it is for."""


class LedgerError(DiffclusterError):
    """A lease was used in a way that its state forbids. The ledger is unchanged."""


class TransferError(DiffclusterError):
    """A transfer failed.

    `settled`: no byte of it can arrive any more. `source_held`: the engine may still read what was to be sent.
    """

    def __init__(self, problem: str, *, settled: bool, source_held: bool = False) -> None:
        super().__init__(problem)
        self.settled, self.source_held = settled, source_held


class RequestError(DiffclusterError):
    """Ends one request. Subclasses fix how it looks over HTTP."""

    code: ClassVar[FailureCode]
    status: ClassVar[int]
    kind: ClassVar[str]
    should_retry: ClassVar[bool] = False
    """Whether sending the same request again can help. Tells clients not to burn an accelerator twice."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """The client asked for something that cannot be; `param` names the field."""

    code, status, kind = "invalid_value", 400, "invalid_request_error"


class InvalidImageError(RequestError):
    """A picture that the client sent is none, is broken, or too large; `param` names the field."""

    code, status, kind = "invalid_image", 400, "invalid_request_error"


class ModelNotFoundError(RequestError):
    """No registered role serves the model that was named."""

    code, status, kind = "model_not_found", 404, "invalid_request_error"


class NotFoundError(RequestError):
    """There is nothing of that name."""

    code, status, kind = "not_found", 404, "invalid_request_error"


class ConflictError(RequestError):
    """It cannot be done in the state that the thing is in."""

    code, status, kind = "conflict", 409, "invalid_request_error"


class QueueFullError(RequestError):
    """As many requests wait as the router holds."""

    code, status, kind, should_retry = "queue_full", 429, "rate_limit_error", True


class WorkerFailedError(RequestError):
    """A role failed while it worked on the request."""

    code, status, kind = "worker_error", 500, "server_error"


class TransferFailedError(RequestError):
    """Its tensors did not reach the next stage, or not as they were sent."""

    code, status, kind, should_retry = "transfer_failed", 500, "server_error", True


class NanOutputError(RequestError):
    """The result holds NaN or infinity. It would have been a black picture."""

    code, status, kind = "nan_output", 500, "server_error"


class OutOfMemoryError(RequestError):
    """The request needs more memory than a role has."""

    code, status, kind = "out_of_memory", 500, "server_error"


class NoInstanceError(RequestError):
    """No instance of a role that the request needs is there."""

    code, status, kind, should_retry = "no_instance", 503, "server_error", True


class DeadlineError(RequestError):
    """The request did not end in its time."""

    code, status, kind = "deadline_exceeded", 504, "timeout_error"


class CancelledError(RequestError):
    """The request was given up, by its client or with a sibling that failed."""

    code, status, kind = "cancelled", 499, "invalid_request_error"


_BY_CODE: dict[str, type[RequestError]] = {cls.code: cls for cls in RequestError.__subclasses__()}


def request_error(code: FailureCode, message: str, param: str | None = None) -> RequestError:
    """The error that `code` stands for on the wire."""
    return _BY_CODE[code](message, param=param)
