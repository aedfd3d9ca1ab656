"""The prefetch thread: brings a request's tensors from their slot to the device while the request before computes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from msgspec import Struct

from diffcluster.errors import FailureCode, ManifestError
from diffcluster.messages import Ready
from diffcluster.tensors import Manifest
from diffcluster.transport.checksum import checksum_of
from diffcluster.transport.mailbox import Mailbox
from diffcluster.transport.packing import Memory

__all__ = ["LoadResult", "Prefetcher"]

_log = logging.getLogger(__name__)


class Loader(Protocol):
    """Copies a slot's tensors to the device, and returns when they are there."""

    def __call__(self, manifest: Manifest, source: Memory) -> dict[str, torch.Tensor]:
        """Tensors of their own: the slot may be reused at once."""


class LoadResult(Struct, frozen=True):
    """Tensors on the device, or why not. `seconds` is the time that the load took."""

    ready: Ready
    seconds: float
    tensors: dict[str, torch.Tensor] | None
    error: str = ""
    code: FailureCode = "worker_error"


class Prefetcher:
    """Owns the copy stream inwards. Reports each load once, to `report`, which must be a mailbox's post."""

    def __init__(self, loader: Loader, report: Callable[[LoadResult], Any]) -> None:
        self._loader, self._report = loader, report
        self._inbox: Mailbox[tuple[Ready, Memory] | None] = Mailbox()
        self._thread = threading.Thread(target=self._run, name="prefetch")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def load(self, ready: Ready, source: Memory) -> None:
        """Load the tensors that `ready` describes from `source`, the whole slot."""
        if not self._inbox.post((ready, source)):
            self._report(LoadResult(ready, 0.0, None, "too many loads are waiting"))

    def stop(self) -> None:
        """Finish the load under way, and end the thread."""
        self._inbox.post(None)
        self._thread.join()
        self._inbox.close()

    def _run(self) -> None:
        while True:
            for item in self._inbox.take():
                if item is None:
                    return
                self._report(self._load(*item))

    def _load(self, ready: Ready, source: Memory) -> LoadResult:
        started = time.monotonic()
        try:
            _verify(ready, source)
            tensors = self._loader(ready.manifest, source)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request and not the thread
            _log.warning("loading the input of %s failed: %s", ready.request_id, error)
            code: FailureCode = "transfer_failed" if isinstance(error, ManifestError) else "worker_error"
            return LoadResult(ready, time.monotonic() - started, None, f"{type(error).__name__}: {error}", code)
        return LoadResult(ready, time.monotonic() - started, tensors)


def _verify(ready: Ready, source: Memory) -> None:
    if ready.checksum is None:
        return
    found = checksum_of(source[: ready.manifest.nbytes])
    if found != ready.checksum:
        raise ManifestError(f"the bytes that arrived have checksum {found}, those that were sent {ready.checksum}")
