"""The ledger of a memory region: by example, and against a model that keeps a map of granules."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from diffcluster.errors import LedgerError
from diffcluster.ids import LeaseId
from diffcluster.transport.slots import GRANULE, TRANSITIONS, Lease, Ledger, State

STATES: list[State] = list(TRANSITIONS)


def _lease(ledger: Ledger, nbytes: int = GRANULE) -> Lease:
    lease = ledger.lease(nbytes)
    assert lease is not None
    return lease


def _moved(ledger: Ledger, to: State) -> Lease:
    """A lease in state `to`, by a way that the table allows."""
    lease = _lease(ledger)
    for state in {"leased": (), "full": ("full",), "quarantined": ("quarantined",)}.get(to, ("full", to)):
        ledger.move(lease.id, state)  # type: ignore[arg-type]
    return lease


@pytest.mark.parametrize(
    ("nbytes", "covered"), [(0, GRANULE), (1, GRANULE), (GRANULE, GRANULE), (GRANULE + 1, 2 * GRANULE)]
)
def test_a_lease_covers_whole_granules(nbytes: int, covered: int) -> None:
    assert _lease(Ledger(4 * GRANULE), nbytes) == Lease(LeaseId(1), 0, covered, "leased")


def test_a_capacity_that_is_no_multiple_is_rounded_down() -> None:
    assert Ledger(2 * GRANULE - 1).capacity == GRANULE
    assert Ledger(GRANULE - 1).lease(0) is None


def test_the_smallest_free_range_that_fits_is_taken() -> None:
    ledger = Ledger(10 * GRANULE)
    large, _, small, _ = (_lease(ledger, n * GRANULE) for n in (4, 1, 2, 3))
    ledger.free(large.id)
    ledger.free(small.id)
    assert _lease(ledger, 2 * GRANULE).offset == small.offset
    assert _lease(ledger, 3 * GRANULE).offset == large.offset


def test_what_does_not_fit_now_may_fit_later_but_never_what_exceeds_the_capacity() -> None:
    ledger = Ledger(2 * GRANULE)
    held = _lease(ledger)
    assert ledger.lease(2 * GRANULE) is None
    assert ledger.fits(2 * GRANULE)
    assert not ledger.fits(2 * GRANULE + 1)
    ledger.free(held.id)
    assert ledger.lease(2 * GRANULE) is not None


def test_neighbours_merge_whatever_the_order_in_which_they_are_freed() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        ledger = Ledger(3 * GRANULE)
        leases = [_lease(ledger) for _ in range(3)]
        for index in order:
            ledger.free(leases[index].id)
        assert ledger.largest_free() == ledger.capacity


def test_an_id_is_never_used_twice() -> None:
    ledger = Ledger(GRANULE)
    first = _lease(ledger)
    ledger.free(first.id)
    assert _lease(ledger).id != first.id
    assert ledger.get(first.id) is None


@pytest.mark.parametrize("origin", STATES)
@pytest.mark.parametrize("to", STATES)
def test_a_move_follows_the_table_or_raises_and_changes_nothing(origin: State, to: State) -> None:
    ledger = Ledger(GRANULE)
    lease = _moved(ledger, origin)
    if to in TRANSITIONS[origin]:
        ledger.move(lease.id, to)
    else:
        with pytest.raises(LedgerError, match=f"is {origin} and cannot become {to}"):
            ledger.move(lease.id, to)
        to = origin
    held = ledger.get(lease.id)
    assert held is not None
    assert held.state == to
    assert ledger.bytes_by_state()[to] == GRANULE


@pytest.mark.parametrize("state", STATES)
def test_a_lease_may_be_freed_from_each_state_but_only_once(state: State) -> None:
    ledger = Ledger(GRANULE)
    lease = _moved(ledger, state)
    ledger.free(lease.id)
    with pytest.raises(LedgerError, match="is not held"):
        ledger.free(lease.id)
    with pytest.raises(LedgerError, match="is not held"):
        ledger.move(lease.id, "full")
    assert ledger.bytes_by_state()["free"] == GRANULE


class LedgerModel(RuleBasedStateMachine):
    """The ledger beside a list that says, for each granule, which lease has it."""

    CAPACITY = 12
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.CAPACITY * GRANULE)
        self.owner: list[int | None] = [None] * self.CAPACITY
        self.states: dict[int, State] = {}

    def _runs(self) -> list[int]:
        """Lengths of all free runs of granules."""
        text = "".join("x" if owner else "." for owner in self.owner)
        return [len(run) for run in text.split("x") if run]

    @rule(target=leases, granules=st.integers(1, CAPACITY + 1))
    def lease(self, granules: int) -> object:
        lease = self.ledger.lease(granules * GRANULE)
        fitting = [run for run in self._runs() if run >= granules]
        assert (lease is None) == (not fitting)
        if lease is None:
            return multiple()
        first = lease.offset // GRANULE
        assert self.owner[first : first + granules] == [None] * granules
        self.owner[first : first + granules] = [lease.id] * granules
        self.states[lease.id] = "leased"
        return lease.id

    @rule(lease=leases, to=st.sampled_from(STATES))
    def move(self, lease: LeaseId, to: State) -> None:
        if to in TRANSITIONS[self.states[lease]]:
            self.ledger.move(lease, to)
            self.states[lease] = to
        else:
            with pytest.raises(LedgerError):
                self.ledger.move(lease, to)

    @rule(lease=consumes(leases))
    def free(self, lease: LeaseId) -> None:
        self.ledger.free(lease)
        del self.states[lease]
        self.owner = [None if owner == lease else owner for owner in self.owner]
        with pytest.raises(LedgerError):
            self.ledger.free(lease)

    @invariant()
    def bytes_add_up(self) -> None:
        counts = self.ledger.bytes_by_state()
        assert sum(counts.values()) == self.ledger.capacity
        for state in STATES:
            held = sum(self.states.get(owner) == state for owner in self.owner if owner)
            assert counts[state] == held * GRANULE

    @invariant()
    def free_ranges_are_merged(self) -> None:
        assert self.ledger.largest_free() == max(self._runs(), default=0) * GRANULE

    @invariant()
    def the_two_lists_of_free_ranges_agree(self) -> None:
        assert sorted((offset, size) for size, offset in self.ledger._by_size) == self.ledger._by_offset

    def teardown(self) -> None:
        for lease in list(self.states):
            self.ledger.free(LeaseId(lease))
        assert self.ledger.largest_free() == self.ledger.capacity


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
