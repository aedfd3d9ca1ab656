"""The decoder: latents to picture files."""

from __future__ import annotations

from diffcluster.messages import GenerationParameters
from diffcluster.roles.media import encode_image
from diffcluster.roles.pipelines.base import Adapter
from diffcluster.roles.stage import Output, Task

__all__ = ["DecoderStage"]


class DecoderStage:
    """Last stage of the usual route. Files are made here: raw pixels are many times larger."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.facts, self.components = adapter.facts, adapter.components

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Nothing is handed on."""
        del parameters
        return 0

    def run(self, task: Task) -> Output:
        """Decode, and encode as a file."""
        images = self._adapter.decode(task.parameters, task.tensors)
        return Output(files=[encode_image(image, task.parameters) for image in images])
