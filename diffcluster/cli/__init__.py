"""The `diffcluster` command. Each subcommand imports what it needs when it runs: the router never imports torch."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import click

from diffcluster import __version__
from diffcluster.errors import DiffclusterError

__all__ = ["cli", "main"]

_COMMANDS: Final = {
    "up": "up",
    "generate": "generate",
    "status": "status",
    "model-path": "status",
    "router": "serve",
    "encoder": "serve",
    "denoiser": "serve",
    "decoder": "serve",
    "monolithic": "serve",
}
"""Where each subcommand is defined."""


class _Lazy(click.Group):
    """Finds subcommands by importing the module that has them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click gives it
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module: Any = import_module(f"diffcluster.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = module.COMMANDS[cmd_name]
        return command


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Serve diffusion models on a cluster of encoders, denoisers and decoders.

    Try it: diffcluster generate "a slice of pizza" --out pizza.png
    """


def main() -> None:
    """Run the command; our own errors end it with one line and status 1."""
    try:
        cli()
    except DiffclusterError as error:
        click.echo(f"diffcluster: {error}", err=True)
        sys.exit(1)
