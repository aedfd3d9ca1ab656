"""Bodies with pictures: how many are read at one time, and what is in them, as JSON or as a form."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from litestar import Request
from litestar.exceptions import HTTPException

from diffcluster.errors import InvalidRequestError, QueueFullError
from diffcluster.router.http.forms import is_form, read_form
from diffcluster.router.http.pictures import Picture, decode_base64, read_image, read_mask
from diffcluster.router.http.schemas import EditRequest, ImageReference, VideoRequest
from diffcluster.router.http.validate import parse

__all__ = ["Upload", "Uploads", "content_type", "read_edit", "read_video"]

_Body = TypeVar("_Body")
_Result = TypeVar("_Result")
_AT_ONCE: Final = 4
"""Bodies that are taken apart, or decoded, at one time: a small file can be a large picture."""
_LENGTH: Final = re.compile(r"[0-9]{1,19}", re.ASCII)
_Given = bytes | str
"""A picture as the client sent it: a file, or base64."""


class Uploads:
    """Bounds what bodies with pictures take of memory while they are read and decoded. Bytes."""

    def __init__(self, limit: int, largest: int) -> None:
        self._limit, self._largest = limit, largest
        self._held = 0
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def on_thread(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """What `work` returns or raises; the event loop serves others meanwhile."""
        async with self._turns:
            return await asyncio.to_thread(work, *arguments)

    @contextmanager
    def reading(self, request: Request[Any, Any, Any]) -> Iterator[None]:
        """Within it the body may be read; raises `QueueFullError` if too much is being read already."""
        announced = request.headers.get("content-length", "")
        nbytes = min(int(announced), self._largest) if _LENGTH.fullmatch(announced) else self._largest
        if self._held and self._held + nbytes > self._limit:
            raise QueueFullError(f"pictures of {self._held} bytes are being read already")
        self._held += nbytes
        try:
            yield
        finally:
            self._held -= nbytes


@dataclass(frozen=True)
class Upload(Generic[_Body]):
    """A body, and the pictures that came with it, not looked at yet. `param` is what the client called them."""

    body: _Body
    images: list[_Given] = field(default_factory=list)
    mask: _Given | None = None
    param: str = "image"

    def pictures(self, max_pixels: int) -> tuple[Picture, ...]:
        """All pictures, the mask last; slow. Raises `InvalidImageError` or `InvalidRequestError`."""
        images = [read_image(self.param, _content(self.param, image), max_pixels) for image in self.images]
        if self.mask is None:
            return tuple(images)
        return (*images, read_mask("mask", _content("mask", self.mask), max_pixels, images[0].info))


def content_type(request: Request[Any, Any, Any]) -> str:
    """The type of a body that may be JSON or a form; raises 415 for all others."""
    given: str = request.headers.get("content-type", "")
    if not is_form(given) and given.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(status_code=415)
    return given


def read_edit(kind: str, body: bytes) -> Upload[EditRequest]:
    """The body of an edit. `kind` is its content type. Slow if it is large.

    Raises:
        InvalidRequestError: a field that cannot be; `param` names it.
    """
    if is_form(kind):
        form = read_form(kind, body, frozenset({"image", "images", "mask"}))
        request = form.request(EditRequest)
        groups = {name: form.files.get(name, []) for name in ("image", "images")}
        masks = form.files.get("mask", [])
    else:
        request = parse(body, EditRequest)
        groups = {"image": _listed(request.image), "images": _listed(request.images)}
        masks = _listed(request.mask)
    if groups["image"] and groups["images"]:
        raise InvalidRequestError("images: and image cannot both be given", param="images")
    if len(masks) > 1:
        raise InvalidRequestError("mask: there can be one only", param="mask")
    param = "images" if groups["images"] else "image"
    return Upload(request, groups[param], masks[0] if masks else None, param)


def read_video(kind: str, body: bytes) -> Upload[VideoRequest]:
    """The same for a video."""
    name = "input_reference"
    if is_form(kind):
        form = read_form(kind, body, frozenset({name}))
        request, images = form.request(VideoRequest), form.files.get(name, [])
    else:
        request = parse(body, VideoRequest)
        images = _listed(request.input_reference)
    return Upload(request, images, None, name)


def _listed(given: str | ImageReference | Sequence[str | ImageReference] | None) -> list[_Given]:
    """Pictures of a JSON body, whichever way they were given."""
    if given is None:
        return []
    several = [given] if isinstance(given, (str, ImageReference)) else given
    return [each.image_url if isinstance(each, ImageReference) else each for each in several]


def _content(param: str, given: _Given) -> bytes:
    return decode_base64(param, given) if isinstance(given, str) else given
