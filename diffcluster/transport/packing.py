"""Tensors into the bytes of a slot and back, bit for bit, for every dtype that may travel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from diffcluster import tensors as layout
from diffcluster.errors import ManifestError
from diffcluster.tensors import Manifest

__all__ = ["Memory", "manifest_of", "pack", "unpack"]

Memory = npt.NDArray[np.uint8] | torch.Tensor
"""Bytes of a region: of the host, or of an accelerator."""


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """The layout that `pack` writes."""
    return layout.plan((name, _dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items())


def pack(tensors: Mapping[str, torch.Tensor], manifest: Manifest, target: npt.NDArray[np.uint8]) -> None:
    """Copy `tensors` into `target` as `manifest` says. On an accelerator, call it within `Device.copying`.

    Tensors that are not contiguous are gathered first, by the stream that copies them.
    """
    if target.nbytes < manifest.nbytes:
        raise ManifestError(f"{manifest.nbytes} bytes of tensors do not fit the {target.nbytes} of their slot")
    region = torch.from_numpy(target)
    for spec in manifest.tensors:
        region[spec.offset : spec.offset + spec.nbytes].copy_(_as_bytes(tensors[spec.name]), non_blocking=True)


def unpack(manifest: Manifest, source: Memory, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of their own on `device`, equal in every bit to what was packed.

    Raises:
        ManifestError: `manifest` does not fit `source`.
    """
    layout.check(manifest, source.nbytes)
    region = source if isinstance(source, torch.Tensor) else torch.from_numpy(source)
    result = {}
    for spec in manifest.tensors:
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        if spec.nbytes:
            _as_bytes(tensor).copy_(region[spec.offset : spec.offset + spec.nbytes], non_blocking=True)
        result[spec.name] = tensor
    return result


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as one row of bytes. 0-dim tensors cannot be viewed as another dtype: so flatten first."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
