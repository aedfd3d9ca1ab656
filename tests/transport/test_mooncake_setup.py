"""What of the Mooncake engine needs no library: how that is set up, or refused; its address, its door."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diffcluster.errors import ConfigError, TransferError
from diffcluster.ids import LeaseId
from diffcluster.transport.engines import mooncake_library as library
from diffcluster.transport.engines.mooncake_address import ECHO_BYTES, MooncakeAddress, parse
from diffcluster.transport.engines.mooncake_door import CELL_BYTES, Door, Visit
from diffcluster.transport.engines.waiting import Limit
from tests.transport.kit import slot, until

ADDRESS = MooncakeAddress("10.0.0.7", 15001, 40000, 0x7F0000001000, 4096, 0x7F0000009000, "ab" * 16, "tcp")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the library had not been loaded in this process, and nothing were set."""
    monkeypatch.setattr(library, "_loaded", None)
    for name in (*library._DEFAULTS, "MC_FORCE_TCP", "MC_USE_IPV6", "MC_TCP_PROTO", library.VARIABLE):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(library.metadata, "version", version)


def loading(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any]) -> None:
    install(monkeypatch, mooncake_transfer_engine_non_cuda="0.3.13.post1")
    monkeypatch.setattr(library, "import_module", lambda name: load())


# ---------------------------------------------------------------- the library


def test_a_library_that_is_not_installed_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    install(monkeypatch)
    with pytest.raises(ConfigError, match=r"role\.engine: mooncake is not installed: .*\[mooncake-cpu\].*libibverbs1"):
        library.load(ipv6=False)


@pytest.mark.parametrize("version", ["0.3.12", "0.3.12rc1", "0.3.11.post3", "0.2.9", "unknown"])
def test_a_version_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, mooncake_transfer_engine=version)
    with pytest.raises(ConfigError, match=rf"mooncake-transfer-engine is {version}, .* before 0\.3\.12\.post1"):
        library.check_version()


@pytest.mark.parametrize("version", ["0.3.12.post1", "0.3.13.post1", "0.3.14rc1", "0.3.14", "0.4.0", "1.0.0"])
def test_a_version_that_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, mooncake_transfer_engine_cuda13=version)
    assert library.check_version() == version


def test_two_wheels_that_overwrite_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mooncake_transfer_engine="0.3.13", mooncake_transfer_engine_non_cuda="0.3.13")
    with pytest.raises(ConfigError, match="overwrite each other"):
        library.check_version()


@pytest.mark.parametrize("kind", [ImportError, OSError])
def test_a_library_that_cannot_be_loaded_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, fresh: None, kind: type[Exception]
) -> None:
    def load() -> Any:
        raise kind("libibverbs.so.1: cannot open shared object file")

    loading(monkeypatch, load)
    with pytest.raises(ConfigError, match=r"role\.engine: .*libibverbs\.so\.1.*mooncake-cpu.*libnuma1 libcurl4"):
        library.load(ipv6=False)


def test_the_environment_is_set_before_the_library_is_imported(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    seen: dict[str, str] = {}

    class Module:
        TransferEngine = object

    def load() -> Any:
        seen.update(library.os.environ)
        return Module

    loading(monkeypatch, load)
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "40")
    assert library.load(ipv6=False) == "tcp"
    assert seen["MC_FORCE_TCP"] == seen["MC_TCP_ENABLE_CONNECTION_POOL"] == "1"
    assert seen["MC_TRANSFER_TIMEOUT"] == "40", "what the operator has set stays"
    assert int(seen["MC_TCP_PROGRESS_TIMEOUT_SEC"]) < 40
    with pytest.raises(ConfigError, match="IPv4 alone"):
        library.load(ipv6=True)


def test_time_outs_that_are_unsafe_together_are_corrected() -> None:
    environ = {"MC_TRANSFER_TIMEOUT": "30", "MC_TCP_PROGRESS_TIMEOUT_SEC": "30"}
    assert not library.prepare(environ, "tcp", ipv6=False)
    assert (environ["MC_TRANSFER_TIMEOUT"], environ["MC_TCP_PROGRESS_TIMEOUT_SEC"]) == ("30", "10")


def test_ipv6_is_asked_for_only_where_it_is_used() -> None:
    four: dict[str, str] = {}
    six: dict[str, str] = {}
    assert (library.prepare(four, "tcp", ipv6=False), library.prepare(six, "tcp", ipv6=True)) == (False, True)
    assert "MC_USE_IPV6" not in four
    assert six["MC_USE_IPV6"] == "1"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"MC_TCP_PROTO": "1"}, "MC_TCP_PROTO"),
        ({"MC_TRANSFER_TIMEOUT": "soon"}, "MC_TRANSFER_TIMEOUT"),
        ({"MC_TCP_PROGRESS_TIMEOUT_SEC": "0"}, "MC_TCP_PROGRESS_TIMEOUT_SEC"),
        ({"MC_FORCE_TCP": "1"}, "MC_FORCE_TCP"),
    ],
)
def test_what_is_unsafe_or_contradicts_itself_is_refused(environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as failure:
        library.prepare(environ, "rdma", ipv6=False)
    assert failure.value.path == named


def test_rdma_without_an_adapter_is_an_error_and_not_tcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_HCAS", tmp_path)
    with pytest.raises(ConfigError, match="host channel adapter"):
        library.wanted_transport({library.VARIABLE: "rdma"})
    (tmp_path / "mlx5_0").mkdir()
    assert library.wanted_transport({library.VARIABLE: "rdma"}) == "rdma"
    with pytest.raises(ConfigError, match="must be tcp or rdma, got 'banana'"):
        library.wanted_transport({library.VARIABLE: "banana"})


class Refusing:
    """A library in which nothing works."""

    code = -1

    def initialize(self, *_: object) -> int:
        return self.code

    def register_memory(self, *_: object) -> int:
        return -1

    def transfer_submit_write(self, *_: object) -> int:
        return 0


def test_return_codes_become_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", library._Loaded(Refusing, "rdma", ipv6=False))
    with pytest.raises(ConfigError, match=r"^role\.transfer_host: .* 10\.0\.0\.7 by rdma"):
        library.Engine("10.0.0.7", "role.transfer_host")
    monkeypatch.setattr(Refusing, "code", 0)
    engine = library.Engine("10.0.0.7", "role.transfer_host")
    with pytest.raises(ConfigError, match=r"^role\.receive_bytes: .* 4096 bytes .*ulimit"):
        engine.register(0x1000, 4096, "role.receive_bytes")
    with pytest.raises(ConfigError, match=r"nvidia_peermem .*dma-buf"):
        engine.register(0x1000, 4096, "role.device", device=True)
    with pytest.raises(TransferError) as failure:
        engine.submit("10.0.0.8:15000", 0x1000, 0x1000, 8)
    assert (failure.value.settled, failure.value.source_held) == (False, True)


# ---------------------------------------------------------------- the address


@pytest.mark.parametrize("host", ["10.0.0.7", "node-3.example", "::1", "fe80::1%eth0"])
def test_an_address_is_read_as_it_was_written(host: str) -> None:
    address = replace(ADDRESS, host=host)
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("field", "old", "new"),
    [
        ("host:port", "10.0.0.7:15001", "10.0.0.7"),
        ("host:port", "10.0.0.7:15001", "::1:15001"),
        ("host:port", ":15001", ":65536"),
        ("door", "/40000/", "/0/"),
        ("door", "/40000/", "/70000/"),
        ("base", "0x7f0000001000", "7f0000001000"),
        ("nbytes", "/4096/", "/-1/"),
        ("nbytes", "0x7f0000001000", "0xfffffffffffff800"),
        ("echo", "0x7f0000009000", "0xfffffffffffff800"),
        ("id", "ab" * 16, "AB" * 16),
        ("transport", "/tcp", "/nvlink"),
        ("", "/tcp", ""),
    ],
)
def test_an_address_that_is_wrong_names_the_field(field: str, old: str, new: str) -> None:
    with pytest.raises(TransferError, match=f"is no address of a mooncake session: {field} ") as failure:
        parse(str(ADDRESS).replace(old, new))
    assert failure.value.settled


# ---------------------------------------------------------------- the door


@pytest.fixture
def cells() -> np.ndarray:
    return np.arange(ECHO_BYTES, dtype=np.uint8)


@pytest.fixture
def door(cells: np.ndarray) -> Iterator[Door]:
    door = Door("127.0.0.1", ADDRESS.id, cells)
    yield door
    door.stop()


@contextlib.contextmanager
def visiting(door: Door) -> Iterator[Visit]:
    visit = Visit(replace(ADDRESS, host="127.0.0.1", door=door.port), Limit(5))
    try:
        yield visit
    finally:
        visit.close()


def test_the_door_shows_what_lies_in_memory(door: Door, cells: np.ndarray) -> None:
    with visiting(door) as visit:
        for cell in (0, 7, 63):
            assert visit.meet(cell, Limit(5)) == cells[cell * CELL_BYTES : (cell + 1) * CELL_BYTES].tobytes()
        assert visit.local_host == "127.0.0.1"


def test_another_life_of_a_receiver_is_not_the_one_that_was_meant(door: Door) -> None:
    visit = Visit(replace(ADDRESS, host="127.0.0.1", door=door.port, id="cd" * 16), Limit(5))
    with pytest.raises(ConnectionError, match="not the receiver of that session"):
        visit.meet(0, Limit(5))
    visit.close()


def test_the_door_lets_one_write_into_a_window(door: Door) -> None:
    place = slot(1, 0, 4096)
    with visiting(door) as visit:
        assert not visit.may_i(place, Limit(5))
        door.open(place)
        for forged in (replace(place, token="f" * 32), replace(place, offset=64), replace(place, nbytes=8192)):
            assert not visit.may_i(forged, Limit(5))
        assert visit.may_i(place, Limit(5))
        assert not visit.may_i(place, Limit(5))
        door.open(slot(2, 0, 4096))
        door.close(slot(2, 0, 4096))
        assert not visit.may_i(slot(2, 0, 4096), Limit(5))


def test_the_door_knows_who_is_writing(door: Door) -> None:
    places = [slot(lease, 0, 4096) for lease in (1, 2, 3)]
    for place in places:
        door.open(place)
    with visiting(door) as visit:
        assert all(visit.may_i(place, Limit(5)) for place in places[:2])
        assert [door.settled(place.lease) for place in places] == [False, False, True]
        visit.done(places[0], Limit(5))
        until(lambda: door.settled(LeaseId(1)) is True)
        assert door.settled(LeaseId(2)) is False
    until(lambda: door.settled(LeaseId(2)) is None)


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"MEET" + b"\xff" * 40, b"DONE" + bytes(40)]
)
def test_garbage_at_the_door_harms_nobody(door: Door, said: bytes) -> None:
    with visiting(door) as visit, socket.create_connection(("127.0.0.1", door.port), 5) as stranger:
        with contextlib.suppress(OSError):  # it may be cut off at any point
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
        visit.meet(0, Limit(5))


def test_a_door_that_is_closed_is_noticed_by_visitors(cells: np.ndarray) -> None:
    door = Door("127.0.0.1", ADDRESS.id, cells)
    with visiting(door) as visit:
        assert not visit.ended()
        door.stop()
        assert visit.ended()
        with pytest.raises(OSError, match=r"closed|reset|pipe"):
            visit.meet(0, Limit(5))
