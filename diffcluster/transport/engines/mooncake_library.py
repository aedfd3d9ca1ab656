"""The Mooncake library as we use it: loaded late, set up before it is loaded, its return codes turned into errors.

It is loaded when the first half of an engine is opened, in the process that will use it, and not before: it starts
threads that no child gets, so from then on the process must not fork without an exec (`spawn` is fine).

It reads most of its environment once, at that moment. What the operator has set stays, unless it is unsafe.
`DIFFCLUSTER_MOONCAKE_TRANSPORT` says what it moves bytes with: `tcp` (if not set) or `rdma`. The library itself takes
any name, says that all is well and does something else, so what we ask for is made sure of beforehand.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import MutableMapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Final, Literal, cast

from diffcluster.errors import ConfigError, TransferError

__all__ = ["VARIABLE", "Engine", "Status", "Transport", "check_version", "load", "prepare", "wanted_transport"]

Transport = Literal["tcp", "rdma"]
Status = Literal["pending", "done", "failed"]

VARIABLE: Final = "DIFFCLUSTER_MOONCAKE_TRANSPORT"
_SETTING: Final = "role.engine"
_DISTRIBUTIONS: Final = (
    "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13",
)  # fmt: skip
# Before, a write was reported done ahead of its arrival, and a peer could write anywhere in the process.
_FLOOR: Final = (0, 3, 12, 1)
_FLOOR_TEXT: Final = "0.3.12.post1"
_INSTALL: Final = (
    "install diffcluster[mooncake-cpu], or diffcluster[mooncake] on a machine with CUDA, and the system packages "
    "libibverbs1 libnuma1 libcurl4"
)
_DEFAULTS: Final = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TRANSFER_TIMEOUT": "15",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}
_LEAST_TRANSFER_S: Final = 5  # the library takes no less
_HCAS: Final = Path("/sys/class/infiniband")
_STATUS: Final[dict[int, Status]] = {0: "pending", 1: "done"}

_log = logging.getLogger(__name__)
_lock: Final = threading.Lock()
_loaded: _Loaded | None = None


class _Loaded:
    """The library in this process, and how it was set up."""

    def __init__(self, make: Any, transport: Transport, *, ipv6: bool) -> None:
        self.make, self.transport, self.ipv6, self.pid = make, transport, ipv6, os.getpid()


def load(*, ipv6: bool) -> Transport:
    """Load the library, if that was not done; what it moves bytes with.

    Raises:
        ConfigError: it is missing, too old, set up so that it is unsafe, or for the other IP version.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            transport = wanted_transport(os.environ)
            version = check_version()
            ipv6 = prepare(os.environ, transport, ipv6=ipv6)
            _loaded = _Loaded(_import(), transport, ipv6=ipv6)
            _log.info("mooncake %s, by %s", version, transport)
        if _loaded.pid != os.getpid():
            raise ConfigError(_SETTING, "mooncake was loaded before this process was forked, and does not work in it")
        if _loaded.ipv6 != ipv6:
            had, asked = ("IPv6", "IPv4") if _loaded.ipv6 else ("IPv4", "IPv6")
            raise ConfigError(_SETTING, f"mooncake uses {had} alone in this process, and cannot use {asked}, too")
        return _loaded.transport


def wanted_transport(environ: MutableMapping[str, str]) -> Transport:
    """What is asked for; raises ConfigError if it cannot be had. There is no silent other way."""
    wanted = environ.get(VARIABLE, "tcp")
    if wanted not in ("tcp", "rdma"):
        raise ConfigError(VARIABLE, f"must be tcp or rdma, got {wanted!r}")
    if wanted == "rdma" and not (_HCAS.is_dir() and any(_HCAS.iterdir())):
        raise ConfigError(VARIABLE, f"rdma needs a host channel adapter, and there is none in {_HCAS}")
    return cast("Transport", wanted)


def check_version() -> str:
    """The version that is installed; raises ConfigError if that is none, an unsafe one, or more than one."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not found:
        raise ConfigError(_SETTING, f"mooncake is not installed: {_INSTALL}")
    if len(found) > 1:
        raise ConfigError(_SETTING, f"{' and '.join(found)} overwrite each other: uninstall all, then install one")
    name, version = found.popitem()
    parts = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version)
    if parts is None or tuple(int(part or 0) for part in parts.groups()) < _FLOOR:
        raise ConfigError(_SETTING, f"{name} is {version}, and loses data before {_FLOOR_TEXT}: install a newer one")
    return version


def prepare(environ: MutableMapping[str, str], transport: Transport, *, ipv6: bool) -> bool:
    """Set what the library will read; whether it will use IPv6, and that alone."""
    if environ.get("MC_TCP_PROTO"):
        raise ConfigError("MC_TCP_PROTO", "makes mooncake report writes as done that have not arrived: unset it")
    for name, value in _DEFAULTS.items():
        environ.setdefault(name, value)
    progress, total = (_seconds(environ, name) for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TRANSFER_TIMEOUT"))
    total = max(total, _LEAST_TRANSFER_S)
    if progress >= total:
        # Else a write that stalls late is given up while the library still reads what was to be sent.
        safe = str(max(total // 3, 1))
        _log.warning("MC_TCP_PROGRESS_TIMEOUT_SEC must be below MC_TRANSFER_TIMEOUT (%d): taking %s", total, safe)
        environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = safe
    if transport == "tcp":
        environ["MC_FORCE_TCP"] = "1"
    elif "MC_FORCE_TCP" in environ:
        raise ConfigError("MC_FORCE_TCP", f"contradicts {VARIABLE}=rdma: unset one of them")
    if ipv6:
        environ["MC_USE_IPV6"] = "1"
    return "MC_USE_IPV6" in environ


def _seconds(environ: MutableMapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", environ[name]):
        raise ConfigError(name, f"must be a whole number of seconds, at least 1, got {environ[name]!r}")
    return int(environ[name])


def _import() -> Any:
    try:
        return import_module("mooncake.engine").TransferEngine
    except (ImportError, OSError) as error:
        raise ConfigError(_SETTING, f"mooncake cannot be loaded ({error}): {_INSTALL}") from error


class Engine:
    """One engine of the library: its threads, its ports, its registered memory. `load` comes first.

    The library's listeners take connections on all addresses of the machine; that cannot be narrowed.
    """

    def __init__(self, host: str, setting: str) -> None:
        """`host` is what peers are told; `setting` is where it was written down."""
        assert _loaded is not None
        self.transport: Final = _loaded.transport
        self._library = _loaded.make()
        code = self._library.initialize(join_host(host), "P2PHANDSHAKE", self.transport, "")
        if code != 0:
            self.close()
            raise ConfigError(setting, f"mooncake cannot start for {host} by {self.transport} (code {code})")

    @property
    def port(self) -> int:
        """Where peers begin."""
        return int(self._library.get_rpc_port())

    def register(self, address: int, nbytes: int, setting: str, *, device: bool = False) -> None:
        """Let the engine use this memory, and peers write and read it. The caller keeps it mapped until `close`."""
        code = self._library.register_memory(address, nbytes)
        if code == 0:
            return
        advice = ""
        if device:
            advice = ": memory of a device needs the nvidia_peermem module, or WITH_NVIDIA_PEERMEM=0 and dma-buf"
        elif self.transport == "rdma":
            advice = ": memory for RDMA is locked, which `ulimit -l` must allow"
        raise ConfigError(setting, f"mooncake cannot register {nbytes} bytes (code {code}){advice}")

    def submit(self, peer: str, source: int, target: int, nbytes: int) -> int:
        """Begin a write of `nbytes` from our address `source` to the peer's `target`; its number for `status`.

        The first one to a peer waits, for up to 60 s, until that has answered.
        """
        number = int(self._library.transfer_submit_write(peer, source, target, nbytes))
        if number == 0:
            raise TransferError(f"mooncake took no write to {peer}", settled=False, source_held=True)
        return number

    def status(self, number: int) -> Status:
        """How a write is doing. What is over is forgotten, and must not be asked about again."""
        return _STATUS.get(self._library.transfer_check_status(number), "failed")

    def close(self) -> None:
        """End its threads and give up writes that are under way: none of them reads its source after this.

        The library has no call for it, only the last reference that goes, and holds the interpreter's lock for the up
        to 1 s that it takes.
        """
        self._library = None


def join_host(host: str) -> str:
    """The form in which the library, and an address with a port, take a host."""
    return f"[{host}]" if ":" in host else host
