"""The pictures of one HTTP request, from the server's queue to the answer, plain or streamed."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from litestar import Request, Response
from litestar.response import ServerSentEvent, ServerSentEventMessage

from diffcluster.errors import NoInstanceError, RequestError
from diffcluster.ids import RequestId
from diffcluster.messages import GenerationParameters, ModelFacts
from diffcluster.router.actions import StageRecord
from diffcluster.router.http.schemas import EditRequest, Image, ImageRequest, ImageResponse
from diffcluster.router.http.validate import choose_model, deadline
from diffcluster.router.http.watch import until_disconnected
from diffcluster.router.server import DiffusionServer, Result

__all__ = ["answer", "draw_seed", "model_of", "timings"]

_SEED_BITS: Final = 2**32
Prefix = Literal["image_generation", "image_edit"]
"""What the names of events begin with."""


def draw_seed(count: int) -> int:
    """A seed that leaves room for `count` - 1 more."""
    return secrets.randbelow(_SEED_BITS - count)


def model_of(request: Request[Any, Any, Any], name: str | None) -> ModelFacts:
    """The model that a request names.

    Raises:
        NoInstanceError, ModelNotFoundError, InvalidRequestError: there is none, or none of that name, or a choice.
    """
    server: DiffusionServer = request.app.state.server
    if not server.models:
        raise NoInstanceError("no role has registered yet")
    return choose_model(name, server.models)


async def answer(
    request: Request[Any, Any, Any],
    body: ImageRequest | EditRequest,
    parameters: list[GenerationParameters],
    inputs: tuple[bytes, ...],
    prefix: Prefix,
) -> Response[Any]:
    """Have the pictures made, and answer with them. Everything has been checked by now."""
    app = request.app.state
    seconds = deadline(body.deadline_s, app.config)
    batch = _Batch(app.server, parameters, inputs, seconds, app.watched, request.state.request_id)
    as_url = body.response_format == "url"
    if body.stream:
        return ServerSentEvent(_events(batch, as_url, prefix))
    results = await until_disconnected(request, batch.results(), batch.cancel)
    return Response(_response(batch, results, as_url), media_type="application/json")


@dataclass
class _Batch:
    """The pictures of one HTTP request. If one fails, the others are given up, and the client gets that error."""

    server: DiffusionServer
    parameters: list[GenerationParameters]
    inputs: tuple[bytes, ...]
    deadline_s: float
    watched: dict[str, list[RequestId]]
    client_id: str
    ids: list[RequestId] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    async def results(self) -> list[Result]:
        """All of them, in order."""
        futures = []
        try:
            for parameters in self.parameters:
                request_id, future = self.server.submit(parameters, self.deadline_s, self.inputs)
                self.ids.append(request_id)
                futures.append(asyncio.wrap_future(future))
            self.watched[self.client_id] = self.ids
            return list(await asyncio.gather(*futures))
        except BaseException:
            self.cancel("another picture of the same request failed")
            await asyncio.gather(*futures, return_exceptions=True)
            raise
        finally:
            if self.watched.get(self.client_id) is self.ids:  # not those of another request with the same id
                del self.watched[self.client_id]

    def cancel(self, reason: str) -> None:
        """Give up all that have not ended."""
        for request_id in self.ids:
            self.server.cancel(request_id, reason)


def _response(batch: _Batch, results: list[Result], as_url: bool) -> ImageResponse:
    first = batch.parameters[0]
    return ImageResponse(
        created=int(time.time()),
        data=[_image(result, parameters, as_url) for result, parameters in zip(results, batch.parameters, strict=True)],
        model=first.model,
        size=f"{first.width}x{first.height}",
        output_format=first.output_format,
        seed=first.seed,
        timings={"total_s": time.monotonic() - batch.started},
    )


def _image(result: Result, parameters: GenerationParameters, as_url: bool) -> Image:
    media_type, content = result.files[0]
    text = base64.b64encode(content).decode("ascii")
    if as_url:
        return Image(url=f"data:{media_type};base64,{text}", seed=parameters.seed, timings=timings(result))
    return Image(b64_json=text, seed=parameters.seed, timings=timings(result))


def timings(result: Result) -> dict[str, Any]:
    """Where the time of a picture or video went, by stage."""
    return {"total_s": result.total_s} | {stage.role: _timing(stage) for stage in result.stages}


def _timing(stage: StageRecord) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(stage)
    del values["role"]
    return values


async def _events(batch: _Batch, as_url: bool, prefix: Prefix) -> AsyncIterator[ServerSentEventMessage]:
    """OpenAI's streaming form. After the headers an error can only be an event."""
    try:
        results = await batch.results()
    except RequestError as error:
        body = {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
        yield ServerSentEventMessage(event="error", data=msgspec.json.encode(body).decode())
        return
    response = _response(batch, results, as_url)
    for image in response.data:
        data: dict[str, Any] = {
            "type": f"{prefix}.completed",
            "created_at": response.created,
            "size": response.size,
            "quality": "auto",
            "background": "opaque",
            "output_format": response.output_format,
            "usage": {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0,
                      "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}},
        }  # fmt: skip
        data |= msgspec.to_builtins(image)
        yield ServerSentEventMessage(event=f"{prefix}.completed", data=msgspec.json.encode(data).decode())
    yield ServerSentEventMessage(data="[DONE]")
