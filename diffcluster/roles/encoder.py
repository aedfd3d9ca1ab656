"""The encoder: prompts to prompt embeds."""

from __future__ import annotations

from diffcluster.messages import GenerationParameters
from diffcluster.roles.pipelines.base import Adapter
from diffcluster.roles.stage import Output, Task

__all__ = ["EncoderStage"]


class EncoderStage:
    """First stage of the usual route."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self.facts, self.components = adapter.facts, adapter.components

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Size of the prompt embeds."""
        return self._adapter.encoded_bytes(parameters)

    def run(self, task: Task) -> Output:
        """Encode."""
        return Output(tensors=self._adapter.encode(task.parameters))
