"""`diffcluster generate`: one picture from the command line."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from diffcluster import logs
from diffcluster.cli.up import cluster_options, plan
from diffcluster.client import ApiError, Client, GeneratedImage
from diffcluster.ids import Role
from diffcluster.local import LocalCluster, interruptible

__all__ = ["COMMANDS"]

_POLL_S: Final = 0.1
_FORMATS: Final = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


@click.command()
@click.argument("prompt")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("picture.png"), show_default=True,
              help="File to write; its ending chooses PNG, JPEG or WebP.")  # fmt: skip
@click.option("--seed", type=int, help="Seed of the noise; drawn, and printed, if left out.")
@click.option("--steps", "num_inference_steps", type=int, help="Denoising steps; the model's default if left out.")
@click.option("--guidance", "guidance_scale", type=float, help="Guidance scale; the model's default if left out.")
@click.option("--negative-prompt", help="What to keep away from.")
@click.option("--size", help="WIDTHxHEIGHT; the model's own size if left out.")
@click.option("--url", help="Router to ask; without it a cluster is started for this one picture.")
@click.option("--verbose", is_flag=True, help="Show the processes' log lines.")
@cluster_options
def generate(
    prompt: str,
    out: Path,
    url: str | None,
    verbose: bool,
    model: str,
    device: str,
    dtype: str,
    threads: int,
    engine: str,
    **fields: Any,
) -> None:
    """Make a picture of PROMPT."""
    logs.setup("warning", "generate")
    output_format = _FORMATS.get(out.suffix.lower())
    if output_format is None:
        raise click.BadParameter(f"{out.name!r} ends in none of {', '.join(_FORMATS)}", param_hint="--out")
    given = {name: value for name, value in fields.items() if value is not None} | {"output_format": output_format}
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn()
    )
    with interruptible(), bar:
        if url is not None:
            image = _picture(url, prompt, given, bar)
        else:
            roles: dict[Role, int] = {"encoder": 1, "denoiser": 1, "decoder": 1}
            settings = {"model": model, "device": device, "dtype": dtype, "threads": threads, "engine": engine}
            level = ["--log-level", "info" if verbose else "warning"]
            own_plan = plan(roles, settings, [*level, "--port", "0", "--control-port", "0"], level)
            with _own_cluster(LocalCluster(own_plan), bar) as own:
                image = _picture(own, prompt, given, bar)
    out.write_bytes(image.content)
    click.echo(f"{out}  (seed {image.seed}, {image.timings['total_s']:.1f} s)")


@contextmanager
def _own_cluster(cluster: LocalCluster, bar: Progress) -> Iterator[str]:
    with cluster:
        task = bar.add_task("loading the model", total=3)
        cluster.wait_ready(lambda count, total: bar.update(task, completed=count, total=total))
        yield cluster.url


def _picture(url: str, prompt: str, fields: dict[str, Any], bar: Progress) -> GeneratedImage:
    """Ask for the picture on a thread, and watch its steps meanwhile."""
    request_id = uuid.uuid4().hex
    with Client(url) as client, ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.generate, prompt, request_id=request_id, **fields)
        task = bar.add_task("denoising", total=None)
        with Client(url) as watcher:
            _watch(future, lambda: watcher.get(f"/v1/requests/{request_id}"), lambda **now: bar.update(task, **now))
        image = future.result()[0]
        total = bar.tasks[task].total or 1
        bar.update(task, completed=total, total=total)
        return image


def _watch(future: Future[Any], look: Callable[[], dict[str, Any]], show: Callable[..., None]) -> None:
    ended = threading.Event()
    future.add_done_callback(lambda _: ended.set())
    while not ended.wait(_POLL_S):
        try:
            now = look()["pictures"][0]
        except ApiError:  # not there yet, or over already: the picture itself will tell
            continue
        if "steps" in now:
            show(completed=now["step"], total=now["steps"])


COMMANDS: Final[dict[str, click.Command]] = {"generate": generate}
