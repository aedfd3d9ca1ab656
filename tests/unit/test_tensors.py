"""Manifests: what `plan` makes is consistent, and `check` refuses what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diffcluster.errors import ManifestError
from diffcluster.tensors import ALIGNMENT, DTYPE_BYTES, Manifest, TensorSpec, aligned, check, plan

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=6).map(
    lambda parts: [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(parts)]
)


@given(TENSORS)
def test_planned_tensors_lie_aligned_and_apart_and_fill_the_length(
    tensors: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    manifest = plan(tensors)
    end = 0
    for spec in manifest.tensors:
        assert spec.offset % ALIGNMENT == 0
        assert spec.offset >= end
        end = spec.offset + spec.nbytes
    assert manifest.nbytes == aligned(end)
    check(manifest, manifest.nbytes)


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_lengths_are_rounded_up(nbytes: int, expected: int) -> None:
    assert aligned(nbytes) == expected


def test_a_scalar_and_an_empty_tensor_can_travel() -> None:
    manifest = plan([("scalar", "float32", ()), ("empty", "int64", (0, 3)), ("last", "bool", (2,))])
    assert [(spec.offset, spec.nbytes) for spec in manifest.tensors] == [(0, 4), (64, 0), (64, 2)]
    assert manifest.nbytes == 128


def test_nothing_at_all_can_travel() -> None:
    assert plan([]) == Manifest((), 0)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([("x", "object", (1,))], "cannot travel"),
        ([("x", "int8", (1,)), ("x", "int8", (1,))], "occurs twice"),
    ],
)
def test_what_cannot_be_planned_is_refused(tensors: list[tuple[str, str, tuple[int, ...]]], problem: str) -> None:
    with pytest.raises(ManifestError, match=problem):
        plan(tensors)


GOOD = plan([("a", "float32", (2, 3)), ("b", "int8", (5,))])


def _with(index: int, **fields: object) -> Manifest:
    specs = list(GOOD.tensors)
    specs[index] = replace(specs[index], **fields)
    return replace(GOOD, tensors=tuple(specs))


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (_with(1, name="a"), "occurs twice"),
        (_with(0, nbytes=25), "dtype and shape say otherwise"),
        (_with(0, shape=(2, 4)), "dtype and shape say otherwise"),
        (_with(0, dtype="float31"), "cannot travel"),
        (_with(1, offset=65), "unaligned"),
        (_with(1, offset=0), "inside its neighbour"),
        (_with(1, offset=128), "tensors end at"),
        (replace(GOOD, nbytes=68), "tensors end at"),
        (Manifest((TensorSpec("x", "uint8", (256,), 0, 256),), 128), "tensors end at"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(manifest: Manifest, problem: str) -> None:
    with pytest.raises(ManifestError, match=problem):
        check(manifest, 1 << 20)


def test_a_manifest_that_is_longer_than_its_slot_is_refused() -> None:
    check(GOOD, GOOD.nbytes)
    with pytest.raises(ManifestError, match="more than the slot's 127"):
        check(GOOD, 127)
