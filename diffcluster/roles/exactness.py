"""What it takes for a joined call to give every request the same bits as a call of its own.

Most kernels compute each row, or each sample, in the same order of operations however many there are. Matrix products
with very few rows do not: time embeddings, pooled prompts. They cost next to nothing, so they are made call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from diffcluster.config import RoleConfig

__all__ = ["FewRowsApart", "is_demanded", "same_bits"]

_FEW: Final = 16
"""Rows of a sample. Measured on CPUs: from 7 rows on, products do not depend on how many there are."""


class FewRowsApart(TorchFunctionMode):
    """Within it, `linear` of few rows is computed for each of the calls, whose samples are `sizes`, by itself."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes, self._total = list(sizes), sum(sizes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Of torch's protocol."""
        options = kwargs or {}
        if func is torch.nn.functional.linear and self._has_few_rows(args[0]):
            return self._apart(*args, **options)
        return func(*args, **options)

    def _apart(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if rows.ndim > 2 or len(set(self._sizes)) > 1:
            parts = torch.split(rows, self._sizes)
            return torch.cat([torch.nn.functional.linear(part, weight, bias) for part in parts])
        # A batch of products is computed product by product, each as it would be alone.
        calls = rows.reshape(len(self._sizes), -1, rows.shape[-1])
        weights = weight.t().expand(len(calls), -1, -1)
        if bias is None:
            made = torch.bmm(calls, weights)
        else:
            made = torch.baddbmm(bias.expand(*calls.shape[:2], -1), calls, weights)
        return made.reshape(*rows.shape[:-1], -1)

    def _has_few_rows(self, rows: torch.Tensor) -> bool:
        return rows.ndim > 1 and rows.shape[0] == self._total and rows.numel() <= _FEW * self._total * rows.shape[-1]


def is_demanded(config: RoleConfig, device: torch.device) -> bool:
    """Whether pictures must not depend on what is computed beside them."""
    return config.exact == "on" or (config.exact == "auto" and device.type == "cpu")


def same_bits(one: Any, other: Any) -> bool:
    """Whether two answers of a module are equal, leaf by leaf: in their bits, so that NaN equals NaN."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(value, other[key]) for key, value in one.items())
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
