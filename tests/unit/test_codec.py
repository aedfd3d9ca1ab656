"""Messages survive the wire unchanged; whatever else arrives is a `WireError` and nothing worse."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffcluster import messages
from diffcluster.codec import MAX_MESSAGE_BYTES, decode_bulk, decode_from_role, decode_from_router, encode
from diffcluster.errors import WireError
from diffcluster.messages import BulkPiece, FileInfo, RoleToRouter, RouterToRole
from tests.support import REQUEST, TIMINGS, incarnation, manifest, parameters, register, slot

OF_REQUEST: dict[str, Any] = {"request_id": REQUEST, "attempt": 2}
PEER: dict[str, Any] = {"receiver": incarnation(2), "lease": 7}
FROM_ROLE = [
    register(),
    messages.RoleHeartbeat(queued=1, running=1, receive_free=1, receive_quarantined=1, send_free=1, resident_bytes=1),
    messages.Staged(**OF_REQUEST, manifest=manifest(), scalars={"a": 1, "b": 1.5, "c": "x"}, timings=TIMINGS),
    messages.Allocated(**OF_REQUEST, slot=slot()),
    messages.AllocationRefused(**OF_REQUEST, permanent=True, reason="too large"),
    messages.Pushed(**OF_REQUEST, **PEER, engine="tcp", nbytes=4096, seconds=0.5),
    messages.PushFailed(**OF_REQUEST, **PEER, settled=False, reason="timed out"),
    messages.Progress(**OF_REQUEST, step=1, steps=4),
    messages.Done(**OF_REQUEST, files=(FileInfo("image/png", 10),), timings=TIMINGS),
    messages.Failed(**OF_REQUEST, code="nan_output", reason="NaN"),
    messages.Cancelled(**OF_REQUEST),
    messages.Evicted(**OF_REQUEST, lease=7, quarantined=True),
    messages.Grant(slot=slot()),
    messages.Met(receiver=incarnation(2), engine="shm"),
    messages.Met(receiver=incarnation(2), engine=None, reason="no way"),
    messages.Drain(),
]
PEER = messages.Peer("denoiser-1", incarnation(2), "h", register().sessions)
FROM_ROUTER = [
    messages.Registered(fresh=True, heartbeat_s=1.0, bulk_port=1),
    messages.Refused(again=True, reason="not registered"),
    messages.RouterHeartbeat(),
    messages.Submit(**OF_REQUEST, parameters=parameters(extra={"x": 1.0})),
    messages.Allocate(**OF_REQUEST, nbytes=4096),
    messages.Ungrant(leases=(3, 4)),
    messages.Meet(peer=PEER),
    messages.Part(receiver=incarnation(2)),
    messages.Push(
        **OF_REQUEST,
        peer=PEER,
        slot=slot(),
    ),
    messages.Ready(**OF_REQUEST, lease=7, manifest=manifest(), scalars={}, parameters=parameters()),
    messages.Release(**OF_REQUEST),
    messages.Evict(**OF_REQUEST, lease=7, settled=False),
    messages.Cancel(**OF_REQUEST),
    messages.Drain(),
    messages.Drained(),
]


def _name(message: object) -> str:
    return type(message).__name__


@pytest.mark.parametrize("message", FROM_ROLE, ids=_name)
def test_what_roles_say_survives_the_wire(message: Any) -> None:
    assert decode_from_role(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ROUTER, ids=_name)
def test_what_the_router_says_survives_the_wire(message: Any) -> None:
    assert decode_from_router(encode(message)) == message


def test_the_examples_above_are_all_messages_that_there_are() -> None:
    assert {type(message) for message in FROM_ROLE} == set(get_args(RoleToRouter))
    assert {type(message) for message in FROM_ROUTER} == set(get_args(RouterToRole))


def test_the_head_of_a_piece_survives_the_wire() -> None:
    head = BulkPiece(**OF_REQUEST, file=0, offset=0)
    assert decode_bulk(encode(head)) == head


def test_each_direction_refuses_the_other_ones_messages() -> None:
    with pytest.raises(WireError):
        decode_from_role(encode(messages.Release(**OF_REQUEST)))
    with pytest.raises(WireError):
        decode_from_router(encode(messages.Cancelled(**OF_REQUEST)))


GOOD = msgspec.to_builtins(messages.Evicted(**OF_REQUEST, lease=7, quarantined=True))


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Exec"},
        {"surprise": 1},
        {"attempt": 0},
        {"attempt": 1001},
        {"attempt": "2"},
        {"request_id": ""},
        {"request_id": "r" * 65},
        {"quarantined": None},
    ],
    ids=str,
)
def test_a_message_with_a_wrong_field_is_refused(change: dict[str, object]) -> None:
    decode_from_role(msgspec.msgpack.encode(GOOD))
    with pytest.raises(WireError):
        decode_from_role(msgspec.msgpack.encode(GOOD | change))


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_a_message_without_one_of_its_fields_is_refused(missing: str) -> None:
    with pytest.raises(WireError):
        decode_from_role(msgspec.msgpack.encode({name: value for name, value in GOOD.items() if name != missing}))


def test_a_frame_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(WireError, match="at most"):
        decode_from_role(bytes(MAX_MESSAGE_BYTES + 1))


def test_a_frame_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(WireError):
        decode_from_role(b"\x91" * 100_000)


def test_text_that_is_no_utf8_is_refused() -> None:
    frame = encode(messages.Failed(**OF_REQUEST, code="worker_error", reason="xxxx")).replace(
        b"xxxx", b"\xff\xfe\xff\xfe"
    )
    with pytest.raises(WireError):
        decode_from_role(frame)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_a_message_or_a_wire_error(frame: bytes) -> None:
    for decode in (decode_from_role, decode_from_router, decode_bulk):
        with contextlib.suppress(WireError):
            decode(frame)


@given(st.sampled_from(FROM_ROLE), st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(message: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        decode_from_role(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
