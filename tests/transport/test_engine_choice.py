"""By which engine two peers talk."""

from __future__ import annotations

import pytest

from diffcluster.errors import TransferError
from diffcluster.ids import HostId
from diffcluster.messages import Session
from diffcluster.transport.engines.base import choose

SHM, TCP = Session("shm", "name"), Session("tcp", "127.0.0.1:1")


def test_peers_on_one_host_take_shared_memory() -> None:
    assert choose(HostId("a"), HostId("a"), [TCP, SHM]) == SHM


def test_peers_on_two_hosts_take_tcp() -> None:
    assert choose(HostId("a"), HostId("b"), [SHM, TCP]) == TCP


def test_a_receiver_that_offers_tcp_alone_gets_tcp() -> None:
    assert choose(HostId("a"), HostId("a"), [TCP]) == TCP


@pytest.mark.parametrize("sessions", [[], [SHM]])
def test_nothing_in_common_is_an_error_and_not_another_way(sessions: list[Session]) -> None:
    with pytest.raises(TransferError, match="does not work"):
        choose(HostId("a"), HostId("b"), sessions)
