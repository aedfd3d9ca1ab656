"""Peer processes, as seen by the tests: see `peer` for what they can be told."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from diffcluster.messages import EngineKind, Session
from tests.transport.kit import until

ANSWER_S = 20.0
ROOT = Path(__file__).parents[2]


class Peer:
    """A running peer. `session` is that of a receiver."""

    session: Session

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.transport.peer", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd=ROOT)

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    def hear(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        assert ready, "the peer says nothing"
        return self.process.stdout.readline().decode().strip()

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.hear()

    def freeze(self) -> None:
        """Return when all of its threads stand still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)

    def leave(self) -> int:
        """How it exits by itself."""
        return self.process.wait(ANSWER_S)

    def settles(self, lease: int) -> None:
        until(lambda: self.ask("settled", lease) == "True")


@contextlib.contextmanager
def receiving(kind: EngineKind, nbytes: int, address: str = "") -> Iterator[Peer]:
    with _ending(Peer("receiver", kind, nbytes, *filter(None, [address]))) as peer:
        peer.session = Session(kind, peer.hear())
        yield peer


@contextlib.contextmanager
def sending(kind: EngineKind) -> Iterator[Peer]:
    with _ending(Peer("sender", kind)) as peer:
        yield peer


@contextlib.contextmanager
def _ending(peer: Peer) -> Iterator[Peer]:
    with peer.process:
        try:
            yield peer
        finally:
            peer.kill()
