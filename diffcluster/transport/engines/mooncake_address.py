"""The address of a Mooncake session: host:port/door/base/nbytes/echo/id/transport, all of it checked when it is read.

host:port   where the library begins; an IPv6 address in brackets    door   port of our own, see `mooncake_door`
base        address of the slots in the receiver's memory, as hexadecimal digits         nbytes   size of the slots
echo        address of `ECHO_BYTES` for proofs, as hexadecimal digits
id          32 hexadecimal digits, drawn when the receiving half is opened               transport   tcp or rdma
"""

from __future__ import annotations

import re
from typing import Final, cast

from msgspec import Struct

from diffcluster.errors import TransferError
from diffcluster.transport.engines.mooncake_library import Transport, join_host

__all__ = ["ECHO_BYTES", "MooncakeAddress", "parse"]

ECHO_BYTES: Final = 4096
"""The last bytes of the control memory are Mooncake's."""

_FIELDS: Final = {
    "host:port": r"(?:\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9._-]+):[1-9][0-9]{0,4}",
    "door": r"[1-9][0-9]{0,4}",
    "base": r"0x[1-9a-f][0-9a-f]{0,15}",
    "nbytes": r"[1-9][0-9]{0,15}",
    "echo": r"0x[1-9a-f][0-9a-f]{0,15}",
    "id": r"[0-9a-f]{32}",
    "transport": r"tcp|rdma",
}
_PORTS: Final = 65536


class MooncakeAddress(Struct, frozen=True):
    """Where a receiving half is."""

    host: str
    port: int
    door: int
    base: int
    nbytes: int
    echo: int
    id: str
    transport: Transport

    def __str__(self) -> str:
        place = f"{self.peer}/{self.door}/{self.base:#x}/{self.nbytes}/{self.echo:#x}"
        return f"{place}/{self.id}/{self.transport}"

    @property
    def peer(self) -> str:
        """The library's name for it."""
        return f"{join_host(self.host)}:{self.port}"


def parse(text: str) -> MooncakeAddress:
    """Read an address.

    Raises:
        TransferError: it is none; names the field that is wrong.
    """
    values = text.split("/")
    if len(values) != len(_FIELDS):
        raise _wrong(text, "", f"has {len(values)} fields instead of {len(_FIELDS)}")
    for (name, form), value in zip(_FIELDS.items(), values, strict=True):
        if not re.fullmatch(form, value):
            raise _wrong(text, name, f"is {value!r}")
    host, _, port = values[0].rpartition(":")
    address = MooncakeAddress(
        host=host.removeprefix("[").removesuffix("]"),
        port=int(port),
        door=int(values[1]),
        base=int(values[2], 16),
        nbytes=int(values[3]),
        echo=int(values[4], 16),
        id=values[5],
        transport=cast("Transport", values[6]),
    )
    _check_ranges(text, address)
    return address


def _check_ranges(text: str, address: MooncakeAddress) -> None:
    for name, port in (("host:port", address.port), ("door", address.door)):
        if port >= _PORTS:
            raise _wrong(text, name, f"has no port {port}")
    if address.base + address.nbytes > 2**64:
        raise _wrong(text, "nbytes", f"is {address.nbytes}, which goes beyond the end of memory")
    if address.echo + ECHO_BYTES > 2**64:
        raise _wrong(text, "echo", "goes beyond the end of memory")


def _wrong(text: str, field: str, problem: str) -> TransferError:
    return TransferError(f"{text[:200]!r} is no address of a mooncake session: {field} {problem}", settled=True)
