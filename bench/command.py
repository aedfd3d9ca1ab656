"""How benchmarks are started: one alone, `python -m bench.NAME`, or several, `python -m bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.report import Result, print_table, write_json

__all__ = ["alone", "main"]

Measure = Callable[[bool], Result]
"""Takes whether to be quick: under 45 seconds, less exact."""


def alone(name: str, measure: Measure) -> int:
    """Run one benchmark; the number of claims that do not hold."""
    return _run({name: measure}, _parser().parse_args())


def main(benchmarks: Mapping[str, Measure]) -> int:
    """Run those that are named, or all; the number of claims that do not hold."""
    parser = _parser()
    parser.add_argument("names", nargs="*", choices=[*benchmarks, []], help="which ones; all if none is named")
    arguments = parser.parse_args()
    return _run({name: benchmarks[name] for name in arguments.names or benchmarks}, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Prints a table, and the claims that do not hold.")
    parser.add_argument("--quick", action="store_true", help="under 45 s each, less exact")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def _run(benchmarks: Mapping[str, Measure], arguments: argparse.Namespace) -> int:
    results = {}
    for name, measure in benchmarks.items():
        results[name] = measure(arguments.quick)
        print_table(name, results[name])
    if arguments.json is not None:
        write_json(arguments.json, results)
    missed = [claim for result in results.values() for claim in result.claims if not claim.holds]
    for claim in missed:
        print(f"does not hold: {claim.name}: {claim.value:.3f}, bound {claim.bound}")
    return len(missed)
