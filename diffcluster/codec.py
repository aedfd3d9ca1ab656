"""The one place where messages become bytes and bytes become messages: MessagePack by msgspec, never pickle."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from diffcluster.errors import WireError
from diffcluster.messages import BulkPiece, RoleToRouter, RouterToRole

__all__ = ["MAX_MESSAGE_BYTES", "decode_bulk", "decode_from_role", "decode_from_router", "encode"]

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Larger control messages are refused unread; what is large travels on the bulk connection."""

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_from_role: msgspec.msgpack.Decoder[RoleToRouter] = msgspec.msgpack.Decoder(RoleToRouter)
_from_router: msgspec.msgpack.Decoder[RouterToRole] = msgspec.msgpack.Decoder(RouterToRole)
_bulk: msgspec.msgpack.Decoder[BulkPiece] = msgspec.msgpack.Decoder(BulkPiece)


def encode(message: RoleToRouter | RouterToRole | BulkPiece) -> bytes:
    """`message` as bytes."""
    return _encoder.encode(message)


def decode_from_role(frame: bytes | memoryview) -> RoleToRouter:
    """The message in `frame`; raises `WireError` if it is none."""
    return _decode(_from_role, frame)


def decode_from_router(frame: bytes | memoryview) -> RouterToRole:
    """The message in `frame`; raises `WireError` if it is none."""
    return _decode(_from_router, frame)


def decode_bulk(frame: bytes | memoryview) -> BulkPiece:
    """The head in `frame`; raises `WireError` if it is none."""
    return _decode(_bulk, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes | memoryview) -> _T:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"a control message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are read")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error
