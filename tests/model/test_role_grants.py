"""A role's machine: slots leased ahead, what an engine knows of writers, and doing one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diffcluster.transport.slots import GRANULE
from tests.model.role_shell import QUARANTINE_S, RoleShell
from tests.model.test_role_machine import names, quarantined, staged


@pytest.fixture
def make() -> Iterator[Callable[..., RoleShell]]:
    made: list[RoleShell] = []

    def make(*args: Any, **options: Any) -> RoleShell:
        made.append(RoleShell(*args, **options))
        return made[-1]

    yield make
    for shell in made:
        shell.finish()


@pytest.fixture
def role(make: Callable[..., RoleShell]) -> RoleShell:
    """It has leased two slots of one granule ahead, of eight."""
    shell = make(grants=2)
    shell.joined()
    shell.allocate("first")
    shell.evict("first", 1, settled=True)
    assert {slot.nbytes for slot in shell.machine.grants.values()} == {GRANULE}
    assert set(shell.machine.grants) == {2, 3}
    return shell


def free(shell: RoleShell) -> int:
    return shell.machine.receive.bytes_by_state()["free"] // GRANULE


# ---------------------------------------------------------------- when, how many, how large


def test_nothing_is_granted_before_the_router_listens(make: Callable[..., RoleShell]) -> None:
    role = make(grants=2)
    assert names(role.allocate("a")) == ["Allocated"]
    assert names(role.joined()) == ["Grant", "Grant"]


def test_nothing_is_granted_before_a_size_is_known(make: Callable[..., RoleShell]) -> None:
    role = make(grants=2)
    assert role.joined() == []
    assert names(role.allocate("a")) == ["Allocated", "Grant", "Grant"]


def test_nothing_is_granted_where_grants_are_turned_off(make: Callable[..., RoleShell]) -> None:
    role = make()
    role.joined()
    assert names(role.allocate("a")) == ["Allocated"]


@pytest.mark.parametrize(("granules", "slots"), [(1, 4), (2, 2), (3, 1), (4, 1), (5, 0)])
def test_grants_take_at_most_half_of_the_region(make: Callable[..., RoleShell], granules: int, slots: int) -> None:
    role = make(grants=9)
    role.joined()
    role.allocate("a", granules)
    role.evict("a", 1, settled=True)
    assert [slot.nbytes for slot in role.machine.grants.values()] == [granules * GRANULE] * slots


def test_a_grant_is_as_large_as_the_largest_of_the_last_eight_inputs(make: Callable[..., RoleShell]) -> None:
    role = make(receive=32, grants=1)
    role.joined()
    for number, granules in enumerate((2, *[1] * 8)):
        role.ungrant(*role.machine.grants)
        [allocated, *_] = role.allocate(str(number), granules)
        role.evict(str(number), allocated.slot.lease, settled=True)
        expected = 2 if number < 8 else 1
        role.ungrant(*role.machine.grants)
        assert [slot.nbytes for slot in role.machine.grants.values()] == [expected * GRANULE]


# ---------------------------------------------------------------- how they end


def test_a_ready_on_a_grant_makes_it_a_job_and_another_one_is_granted(role: RoleShell) -> None:
    assert names(role.ready("a", lease=2)) == ["Grant"]
    assert [load.slot.lease for load in role.loads] == [2]
    role.loaded()
    assert names(role.computed()) == ["Staged"]


def test_a_manifest_that_does_not_fit_its_grant_fails_the_request(role: RoleShell) -> None:
    failed, grant = role.ready("a", nbytes=2 * GRANULE, lease=2)
    assert (failed.code, names([grant])) == ("transfer_failed", ["Grant"])


def test_a_grant_that_ends_without_use_is_free_if_the_engine_fences(role: RoleShell) -> None:
    evicted, grant = role.evict("a", 2, settled=False)
    assert (evicted.request_id, evicted.lease, evicted.quarantined) == ("a", 2, False)
    assert names([grant]) == ["Grant"]
    assert quarantined(role, "receive") == 0


def test_a_grant_that_ends_without_use_is_quarantined_if_the_engine_does_not_fence(role: RoleShell) -> None:
    role.fences = False
    [evicted, *_] = role.evict("a", 2, settled=False)
    assert evicted.quarantined
    assert quarantined(role, "receive") == GRANULE


def test_a_grant_that_nobody_was_told_of_is_free_at_once(role: RoleShell) -> None:
    role.fences = False
    assert names(role.ungrant(2, 3, 99)) == ["Grant", "Grant"]
    assert set(role.machine.grants) == {4, 5}
    assert quarantined(role, "receive") == 0


def test_giving_a_grant_back_does_not_touch_a_slot_that_is_in_use(role: RoleShell) -> None:
    role.ready("a", lease=2)
    assert role.ungrant(2) == []
    role.loaded()
    assert names(role.computed()) == ["Staged"]


def test_a_reset_voids_the_grants_and_makes_no_new_ones(role: RoleShell) -> None:
    assert role.reset() == []
    assert (role.machine.grants, free(role)) == ({}, 8)
    assert names(role.joined()) == ["Grant", "Grant"]


def test_a_reset_quarantines_grants_that_somebody_may_still_write(role: RoleShell) -> None:
    role.fences = False
    assert role.reset() == []
    assert quarantined(role, "receive") == 2 * GRANULE
    role.after(QUARANTINE_S)
    assert free(role) == 8


# ---------------------------------------------------------------- what had to wait


def test_what_was_refused_is_granted_as_soon_as_there_is_room(make: Callable[..., RoleShell]) -> None:
    role = make(grants=2)
    role.joined()
    role.allocate("a", 2)
    assert len(role.machine.grants) == 2
    assert names(role.allocate("b", 6)) == ["AllocationRefused"]
    first, second = role.machine.grants
    assert role.ungrant(first) == [], "smaller grants wait meanwhile"
    [grant] = role.ungrant(second)
    assert grant.slot.nbytes == 6 * GRANULE
    assert role.ready("c", nbytes=6 * GRANULE, lease=grant.slot.lease) == []


def test_a_slot_that_is_loaded_makes_room_for_what_was_refused(make: Callable[..., RoleShell]) -> None:
    role = make(receive=1, grants=1)
    role.joined()
    role.allocate("a")
    assert names(role.allocate("b")) == ["AllocationRefused"]
    role.ready("a")
    assert names(role.loaded()) == ["Grant"]


def test_what_was_refused_for_ever_is_not_waited_for(make: Callable[..., RoleShell]) -> None:
    role = make(grants=1)
    role.joined()
    assert names(role.allocate("a", 9)) == ["AllocationRefused"]
    assert names(role.allocate("b", 1)) == ["Allocated", "Grant"]


# ---------------------------------------------------------------- engines that know who writes


def _quarantine_a_slot(role: RoleShell) -> None:
    role.fences = False
    role.allocate("a")
    role.evict("a", 1, settled=False)
    assert quarantined(role, "receive") == GRANULE


def test_a_slot_is_free_early_if_the_engine_knows_that_nobody_writes(make: Callable[..., RoleShell]) -> None:
    role = make()
    _quarantine_a_slot(role)
    role.after(0.0, {1: False})
    assert quarantined(role, "receive") == 0


def test_a_slot_is_kept_however_long_the_engine_knows_that_somebody_writes(make: Callable[..., RoleShell]) -> None:
    role = make()
    _quarantine_a_slot(role)
    for _ in range(3):
        role.after(QUARANTINE_S, {1: True})
    assert quarantined(role, "receive") == GRANULE
    role.after(0.0, {1: False})
    assert quarantined(role, "receive") == 0


def test_what_the_engine_knows_of_receive_slots_says_nothing_of_send_slots(make: Callable[..., RoleShell]) -> None:
    role = make()
    staged(role)
    role.push("a")
    role.push_failed(settled=False)
    role.release("a")
    role.after(0.0, {1: False})
    assert quarantined(role, "send") == GRANULE


# ---------------------------------------------------------------- one thing at a time


def test_without_overlap_nothing_is_loaded_while_one_computes(make: Callable[..., RoleShell]) -> None:
    role = make(overlap=False)
    for name in "ab":
        role.allocate(name)
        role.ready(name)
    role.loaded()
    assert (len(role.computes), len(role.loads)) == (1, 0)
    role.computed()
    assert (len(role.computes), len(role.loads)) == (0, 1)


def test_without_overlap_nothing_is_computed_while_one_is_loaded(make: Callable[..., RoleShell]) -> None:
    role = make(overlap=False)
    role.allocate("a")
    role.ready("a")
    role.submit("b")
    assert (len(role.computes), len(role.loads)) == (0, 1)


def test_without_overlap_nothing_is_computed_while_one_is_pushed(make: Callable[..., RoleShell]) -> None:
    role = make(overlap=False)
    staged(role, "a")
    role.push("a")
    role.submit("b")
    assert role.computes == []
    role.pushed()
    assert len(role.computes) == 1


def test_without_overlap_nothing_is_computed_while_an_output_is_written(make: Callable[..., RoleShell]) -> None:
    role = make(overlap=False)
    role.submit("a")
    role.submit("b")
    role.compute_ended()
    assert len(role.computes) == 0
    role.packed()
    assert [work.key[0] for work in role.computes] == ["b"]


def test_with_overlap_the_next_one_computes_while_an_output_is_written(make: Callable[..., RoleShell]) -> None:
    role = make()
    role.submit("a")
    role.submit("b")
    role.compute_ended()
    assert [work.key[0] for work in role.computes] == ["b"]
    assert names(role.packed()) == ["Staged"]
