"""`python -m diffcluster.testing NAME DIRECTORY`: write a tiny model."""

from __future__ import annotations

from pathlib import Path

import click

from diffcluster.testing import TINY_MODELS, make_tiny_model


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", type=click.Choice(TINY_MODELS))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights.")
def main(name: str, directory: Path, seed: int) -> None:
    """Write the tiny model NAME, with random weights, to DIRECTORY."""
    make_tiny_model(name, directory, seed=seed)
    click.echo(directory)


if __name__ == "__main__":
    main()
