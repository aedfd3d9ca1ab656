"""`diffcluster up`: a whole cluster on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from diffcluster import logs
from diffcluster.ids import Role
from diffcluster.local import LocalCluster, Plan, interruptible

__all__ = ["COMMANDS", "cluster_options", "plan"]


def cluster_options(function: Any) -> Any:
    """Flags that say what the roles of a local cluster run."""
    for option in (
        click.option("--model", default="demo", show_default=True, help="Pipeline directory, or `demo`."),
        click.option("--device", default="auto", show_default=True, help="Torch device of all roles."),
        click.option("--dtype", default="auto", show_default=True, help="Weights of all roles: float32, bfloat16, …"),
        click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads of each role; 0: all cores."),
        click.option("--engine", default="auto", show_default=True, help="How tensors travel: see the roles."),
    ):
        function = option(function)
    return function


def plan(
    roles: dict[Role, int],
    settings: Mapping[str, object],
    router: Sequence[str],
    more: Sequence[str] = (),
) -> Plan:
    """A plan from the flags of `cluster_options`, of the router, and `more` of the roles."""
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return Plan({role: count for role, count in roles.items() if count}, [*arguments, *more], router)


@click.command()
@click.option("--encoders", type=click.IntRange(0), default=1, show_default=True, help="Encoder processes.")
@click.option("--denoisers", type=click.IntRange(0), default=1, show_default=True, help="Denoiser processes.")
@click.option("--decoders", type=click.IntRange(0), default=1, show_default=True, help="Decoder processes.")
@click.option("--monolithics", type=click.IntRange(0), default=0, show_default=True, help="Monolithic processes.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the HTTP API.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Its port; 0 takes a free one."
)
@click.option(
    "--control-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port that roles connect to; a free one by default.",
)
@click.option("--max-pixels", type=click.IntRange(1), help="Largest width x height.")
@cluster_options
def up(
    encoders: int,
    denoisers: int,
    decoders: int,
    monolithics: int,
    host: str,
    port: int,
    control_port: int,
    max_pixels: int | None,
    **flags: object,
) -> None:
    """Run router and roles on this machine until Ctrl-C, and start again what dies."""
    logs.setup("info", "up")
    roles: dict[Role, int] = {
        "encoder": encoders,
        "denoiser": denoisers,
        "decoder": decoders,
        "monolithic": monolithics,
    }
    router = ["--host", host, "--port", str(port), "--control-port", str(control_port)]
    if max_pixels is not None:
        router += ["--max-pixels", str(max_pixels)]
    try:
        with interruptible(), LocalCluster(plan(roles, flags, router)) as cluster:
            cluster.wait_ready()
            click.echo(f"ready: {cluster.url}")
            cluster.supervise()
    except KeyboardInterrupt:
        click.echo("ended")


COMMANDS: Final[dict[str, click.Command]] = {"up": up}
