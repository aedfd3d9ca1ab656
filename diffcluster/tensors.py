"""How tensors lie in a slot, without torch: names, dtypes, shapes, offsets.

A manifest is made by the sender and checked by the receiver against the slot's true size before a byte is looked at.
Offsets are from the slot's start. Each tensor starts at a multiple of `ALIGNMENT`, and the padding is part of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Final

from msgspec import Meta, Struct

from diffcluster.errors import ManifestError

__all__ = ["ALIGNMENT", "DTYPE_BYTES", "Manifest", "TensorSpec", "aligned", "check", "plan"]

ALIGNMENT: Final = 64
"""Bytes. Enough for every dtype to be viewed in place, and for wide vector loads."""

DTYPE_BYTES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Element size in bytes of each torch dtype that may travel, by its name without `torch.`."""

_MAX_DIMENSIONS: Final = 16
_MAX_TENSORS: Final = 1024


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: where it lies in its slot and how to read it. `shape` may be () or hold zeros."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=_MAX_DIMENSIONS)]
    offset: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=0)]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors of one hand-off. `nbytes` is the whole length to transfer, padding included."""

    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=_MAX_TENSORS)]
    nbytes: Annotated[int, Meta(ge=0)]


def aligned(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def plan(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Manifest:
    """Lay (name, dtype, shape) after each other.

    Raises:
        ManifestError: a dtype that cannot travel, or a name that occurs twice.
    """
    specs: list[TensorSpec] = []
    offset = 0
    for name, dtype, shape in tensors:
        nbytes = _nbytes(name, dtype, shape)
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, nbytes))
        offset = aligned(offset + nbytes)
    manifest = Manifest(tuple(specs), offset)
    check(manifest, offset)
    return manifest


def check(manifest: Manifest, capacity: int) -> None:
    """Raise `ManifestError` unless `manifest` is consistent and fits a slot of `capacity` bytes."""
    if manifest.nbytes > capacity:
        raise ManifestError(f"manifest.nbytes: {manifest.nbytes} is more than the slot's {capacity}")
    names: set[str] = set()
    end = 0
    for spec in manifest.tensors:
        if spec.name in names:
            raise ManifestError(f"manifest: tensor {spec.name!r} occurs twice")
        names.add(spec.name)
        if spec.nbytes != _nbytes(spec.name, spec.dtype, spec.shape):
            raise ManifestError(f"manifest: {spec.name!r} says {spec.nbytes} bytes, its dtype and shape say otherwise")
        if spec.offset % ALIGNMENT or spec.offset < end:
            raise ManifestError(f"manifest: {spec.name!r} has offset {spec.offset}, unaligned or inside its neighbour")
        end = spec.offset + spec.nbytes
    if end > manifest.nbytes:
        raise ManifestError(f"manifest: tensors end at {end}, after its {manifest.nbytes} bytes")


def _nbytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise ManifestError(f"manifest: {name!r} has dtype {dtype!r}, which cannot travel")
    return size * math.prod(shape)
