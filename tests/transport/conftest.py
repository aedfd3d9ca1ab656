"""An arena, and for each engine a receiver and a sender."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diffcluster.messages import EngineKind
from diffcluster.transport.arena import Arena
from diffcluster.transport.engines import open_receiver, open_sender
from diffcluster.transport.engines.base import Receiver, Sender
from tests.transport.capabilities import kinds
from tests.transport.kit import OPTIONS, SIZE


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(SIZE, shared=True)
    yield arena
    arena.close()


@pytest.fixture(params=kinds())
def kind(request: pytest.FixtureRequest) -> EngineKind:
    """Each engine; a module can name fewer by a fixture of its own."""
    return request.param


@pytest.fixture
def receiver(kind: EngineKind, arena: Arena) -> Iterator[Receiver]:
    receiver = open_receiver(kind, arena, OPTIONS)
    yield receiver
    receiver.stop()


@pytest.fixture
def sender(kind: EngineKind) -> Iterator[Sender]:
    sender = open_sender(kind)
    yield sender
    sender.stop()
