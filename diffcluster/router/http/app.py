"""The ASGI application over a running `DiffusionServer`."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any, Final

from litestar import Litestar, Request, Router
from litestar.datastructures import Headers, MutableScopeHeaders, State
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig

from diffcluster import __version__
from diffcluster.errors import RequestError
from diffcluster.router.http import cluster, errors, images, videos
from diffcluster.router.http.schemas import EditRequest, ImageRequest, ImageResponse, VideoRequest
from diffcluster.router.http.uploads import Uploads

if TYPE_CHECKING:
    from litestar.types import Message, Scope

    from diffcluster.config import RouterConfig
    from diffcluster.router.server import DiffusionServer

__all__ = ["make_app"]

_HANDLERS: Final = (
    images.generations,
    cluster.models,
    cluster.model,
    cluster.health,
    cluster.ready,
    cluster.metrics,
    cluster.cluster,
    cluster.request_status,
    videos.video,
    videos.content,
    videos.remove,
)
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)


def make_app(server: DiffusionServer, config: RouterConfig) -> Litestar:
    """Routes, errors and the OpenAPI document (at /schema, for people at /schema/swagger)."""
    maker = videos.VideoMaker(server, config)
    state = {
        "server": server,
        "config": config,
        "watched": {},
        "videos": maker,
        "uploads": Uploads(config.max_input_bytes, config.max_upload_bytes),
    }
    # All methods of one path belong to one router.
    with_pictures = Router(
        "/", route_handlers=[images.edits, videos.create, videos.listed], request_max_body_size=config.max_upload_bytes
    )
    return Litestar(
        [*_HANDLERS, with_pictures],
        state=State(state),
        on_shutdown=[maker.stop],
        before_request=_name_request,
        before_send=[_say_request_id],
        exception_handlers={
            RequestError: errors.on_request_error,
            HTTPException: errors.on_http_exception,
            Exception: errors.on_unexpected,
        },
        request_max_body_size=config.max_body_bytes,
        openapi_config=OpenAPIConfig(
            title="diffcluster",
            version=__version__,
            description="Pictures and videos from a cluster of encoders, denoisers and decoders. OpenAI's API.",
            use_handler_docstrings=True,
        ),
        signature_types=[ImageRequest, ImageResponse, EditRequest, VideoRequest],
        logging_config=None,
    )


async def _name_request(request: Request[Any, Any, Any]) -> None:
    request.state.request_id = _request_id(request.headers)


async def _say_request_id(message: Message, scope: Scope) -> None:
    if message["type"] == "http.response.start":
        # Not named yet if it was refused before it came to a handler.
        request_id = scope.get("state", {}).get("request_id") or _request_id(Headers.from_scope(scope))
        MutableScopeHeaders.from_message(message)["x-request-id"] = request_id


def _request_id(headers: Headers) -> str:
    """The client's request id if it is fit for a header; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
