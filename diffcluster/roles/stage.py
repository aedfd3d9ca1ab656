"""What a role computes, as the runtime sees it: one request in, tensors or files out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from diffcluster.messages import GenerationParameters, ModelFacts

__all__ = ["Output", "Progressing", "Stage", "Task"]

Progressing = Callable[[int, int], None]
"""Called after each step with (steps done, all steps). Raises `CancelledError` when the request was given up."""


@dataclass(slots=True)
class Task:
    """One request at one stage. `tensors` and `scalars` are what the stage before handed over; `inputs` the client's
    pictures, at a first stage: PNG files, in the order of `parameters.inputs`.
    """

    parameters: GenerationParameters
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, float | int | str]
    progress: Progressing
    inputs: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Output:
    """What a stage made: tensors and scalars for the next stage, or (media type, bytes) files for the client."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, float | int | str] = field(default_factory=dict)
    files: list[tuple[str, bytes]] = field(default_factory=list)


class Stage(Protocol):
    """The computation of one role for one model, loaded and ready."""

    facts: ModelFacts
    components: dict[str, int]
    """Bytes of parameters and buffers of each loaded component."""

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Upper bound of what `run` hands to the next stage; 0 for a last stage. Reserved before it computes."""

    def warm_up(self, *, small: bool) -> None:
        """Do once, with blank input, what `run` does: at the model's own size, or a small one. It need do nothing."""

    def run(self, task: Task) -> Output:
        """Compute.

        Raises:
            RequestError: this request cannot be computed; the stage is as good as before.
        """
