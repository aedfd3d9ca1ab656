"""Log lines: time, level, process name, text. One set-up for every process."""

from __future__ import annotations

import logging
import sys

from diffcluster.config import LogLevel

__all__ = ["setup"]


def setup(level: LogLevel, name: str) -> None:
    """Send all log lines of this process to standard error, each marked with `name`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s [{name}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries below us speak at INFO of things that are not our users' business.
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "diffusers", "transformers", "accelerate"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
