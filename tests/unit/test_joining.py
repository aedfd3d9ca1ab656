"""Joined calls: what may be joined, with which arguments the call is made, and which part of the answer is whose."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffcluster.roles.batching import difference
from diffcluster.roles.joining import Call, JoinRules, join, split


def call(*args: Any, rules: JoinRules | None = None, module: str = "net", **kwargs: Any) -> Call:
    """A call of a module whose positional arguments are x and t."""
    return Call(module, lambda *a, **k: None, args, kwargs, rules or JoinRules(names=("x", "t")))


def rows(samples: int, *shape: int, start: float = 0) -> torch.Tensor:
    """Samples that can all be told apart."""
    count = torch.Size((samples, *shape)).numel()
    return torch.arange(start, start + count, dtype=torch.float32).reshape(samples, *shape)


def joinable(*calls: Call) -> bool:
    return len({made.signature for made in calls}) == 1


def why_not(one: Call, other: Call) -> str:
    assert one.signature != other.signature
    return difference(one.signature, other.signature)


# ---------------------------------------------------------------- samples


def test_the_first_dimension_of_the_first_argument_counts_the_samples() -> None:
    made = call(rows(3, 4, 5))
    assert (made.samples, made.units) == (3, 20)


def test_a_call_by_keywords_alone_counts_its_first() -> None:
    made = call(hidden_states=rows(2, 6), t=torch.tensor(1.0))
    assert (made.samples, made.units) == (2, 6)


def test_a_list_counts_its_elements() -> None:
    made = call([rows(4, 2), rows(4, 2)], rules=JoinRules(names=("x",), per_sample=frozenset({"x"})))
    assert (made.samples, made.units) == (2, 8)


@pytest.mark.parametrize("args", [(), (torch.tensor(1.0),), ("text",), ([],), (None,)])
def test_a_call_without_samples_is_made_alone(args: tuple[Any, ...]) -> None:
    assert call(*args).signature.alone == "no samples"


def test_a_module_whose_calls_are_never_joined_says_why() -> None:
    assert call(rows(1, 2), rules=JoinRules(alone="it draws at random")).signature.alone == "it draws at random"


def test_tensors_with_samples_are_joined_along_them() -> None:
    one, other = call(rows(2, 3)), call(rows(1, 3, start=100))
    assert joinable(one, other)
    args, kwargs = join([one, other])
    assert torch.equal(args[0], torch.cat([rows(2, 3), rows(1, 3, start=100)]))
    assert kwargs == {}


def test_samples_of_other_shapes_or_dtypes_are_not_joined() -> None:
    assert why_not(call(rows(2, 3)), call(rows(2, 4))) == "x"
    assert why_not(call(rows(2, 3)), call(rows(2, 3).double())) == "x"


# ---------------------------------------------------------------- one number for all samples of a call


def test_numbers_without_dimensions_are_given_to_each_sample_of_their_call() -> None:
    one, other = call(rows(2, 3), torch.tensor(7.0)), call(rows(1, 3), torch.tensor(9.0))
    assert joinable(one, other)
    assert join([one, other])[0][1].tolist() == [7, 7, 9]


def test_numbers_of_different_dtypes_meet_in_one_that_holds_both() -> None:
    """Schedulers count their timesteps in integers or in fractions."""
    one, other = call(rows(1, 3), torch.tensor(999)), call(rows(1, 3), torch.tensor(998.5))
    assert joinable(one, other)
    assert join([one, other])[0][1].tolist() == [999.0, 998.5]


def test_a_timestep_with_one_element_is_one_for_all_samples_of_its_call() -> None:
    one, other = call(rows(2, 3), torch.tensor([7.0])), call(rows(3, 3), torch.tensor(9.0))
    assert joinable(one, other)
    assert join([one, other])[0][1].tolist() == [7, 7, 9, 9, 9]


def test_a_timestep_for_each_sample_is_joined_as_it_is() -> None:
    one, other = call(rows(2, 3), torch.tensor([7.0, 7.0])), call(rows(1, 3), torch.tensor([9]))
    assert joinable(one, other)
    assert join([one, other])[0][1].tolist() == [7, 7, 9]


# ---------------------------------------------------------------- nested, shared, absent


def test_tensors_in_dicts_lists_and_tuples_are_joined_in_their_places() -> None:
    def nested(samples: int, start: float) -> dict[str, Any]:
        return {"ids": [rows(samples, 2, start=start)], "pair": (rows(samples, 1, start=start), "text"), "none": None}

    one, other = call(rows(2, 3), added=nested(2, 0)), call(rows(1, 3), added=nested(1, 50))
    assert joinable(one, other)
    added = join([one, other])[1]["added"]
    assert torch.equal(added["ids"][0], torch.cat([rows(2, 2), rows(1, 2, start=50)]))
    assert isinstance(added["pair"], tuple)
    assert torch.equal(added["pair"][0], torch.cat([rows(2, 1), rows(1, 1, start=50)]))
    assert (added["pair"][1], added["none"]) == ("text", None)


def test_a_difference_in_something_nested_is_named_by_its_path() -> None:
    one, other = call(rows(1, 3), added={"ids": [rows(1, 2)]}), call(rows(1, 3), added={"ids": [rows(1, 5)]})
    assert why_not(one, other) == "added.ids.0"


def test_lists_of_other_lengths_are_not_joined() -> None:
    assert why_not(call(rows(1, 3), parts=[1]), call(rows(1, 3), parts=[1, 1])) == "parts.length"


def test_a_tensor_without_samples_is_shared_if_its_content_is_equal() -> None:
    one, other = call(rows(2, 3), ids=rows(7, 2)), call(rows(2, 3), ids=rows(7, 2))
    assert joinable(one, other)
    assert torch.equal(join([one, other])[1]["ids"], rows(7, 2))


@pytest.mark.parametrize("ids", [rows(7, 2, start=1), rows(7, 2).double(), rows(2, 7), rows(8, 2)])
def test_a_tensor_without_samples_that_differs_in_anything_is_not_shared(ids: torch.Tensor) -> None:
    assert why_not(call(rows(3, 3), ids=rows(7, 2)), call(rows(3, 3), ids=ids)) == "ids"


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_tensors_of_any_dtype_are_compared_by_content(dtype: torch.dtype) -> None:
    one, other = (call(rows(3, 3), ids=torch.tensor([0, 1]).to(dtype)) for _ in range(2))
    assert joinable(one, other)
    assert why_not(one, call(rows(3, 3), ids=torch.tensor([1, 1]).to(dtype))) == "ids"


def test_a_shared_argument_is_never_joined_even_if_its_length_is_the_number_of_samples() -> None:
    rules = JoinRules(names=("x",), shared=frozenset({"ids"}))
    one, other = (call(rows(2, 3), rules=rules, ids=rows(2, 2)) for _ in range(2))
    assert joinable(one, other)
    assert torch.equal(join([one, other])[1]["ids"], rows(2, 2))
    assert why_not(one, call(rows(2, 3), rules=rules, ids=rows(2, 2, start=1))) == "ids"


@pytest.mark.parametrize(("value", "same", "different"), [
    (1, 1, 2), (1, 1, True), (1, 1, 1.0), ("a", "a", "b"), (None, None, 0),
    (torch.float32, torch.float32, torch.float16),
])  # fmt: skip
def test_other_values_must_be_equal_in_type_too(value: Any, same: Any, different: Any) -> None:
    one = call(rows(1, 3), option=value)
    assert joinable(one, call(rows(1, 3), option=same))
    assert join([one, call(rows(1, 3), option=same)])[1] == {"option": value}
    assert why_not(one, call(rows(1, 3), option=different)) == "option"


def test_an_object_of_an_unknown_kind_is_joined_only_with_itself() -> None:
    thing, other = object(), object()
    assert joinable(call(rows(1, 3), cache=thing), call(rows(1, 3), cache=thing))
    assert why_not(call(rows(1, 3), cache=thing), call(rows(1, 3), cache=other)) == "cache"


def test_an_argument_that_one_of_them_lacks_keeps_them_apart() -> None:
    assert why_not(call(rows(1, 3)), call(rows(1, 3), more=1)) == "arguments"
    assert why_not(call(rows(1, 3), less=1), call(rows(1, 3), more=1)) == "less"


def test_calls_of_two_modules_are_kept_apart() -> None:
    assert why_not(call(rows(1, 3)), call(rows(1, 3), module="other")) == "module"


# ---------------------------------------------------------------- lists with an element for each sample


LISTS = JoinRules(names=("x", "t", "caps"), per_sample=frozenset({"x", "caps", "shapes"}), ragged=frozenset({"caps"}))


def test_lists_with_an_element_for_each_sample_are_put_one_behind_the_other() -> None:
    one = call([rows(4)], torch.tensor([1.0]), [rows(2, 3)], rules=LISTS)
    other = call([rows(4), rows(4)], torch.tensor([2.0, 3.0]), [rows(5, 3), rows(1, 3)], rules=LISTS)
    assert joinable(one, other)
    args, _ = join([one, other])
    assert [tuple(part.shape) for part in args[0]] == [(4,)] * 3
    assert args[1].tolist() == [1, 2, 3]
    assert [len(part) for part in args[2]] == [2, 5, 1]


def test_elements_that_may_not_differ_in_shape_keep_calls_apart() -> None:
    assert why_not(call([rows(4)], rules=LISTS), call([rows(5)], rules=LISTS)) == "x"
    assert why_not(call([rows(4), rows(5)], rules=LISTS), call([rows(4), rows(5)], rules=LISTS)) == "x"


def test_lists_of_plain_values_for_each_sample_are_joined_if_all_are_equal() -> None:
    one, other = (call(rows(1, 3), rules=LISTS, shapes=[[(1, 2, 3)]]) for _ in range(2))
    assert joinable(one, other)
    assert join([one, other])[1]["shapes"] == [[(1, 2, 3)], [(1, 2, 3)]]
    assert why_not(one, call(rows(1, 3), rules=LISTS, shapes=[[(1, 2, 4)]])) == "shapes"


# ---------------------------------------------------------------- lengths that a mask tells


MASKED = JoinRules(names=("x",), masks={"text": "mask"})


def masked(length: int, mask: list[int] | None = None, samples: int = 1) -> Call:
    given = None if mask is None else torch.tensor([mask] * samples)
    return call(rows(samples, 3), rules=MASKED, text=rows(samples, length, 2, start=1), mask=given)


def test_shorter_texts_are_padded_and_masked() -> None:
    one, other = masked(2), masked(4)
    assert joinable(one, other)
    _, kwargs = join([one, other])
    assert torch.equal(kwargs["text"][0, :2], rows(1, 2, 2, start=1)[0])
    assert not kwargs["text"][0, 2:].any()
    assert torch.equal(kwargs["text"][1], rows(1, 4, 2, start=1)[0])
    assert kwargs["mask"].tolist() == [[True, True, False, False], [True] * 4]


def test_texts_of_one_length_without_masks_stay_without() -> None:
    _, kwargs = join([masked(3), masked(3, samples=2)])
    assert kwargs["text"].shape == (3, 3, 2)
    assert kwargs["mask"] is None


def test_a_mask_that_one_of_them_has_is_kept() -> None:
    one, other = masked(3, [1, 1, 0]), masked(3)
    assert joinable(one, other)
    assert join([one, other])[1]["mask"].tolist() == [[True, True, False], [True, True, True]]


def test_a_mask_is_padded_with_its_text() -> None:
    _, kwargs = join([masked(2, [1, 0], samples=2), masked(3)])
    assert kwargs["mask"].tolist() == [[True, False, False]] * 2 + [[True] * 3]


def test_texts_of_other_widths_are_not_joined() -> None:
    assert why_not(masked(2), call(rows(1, 3), rules=MASKED, text=rows(1, 2, 5), mask=None)) == "text"


# ---------------------------------------------------------------- the answer


class Answer(OrderedDict[str, Any]):
    """As the libraries' outputs: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_a_tensor_is_cut_by_samples() -> None:
    assert [part.tolist() for part in split(torch.arange(5), [2, 3])] == [[0, 1], [2, 3, 4]]


def test_a_tuple_stays_one_and_so_does_a_list() -> None:
    whole = rows(3, 2)
    assert [type(part) for part in split((whole, "text"), [1, 2])] == [tuple, tuple]
    first, second = split([whole, whole], [1, 2])
    assert isinstance(first, list)
    assert torch.equal(first[1], whole[:1])
    assert torch.equal(second[0], whole[1:])


def test_a_list_with_an_element_for_each_sample_is_cut_between_them() -> None:
    parts = [rows(2), rows(5), rows(3)]
    first, second = split(parts, [1, 2])
    assert first[0] is parts[0]
    assert second == parts[1:]


def test_an_output_of_the_libraries_keeps_its_class() -> None:
    first, second = split(Answer(sample=rows(3, 2), hidden=(rows(3, 1),), none=None), [2, 1])
    assert isinstance(first, Answer)
    assert torch.equal(first.sample, rows(3, 2)[:2])
    assert torch.equal(second.hidden[0], rows(3, 1)[2:])
    assert second.none is None


def test_what_has_no_samples_is_everybodys() -> None:
    whole = rows(7, 2)
    assert split(whole, [1, 2]) == [whole, whole]
    assert split("text", [1, 2]) == ["text", "text"]


# ---------------------------------------------------------------- there and back


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(sizes=sizes, width=st.integers(1, 4), scalar=st.booleans())
def test_what_an_identity_answers_is_what_each_call_gave(sizes: list[int], width: int, scalar: bool) -> None:
    calls = [
        call(
            rows(size, width, start=1000 * number),
            torch.tensor(float(number)) if scalar else torch.full((size,), float(number)),
            added={"more": rows(size, 2, start=1000 * number)},
        )
        for number, size in enumerate(sizes)
    ]
    assert joinable(*calls)
    (x, t), kwargs = join(calls)
    for number, (made, answer) in enumerate(zip(calls, split((x, kwargs["added"], t), sizes), strict=True)):
        assert torch.equal(answer[0], made.args[0])
        assert torch.equal(answer[1]["more"], made.kwargs["added"]["more"])
        assert answer[2].tolist() == [number] * made.samples


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), sizes=sizes)
def test_padding_keeps_each_text_and_adds_nothing_that_is_not_masked(lengths: list[int], sizes: list[int]) -> None:
    calls = [masked(length, samples=size) for length, size in zip(lengths, sizes, strict=False)]
    kwargs = join(calls)[1]
    used = sizes[: len(calls)]
    masks = split(kwargs["mask"], used) if kwargs["mask"] is not None else [None] * len(calls)
    for made, text, mask in zip(calls, split(kwargs["text"], used), masks, strict=True):
        given_text = made.kwargs["text"]
        kept = text if mask is None else text[mask].reshape(given_text.shape)
        assert torch.equal(kept, given_text)
