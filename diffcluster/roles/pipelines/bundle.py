"""What one role's part of a pipeline hands to the next: nested Python values as named tensors and a text.

The text is JSON of a closed set of types, so that a bundle from outside can hold nothing but tensors, numbers, strings,
lists and dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from msgspec import Struct

from diffcluster.errors import WorkerFailedError

__all__ = ["Scalars", "Tensors", "pack", "unpack"]

Tensors = dict[str, torch.Tensor]
Scalars = dict[str, float | int | str]
_TREE = "tree"


class _Tensor(Struct, tag="tensor", forbid_unknown_fields=True):
    name: str
    order: list[int] = []
    """Of its dimensions in memory, if that is another: kernels are chosen by it, and they differ in the last bits."""


class _Value(Struct, tag="value", forbid_unknown_fields=True):
    value: bool | int | float | str | None


class _Dtype(Struct, tag="dtype", forbid_unknown_fields=True):
    name: str


class _List(Struct, tag="list", forbid_unknown_fields=True):
    items: list[_Node]
    is_tuple: bool = False


class _Dict(Struct, tag="dict", forbid_unknown_fields=True):
    items: dict[str, _Node]


_Node = _Tensor | _Value | _Dtype | _List | _Dict
_decode = msgspec.json.Decoder(_Node)


def pack(value: Any) -> tuple[Tensors, Scalars]:
    """`value` as tensors by name, and the text that says where in it they belong.

    Raises:
        TypeError: it holds something else than tensors, plain values, lists, tuples and dicts.
    """
    tensors: Tensors = {}
    node = _pack(value, "", tensors)
    return tensors, {_TREE: msgspec.json.encode(node).decode()}


def unpack(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float | int | str]) -> Any:
    """What was packed.

    Raises:
        WorkerFailedError: it is nothing that `pack` makes.
    """
    try:
        return _unpack(_decode.decode(str(scalars[_TREE])), tensors)
    except (KeyError, msgspec.DecodeError, AttributeError, RuntimeError) as error:
        raise WorkerFailedError(f"what the stage before handed over cannot be read: {error!r}") from error


def _pack(value: Any, path: str, tensors: Tensors) -> _Node:
    if isinstance(value, torch.Tensor):
        name = path or "value"
        while name in tensors:  # a key may look like the path of something else
            name += "~"
        strides = value.stride()
        order = sorted(range(value.ndim), key=lambda dim: -strides[dim])
        if value.is_contiguous() or not value.permute(order).is_contiguous():
            order = []
        tensors[name] = value.permute(order) if order else value
        return _Tensor(name, order)
    if isinstance(value, (list, tuple)):
        items = [_pack(part, f"{path}.{index}".lstrip("."), tensors) for index, part in enumerate(value)]
        return _List(items, isinstance(value, tuple))
    if isinstance(value, dict):
        return _Dict({key: _pack(part, f"{path}.{key}".lstrip("."), tensors) for key, part in value.items()})
    if isinstance(value, torch.dtype):
        return _Dtype(str(value).removeprefix("torch."))
    if value is None or isinstance(value, (bool, int, float, str)):
        return _Value(value)
    raise TypeError(f"{path}: a {type(value).__name__} cannot be handed to another role")


def _unpack(node: _Node, tensors: Mapping[str, torch.Tensor]) -> Any:
    match node:
        case _Tensor(name, order):
            tensor = tensors[name]
            return tensor.permute(sorted(range(len(order)), key=order.__getitem__)) if order else tensor
        case _Dtype(name):
            dtype = getattr(torch, name)
            if not isinstance(dtype, torch.dtype):
                raise KeyError(name)
            return dtype
        case _List(items, is_tuple):
            parts = [_unpack(part, tensors) for part in items]
            return tuple(parts) if is_tuple else parts
        case _Dict(items):
            return {key: _unpack(part, tensors) for key, part in items.items()}
        case _Value(value):
            return value
