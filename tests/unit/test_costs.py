"""What is learnt of joined calls: their times, the sizes that are not worthwhile, and those that do not fit."""

from __future__ import annotations

import pytest

from diffcluster.roles.batching import Signature
from diffcluster.roles.costs import CostModel

NET = Signature("net", ())


@pytest.fixture
def costs() -> CostModel:
    return CostModel()


def test_what_was_never_measured_is_unknown_fits_and_is_tried(costs: CostModel) -> None:
    assert costs.seconds(NET, 1) is None
    assert costs.fits(NET, 1000)
    assert costs.worthwhile(NET, 1, 1000)


def test_a_first_measurement_is_believed_and_later_ones_move_it(costs: CostModel) -> None:
    costs.observe(NET, 2, 1.0)
    assert costs.seconds(NET, 2) == 1.0
    costs.observe(NET, 2, 2.0)
    assert 1.0 < costs.seconds(NET, 2) < 2.0


def test_an_average_comes_close_to_what_it_measures_again_and_again(costs: CostModel) -> None:
    costs.observe(NET, 2, 100.0)
    for _ in range(50):
        costs.observe(NET, 2, 1.0)
    assert costs.seconds(NET, 2) == pytest.approx(1.0, rel=0.01)


def test_between_two_measured_sizes_the_time_lies_on_their_line(costs: CostModel) -> None:
    costs.observe(NET, 2, 1.0)
    costs.observe(NET, 6, 3.0)
    assert costs.seconds(NET, 3) == pytest.approx(1.5)
    assert costs.seconds(NET, 5) == pytest.approx(2.5)


@pytest.mark.parametrize("samples", [1, 7])
def test_beyond_the_measured_sizes_nothing_is_said(costs: CostModel, samples: int) -> None:
    costs.observe(NET, 2, 1.0)
    costs.observe(NET, 6, 3.0)
    assert costs.seconds(NET, samples) is None
    assert costs.worthwhile(NET, 2, samples + 4)


def test_the_nearest_measurements_are_used(costs: CostModel) -> None:
    for samples, seconds in ((1, 0.0), (2, 10.0), (4, 20.0), (8, 0.0)):
        costs.observe(NET, samples, seconds)
    assert costs.seconds(NET, 3) == pytest.approx(15.0)


def test_more_samples_are_worthwhile_if_each_is_faster(costs: CostModel) -> None:
    costs.observe(NET, 1, 1.0)
    costs.observe(NET, 2, 1.5)
    assert costs.worthwhile(NET, 1, 1)


@pytest.mark.parametrize("seconds", [2.0, 2.5, 1.999])
def test_they_are_not_if_each_is_as_slow_or_hardly_faster(costs: CostModel, seconds: float) -> None:
    costs.observe(NET, 1, 1.0)
    costs.observe(NET, 2, seconds)
    assert not costs.worthwhile(NET, 1, 1)


def test_after_many_refusals_a_size_is_tried_again(costs: CostModel) -> None:
    """The machine may have been busy with something else when it was measured."""
    costs.observe(NET, 1, 1.0)
    costs.observe(NET, 2, 5.0)
    answers = [costs.worthwhile(NET, 1, 1) for _ in range(1000)]
    assert not any(answers[:100])
    assert any(answers)
    assert costs.seconds(NET, 1) == 1.0


def test_what_was_too_large_does_not_fit_again_and_nothing_larger(costs: CostModel) -> None:
    costs.too_large(NET, 4)
    assert [samples for samples in range(1, 9) if costs.fits(NET, samples)] == [1, 2, 3]


def test_the_smallest_size_that_did_not_fit_counts(costs: CostModel) -> None:
    costs.too_large(NET, 3)
    costs.too_large(NET, 6)
    assert not costs.fits(NET, 3)


def test_each_signature_is_known_by_itself(costs: CostModel) -> None:
    other = Signature("net", (("x", 1),))
    costs.observe(NET, 1, 1.0)
    costs.too_large(NET, 2)
    assert costs.seconds(other, 1) is None
    assert costs.fits(other, 2)


def test_signatures_without_end_take_no_memory_without_end_and_the_one_in_use_is_kept(costs: CostModel) -> None:
    costs.too_large(NET, 2)
    for number in range(2000):
        costs.observe(NET, 1, 1.0)
        costs.observe(Signature("net", (("width", number),)), 1, 1.0)
    assert len(costs._known) < 500
    assert not costs.fits(NET, 2)
    assert costs.seconds(Signature("net", (("width", 0),)), 1) is None
