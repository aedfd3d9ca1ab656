"""Prints how many states each small world of handoffs has: python -m tests.model [WORDS OF A NAME]."""

from __future__ import annotations

import sys
import time

from tests.model.explore import explore
from tests.model.handoff import two_pools
from tests.model.handoff_worlds import WORLDS


def main() -> None:
    total, seconds = 0, 0.0
    with two_pools():
        for name, world in WORLDS.items():
            if not all(word in name for word in sys.argv[1:]):
                continue
            started = time.process_time()
            states = explore(world())
            spent = time.process_time() - started
            print(f"{states:8} states {spent:6.1f} s  {name}", flush=True)
            total, seconds = total + states, seconds + spent
    print(f"{total:8} states {seconds:6.1f} s of one CPU in all")


if __name__ == "__main__":
    main()
