"""The stages of a model: what each role computes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from diffcluster.ids import Role
from diffcluster.roles import media
from diffcluster.roles.stage import Output, Stage, Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from diffcluster.messages import GenerationParameters
    from diffcluster.roles.pipelines import PipelineAdapter

__all__ = ["STAGES", "DecoderStage", "DenoiserStage", "EncoderStage", "MonolithicStage"]


class _OfModel:
    """What all stages of a model have in common."""

    role: ClassVar[Role]

    def __init__(self, adapter: PipelineAdapter) -> None:
        self._adapter = adapter
        self.facts, self.components = adapter.facts, adapter.components

    def warm_up(self, *, small: bool) -> None:
        """With blank input."""
        self._adapter.warm_up(self.role, small=small)


class EncoderStage(_OfModel):
    """Prompts to prompt embeds, pictures to latents: the first stage of the usual route."""

    role = "encoder"

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Size of the embeds."""
        return self._adapter.encoded_bytes(parameters)

    def run(self, task: Task) -> Output:
        """Encode."""
        tensors, scalars = self._adapter.encode(task)
        return Output(tensors, scalars)


class DenoiserStage(_OfModel):
    """Embeds to latents, step by step; `task.progress` may end it between two steps."""

    role = "denoiser"

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Size of the latents."""
        return self._adapter.denoised_bytes(parameters)

    def run(self, task: Task) -> Output:
        """Run the loop."""
        tensors, scalars = self._adapter.denoise(task)
        return Output(tensors, scalars)


class _Last(_OfModel):
    """A stage that makes files: raw pixels are many times larger, so they are encoded here."""

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """Nothing is handed on."""
        del parameters
        return 0

    def _files(self, images: list[Image], parameters: GenerationParameters) -> Output:
        if self.facts.video is not None:
            return Output(files=[media.encode_video(images, parameters)])
        return Output(files=[media.encode_image(image, parameters) for image in images])


class DecoderStage(_Last):
    """Latents to picture and video files."""

    role = "decoder"

    def run(self, task: Task) -> Output:
        """Decode, and encode as a file."""
        return self._files(self._adapter.decode(task), task.parameters)


class MonolithicStage(_Last):
    """A route of one: all three stages in one process, behind the same API. The baseline, and a choice."""

    role = "monolithic"

    def run(self, task: Task) -> Output:
        """Encode, denoise, decode."""
        return self._files(self._adapter.generate(task), task.parameters)


STAGES: Final[dict[Role, Callable[[PipelineAdapter], Stage]]] = {
    stage.role: stage for stage in (EncoderStage, DenoiserStage, DecoderStage, MonolithicStage)
}
