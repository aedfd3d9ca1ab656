"""The monolithic role: all three stages in one process, behind the same API. The baseline, and a choice."""

from __future__ import annotations

from diffcluster.messages import GenerationParameters
from diffcluster.roles.media import encode_image
from diffcluster.roles.pipelines.base import Adapter
from diffcluster.roles.stage import Output, Task

__all__ = ["MonolithicStage"]


class MonolithicStage:
    """A route of one."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.facts, self.components = adapter.facts, adapter.components

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Nothing is handed on."""
        del parameters
        return 0

    def run(self, task: Task) -> Output:
        """Encode, denoise, decode."""
        embeds = self._adapter.encode(task.parameters)
        latents = self._adapter.denoise(task.parameters, embeds, task.progress)
        images = self._adapter.decode(task.parameters, latents)
        return Output(files=[encode_image(image, task.parameters) for image in images])
