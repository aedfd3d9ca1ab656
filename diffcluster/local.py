"""A whole cluster on this machine, each process supervised: what `diffcluster up` and `generate` run.

A role that dies after it was ready is started again, with growing pauses; one that cannot even start ends the cluster
with its reason. Children live in sessions of their own, so that Ctrl-C reaches the supervisor alone, and hold the end
of a pipe that tells them when the supervisor is gone, however it went.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

from diffcluster.client import ApiError, Client
from diffcluster.errors import DiffclusterError
from diffcluster.ids import Role

__all__ = ["ClusterFailedError", "LocalCluster", "Plan", "interruptible"]

_log = logging.getLogger(__name__)
_POLL_S: Final = 0.1
_START_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_STABLE_S: Final = 60.0
_END_S: Final = 10.0


class ClusterFailedError(DiffclusterError):
    """A process could not start, so the cluster was ended."""


@dataclass(frozen=True)
class Plan:
    """What to run. `arguments` of the roles and of the router are command-line flags."""

    roles: dict[Role, int]
    role_arguments: Sequence[str] = ()
    router_arguments: Sequence[str] = ()


@dataclass
class _Child:
    """One process and its restarts. `ready`: it has come so far that a later death is worth another start."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    ready: bool = False
    started: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    again_at: float | None = None
    environment: dict[str, str] = field(default_factory=dict)


class LocalCluster:
    """Started by entering it, ended by leaving it. `url` is the router's."""

    def __init__(self, plan: Plan, *, startup_timeout_s: float = 300.0) -> None:
        self.plan, self._startup_timeout_s = plan, startup_timeout_s
        self.url = ""
        self._children: dict[str, _Child] = {}
        self._lifeline, self._lifeline_end = -1, -1

    def __enter__(self) -> LocalCluster:
        self._lifeline_end, self._lifeline = os.pipe()
        try:
            self._start_router()
            for role, count in self.plan.roles.items():
                for number in range(1, count + 1):
                    self._add_role(role, f"{role}-{number}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, of those that run."""
        return {name: child.process.pid for name, child in self._children.items() if child.process is not None}

    def wait_ready(self, on_progress: Callable[[int, int], Any] | None = None) -> None:
        """Return when all roles have registered; `on_progress` hears (registered, all).

        Raises:
            ClusterFailedError: one could not start.
        """
        wanted = sum(self.plan.roles.values())
        deadline = time.monotonic() + self._startup_timeout_s
        with Client(self.url) as client:
            while (count := self._registered(client)) < wanted:
                if on_progress is not None:
                    on_progress(count, wanted)
                self.check()
                if time.monotonic() > deadline:
                    raise ClusterFailedError(
                        f"only {count} of {wanted} roles are ready after {self._startup_timeout_s} s"
                    )
                select.select([], [], [], _POLL_S)
        if on_progress is not None:
            on_progress(wanted, wanted)

    def supervise(self) -> None:
        """Watch the processes until interrupted; starts again what dies."""
        with Client(self.url) as client:
            while True:
                self._registered(client)
                self.check()
                select.select([], [], [], 5 * _POLL_S)

    def check(self) -> None:
        """Start again what has died and may be; raises `ClusterFailedError` for what never got ready."""
        now = time.monotonic()
        for child in self._children.values():
            if child.again_at is not None:
                if now >= child.again_at:
                    self._spawn(child)
            elif child.process is not None and child.process.poll() is not None:
                self._died(child, now)

    def close(self) -> None:
        """End all processes: asked to at first, the roles before the router, then made to."""
        for group in (
            [child for child in self._children.values() if child.name != "router"],
            [child for child in self._children.values() if child.name == "router"],
        ):
            _end([child.process for child in group if child.process is not None])
        self._children.clear()
        for descriptor in (self._lifeline, self._lifeline_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._lifeline = self._lifeline_end = -1

    # ------------------------------------------------------------ starting

    def _start_router(self) -> None:
        reading, writing = os.pipe()
        child = _Child("router", [*_command("router"), "--ready-fd", str(writing), *self.plan.router_arguments])
        self._children["router"] = child
        try:
            self._spawn(child, writing)
        finally:
            os.close(writing)
        with os.fdopen(reading, "rb") as ready:
            if not select.select([ready], [], [], _START_S)[0]:
                raise ClusterFailedError(f"the router is not there after {_START_S} s")
            line = ready.readline()
        if not line:
            assert child.process is not None
            raise ClusterFailedError(f"the router could not start: {_how(child.process.wait())}")
        where = json.loads(line)
        self.url = where["url"]
        self._control = where["control"]
        child.ready = True
        # Started again, it must be where the roles and the clients look for it.
        fixed = ["--port", str(where["port"]), "--control-port", str(where["control_port"])]
        child.command = [*_command("router"), *self.plan.router_arguments, *fixed]

    def _add_role(self, role: Role, name: str) -> None:
        command = [*_command(role), "--router", self._control, "--name", name, *self.plan.role_arguments]
        child = _Child(name, command)
        # Several processes share the cores: threads that spin at barriers would steal each other's time.
        child.environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._children[name] = child
        self._spawn(child)

    def _spawn(self, child: _Child, *descriptors: int) -> None:
        child.process = subprocess.Popen(  # noqa: S603 - our own command
            [*child.command, "--parent-fd", str(self._lifeline_end)],
            stdin=subprocess.DEVNULL,
            pass_fds=(self._lifeline_end, *descriptors),
            start_new_session=True,
            env=os.environ | child.environment,
        )
        child.started, child.again_at = time.monotonic(), None

    # ------------------------------------------------------------ watching

    def _registered(self, client: Client) -> int:
        """How many of our roles the router knows; those are ready."""
        try:
            instances = client.get("/v1/cluster")["instances"]
        except ApiError:
            return 0
        pids = {instance["pid"] for instance in instances}
        count = 0
        for child in self._children.values():
            if child.name != "router" and child.process is not None and child.process.pid in pids:
                child.ready = True
                count += 1
        return count

    def _died(self, child: _Child, now: float) -> None:
        assert child.process is not None
        how = _how(child.process.returncode)
        if not child.ready:
            raise ClusterFailedError(f"{child.name} could not start: {how}")
        if now - child.started > _STABLE_S:
            child.pause_s = _FIRST_PAUSE_S
        _log.warning("%s has ended (%s); starting it again in %.1f s", child.name, how, child.pause_s)
        child.process, child.again_at = None, now + child.pause_s
        child.pause_s = min(2 * child.pause_s, _LONGEST_PAUSE_S)


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "diffcluster", name]


def _how(status: int) -> str:
    """An exit status in words."""
    if status == -signal.SIGKILL:
        return "killed by signal 9 (out of memory?)"
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}; its log says why"


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all; again to those that are still at work; SIGKILL to what does not listen. Reaps every one."""
    for number, wait_s in ((signal.SIGTERM, 1.0), (signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        deadline = time.monotonic() + wait_s
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, SIGTERM and SIGINT both end the program by `KeyboardInterrupt`, through every `finally`.

    SIGINT too, because a shell starts its background jobs with that signal ignored.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
