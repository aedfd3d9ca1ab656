"""Who gets the next request."""

from __future__ import annotations

from typing import Any

from diffcluster.ids import Incarnation, RequestId
from diffcluster.router.policy import least_loaded
from diffcluster.router.state import Instance
from tests.support import incarnation, register


def instance(number: int, busy: int = 0, **fields: Any) -> tuple[Incarnation, Instance]:
    keys = frozenset((RequestId(str(n)), 1) for n in range(busy))
    made = Instance(register("encoder", number, max_outstanding=2), 0.0, 0.0, busy=keys, **fields)
    return incarnation(number), made


def test_the_one_with_the_fewest_requests_in_hand() -> None:
    assert least_loaded([instance(1, busy=1), instance(2, busy=0), instance(3, busy=1)]) == incarnation(2)


def test_among_equals_the_one_that_was_given_the_fewest() -> None:
    assert least_loaded([instance(1, given=5), instance(2, given=4)]) == incarnation(2)


def test_the_order_of_the_pool_does_not_matter() -> None:
    pool = [instance(2), instance(1)]
    assert least_loaded(pool) == least_loaded(reversed(pool))


def test_none_if_each_one_drains_is_full_or_has_enough() -> None:
    assert least_loaded([instance(1, draining=True), instance(2, full=True), instance(3, busy=2)]) is None
    assert least_loaded([]) is None


def test_a_busy_one_is_better_than_one_that_cannot() -> None:
    assert least_loaded([instance(1, draining=True), instance(2, busy=1)]) == incarnation(2)
