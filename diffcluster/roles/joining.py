"""Calls of one module that are made as one: their arguments joined sample by sample, the answer split again.

A call's arguments are walked leaf by leaf. A tensor whose first dimension counts the call's samples is joined along it;
one without dimensions, such as a timestep, is given to each of the call's samples; all else is shared by the calls, and
must be equal. What is left of a call when its samples are taken away is its signature: calls of equal signatures can be
made together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import xxhash
from torch.utils.weak import WeakIdKeyDictionary

from diffcluster.roles.batching import Signature

__all__ = ["Call", "JoinRules", "join", "look_at", "split"]

_digests: Final = WeakIdKeyDictionary()


@dataclass(frozen=True)
class JoinRules:
    """What a module's arguments mean, where their shapes do not tell.

    `shared`: they have no sample dimension, even if their first one happens to be as long. `per_sample`: lists with one
    element for each sample; of those in `ragged` the elements may differ in shape, which the module copes with.
    `masks`: keyword arguments whose second dimension is a length, and the argument that masks it, (samples, length):
    the shorter ones are padded. `alone`: why calls of the module are never joined; empty if they may be.
    """

    names: tuple[str, ...] = ()
    """Of positional arguments."""
    shared: frozenset[str] = frozenset()
    per_sample: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    masks: Mapping[str, str] = field(default_factory=dict)
    alone: str = ""


@dataclass
class Call:
    """A module's call, as a request makes it, and what came of it. `units`: elements of its first argument, for each
    sample.
    """

    module: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rules: JoinRules
    signature: Signature = field(init=False)
    samples: int = field(init=False, default=1)
    units: int = field(init=False, default=1)
    answered: bool = field(init=False, default=False)
    answer: Any = field(init=False, default=None)
    error: BaseException | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        look_at(self)

    def set_answer(self, value: Any) -> None:
        """The call returned `value`."""
        self.answered, self.answer = True, value

    def set_error(self, error: BaseException) -> None:
        """The call raised `error`."""
        self.answered, self.error = True, error


def look_at(call: Call) -> None:
    """Count the samples of `call` and find its signature."""
    first = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
    if isinstance(first, torch.Tensor) and first.ndim:
        call.samples = max(1, first.shape[0])
        call.units = first.numel() // call.samples
    elif isinstance(first, list) and first:
        call.samples, call.units = len(first), sum(map(_size, first)) // len(first)
    else:
        call.rules = JoinRules(alone="no samples")
    fields = [] if call.rules.alone else [(path, _kind(leaf, name, call)) for path, name, leaf in _leaves(call)]
    call.signature = Signature(call.module, tuple(fields), call.rules.alone)


def join(calls: Sequence[Call]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one call with the samples of all; their signatures must be equal."""
    first = calls[0]
    args = tuple(
        _join([call.args[index] for call in calls], _name(first.rules, index), calls)
        for index in range(len(first.args))
    )
    kwargs = {name: _join([call.kwargs[name] for call in calls], name, calls) for name in first.kwargs}
    for name, mask in first.rules.masks.items():
        if name in kwargs:
            kwargs[name], kwargs[mask] = _padded(calls, name, mask)
    return args, kwargs


def split(output: Any, sizes: Sequence[int]) -> list[Any]:
    """`output` of a joined call, cut into what belongs to each."""
    total = sum(sizes)
    if isinstance(output, torch.Tensor):
        whole = output.ndim and output.shape[0] == total
        return list(torch.split(output, list(sizes))) if whole else [output] * len(sizes)
    if isinstance(output, list) and len(output) == total and all(isinstance(part, torch.Tensor) for part in output):
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [output[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    if isinstance(output, dict):  # a ModelOutput is one
        columns = {key: split(value, sizes) for key, value in output.items()}
        return [type(output)(**{key: column[k] for key, column in columns.items()}) for k in range(len(sizes))]
    if isinstance(output, (tuple, list)):
        parts = [split(value, sizes) for value in output]
        return [type(output)(part[k] for part in parts) for k in range(len(sizes))]
    return [output] * len(sizes)


def _leaves(call: Call) -> Iterator[tuple[str, str, Any]]:
    """(path, name of the argument, value) of each leaf."""
    named = [(_name(call.rules, index), value) for index, value in enumerate(call.args)]
    for name, value in [*named, *call.kwargs.items()]:
        yield from _walk(name, name, value, call)


def _walk(path: str, name: str, value: Any, call: Call) -> Iterator[tuple[str, str, Any]]:
    if name in call.rules.per_sample and isinstance(value, list):
        yield path, name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _walk(f"{path}.{key}", name, part, call)
    elif isinstance(value, (tuple, list)):
        yield f"{path}.length", name, len(value)
        for index, part in enumerate(value):
            yield from _walk(f"{path}.{index}", name, part, call)
    else:
        yield path, name, value


def _kind(leaf: Any, name: str, call: Call) -> object:
    """What of a leaf must be equal in calls that are joined."""
    if name in call.rules.masks.values():
        return "mask"
    if isinstance(leaf, list):  # one element for each sample
        if name in call.rules.ragged:
            return "ragged"
        kinds = {_element(part) for part in leaf}
        return kinds.pop() if len(kinds) == 1 else ("ragged", id(leaf))
    if not isinstance(leaf, torch.Tensor):
        return _element(leaf)
    if name in call.rules.masks:
        return "padded", leaf.dtype, tuple(leaf.shape[2:])
    if name not in call.rules.shared:
        if _is_scalar(leaf, call.samples):
            return "scalar"
        if leaf.ndim and leaf.shape[0] == call.samples:
            return "samples", leaf.dtype if leaf.ndim > 1 else None, tuple(leaf.shape[1:]), _order(leaf)
    return "shared", leaf.dtype, tuple(leaf.shape), _digest(leaf)


def _order(leaf: torch.Tensor) -> tuple[int, ...]:
    """Of the dimensions in memory, if it is another than theirs: kernels are chosen by it."""
    strides = leaf.stride()
    return () if leaf.is_contiguous() else tuple(sorted(range(leaf.ndim), key=lambda dim: -strides[dim]))


def _element(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(_element(part) for part in value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value).__name__, value
    return "object", id(value)


def _is_scalar(leaf: torch.Tensor, samples: int) -> bool:
    return leaf.ndim == 0 or (leaf.shape == (1,) and samples > 1)


def _digest(leaf: torch.Tensor) -> str:
    """Of the content. Position ids stay the same object from step to step, so it is taken once."""
    if leaf not in _digests:
        content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        _digests[leaf] = xxhash.xxh3_64_hexdigest(content.numpy().data)
    return str(_digests[leaf])


def _join(values: list[Any], name: str, calls: Sequence[Call]) -> Any:
    first, rules = values[0], calls[0].rules
    if name in rules.masks or name in rules.masks.values():
        return None  # both are joined together
    if isinstance(first, list) and name in rules.per_sample:
        return [part for value in values for part in value]
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values], name, calls) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_join(list(parts), name, calls) for parts in zip(*values, strict=True))
    if isinstance(first, torch.Tensor) and name not in rules.shared:
        if any(_is_scalar(value, call.samples) for value, call in zip(values, calls, strict=True)):
            each = [value.reshape(-1).expand(call.samples) for value, call in zip(values, calls, strict=True)]
            return torch.cat(each)
        if first.shape[0] == calls[0].samples:
            return torch.cat(values)
    return first


def _padded(calls: Sequence[Call], name: str, mask: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tensors of different lengths, and the mask of what is in them. None: all are whole and of one length."""
    values: list[torch.Tensor] = [call.kwargs[name] for call in calls]
    masks: list[torch.Tensor | None] = [call.kwargs.get(mask) for call in calls]
    longest = max(value.shape[1] for value in values)
    if all(value.shape[1] == longest for value in values) and all(mask is None for mask in masks):
        return torch.cat(values), None
    whole, valid = [], []
    for value, given in zip(values, masks, strict=True):
        missing = longest - value.shape[1]
        whole.append(torch.nn.functional.pad(value, (0, 0) * (value.ndim - 2) + (0, missing)))
        present = value.new_ones(value.shape[:2], dtype=torch.bool) if given is None else given.to(torch.bool)
        valid.append(torch.nn.functional.pad(present, (0, missing)))
    return torch.cat(whole), torch.cat(valid)


def _name(rules: JoinRules, index: int) -> str:
    return rules.names[index] if index < len(rules.names) else str(index)


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1
