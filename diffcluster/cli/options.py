"""Flags made from the configuration structs, so that flags, environment, files and docs are always the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import Struct

from diffcluster import config

__all__ = ["config_options", "load"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Group = TypeVar("_Group", bound=Struct)


def config_options(group: type[Struct], section: str) -> Callable[[_Function], _Function]:
    """A flag for each setting of `group`, and `--config`."""

    def decorate(function: _Function) -> _Function:
        for name, default, description in reversed(config.describe(group)):
            shown = "empty" if default == "" else default
            variable = f"{config.PREFIX}{section.upper()}_{name.upper()}"
            text = f"{description}  [default: {shown}; env: {variable}]"
            flag = f"--{name.replace('_', '-')}"
            flag += f"/--no-{flag[2:]}" if isinstance(default, bool) else ""
            function = click.option(flag, name, default=None, help=text)(function)
        path = click.Path(exists=True, dir_okay=False, path_type=Path)
        return click.option("--config", "config_file", type=path, help=f"TOML file with a [{section}] table.")(function)

    return decorate


def load(group: type[_Group], section: str, flags: dict[str, Any]) -> _Group:
    """The configuration from `flags`, the environment and the file that `flags` name."""
    file = flags.pop("config_file", None)
    return config.load(group, section, file=file, environ=os.environ, flags=flags)
