"""POST /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, Response, post
from litestar.exceptions import HTTPException
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema

from diffcluster.router.http.batch import answer, draw_seed, model_of
from diffcluster.router.http.schemas import EditRequest, ImageRequest
from diffcluster.router.http.tasks import check_count, edit_parameters, edit_task, image_parameters
from diffcluster.router.http.uploads import content_type, read_edit
from diffcluster.router.http.validate import parse

__all__ = ["described", "edits", "generations"]


@dataclass
class _BodySchema(Schema):
    """What msgspec says of a struct, as it is."""

    kind: type[msgspec.Struct] = msgspec.Struct

    def to_schema(self) -> dict[str, Any]:
        _, components = msgspec.json.schema_components([self.kind])
        schema: dict[str, Any] = components[self.kind.__name__]
        return schema


def described(kind: type[msgspec.Struct], *media_types: str) -> type[Operation]:
    """The operation as it stands in the OpenAPI document: its body is read by us, so it must be told."""

    @dataclass
    class Described(Operation):
        def __post_init__(self) -> None:
            content = OpenAPIMediaType(schema=_BodySchema(kind=kind))
            self.request_body = RequestBody(content=dict.fromkeys(media_types, content), required=True)

    return Described


@post(
    "/v1/images/generations",
    status_code=200,
    operation_class=described(ImageRequest, "application/json"),
    tags=["images"],
)
async def generations(request: Request[Any, Any, Any]) -> Response[Any]:
    """Make pictures from a prompt."""
    body = parse(await _json_body(request), ImageRequest)
    facts = model_of(request, body.model)
    parameters = image_parameters(body, facts, request.app.state.config, draw_seed)
    return await answer(request, body, parameters, (), "image_generation")


async def _json_body(request: Request[Any, Any, Any]) -> bytes:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(status_code=415)
    return await request.body()


@post(
    "/v1/images/edits",
    status_code=200,
    operation_class=described(EditRequest, "application/json", "multipart/form-data"),
    tags=["images"],
)
async def edits(request: Request[Any, Any, Any]) -> Response[Any]:
    """Make pictures from a picture and a prompt; with a mask, only where it says so."""
    app = request.app.state
    kind = content_type(request)
    with app.uploads.reading(request):
        upload = await app.uploads.on_thread(read_edit, kind, await request.body())
        facts = model_of(request, upload.body.model)
        task = edit_task(facts, mask=upload.mask is not None)
        check_count(upload.param, len(upload.images), facts)
        pictures = await app.uploads.on_thread(upload.pictures, app.config.max_input_pixels)
    body = upload.body
    parameters = edit_parameters(body, facts, app.config, task, [picture.info for picture in pictures], draw_seed)
    del upload  # what the client sent is not needed any more
    return await answer(request, body, parameters, tuple(picture.content for picture in pictures), "image_edit")
