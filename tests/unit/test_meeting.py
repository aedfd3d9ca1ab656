"""Fibers: a computation parks at its calls of a module, and goes on with an answer or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import greenlet
import pytest
import torch

from diffcluster.roles.joining import JoinRules
from diffcluster.roles.meeting import Fiber, meeting


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return 2 * x


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("it is not to be called by itself")


X = torch.ones(1, 2)
met = meeting("net", refuse, JoinRules(names=("x",)))


def started(function: Callable[[], Any]) -> Fiber:
    fiber = Fiber(function)
    fiber.start()
    return fiber


def test_outside_of_a_fiber_a_wrapped_function_is_the_function() -> None:
    wrapped = meeting("net", double, JoinRules())
    assert torch.equal(wrapped(X), 2 * X)
    assert (wrapped.__name__, wrapped.__doc__) == ("double", "Twice x.")


def test_in_a_plain_greenlet_it_is_the_function_too() -> None:
    wrapped = meeting("net", double, JoinRules())
    assert torch.equal(greenlet.greenlet(lambda: wrapped(X)).switch(), 2 * X)


def test_a_fiber_parks_at_its_call_with_what_it_gave() -> None:
    fiber = started(lambda: met(X, scale=2))
    assert fiber.call is not None
    assert not fiber.ended
    assert (fiber.call.module, fiber.call.function, fiber.call.kwargs) == ("net", refuse, {"scale": 2})
    assert fiber.call.args[0] is X
    fiber.answer(None)


def test_it_goes_on_with_the_answer_and_ends_with_its_result() -> None:
    fiber = started(lambda: (met(X) + met(X), "more"))
    fiber.answer(1)
    assert not fiber.ended
    fiber.answer(2)
    assert fiber.ended
    assert (fiber.call, fiber.result) == (None, (3, "more"))


def test_one_that_calls_nothing_ends_when_it_is_started() -> None:
    fiber = started(lambda: 5)
    assert (fiber.ended, fiber.call, fiber.result) == (True, None, 5)


def test_it_does_nothing_before_it_is_started() -> None:
    ran: list[int] = []
    Fiber(lambda: ran.append(1))
    assert ran == []


def test_several_park_at_once_and_go_on_in_any_order() -> None:
    fibers = [started(lambda number=number: (number, met(X))) for number in range(3)]
    for number in (2, 0, 1):
        fibers[number].answer(10 * number)
    assert [fiber.result for fiber in fibers] == [(0, 0), (1, 10), (2, 20)]


def test_a_call_deep_in_other_calls_parks_all_of_them() -> None:
    def deep(levels: int) -> Any:
        return met(X) if levels == 0 else deep(levels - 1) + 1

    fiber = started(lambda: deep(50))
    fiber.answer(0)
    assert fiber.result == 50


def test_a_wrapped_function_that_calls_another_is_called_as_a_whole() -> None:
    """The loop makes a call outside of the fiber, so what the module calls does not park."""
    inner = meeting("inner", double, JoinRules())
    outer = meeting("outer", lambda x: inner(x) + 1, JoinRules())
    fiber = started(lambda: outer(X))
    assert fiber.call is not None
    assert fiber.call.module == "outer"
    fiber.answer(fiber.call.function(*fiber.call.args))
    assert torch.equal(fiber.result, 2 * X + 1)


# ---------------------------------------------------------------- errors

ERRORS = [ValueError("no"), SystemExit(2), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS)
def test_what_the_computation_raises_comes_out_where_it_was_let_run(error: BaseException) -> None:
    def fails(after: int) -> None:
        for _ in range(after):
            met(X)
        raise error

    with pytest.raises(type(error)):
        started(lambda: fails(0))
    fiber = started(lambda: fails(1))
    with pytest.raises(type(error)):
        fiber.answer(None)
    assert fiber.ended


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_raised_at_the_call_and_comes_out_if_nobody_catches_it(error: BaseException) -> None:
    left: list[str] = []

    def runs() -> None:
        try:
            met(X)
        finally:
            left.append("cleaned")

    fiber = started(runs)
    with pytest.raises(type(error)) as raised:
        fiber.throw(error)
    assert raised.value is error
    assert left == ["cleaned"]
    assert (fiber.ended, fiber.call) == (True, None)


def test_one_that_catches_its_error_goes_on() -> None:
    def runs() -> Any:
        try:
            return met(X)
        except ValueError:
            return met(X) + 1

    fiber = started(runs)
    fiber.throw(ValueError())
    assert not fiber.ended
    fiber.answer(1)
    assert fiber.result == 2


def test_the_exit_of_greenlets_is_an_error_like_others() -> None:
    """Greenlets take it for a result."""

    def exits() -> None:
        met(X)
        raise greenlet.GreenletExit

    fiber = started(exits)
    with pytest.raises(greenlet.GreenletExit):
        fiber.answer(None)


# ---------------------------------------------------------------- what belongs to the thread


def test_gradients_are_off_in_all_fibers_however_their_functions_interleave() -> None:
    """Each `no_grad` puts back what it found when it began, and the first that ends is not the last that began."""
    seen: list[bool] = []

    @torch.no_grad()
    def pipeline(steps: int) -> None:
        for _ in range(steps):
            met(X)
            seen.append(torch.is_grad_enabled())

    with torch.inference_mode():
        first, second = started(lambda: pipeline(1)), started(lambda: pipeline(2))
        first.answer(None)
        second.answer(None)
        seen.append(torch.is_grad_enabled())
        second.answer(None)
        assert not torch.is_grad_enabled()
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert seen == [False] * 4


def test_inference_mode_is_kept_by_functions_that_set_it_themselves() -> None:
    @torch.inference_mode()
    def pipeline(steps: int) -> None:
        for _ in range(steps):
            met(X)

    with torch.inference_mode():
        first, second = started(lambda: pipeline(1)), started(lambda: pipeline(2))
        first.answer(None)
        assert torch.is_inference_mode_enabled()
        second.answer(None)
        second.answer(None)
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
