"""A small client of the router's HTTP API, blocking and async.

    with Client("http://127.0.0.1:8000") as client:
        image = client.generate("a slice of pizza", seed=7)[0]
        Path("pizza.png").write_bytes(image.content)
        other = client.edit("a slice of melon", [image.content], strength=0.6)[0]

OpenAI's own client works as well; this one knows our fields, our errors and the cluster's state.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

import httpx
from msgspec import Struct

from diffcluster.errors import DiffclusterError

__all__ = ["ApiError", "AsyncClient", "Client", "GeneratedImage", "GeneratedVideo"]

_TIMEOUT: Final = httpx.Timeout(None, connect=5.0)  # the router bounds how long a picture may take
_LOOK_S: Final = 5.0  # but looking at it takes no time
_POLL_S: Final = 0.2
_VIDEOS: Final = "/v1/videos"


def _options(url: str) -> dict[str, Any]:
    # Reading the machine's certificates takes longer than a request: plain HTTP does without.
    verify: bool | ssl.SSLContext = True if url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return {"base_url": url, "timeout": _TIMEOUT, "trust_env": False, "verify": verify}


class ApiError(DiffclusterError):
    """The router said no, or could not be reached. `status` is 0 if there was no answer."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class GeneratedImage(Struct, frozen=True):
    """One picture: the file's bytes, the seed that makes it again, seconds by stage."""

    content: bytes
    seed: int
    timings: dict[str, Any]


class GeneratedVideo(Struct, frozen=True):
    """One video: the file's bytes and their media type, the seed that makes it again, seconds by stage."""

    content: bytes
    media_type: str
    seed: int
    timings: dict[str, Any]


def _checked(response: httpx.Response) -> dict[str, Any]:
    if response.is_success:
        body: dict[str, Any] = response.json()
        return body
    try:
        error = response.json()["error"]
        raise ApiError(response.status_code, error["message"], error["code"], error["param"])
    except (ValueError, KeyError, TypeError):
        raise ApiError(response.status_code, f"HTTP {response.status_code} from {response.url}") from None


def _images(response: httpx.Response) -> list[GeneratedImage]:
    data = _checked(response)["data"]
    return [GeneratedImage(base64.b64decode(image["b64_json"]), image["seed"], image["timings"]) for image in data]


def _request(prompt: str, fields: dict[str, Any], request_id: str | None) -> dict[str, Any]:
    headers = {"x-request-id": request_id} if request_id else {}
    return {"url": "/v1/images/generations", "json": {"prompt": prompt} | fields, "headers": headers}


def _edit(
    prompt: str, images: Sequence[bytes], mask: bytes | None, fields: dict[str, Any], request_id: str | None
) -> dict[str, Any]:
    pictures = {"image": [_base64(image) for image in images]} | ({} if mask is None else {"mask": _base64(mask)})
    return _request(prompt, fields | pictures, request_id) | {"url": "/v1/images/edits"}


def _video(prompt: str, image: bytes | None, fields: dict[str, Any]) -> dict[str, Any]:
    picture = {} if image is None else {"input_reference": _base64(image)}
    return _request(prompt, fields | picture, None) | {"url": _VIDEOS}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _is_made(video: dict[str, Any]) -> bool:
    """Whether it is; raises `ApiError` if it will never be."""
    if video["status"] == "failed":
        raise ApiError(200, video["error"]["message"], video["error"]["code"])
    return bool(video["status"] == "completed")


def _video_file(video: dict[str, Any], response: httpx.Response) -> GeneratedVideo:
    if not response.is_success:
        _checked(response)
    return GeneratedVideo(response.content, response.headers["content-type"], video["seed"], video["timings"])


class Client:
    """Blocking. Proxies of the environment are not used: a cluster is reached directly."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(**_options(url))

    def generate(self, prompt: str, *, request_id: str | None = None, **fields: Any) -> list[GeneratedImage]:
        """POST /v1/images/generations with `fields` as they are; raises `ApiError`."""
        try:
            return _images(self._http.post(**_request(prompt, fields, request_id)))
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    def edit(
        self,
        prompt: str,
        images: Sequence[bytes],
        mask: bytes | None = None,
        *,
        request_id: str | None = None,
        **fields: Any,
    ) -> list[GeneratedImage]:
        """POST /v1/images/edits with files as `images`, and `fields` as they are; raises `ApiError`."""
        try:
            return _images(self._http.post(**_edit(prompt, images, mask, fields, request_id)))
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    def video(self, prompt: str, image: bytes | None = None, **fields: Any) -> GeneratedVideo:
        """Have a video made, wait for it, fetch it, and have it forgotten; raises `ApiError`."""
        try:
            video = _checked(self._http.post(**_video(prompt, image, fields)))
            path = f"{_VIDEOS}/{video['id']}"
            try:
                while not _is_made(video):
                    time.sleep(_POLL_S)
                    video = _checked(self._http.get(path))
                return _video_file(video, self._http.get(f"{path}/content"))
            finally:
                self._http.delete(path)
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    def get(self, path: str) -> dict[str, Any]:
        """GET any of the router's JSON pages, such as `/v1/cluster`; raises `ApiError`."""
        try:
            return _checked(self._http.get(path, timeout=_LOOK_S))
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(**_options(url))

    async def generate(self, prompt: str, *, request_id: str | None = None, **fields: Any) -> list[GeneratedImage]:
        """POST /v1/images/generations with `fields` as they are; raises `ApiError`."""
        try:
            return _images(await self._http.post(**_request(prompt, fields, request_id)))
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    async def edit(
        self,
        prompt: str,
        images: Sequence[bytes],
        mask: bytes | None = None,
        *,
        request_id: str | None = None,
        **fields: Any,
    ) -> list[GeneratedImage]:
        """POST /v1/images/edits with files as `images`, and `fields` as they are; raises `ApiError`."""
        try:
            return _images(await self._http.post(**_edit(prompt, images, mask, fields, request_id)))
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    async def video(self, prompt: str, image: bytes | None = None, **fields: Any) -> GeneratedVideo:
        """Have a video made, wait for it, fetch it, and have it forgotten; raises `ApiError`."""
        try:
            video = _checked(await self._http.post(**_video(prompt, image, fields)))
            path = f"{_VIDEOS}/{video['id']}"
            try:
                while not _is_made(video):
                    await asyncio.sleep(_POLL_S)
                    video = _checked(await self._http.get(path))
                return _video_file(video, await self._http.get(f"{path}/content"))
            finally:
                await self._http.delete(path)
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    async def get(self, path: str) -> dict[str, Any]:
        """GET any of the router's JSON pages; raises `ApiError`."""
        try:
            return _checked(await self._http.get(path, timeout=_LOOK_S))
        except httpx.HTTPError as error:
            raise ApiError(0, f"{self._http.base_url} does not answer: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()
