"""Which host this is: equal ids mean that two processes can share memory over an abstract Unix socket."""

from __future__ import annotations

import os
from pathlib import Path

from diffcluster.ids import HostId

__all__ = ["host_id"]


def host_id() -> HostId:
    """The kernel's boot id, and the network namespace, which bounds abstract sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return HostId(f"{boot}/{os.stat('/proc/self/ns/net').st_ino}")
