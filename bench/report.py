"""What a benchmark returns, and how it is shown."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["Claim", "Result", "print_table", "write_json"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A ratio of two things that were measured side by side, and the bound that it must keep."""

    name: str
    value: float
    bound: str
    holds: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """Rows of one table, under `columns`, and what is claimed of them."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    claims: list[Claim]


def print_table(name: str, result: Result) -> None:
    """Print to the terminal."""
    table = Table(*result.columns, title=f"{name} on {_machine()}")
    for row in result.rows:
        table.add_row(*map(escape, row))  # a reason may name diffcluster[extra], which is no style
    Console(width=120).print(table)


def write_json(path: Path, results: dict[str, Result]) -> None:
    """Write all results, with the machine, and the claims of all at the end."""
    body: dict[str, object] = {"machine": _machine()}
    body |= {name: {"columns": result.columns, "rows": result.rows} for name, result in results.items()}
    body["claims"] = [dataclasses.asdict(claim) for result in results.values() for claim in result.claims]
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def _machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {model}"
