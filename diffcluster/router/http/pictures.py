"""Pictures that clients send, in whatever form: to 8-bit PNG files, RGB, or L for a mask. No I/O; slow, so on a thread.

A file's first frame is taken, turned as its EXIF orientation says. 16 bits are scaled to 8; what is transparent is laid
on white. Only the formats below are read, and a picture's size is looked at before it is decoded.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import re
from collections.abc import Callable
from typing import Any, Final, Literal

from msgspec import Struct
from PIL import Image, ImageChops, ImageOps

from diffcluster.errors import InvalidImageError, InvalidRequestError, RequestError
from diffcluster.messages import InputImage

__all__ = ["Picture", "decode_base64", "read_image", "read_mask"]

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MAX_SIDE: Final = 16_384
_SCHEME: Final = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):", re.ASCII)
_DATA_URL: Final = re.compile(r"\s*data:[^,]{0,200};\s*base64\s*,", re.ASCII | re.IGNORECASE)
_SPACE: Final = b" \t\r\n\f\v"
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_WIDE_GREY: Final = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})


class Picture(Struct, frozen=True):
    """A picture as it travels on: what it is, and the bytes of its PNG file."""

    info: InputImage
    content: bytes


def decode_base64(param: str, text: str) -> bytes:
    """The bytes of a data: URL or of plain base64, in either alphabet, with or without padding and white space.

    Raises:
        InvalidRequestError: it is a URL of another kind, which nobody fetches, or not base64.
    """
    head = _DATA_URL.match(text)
    scheme = _SCHEME.match(text)
    if scheme and not head:
        kind = "a data: URL without base64" if scheme[1].lower() == "data" else f"a {scheme[1][:20]}: URL"
        raise InvalidRequestError(
            f"{param}: {kind}; send the picture itself as base64: nothing is fetched", param=param
        )
    try:
        data = text[head.end() if head else 0 :].encode("ascii").translate(_URL_SAFE, delete=_SPACE)
        digits = data.rstrip(b"=")
        padding = b"=" * (-len(digits) % 4)
        if data not in (digits, digits + padding):
            raise binascii.Error("padding that does not fit")
        return base64.b64decode(digits + padding, validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise InvalidRequestError(f"{param}: is not base64", param=param) from error


def read_image(param: str, data: bytes, max_pixels: int) -> Picture:
    """A picture.

    Raises:
        InvalidImageError: it is none, is broken, too large, or of a kind whose values have no known range.
    """
    image = _open(param, data, max_pixels)
    return _picture("image", _guarded(param, lambda: _rgb(param, image)))


def read_mask(param: str, data: bytes, max_pixels: int, of: InputImage) -> Picture:
    """The mask of the picture `of`: white is to be made anew. If parts of it are transparent, those are meant.

    Raises:
        InvalidImageError: as for a picture.
        InvalidRequestError: it is not as large as the picture.
    """
    image = _open(param, data, max_pixels)
    mask = _guarded(param, lambda: _mask(param, image))
    if mask.size != (of.width, of.height):
        text = f"{param}: is {mask.width}x{mask.height}, the picture {of.width}x{of.height}; they must be equally large"
        raise InvalidRequestError(text, param=param)
    return _picture("mask", mask)


def _open(param: str, data: bytes, max_pixels: int) -> Image.Image:
    """The file's header, understood; nothing is decoded yet."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # Pillow raises whatever its parsers do
        raise InvalidImageError(f"{param}: is no picture; {', '.join(_FORMATS)} are read", param=param) from error
    width, height = image.size
    if width * height > max_pixels or max(width, height) > _MAX_SIDE:
        text = f"{param}: is {width}x{height}; at most {max_pixels} pixels and {_MAX_SIDE} on a side are read"
        raise InvalidImageError(text, param=param)
    return image


def _guarded(param: str, work: Callable[[], Image.Image]) -> Image.Image:
    """What `work` makes of a picture that may be broken."""
    try:
        return work()
    except RequestError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        raise InvalidImageError(f"{param}: the picture is broken: {text}", param=param) from error


def _decoded(param: str, image: Image.Image) -> Image.Image:
    """The first frame, upright, with 8 bits for each value."""
    image.load()
    with contextlib.suppress(Exception):  # of metadata that is broken; the picture itself has been decoded
        image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise InvalidImageError(f"{param}: floating point values have no known range; send 8 or 16 bits", param=param)
    if image.mode not in _WIDE_GREY:
        return image
    wide = image.convert("I")
    extrema: Any = wide.getextrema()
    if extrema[0] < 0 or extrema[1] >= 65_536:
        raise InvalidImageError(f"{param}: has values of more than 16 bits", param=param)
    return wide.point(lambda value: value * (1 / 256)).convert("L")


def _rgb(param: str, image: Image.Image) -> Image.Image:
    image = _decoded(param, image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


def _mask(param: str, image: Image.Image) -> Image.Image:
    image = _decoded(param, image)
    if image.has_transparency_data:
        alpha = image.convert("RGBA").getchannel("A")
        if alpha.getextrema() != (255, 255):  # opaque everywhere: then it says nothing, and the colours count
            return ImageChops.invert(alpha)
    return image.convert("RGB").convert("L")


def _picture(kind: Literal["image", "mask"], image: Image.Image) -> Picture:
    image.info = {}  # profiles and the like would be written into the file
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    content = buffer.getvalue()
    return Picture(InputImage(kind, image.width, image.height, len(content)), content)
