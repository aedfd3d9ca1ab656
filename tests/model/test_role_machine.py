"""A role's machine: each path by example, then random scripts of messages and of threads that finish in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from diffcluster.ids import LeaseId, RequestId
from diffcluster.messages import Failed, PushFailed
from diffcluster.roles.machine import RoleMachine
from diffcluster.transport.slots import GRANULE
from tests.model.role_shell import QUARANTINE_S, RoleShell
from tests.support import mutant


def names(messages: list[Any]) -> list[str]:
    return [type(message).__name__ for message in messages]


@pytest.fixture
def role() -> Iterator[RoleShell]:
    shell = RoleShell()
    yield shell
    shell.finish()


def staged(shell: RoleShell, name: str = "a", output: int = 1) -> None:
    shell.submit(name, output)
    assert names(shell.computed()) == ["Staged"]


def quarantined(shell: RoleShell, region: str) -> int:
    ledger = shell.machine.receive if region == "receive" else shell.machine.send
    return ledger.bytes_by_state()["quarantined"]


# ---------------------------------------------------------------- the usual way


def test_a_first_stage_computes_stages_pushes_and_is_released(role: RoleShell) -> None:
    assert role.submit("a") == []
    assert names(role.computed()) == ["Staged"]
    assert role.push("a") == []
    assert names(role.pushed()) == ["Pushed"]
    assert role.release("a") == []
    assert role.machine.jobs == {}


def test_a_middle_stage_frees_its_slot_as_soon_as_it_is_loaded(role: RoleShell) -> None:
    assert names(role.allocate("a")) == ["Allocated"]
    role.ready("a")
    role.loaded()
    assert role.machine.receive.bytes_by_state()["free"] == 8 * GRANULE
    assert names(role.computed()) == ["Staged"]


def test_a_last_stage_makes_files_and_forgets(role: RoleShell) -> None:
    role.allocate("a")
    role.ready("a", output=0)
    role.loaded()
    assert names(role.computed()) == ["Done"]
    assert role.machine.jobs == {}


def test_the_next_one_is_loaded_while_one_computes_but_not_the_one_after(role: RoleShell) -> None:
    for name in "abc":
        role.allocate(name)
        role.ready(name)
    role.loaded()
    assert [work.key[0] for work in role.computes] == ["a"]
    assert [load.ready.request_id for load in role.loads] == ["b"]
    role.loaded()
    assert role.loads == []
    role.computed()
    assert [work.key[0] for work in role.computes] == ["b"]
    assert [load.ready.request_id for load in role.loads] == ["c"]


def test_a_request_is_computed_only_when_there_is_room_for_its_output(role: RoleShell) -> None:
    staged(role, "a", output=5)
    role.submit("b", output=5)
    assert role.computes == []
    role.submit("c", output=3)
    assert [work.key[0] for work in role.computes] == ["c"]
    role.computed()
    role.release("a")
    assert [work.key[0] for work in role.computes] == ["b"]


def test_a_slot_may_be_pushed_to_two_peers_and_is_held_until_both_have_ended(role: RoleShell) -> None:
    staged(role)
    role.push("a", lease=1)
    role.push("a", lease=2)
    role.release("a")
    assert names(role.pushed()) == ["Pushed"]
    assert role.machine.send.bytes_by_state()["writing"] == GRANULE
    assert names(role.pushed()) == ["Pushed"]
    assert role.machine.send.bytes_by_state()["free"] == 8 * GRANULE


# ---------------------------------------------------------------- refusals and failures


def test_a_full_region_refuses_for_now_and_a_too_large_request_for_ever(role: RoleShell) -> None:
    role.allocate("a", granules=8)
    [refused] = role.allocate("b")
    assert not refused.permanent
    [refused] = role.allocate("c", granules=9)
    assert refused.permanent


def test_an_output_that_can_never_fit_fails(role: RoleShell) -> None:
    [failed] = role.submit("a", output=9)
    assert failed.code == "out_of_memory"


def test_a_manifest_that_does_not_fit_its_slot_fails_the_request(role: RoleShell) -> None:
    role.allocate("a")
    [failed] = role.ready("a", nbytes=2 * GRANULE)
    assert (failed.code, role.machine.jobs) == ("transfer_failed", {})


def test_a_load_that_fails_frees_the_slot(role: RoleShell) -> None:
    role.allocate("a")
    role.ready("a")
    assert names(role.load_failed()) == ["Failed"]
    assert role.machine.receive.bytes_by_state()["free"] == 8 * GRANULE


def test_a_computation_that_fails_frees_its_output_and_the_next_one_starts(role: RoleShell) -> None:
    role.submit("a", output=8)
    role.submit("b", output=8)
    [failed] = role.compute_failed()
    assert isinstance(failed, Failed)
    assert failed.code == "nan_output"
    assert [work.key[0] for work in role.computes] == ["b"]


def test_a_failed_push_that_is_settled_leaves_the_output_to_be_pushed_again(role: RoleShell) -> None:
    staged(role)
    role.push("a")
    assert names(role.push_failed(settled=True)) == ["PushFailed"]
    role.push("a", lease=2)
    assert names(role.pushed()) == ["Pushed"]
    role.release("a")
    assert role.machine.send.bytes_by_state()["free"] == 8 * GRANULE


def test_a_failed_push_that_is_not_settled_quarantines_the_output_when_the_job_ends(role: RoleShell) -> None:
    staged(role)
    role.push("a")
    role.push_failed(settled=False)
    role.push("a", lease=2)
    role.pushed()
    assert quarantined(role, "send") == 0
    role.release("a")
    assert quarantined(role, "send") == GRANULE
    role.after(QUARANTINE_S - 1)
    assert quarantined(role, "send") == GRANULE
    role.after(1)
    assert quarantined(role, "send") == 0


def test_a_push_of_what_is_not_staged_fails_settled(role: RoleShell) -> None:
    [failed] = role.push("nobody")
    assert isinstance(failed, PushFailed)
    assert failed.settled
    role.submit("a")
    assert names(role.push("a")) == ["PushFailed"]


# ---------------------------------------------------------------- leases that end without use


def test_an_eviction_that_the_engine_fences_frees_the_slot(role: RoleShell) -> None:
    role.allocate("a")
    [evicted] = role.evict("a", 1, settled=False)
    assert (evicted.lease, evicted.quarantined) == (1, False)
    assert role.machine.receive.bytes_by_state()["free"] == 8 * GRANULE


def test_an_eviction_that_is_settled_frees_the_slot_even_if_the_engine_cannot_fence(role: RoleShell) -> None:
    role.fences = False
    role.allocate("a")
    [evicted] = role.evict("a", 1, settled=True)
    assert not evicted.quarantined


def _quarantine_a_slot(role: RoleShell) -> None:
    role.fences = False
    role.allocate("a")
    [evicted] = role.evict("a", 1, settled=False)
    assert evicted.quarantined
    assert quarantined(role, "receive") == GRANULE


def test_an_unsettled_slot_is_free_when_the_router_says_that_nobody_writes(role: RoleShell) -> None:
    _quarantine_a_slot(role)
    assert role.evict("a", 1, settled=False) == []
    assert quarantined(role, "receive") == GRANULE
    assert role.evict("a", 1, settled=True) == []
    assert quarantined(role, "receive") == 0


def test_an_unsettled_slot_is_free_when_its_time_is_over(role: RoleShell) -> None:
    _quarantine_a_slot(role)
    role.after(QUARANTINE_S - 1)
    assert quarantined(role, "receive") == GRANULE
    role.after(1)
    assert quarantined(role, "receive") == 0


def test_a_late_eviction_does_not_touch_a_slot_that_is_in_use(role: RoleShell) -> None:
    role.allocate("a")
    role.ready("a")
    assert role.evict("a", 1, settled=True) == []
    role.loaded()
    assert names(role.computed()) == ["Staged"]


# ---------------------------------------------------------------- cancelling


def test_cancelled_while_it_waits_for_its_tensors(role: RoleShell) -> None:
    role.allocate("a")
    assert sorted(names(role.cancel("a"))) == ["Cancelled", "Evicted"]


def test_cancelled_while_it_waits_to_be_loaded(role: RoleShell) -> None:
    for name in "ab":
        role.allocate(name)
        role.ready(name)
    assert names(role.cancel("b")) == ["Cancelled"]
    assert role.machine.receive.bytes_by_state()["free"] == 7 * GRANULE


@pytest.mark.parametrize("end", [RoleShell.loaded, RoleShell.load_failed])
def test_cancelled_while_it_is_loaded(role: RoleShell, end: Any) -> None:
    role.allocate("a")
    role.ready("a")
    assert role.cancel("a") == []
    assert names(end(role)) == ["Cancelled"]
    assert role.tensors == set()


@pytest.mark.parametrize("end", [RoleShell.computed, RoleShell.compute_failed])
def test_cancelled_while_it_computes(role: RoleShell, end: Any) -> None:
    role.submit("a")
    assert role.cancel("a") == []
    assert role.cancelled == {("a", 1)}
    assert names(end(role)) == ["Cancelled"]


def test_cancelled_while_it_waits_for_room(role: RoleShell) -> None:
    staged(role, "a", output=8)
    role.submit("b")
    assert names(role.cancel("b")) == ["Cancelled"]


def test_cancelled_while_it_is_pushed(role: RoleShell) -> None:
    staged(role)
    role.push("a")
    assert names(role.cancel("a")) == ["Cancelled"]
    assert role.machine.send.bytes_by_state()["writing"] == GRANULE
    assert names(role.push("a")) == ["PushFailed"]
    role.push_failed(settled=False)
    assert quarantined(role, "send") == GRANULE


def test_cancelling_what_is_unknown_is_answered(role: RoleShell) -> None:
    assert names(role.cancel("nobody")) == ["Cancelled"]


# ---------------------------------------------------------------- what is late, or twice


def test_a_message_that_comes_twice_changes_nothing(role: RoleShell) -> None:
    role.submit("a")
    role.submit("a")
    assert len(role.computes) == 1
    role.allocate("b")
    assert role.allocate("b") == []


def test_a_ready_for_another_lease_changes_nothing(role: RoleShell) -> None:
    role.allocate("a")
    assert role.ready("a", lease=7) == []
    assert role.loads == []


def test_a_release_before_there_is_anything_staged_changes_nothing(role: RoleShell) -> None:
    role.submit("a")
    role.release("a")
    assert names(role.computed()) == ["Staged"]


def test_a_reset_gives_up_everything_and_says_nothing(role: RoleShell) -> None:
    staged(role, "a")
    staged(role, "b")
    role.push("b")
    role.submit("c")
    role.allocate("d")
    assert role.reset() == []
    assert set(role.machine.jobs) == {("b", 1), ("c", 1)}
    assert names(role.computed()) == ["Cancelled"]
    role.pushed()
    assert role.machine.jobs == {}


def test_the_heartbeat_counts_what_waits_and_what_is_free(role: RoleShell) -> None:
    role.allocate("a")
    role.ready("a")
    role.submit("b", output=2)
    beat = role.machine.heartbeat(7)
    assert (beat.queued, beat.running, beat.resident_bytes) == (1, 1, 7)
    assert (beat.receive_free, beat.send_free) == (7 * GRANULE, 6 * GRANULE)


# ---------------------------------------------------------------- any order


class AnyOrder(RuleBasedStateMachine):
    """Requests of all kinds and sizes; messages at any time, right or late; threads that finish when they like."""

    @initialize(receive=st.integers(2, 6), send=st.integers(2, 6), grants=st.integers(0, 2), overlap=st.booleans())
    def begin(self, receive: int, send: int, grants: int, overlap: bool) -> None:
        self.role = RoleShell(receive, send, grants, overlap=overlap)
        self.role.joined()
        self.known: list[str] = []
        self.cancels: set[str] = set()

    def _new(self) -> str:
        self.known.append(f"r{len(self.known)}")
        return self.known[-1]

    def _pick(self, index: int, phase: str) -> str | None:
        """A request in `phase`, or now and then one in any."""
        jobs = self.role.machine.jobs
        fitting = [key[0] for key, job in jobs.items() if job.phase == phase]
        candidates = self.known if index % 8 == 0 or not fitting else fitting
        return candidates[index % len(candidates)] if candidates else None

    @rule(output=st.integers(0, 3))
    def submit(self, output: int) -> None:
        self.role.submit(self._new(), output)

    @precondition(lambda self: not self.role.machine.jobs)
    @rule()
    def push_something(self) -> None:
        """So that transfers are not too rare."""
        self.role.submit(self._new())
        if self.role.computes:
            self.role.computed()
            self.role.push(self.known[-1])

    @rule(granules=st.integers(1, 3))
    def allocate(self, granules: int) -> None:
        self.role.allocate(self._new(), granules)

    @rule(index=st.integers(0, 100), output=st.integers(0, 3), granules=st.integers(1, 2))
    def ready(self, index: int, output: int, granules: int) -> None:
        if name := self._pick(index, "leased"):
            self.role.ready(name, output, granules * GRANULE)

    def _grant(self, index: int) -> int:
        return sorted(self.role.machine.grants)[index % len(self.role.machine.grants)]

    @precondition(lambda self: self.role.machine.grants)
    @rule(index=st.integers(0, 100), output=st.integers(0, 3), granules=st.integers(1, 2))
    def ready_on_a_grant(self, index: int, output: int, granules: int) -> None:
        self.role.ready(self._new(), output, granules * GRANULE, self._grant(index))

    @precondition(lambda self: self.role.machine.grants)
    @rule(index=st.integers(0, 100), settled=st.booleans(), fences=st.booleans())
    def evict_a_grant(self, index: int, settled: bool, fences: bool) -> None:
        self.role.fences = fences
        self.role.evict(self._new(), self._grant(index), settled=settled)

    @precondition(lambda self: self.role.machine.grants)
    @rule(index=st.integers(0, 100))
    def ungrant(self, index: int) -> None:
        self.role.ungrant(self._grant(index))

    @rule(index=st.integers(0, 100), settled=st.booleans(), fences=st.booleans())
    def evict(self, index: int, settled: bool, fences: bool) -> None:
        self.role.fences = fences
        if name := self._pick(index, "leased"):
            job = self.role.machine.jobs.get((RequestId(name), 1))
            lease = job.slot.lease if job and job.slot else LeaseId(1 + index % 3)
            # A grant is told to a sender for one attempt, which cannot have ended here before.
            self.role.evict(self._new() if lease in self.role.machine.grants else name, lease, settled=settled)

    @rule(index=st.integers(0, 100))
    def push(self, index: int) -> None:
        if name := self._pick(index, "staged"):
            self.role.push(name)

    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        if name := self._pick(index, "staged"):
            self.role.release(name)

    @rule(index=st.integers(0, 100), phase=st.sampled_from(["leased", "ready", "loading", "computing", "staged"]))
    def cancel(self, index: int, phase: str) -> None:
        name = self._pick(index, phase)
        if name is not None and name not in self.cancels:
            self.cancels.add(name)
            self.role.cancel(name)

    @precondition(lambda self: self.role.loads)
    @rule(works=st.booleans())
    def load_ends(self, works: bool) -> None:
        self.role.loaded() if works else self.role.load_failed()

    @precondition(lambda self: self.role.computes)
    @rule(works=st.booleans())
    def compute_ends(self, works: bool) -> None:
        self.role.computed() if works else self.role.compute_failed()

    @precondition(lambda self: self.role.computes and self.role.computes[0].output is not None)
    @rule()
    def compute_ends_and_its_output_is_to_be_written(self) -> None:
        self.role.compute_ended()

    @precondition(lambda self: self.role.packs)
    @rule()
    def output_is_written(self) -> None:
        self.role.packed()

    @precondition(lambda self: self.role.pushes)
    @rule(index=st.integers(0, 100), works=st.booleans(), settled=st.booleans())
    def push_ends(self, index: int, works: bool, settled: bool) -> None:
        index %= len(self.role.pushes)
        self.role.pushed(index) if works else self.role.push_failed(index, settled=settled)

    @rule(seconds=st.sampled_from([1.0, QUARANTINE_S / 2, QUARANTINE_S]))
    def time_passes(self, seconds: float) -> None:
        self.role.after(seconds)

    @invariant()
    def heartbeats_fit_the_wire(self) -> None:
        if hasattr(self, "role"):
            beat = self.role.machine.heartbeat(0)
            assert min(beat.queued, beat.running, beat.receive_free, beat.receive_quarantined, beat.send_free) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "role"):
            return
        self.role.finish()
        for name in self.known:
            counts = self.role.outcomes[RequestId(name), 1]
            ended = sum(counts.values()) - counts["Cancelled"]
            assert ended == 1 or (ended == 0 and counts["Cancelled"] == 1), f"{name} ended as {counts}"
            assert counts["Cancelled"] == (name in self.cancels), f"{name}: each Cancel is answered once"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- guards that are taken away

MUTANTS = {
    "a source that is still read is freed": ("_on_push_ended", "job.source_held or event.source_held", "False"),
    "a slot that is still written is freed": ("_on_window_closed", "if event.fenced:", "if True:"),
    "a loaded slot is kept": ("_on_loaded", "self.free_slot(job)", "pass"),
    "two compute at a time": ("_may_compute", "ahead < self._concurrency", "True"),
    "nothing is loaded ahead": ("_advance_load", "ahead < _LOAD_AHEAD", "ahead < 0"),
}
SHORT = settings(
    max_examples=300, stateful_step_count=40, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), print_blob=False,
)  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_guard_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, old, new = MUTANTS[name]
    monkeypatch.setattr(RoleMachine, method, mutant(getattr(RoleMachine, method), old, new))
    with pytest.raises(Exception):  # noqa: B017, PT011 - however it is noticed
        run_state_machine_as_test(AnyOrder, settings=SHORT)
