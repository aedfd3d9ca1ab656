"""`diffcluster router` and the roles: one process each, in the foreground."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from typing import Any, Final

import click

from diffcluster import logs
from diffcluster.cli.options import config_options, load
from diffcluster.config import RoleConfig, RouterConfig
from diffcluster.errors import ConfigError
from diffcluster.ids import ROLES, Role

__all__ = ["COMMANDS"]

_PATIENCE_S: Final = 5.0
_DESCRIPTORS: Final = 65_536
_FEWEST_DESCRIPTORS: Final = 256
_DOES: Final[dict[Role, str]] = {
    "encoder": "turns prompts into prompt embeds: the tokenizer and the text encoders.",
    "denoiser": "turns prompt embeds into latents, step by step: the UNet or transformer, and the scheduler.",
    "decoder": "turns latents into picture files: the VAE's decoder.",
    "monolithic": "does all three stages in one process, behind the same API.",
}


def _follow_parent(descriptor: int | None) -> None:
    """End this process when the other end of the pipe `descriptor` is closed, which is when the parent has ended."""
    if descriptor is None:
        return
    os.set_inheritable(descriptor, False)

    def watch(pipe: int) -> None:
        os.read(pipe, 1)
        # Gently, then firmly: the second SIGTERM skips draining, and SIGKILL needs nobody's help.
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            os.kill(os.getpid(), number)
            threading.Event().wait(_PATIENCE_S / 2)

    threading.Thread(target=watch, args=(descriptor,), name="parent-watch", daemon=True).start()


def _allow_descriptors() -> None:
    """Raise this process's limit of open files to what it may have: a connection is one, a ZeroMQ socket several.

    Raises:
        ConfigError: that is too few to serve with.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _FEWEST_DESCRIPTORS:
        problem = f"this process may open {wanted} files at one time, and needs {_FEWEST_DESCRIPTORS}"
        raise ConfigError("RLIMIT_NOFILE", f"{problem}; raise it by `ulimit -n` or LimitNOFILE")


_parent_fd = click.option("--parent-fd", type=int, hidden=True)


@click.command()
@config_options(RouterConfig, "router")
@click.option("--ready-fd", type=int, hidden=True)
@_parent_fd
def router(ready_fd: int | None, parent_fd: int | None, **flags: Any) -> None:
    """Run the router (DiffusionServer): the HTTP API, and the place that all roles connect to."""
    config = load(RouterConfig, "router", flags)
    logs.setup(config.log_level, "router")
    _allow_descriptors()
    _follow_parent(parent_fd)
    from diffcluster.router.http.serve import run

    sys.exit(run(config, ready_fd))


def _role_command(role: Role) -> click.Command:
    @click.command(role, help=f"Run a role process that {_DOES[role]}")
    @config_options(RoleConfig, "role")
    @_parent_fd
    def command(parent_fd: int | None, **flags: Any) -> None:
        config = load(RoleConfig, "role", flags)
        logs.setup(config.log_level, config.name or role)
        _allow_descriptors()
        _follow_parent(parent_fd)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the role serves, Ctrl-C just ends it
        # Models come from disk alone; without this a library may still look for updates of them.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from diffcluster.roles.launch import run

        sys.exit(run(role, config))

    return command


COMMANDS: Final[dict[str, click.Command]] = {"router": router} | {role: _role_command(role) for role in ROLES}
