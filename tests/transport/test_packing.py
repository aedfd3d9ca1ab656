"""Every dtype that may travel arrives bit for bit, whatever its shape and strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffcluster.errors import ManifestError
from diffcluster.tensors import DTYPE_BYTES, Manifest, TensorSpec
from diffcluster.transport.packing import manifest_of, pack, unpack

CPU = torch.device("cpu")


def travel(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    manifest = manifest_of(tensors)
    slot = np.full(max(manifest.nbytes, 1), 0xEE, np.uint8)
    pack(tensors, manifest, slot)
    return unpack(manifest, slot, CPU)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit pattern at all, NaNs and denormals too."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    count = int(np.prod(shape)) * DTYPE_BYTES[str(dtype).removeprefix("torch.")]
    raw = np.random.default_rng(0).integers(0, 256, count, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", [name for name in DTYPE_BYTES if hasattr(torch, name)])
def test_a_dtype_arrives_bit_for_bit(name: str) -> None:
    sent = random_bits(getattr(torch, name), 3, 5, 7)
    got = travel({"x": sent})["x"]
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert bits(got) == bits(sent)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (64,), (65,)])
def test_shapes_without_dimensions_or_elements_travel(shape: tuple[int, ...]) -> None:
    sent = torch.ones(shape)
    assert torch.equal(travel({"x": sent})["x"], sent)


def test_views_are_gathered() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent = {"transposed": base.T, "strided": base[::2, 1::2], "expanded": base[:, :1].expand(4, 9)}
    got = travel(sent)
    assert all(torch.equal(got[name], sent[name]) for name in sent)


def test_many_tensors_keep_their_names_and_order() -> None:
    sent = {f"t{i}": torch.full((i,), float(i)) for i in range(40)}
    got = travel(sent)
    assert list(got) == list(sent)
    assert all(torch.equal(got[name], sent[name]) for name in sent)


def test_what_is_unpacked_does_not_share_the_slot() -> None:
    manifest = manifest_of({"x": torch.ones(8)})
    slot = np.zeros(manifest.nbytes, np.uint8)
    pack({"x": torch.ones(8)}, manifest, slot)
    got = unpack(manifest, slot, CPU)["x"]
    slot[:] = 0xFF
    assert torch.equal(got, torch.ones(8))


def test_a_manifest_that_lies_is_refused_before_a_byte_is_read() -> None:
    slot = np.zeros(64, np.uint8)
    lie = Manifest((TensorSpec("x", "float32", (1000,), 0, 4000),), 4032)
    with pytest.raises(ManifestError, match="4032"):
        unpack(lie, slot, CPU)


def test_a_target_that_is_too_small_is_refused() -> None:
    tensors = {"x": torch.ones(100)}
    with pytest.raises(ManifestError, match="do not fit"):
        pack(tensors, manifest_of(tensors), np.zeros(64, np.uint8))
