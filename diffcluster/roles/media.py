"""Pictures as files."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

    from diffcluster.messages import GenerationParameters

__all__ = ["encode_image"]


def encode_image(image: Image, parameters: GenerationParameters) -> tuple[str, bytes]:
    """(media type, bytes) of `image` in the format that was asked for.

    PNG is lossless and ignores `output_compression`; JPEG and WebP take it as their quality, 0..100.
    """
    options: dict[str, Any] = {}
    if parameters.output_format in ("jpeg", "webp"):
        options["quality"] = parameters.output_compression
    if parameters.output_format == "jpeg" and image.mode != "RGB":
        image = image.convert("RGB")  # JPEG has no alpha channel
    buffer = io.BytesIO()
    image.save(buffer, parameters.output_format.upper(), **options)
    return f"image/{parameters.output_format}", buffer.getvalue()
