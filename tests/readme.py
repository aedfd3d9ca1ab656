"""Runs every block of README.md, in order, as a stranger would: `python -m tests.readme`.

A comment above a block changes how it runs: "runs in the background" (until the end; the next block waits until the
cluster that it belongs to answers) or "not run here". The addresses of the several machines become this one's.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from diffcluster.client import ApiError, Client

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(?:<!-- (?P<how>[^>]*?) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL)
_MACHINE = re.compile(r"\b10\.0\.0\.\d+\b")
_READY_S = 120.0


def main() -> int:
    """The number of blocks that failed."""
    failed, running = 0, []
    blocks = list(_BLOCK.finditer((ROOT / "README.md").read_text(encoding="utf-8")))
    try:
        for block in blocks:
            how, code = block["how"] or "", _MACHINE.sub("127.0.0.1", block["code"])
            print(f"--- {block['language']}{f' ({how})' if how else ''}\n{code}", flush=True)
            if how.startswith("runs in the background"):
                running.append(_start(code))
            elif not how.startswith("not run here"):
                _wait_for_urls(code)
                failed += _run(block["language"], code) != 0
    finally:
        for process in running:
            _end(process)
    skipped = sum((block["how"] or "").startswith("not run here") for block in blocks)
    print(f"{len(blocks) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return failed


def _start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-ec", f"exec {code}"], cwd=ROOT, start_new_session=True)


def _run(language: str, code: str) -> int:
    command = ["bash", "-ec", code] if language == "bash" else [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, timeout=600, check=False).returncode


def _wait_for_urls(code: str) -> None:
    """A block that names a router needs one that is ready."""
    for url in dict.fromkeys(re.findall(r"http://127\.0\.0\.1:\d+", code)):
        deadline = time.monotonic() + _READY_S
        with Client(url) as client:
            while True:
                try:
                    if client.get("/ready")["ready"]:
                        break
                except ApiError as error:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{url} is not ready: {error}") from error
                select.select([], [], [], 0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the leader, which ends its own children; what is left of its session is killed."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
