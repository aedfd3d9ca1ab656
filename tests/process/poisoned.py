"""A real denoiser that words of a prompt make fail, in a chosen place, so that its neighbours can be looked at.

    python -m tests.process.poisoned --steps-to FILE --router tcp://127.0.0.1:5550

`nan`: its embeds are NaN. `late-nan`: so are its latents, once they have been looked at. `step-error` and
`step-memory`: raises between two steps. `call-error` and `call-memory`: the model raises in every call that the request
takes part in. Each step of each request is a line of the file: seed, step. All that may be joined is joined: measured
times would decide it differently each time. Before it registers it says `warm` and waits for a line.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import torch
from diffusers import UNet2DConditionModel

from diffcluster import logs
from diffcluster.cli.options import config_options, load
from diffcluster.config import RoleConfig
from diffcluster.roles import launch
from diffcluster.roles.costs import CostModel
from diffcluster.roles.stage import Output, Progressing, Task
from diffcluster.roles.stages import STAGES, DenoiserStage

_AT_STEP: Final = 2
_ERRORS: Final[dict[str, Callable[[], BaseException]]] = {
    "error": lambda: RuntimeError("failed as it was told"),
    "memory": lambda: torch.OutOfMemoryError("as if there were no memory left"),
}
_MARKS: Final = {"call-error": 12345.0, "call-memory": 54321.0}
"""What the embeds of a request are made, so that the model knows it."""


class _PoisonedStage(DenoiserStage):
    """`steps_to` is set before there is one."""

    steps_to: Path

    def warm_up(self, *, small: bool) -> None:
        super().warm_up(small=small)
        print("warm", flush=True)
        sys.stdin.readline()

    def run(self, task: Task) -> Output:
        words = set(task.parameters.prompt.split())
        task.progress = self._noting(task.parameters.seed, words, task.progress)
        for word, value in {"nan": torch.nan, **_MARKS}.items():
            if word in words:
                task.tensors = {name: torch.full_like(tensor, value) for name, tensor in task.tensors.items()}
        output = super().run(task)
        if "late-nan" in words:
            output.tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in output.tensors.items()}
        return output

    def _noting(self, seed: int, words: set[str], progress: Progressing) -> Progressing:
        def note(step: int, steps: int) -> None:
            progress(step, steps)
            with self.steps_to.open("a") as file:
                file.write(f"{seed} {step}\n")
            for name, error in _ERRORS.items():
                if f"step-{name}" in words and step == _AT_STEP:
                    raise error()

        return note


def _poison(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def poisoned(self: Any, sample: Any, timestep: Any, encoder_hidden_states: torch.Tensor, **options: Any) -> Any:
        for word, value in _MARKS.items():
            if bool((encoder_hidden_states == value).any()):
                raise _ERRORS[word.removeprefix("call-")]()
        return forward(self, sample, timestep, encoder_hidden_states, **options)

    return poisoned


@click.command()
@click.option("--steps-to", type=click.Path(path_type=Path), required=True)
@config_options(RoleConfig, "role")
def main(steps_to: Path, **flags: Any) -> None:
    """Serve until told to leave."""
    config = load(RoleConfig, "role", flags)
    logs.setup(config.log_level, "denoiser")
    _PoisonedStage.steps_to = steps_to
    STAGES["denoiser"] = _PoisonedStage
    UNet2DConditionModel.forward = _poison(UNet2DConditionModel.forward)
    CostModel.worthwhile = lambda *_: True  # type: ignore[method-assign, assignment]
    sys.exit(launch.run("denoiser", config))


if __name__ == "__main__":
    main()
