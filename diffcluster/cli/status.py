"""`diffcluster status` and `diffcluster model-path`: what is there."""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from diffcluster.client import Client
from diffcluster.errors import ModelError

__all__ = ["COMMANDS"]

_MIB: Final = 1 << 20


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The router.")
def status(url: str) -> None:
    """Print the instances of a cluster."""
    with Client(url) as client:
        cluster = client.get("/v1/cluster")
    table = Table(
        "instance", "role", "model", "device", "dtype", "components", "weights", "resident", "requests", "seen"
    )
    for instance in cluster["instances"]:
        table.add_row(*_row(instance))
    # Without a terminal there is no width to keep to.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
    waiting = ", ".join(f"{count} for {role}" for role, count in cluster["queues"].items() if count) or "none"
    console.print(f"{url}: {'ready' if cluster['ready'] else 'not ready'}; waiting requests: {waiting}")


def _row(instance: dict[str, Any]) -> list[str]:
    resident = instance["resident_bytes"]
    return [
        instance["name"] + (" (draining)" if instance["draining"] else ""),
        instance["role"],
        instance["model"],
        instance["device"],
        instance["dtype"],
        " ".join(instance["components"]),
        f"{instance['parameter_bytes'] / _MIB:.1f} MiB",
        f"{resident / _MIB:.0f} MiB" if resident else "?",
        f"{instance['outstanding']}/{instance['max_outstanding']}",
        f"{instance['last_seen_s']:.1f} s ago",
    ]


@click.command("model-path")
@click.argument("name", default="demo")
def model_path(name: str) -> None:
    """Print the directory of an embedded model."""
    models = Path(str(files("diffcluster") / "models"))
    there = sorted(path.parent.name for path in models.glob("*/model_index.json"))
    if name not in there:
        raise ModelError("", f"there is no embedded model called {name!r}; there is {', '.join(there) or 'none'}")
    click.echo(models / name)


COMMANDS: Final[dict[str, click.Command]] = {"status": status, "model-path": model_path}
