"""The denoiser: prompt embeds to latents, step by step."""

from __future__ import annotations

from diffcluster.messages import GenerationParameters
from diffcluster.roles.pipelines.base import Adapter
from diffcluster.roles.stage import Output, Task

__all__ = ["DenoiserStage"]


class DenoiserStage:
    """Second stage of the usual route."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.facts, self.components = adapter.facts, adapter.components

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Size of the latents."""
        return self._adapter.denoised_bytes(parameters)

    def run(self, task: Task) -> Output:
        """Run the loop; `task.progress` may end it between two steps."""
        return Output(tensors=self._adapter.denoise(task.parameters, task.tensors, task.progress))
