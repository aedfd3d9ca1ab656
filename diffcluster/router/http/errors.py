"""Every error over HTTP has OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any, Final

from litestar import Request, Response
from litestar.exceptions import HTTPException

from diffcluster.errors import RequestError

__all__ = ["RETRY_AFTER_S", "error_response", "on_http_exception", "on_request_error", "on_unexpected"]

RETRY_AFTER_S: Final = 1
_log = logging.getLogger(__name__)

_HTTP_CODES: Final = {
    404: ("not_found", "there is nothing at {path}"),
    405: ("method_not_allowed", "{path} does not take {method}"),
    413: ("request_too_large", "the body is larger than this server reads"),
    415: ("unsupported_media_type", "send the body as application/json, or multipart/form-data if it has pictures"),
}


def error_response(
    status: int, message: str, kind: str, code: str | None, param: str | None = None, *, retry: bool | None = None
) -> Response[dict[str, Any]]:
    """The response for one error. `retry` tells OpenAI's clients whether to send it again."""
    headers = {}
    if retry is not None:
        headers["x-should-retry"] = str(retry).lower()
    if retry:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def on_request_error(_: Request[Any, Any, Any], error: RequestError) -> Response[dict[str, Any]]:
    """Our own errors know how they look."""
    retry = None if error.status == 400 else error.should_retry
    return error_response(error.status, error.message, error.kind, error.code, error.param, retry=retry)


def on_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[dict[str, Any]]:
    """The framework's errors: no such route, no such method, too large a body."""
    code, text = _HTTP_CODES.get(error.status_code, (None, str(error.detail)))
    message = text.format(path=request.url.path, method=request.method)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    response = error_response(error.status_code, message, kind, code)
    response.headers.update(error.headers or {})
    return response


def on_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, Any]]:
    """A bug of ours. The log says what; the client does not learn our internals."""
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(
        500, "the server failed on this request; its log says why", "server_error", "internal_error", retry=False
    )
