"""What roles hand to each other: any nested value goes there and back; nothing else can be read out of a text."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffcluster.errors import WorkerFailedError
from diffcluster.roles.pipelines.bundle import pack, unpack


def there_and_back(value: Any) -> Any:
    tensors, scalars = pack(value)
    return unpack(dict(tensors), json.loads(json.dumps(scalars)))


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda parts: st.one_of(st.lists(parts), st.lists(parts).map(tuple), st.dictionaries(st.text(), parts)),
)


@given(values)
def test_a_nested_value_comes_back_equal_in_value_and_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value)


@given(
    st.recursive(st.integers(0, 3), lambda parts: st.one_of(st.lists(parts), st.dictionaries(st.text("ab.0"), parts)))
)
def test_tensors_come_back_in_their_places(shape: Any) -> None:
    """Even where keys look like the paths of others."""
    count = 0

    def planted(node: Any) -> Any:
        nonlocal count
        if isinstance(node, list):
            return [planted(part) for part in node]
        if isinstance(node, dict):
            return {key: planted(part) for key, part in node.items()}
        count += 1
        return torch.tensor(count)

    value = planted(shape)
    assert repr(there_and_back(value)) == repr(value)


def test_a_lone_tensor_is_a_value_too() -> None:
    tensor = torch.ones(2, 3)
    assert there_and_back(tensor) is tensor


@pytest.mark.parametrize("value", [object(), {1, 2}, [b"bytes"], {"a": {"b": 1j}}, torch.Generator()])
def test_what_is_no_plain_value_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        pack(value)


BROKEN = {
    "no text": {},
    "no json": {"tree": "{"},
    "another kind of node": {"tree": '{"type":"object","name":"os"}'},
    "a missing tensor": {"tree": '{"type":"tensor","name":"x"}'},
    "no dtype": {"tree": '{"type":"dtype","name":"nothing"}'},
    "something else of torch": {"tree": '{"type":"dtype","name":"load"}'},
    "a field too many": {"tree": '{"type":"value","value":1,"more":2}'},
    "a number": {"tree": 3},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_text_is_the_other_roles_failure(name: str) -> None:
    with pytest.raises(WorkerFailedError):
        unpack({}, BROKEN[name])


def test_a_text_nested_without_end_is_refused() -> None:
    deep = '{"type":"list","items":[' * 100_000
    with pytest.raises(WorkerFailedError):
        unpack({}, {"tree": deep})


def test_the_order_of_dimensions_in_memory_is_kept() -> None:
    """Kernels are chosen by it, so that a copy in another order gives other bits."""
    tensor = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors, scalars = pack({"x": tensor})
    assert all(part.is_contiguous() for part in tensors.values())
    back = unpack(tensors, scalars)["x"]
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
