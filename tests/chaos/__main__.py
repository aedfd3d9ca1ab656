"""A real cluster under load while an adversary kills and freezes its processes.

    python -m tests.chaos --seed 1 --faults 20

Ends with status 1 if any accepted request was lost or answered twice, any picture was wrong, or anything is still held
when all is over. What the adversary does is drawn from the seed; when, is when the cluster has recovered from the last.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import io
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image

from diffcluster import logs
from diffcluster.client import Client
from diffcluster.local import LocalCluster, Plan

ROLES = {"encoder": 2, "denoiser": 2, "decoder": 2}
REQUESTS = [
    {"prompt": "a slice of pizza", "seed": 1, "num_inference_steps": 6},
    {"prompt": "a rocket on a blue background", "seed": 2, "num_inference_steps": 10, "guidance_scale": 2.0},
    {"prompt": "a cat", "seed": 3, "num_inference_steps": 4, "guidance_scale": 1.0},
    {"prompt": "a sunflower", "seed": 4, "num_inference_steps": 8, "negative_prompt": "a bee"},
]
CLIENTS = 3
RECOVERY_S = 180.0
QUARANTINE_S = 5.0


@dataclasses.dataclass
class Tally:
    """What the clients saw."""

    right: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=20)
    arguments = parser.parse_args()
    logs.setup("warning", "chaos")
    # One request may meet many faults here without being the cause of any.
    router = ["--port", "0", "--control-port", "0", "--max-losses", "50", "--log-level", "warning"]
    timing = ["--transfer-timeout-s", "4", "--quarantine-s", str(QUARANTINE_S)]
    plan = Plan(ROLES, [*timing, "--checksum", "--log-level", "warning"], router)
    with LocalCluster(plan) as cluster:
        cluster.wait_ready()
        tally, faults = _run(cluster, random.Random(arguments.seed), arguments.faults)
        leaks = _leaks(cluster)
    return _report(arguments.seed, tally, faults, leaks)


def _run(cluster: LocalCluster, rng: random.Random, faults: int) -> tuple[Tally, collections.Counter[str]]:
    expected = [_picture(cluster.url, request) for request in REQUESTS]
    tally, stop, done = Tally(), threading.Event(), collections.Counter[str]()
    clients = [threading.Thread(target=_load, args=(cluster.url, expected, tally, stop, i)) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for _ in range(faults):
            goal = tally.right + CLIENTS
            done[_fault(cluster, rng)] += 1
            _until(cluster, lambda goal=goal: _whole(cluster) and tally.right > goal, "the cluster has not recovered")
    finally:
        stop.set()
        for client in clients:
            client.join()
    return tally, done


def _picture(url: str, request: dict[str, object]) -> npt.NDArray[np.uint8]:
    with Client(url) as client:
        content = client.generate(**request)[0].content  # type: ignore[arg-type]
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def _load(url: str, expected: list[npt.NDArray[np.uint8]], tally: Tally, stop: threading.Event, number: int) -> None:
    """Ask for one picture after another; every answer is right, wrong, or missing."""
    turn = number
    while not stop.is_set():
        turn += 1
        which = turn % len(REQUESTS)
        try:
            picture = _picture(url, REQUESTS[which])
        except Exception as error:  # noqa: BLE001 - every way not to get a picture is a lost request
            tally.lost.append(f"{REQUESTS[which]}: {error}")
            continue
        if np.array_equal(picture, expected[which]):
            tally.right += 1
        else:
            tally.wrong.append(str(REQUESTS[which]))


def _fault(cluster: LocalCluster, rng: random.Random) -> str:
    """Hit one role process, at a moment of its own."""
    name, pid = rng.choice(sorted((n, p) for n, p in cluster.pids.items() if n != "router"))
    what = rng.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"))
    print(f"{what} to {name}", flush=True)
    select.select([], [], [], rng.uniform(0, 0.5))  # the moment is part of the draw, not a way to wait for something
    os.kill(pid, getattr(signal, what))
    if what == "SIGSTOP":
        _until(cluster, lambda: name not in _names(cluster), f"{name} is frozen, and the router does not notice")
        os.kill(pid, signal.SIGCONT)
    return what


def _names(cluster: LocalCluster) -> set[str]:
    with Client(cluster.url) as client:
        return {instance["name"] for instance in client.get("/v1/cluster")["instances"]}


def _whole(cluster: LocalCluster) -> bool:
    """All instances are registered, as the processes that run now."""
    with Client(cluster.url) as client:
        registered = {instance["name"]: instance["pid"] for instance in client.get("/v1/cluster")["instances"]}
    return registered == {name: pid for name, pid in cluster.pids.items() if name != "router"}


def _until(cluster: LocalCluster, true: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not true():
        cluster.check()
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        select.select([], [], [], 0.1)


def _leaks(cluster: LocalCluster) -> list[str]:
    """What is still held although nothing is asked for any more."""
    held: list[str] = []

    def nothing_held() -> bool:
        held[:] = _held(cluster)
        return not held

    try:
        _until(cluster, nothing_held, "still held")
    except TimeoutError:
        return held
    return []


def _held(cluster: LocalCluster) -> list[str]:
    with Client(cluster.url) as client:
        state = client.get("/v1/cluster")
    held = [f"request {request['id']} is {request['phase']}" for request in state["requests"]]
    for instance in state["instances"]:
        kinds = ("outstanding", "retained", "receive_quarantined")
        held += [f"{instance['name']}: {what} {instance[what]}" for what in kinds if instance[what]]
        # What is leased ahead is not in use; the router and the role must agree about it.
        if instance["receive_free"] is None:
            held.append(f"{instance['name']}: its first heartbeat is still to come")
        elif instance["receive_free"] + instance["granted_bytes"] != instance["slot_bytes"]:
            held.append(f"{instance['name']}: {instance['receive_free']} of {instance['slot_bytes']} bytes are free")
    return held


def _report(seed: int, tally: Tally, faults: collections.Counter[str], leaks: list[str]) -> int:
    for line in (*tally.lost, *tally.wrong, *leaks):
        print(line)
    total = tally.right + len(tally.wrong) + len(tally.lost)
    print(f"seed {seed}: {total} requests, {sum(faults.values())} faults ({dict(faults)})")
    print(f"lost {len(tally.lost)}, wrong {len(tally.wrong)}, leaked {len(leaks)}")
    failed = len(tally.lost) + len(tally.wrong) + len(leaks)
    print(f"{tally.right} passed, {failed} failed")
    return 1 if failed or not tally.right else 0


if __name__ == "__main__":
    sys.exit(main())
