"""Clients' pictures on the bulk link, as a role sees it: one that this test plays, frame by frame, to a real router."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import zmq
from PIL import Image

from diffcluster import codec
from diffcluster.ids import InstanceName
from diffcluster.local import LocalCluster, Plan
from diffcluster.messages import (
    BulkPiece,
    Cancel,
    Done,
    Failed,
    FileInfo,
    InputImage,
    Registered,
    RoleToRouter,
    Submit,
)
from diffcluster.transport.control import PIECE_BYTES
from tests.process.conftest import ANY_PORT, QUIET, Server, error_of, eventually, file_of
from tests.support import TIMINGS, facts, incarnation, register

EDITS = "/v1/images/edits"
FACTS = facts(tasks=("image_to_image",), max_input_images=4, max_pixels=1 << 22)


@pytest.fixture(scope="module")
def router() -> Iterator[Server]:
    with LocalCluster(Plan({}, (), [*ANY_PORT, *QUIET, "--heartbeat-s", "20"])) as cluster:
        yield Server(cluster.url)


class Role:
    """A monolithic role without a model."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, number: int) -> None:
        self._context, self._identity = context, incarnation(number)
        self._control = self._dealer(port)
        self._bulk: zmq.Socket[bytes] | None = None
        self.say(register("monolithic", number, name=InstanceName("played"), model=FACTS, slot_bytes=0))
        registered = self.hear()
        assert isinstance(registered, Registered)
        self._bulk_port = registered.bulk_port

    def _dealer(self, port: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 2000)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    def connect_bulk(self) -> None:
        self._bulk = self._dealer(self._bulk_port)

    def say(self, message: RoleToRouter) -> None:
        self._control.send(codec.encode(message))

    def hear(self) -> Any:
        return codec.decode_from_router(self._control.recv())

    def piece(self) -> tuple[BulkPiece, bytes]:
        assert self._bulk is not None
        head, data = self._bulk.recv_multipart()
        return codec.decode_bulk(head), data

    def inputs(self, submit: Submit) -> list[bytes]:
        """All that a `Submit` announces, checked piece by piece."""
        files = []
        for number, info in enumerate(submit.parameters.inputs):
            content = b""
            while len(content) < info.nbytes:
                head, data = self.piece()
                place = (submit.request_id, submit.attempt, number, len(content))
                assert (head.request_id, head.attempt, head.file, head.offset) == place
                assert 0 < len(data) <= PIECE_BYTES
                content += data
            assert len(content) == info.nbytes
            files.append(content)
        return files

    def silent(self) -> bool:
        """Whether no piece comes any more."""
        assert self._bulk is not None
        return not self._bulk.poll(500)

    def finish(self, submit: Submit, content: bytes) -> None:
        assert self._bulk is not None
        head = BulkPiece(request_id=submit.request_id, attempt=submit.attempt, file=0, offset=0)
        self._bulk.send_multipart([codec.encode(head), content])
        files = (FileInfo("image/png", len(content)),)
        self.say(Done(request_id=submit.request_id, attempt=submit.attempt, files=files, timings=TIMINGS))

    def close(self) -> None:
        for socket in (self._control, self._bulk):
            if socket is not None:
                socket.close()


@contextmanager
def played(router: Server, number: int) -> Iterator[Role]:
    with zmq.Context() as context:
        role = Role(context, router.cluster()["control_port"], number)
        try:
            yield role
        finally:
            role.close()


@contextmanager
def asked(router: Server, pictures: list[bytes], **fields: Any) -> Iterator[Future[httpx.Response]]:
    images = [base64.b64encode(picture).decode() for picture in pictures]
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(router.post, {"prompt": "x", "image": images} | fields, path=EDITS)


def noise(side: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def png(side: int, seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(side, seed)).save(buffer, "PNG")
    return buffer.getvalue()


def test_pictures_come_in_pieces_and_again_with_each_attempt(router: Server) -> None:
    with played(router, 1) as role, asked(router, [png(600), png(40, 1)]) as future:
        submit = role.hear()
        assert [info.kind for info in submit.parameters.inputs] == ["image", "image"]
        role.connect_bulk()  # later than the request: what was to be sent has waited
        first = role.inputs(submit)
        with Image.open(io.BytesIO(first[0])) as image:
            assert np.array_equal(np.asarray(image), noise(600))
        role.say(Failed(request_id=submit.request_id, attempt=1, code="transfer_failed", reason="a piece is missing"))
        again = role.hear()
        assert (again.request_id, again.attempt) == (submit.request_id, 2)
        assert again.parameters == submit.parameters
        assert role.inputs(again) == first
        role.finish(again, b"made")
        assert file_of(future.result(timeout=20)) == b"made"
        assert role.silent()


def test_pictures_that_never_arrive_end_the_request_after_the_third_time(router: Server) -> None:
    with played(router, 2) as role, asked(router, [png(40)]) as future:
        role.connect_bulk()
        for attempt in (1, 2, 3):
            submit = role.hear()
            assert submit.attempt == attempt
            role.say(Failed(request_id=submit.request_id, attempt=attempt, code="transfer_failed", reason="lost"))
        assert error_of(future.result(timeout=20), 500)["code"] == "transfer_failed"


def test_n_pictures_have_one_source(router: Server) -> None:
    with played(router, 3) as role, asked(router, [png(40)], n=2, seed=7) as future:
        role.connect_bulk()
        submits = [role.hear(), role.hear()]
        assert [submit.parameters.seed for submit in submits] == [7, 8]
        files = [role.inputs(submit) for submit in submits]
        assert files[0] == files[1]
        assert submits[0].parameters.inputs == (InputImage("image", 40, 40, len(files[0][0])),)
        for submit in submits:
            role.finish(submit, b"made")
        assert len(future.result(timeout=20).json()["data"]) == 2


def test_what_was_given_up_is_not_sent(router: Server) -> None:
    """Its pieces wait for a link that is not there yet."""
    with played(router, 4) as role:
        with asked(router, [png(600)], deadline_s=0.5) as future:
            submit = role.hear()
            assert error_of(future.result(timeout=20), 504)["code"] == "deadline_exceeded"
            assert role.hear() == Cancel(request_id=submit.request_id, attempt=1)
        eventually(lambda: not router.cluster()["requests"])
        role.connect_bulk()
        assert role.silent()
