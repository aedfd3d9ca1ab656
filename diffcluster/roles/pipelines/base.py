"""What a family's adapter can do. Each method is one role's work, by the pipeline's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from diffcluster.messages import GenerationParameters, ModelFacts
    from diffcluster.roles.stage import Progressing

__all__ = ["Adapter"]


class Adapter(Protocol):
    """A model with the components of one role. Only that role's methods may be called."""

    facts: ModelFacts
    components: dict[str, int]

    def encoded_bytes(self, parameters: GenerationParameters) -> int:
        """Upper bound of what `encode` returns, padding included."""

    def encode(self, parameters: GenerationParameters) -> dict[str, torch.Tensor]:
        """What the denoiser needs of the prompts."""

    def denoised_bytes(self, parameters: GenerationParameters) -> int:
        """Upper bound of what `denoise` returns, padding included."""

    def denoise(
        self, parameters: GenerationParameters, encoded: dict[str, torch.Tensor], progress: Progressing
    ) -> dict[str, torch.Tensor]:
        """What the decoder needs."""

    def decode(self, parameters: GenerationParameters, denoised: dict[str, torch.Tensor]) -> list[Image]:
        """The pictures."""
