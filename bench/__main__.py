"""Runs every benchmark, or those named, and says which claims do not hold.

python -m bench [--quick] [--json FILE] [NAME …]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import first_picture
from bench.report import print_table, write_json

BENCHMARKS = {"first_picture": first_picture.measure}


def main() -> int:
    """How many claims do not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="which ones; all if none is named")
    parser.add_argument("--quick", action="store_true", help="under 45 s each, less exact")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    results = {name: BENCHMARKS[name](arguments.quick) for name in arguments.names or BENCHMARKS}
    for name, result in results.items():
        print_table(name, result)
    if arguments.json is not None:
        write_json(arguments.json, results)
    missed = [claim for result in results.values() for claim in result.claims if not claim.holds]
    for claim in missed:
        print(f"does not hold: {claim.name}: {claim.value:.3f}, bound {claim.bound}")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
