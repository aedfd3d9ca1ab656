"""Processes of the program around a stage without a model: a cluster of many is cheap, and the rest of each is real.

    python -m tests.process.small '["encoder", "--router", "tcp://127.0.0.1:5550"]' ...

What is handed on is made of the seed, and each stage checks what it gets; the file is its digest. Words of the prompt
make a stage misbehave: `fail-ROLE` raises there after it has allocated `SCRATCH_BYTES`, `large` makes a file of
`LARGE_BYTES`. With `TIGHT` in the environment links hold next to nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final

import psutil

from diffcluster.config import RoleConfig
from diffcluster.ids import Role
from diffcluster.messages import GenerationParameters, ModelFacts
from tests.process.conftest import ANY_PORT, QUIET, Server, eventually

HANDED_ON: Final = 96 << 10
SCRATCH_BYTES: Final = 32 << 20
LARGE_BYTES: Final = 8 << 20
TIGHT: Final = "DIFFCLUSTER_TEST_TIGHT"
_TIGHT_QUEUE: Final = 16
"""Messages. As few as the router may have for a role at one moment, and a role that reads is not to be full."""
_TIGHT_BUFFER: Final = 16 << 10
_START_S: Final = 60.0


def content(seed: int, stage: str, nbytes: int) -> bytes:
    """What that stage makes for a request with that seed."""
    return hashlib.shake_128(f"{seed} {stage}".encode()).digest(nbytes)


def picture(seed: int, nbytes: int = 64) -> bytes:
    """The file of a request with that seed."""
    return b"\x89PNG" + content(seed, "decoder", nbytes)


class SmallStage:
    """Stands for a role's model."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.components = {"small": 0}
        self.facts = ModelFacts(
            id="small", revision="1", pipeline="Small", width=64, height=64, size_multiple=8, max_pixels=4096,
            num_inference_steps=1, max_inference_steps=100, guidance_scale=1.0,
        )  # fmt: skip

    def warm_up(self, *, small: bool) -> None:
        pass

    def output_bytes(self, parameters: GenerationParameters) -> int:
        return 0 if self._role == "decoder" else HANDED_ON

    def run(self, task: Any) -> Any:
        """Check what has come, and make what the next one checks."""
        import numpy as np
        import torch

        from diffcluster.roles.stage import Output

        seed, words = task.parameters.seed, task.parameters.prompt.split()
        before = {"denoiser": "encoder", "decoder": "denoiser"}.get(self._role)
        if before and task.tensors["x"].numpy().tobytes() != content(seed, before, HANDED_ON):
            raise ValueError(f"that is not what the {before} made of seed {seed}")
        if f"fail-{self._role}" in words:
            scratch = torch.ones(SCRATCH_BYTES, dtype=torch.uint8)
            raise RuntimeError(f"failed as it was told, with {scratch.nbytes} bytes in hand")
        task.progress(1, 1)
        if self._role == "decoder":
            return Output(files=[("image/png", picture(seed, LARGE_BYTES if "large" in words else 64))])
        made = np.frombuffer(bytearray(content(seed, self._role, HANDED_ON)), np.uint8)
        return Output(tensors={"x": torch.from_numpy(made)})


def _be_tight() -> None:
    """Let every link hold next to nothing."""
    import zmq

    from diffcluster.transport import control

    ample = control._socket

    def tight(context: zmq.Context[zmq.Socket[bytes]], kind: int, largest: int) -> zmq.Socket[bytes]:
        socket = ample(context, kind, largest)
        for option, value in (
            (zmq.SNDHWM, _TIGHT_QUEUE),
            (zmq.RCVHWM, 1),
            (zmq.SNDBUF, _TIGHT_BUFFER),
            (zmq.RCVBUF, _TIGHT_BUFFER),
        ):
            socket.setsockopt(option, value)
        return socket

    control._socket = tight


def main() -> None:
    """Be the router, or all roles: one command line each, as JSON."""
    from diffcluster.cli import main as program

    if TIGHT in os.environ:
        _be_tight()
    if sys.argv[1] == "router":
        program()
    else:
        _be_roles([json.loads(argument) for argument in sys.argv[1:]])


def _be_roles(lines: list[list[str]]) -> None:
    """Import what all roles need, which takes longer than all else here, and let each be a child. Ends with them."""
    from diffcluster.cli import main as program

    _serve_small()
    parent, mine = os.pipe()  # children end when this process does
    children = []
    for line in lines:
        child = os.fork()
        if child == 0:
            os.close(mine)
            sys.argv[1:] = [*line, "--parent-fd", str(parent)]
            program()
        children.append(child)

    def end(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    for child in children:
        os.waitpid(child, 0)


def _serve_small() -> None:
    """Have the role's command serve a small stage in place of a pipeline."""
    import torch

    from diffcluster.cli import serve  # noqa: F401 - imported ahead of the children
    from diffcluster.roles import runtime
    from diffcluster.roles.device import CpuDevice

    def run(role: Role, config: RoleConfig) -> int:
        torch.set_num_threads(1)
        return runtime.serve(role, config, SmallStage(role), CpuDevice(), torch.float32)

    # In place of the module that would import diffusers.
    sys.modules["diffcluster.roles.launch"] = SimpleNamespace(run=run)  # type: ignore[assignment]


# ---------------------------------------------------------------- for the tests


class SmallCluster:
    """A router and roles around small stages."""

    def __init__(self, server: Server, router: int, names: frozenset[str]) -> None:
        self.server, self._router, self._names = server, router, names
        self._pids: dict[str, int] = {}

    def wait_registered(self) -> None:
        """All are there. Whether they have met is another matter."""
        eventually(lambda: self.server.pids().keys() == self._names, timeout=_START_S)
        self._pids = {"router": self._router} | self.server.pids()

    def process(self, name: str) -> psutil.Process:
        """The router, or the role of that name."""
        return psutil.Process(self._pids[name])

    def wait_free(self) -> None:
        """Nobody holds anything of a request."""
        eventually(
            lambda: not self.server.cluster()["requests"] and all(map(_is_free, self.server.instances().values()))
        )

    @contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Within it the process stands still."""
        process = self.process(name)
        process.suspend()
        eventually(lambda: process.status() == psutil.STATUS_STOPPED)
        try:
            yield
        finally:
            process.resume()


def _is_free(instance: dict[str, Any]) -> bool:
    if instance["receive_free"] is None:  # its first heartbeat is still to come
        return False
    unused = instance["receive_free"] + instance["granted_bytes"]
    return instance["outstanding"] == instance["retained"] == 0 and unused == instance["slot_bytes"]


@contextmanager
def small_cluster(
    roles: dict[Role, int], role_flags: Sequence[str] = (), router_flags: Sequence[str] = (), *, tight: bool = False
) -> Iterator[SmallCluster]:
    """Started all at once; ended with the block."""
    environment = os.environ | ({TIGHT: "1"} if tight else {})
    with ExitStack() as stack:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as ready:
            arguments = ["router", "--ready-fd", str(writing), *ANY_PORT, *QUIET, *router_flags]
            try:
                router = stack.enter_context(_process(arguments, environment, writing))
            finally:
                os.close(writing)
            assert select.select([ready], [], [], _START_S)[0], "the router is not there"
            where = json.loads(ready.readline())
        names = {f"{role}-{number}": role for role, count in roles.items() for number in range(1, count + 1)}
        common = ["--router", where["control"], *QUIET, *role_flags]
        lines = [json.dumps([role, "--name", name, *common]) for name, role in names.items()]
        stack.enter_context(_process(lines, environment))
        yield SmallCluster(Server(where["url"]), router.pid, frozenset(names))


@contextmanager
def _process(
    arguments: Sequence[str], environment: dict[str, str], *descriptors: int
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.process.small", *arguments]
    with subprocess.Popen(command, env=environment, pass_fds=descriptors) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
