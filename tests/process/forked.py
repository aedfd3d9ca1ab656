"""Role processes of real models, forked from one that has imported what they need: that takes longer than all else.

echo '[["encoder", "--router", "tcp://127.0.0.1:5550", "--model", "/tmp/flux"]]' | python -m tests.process.forked
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Be all roles: one command line each. Ends with them."""
    from diffcluster.cli import main as program
    from diffcluster.roles import launch  # noqa: F401 - before the lines have come

    lines = json.load(sys.stdin)
    for model in {line[line.index("--model") + 1] for line in lines}:
        _import_parts(Path(model))
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


def _import_parts(model: Path) -> None:
    """The classes of a model, which libraries import when they are asked for."""
    import diffusers

    from diffcluster.roles.pipelines.directory import ModelDirectory
    from diffcluster.roles.pipelines.families import family_of

    directory = ModelDirectory(model)
    family = family_of(directory.pipeline)
    assert family is not None
    for name in family.pipelines.values():
        getattr(diffusers, name)
    for library, name in directory.parts().values():
        getattr(import_module(library), name)


# ---------------------------------------------------------------- for the tests


@contextmanager
def forked_roles() -> Iterator[Callable[[Sequence[Sequence[str]]], None]]:
    """What starts roles, once; they end with the block."""
    command = [sys.executable, "-m", "tests.process.forked"]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True) as process:

        def start(lines: Sequence[Sequence[str]]) -> None:
            assert process.stdin is not None
            json.dump(lines, process.stdin)
            process.stdin.close()

        try:
            yield start
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
