"""Runs every benchmark, or those named, and says which claims do not hold.

python -m bench [--quick] [--json FILE] [NAME …]
"""

from __future__ import annotations

import sys

from bench import batching, first_picture, handoff, model_matrix, overlap, transfer
from bench.command import main

BENCHMARKS = {
    "batching": batching.measure,
    "first_picture": first_picture.measure,
    "handoff": handoff.measure,
    "model_matrix": model_matrix.measure,
    "overlap": overlap.measure,
    "transfer": transfer.measure,
}

if __name__ == "__main__":
    sys.exit(main(BENCHMARKS))
