"""A role that computes several requests at one time: how many, which, and that all ends as it does one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from diffcluster.ids import RequestId
from diffcluster.messages import Submit
from diffcluster.roles import jobs
from diffcluster.roles.machine import RoleMachine
from diffcluster.transport.slots import GRANULE
from tests.model.role_shell import QUARANTINE_S, RoleShell
from tests.model.test_role_machine import AnyOrder, names
from tests.support import TOKEN, mutant, parameters


class Parallel(RoleShell):
    """A role's shell in which computations run side by side, and end in any order."""

    def __init__(
        self, receive: int = 8, send: int = 8, grants: int = 0, *, overlap: bool = True, concurrency: int = 2
    ) -> None:
        super().__init__(receive, send, grants, overlap=overlap)
        self.concurrency = concurrency
        self.machine = RoleMachine(
            receive * GRANULE, send * GRANULE, QUARANTINE_S, lambda wanted: wanted.seed * GRANULE, lambda: TOKEN,
            grants, overlap=overlap, concurrency=concurrency,
        )  # fmt: skip

    def submit(self, name: str, output: int = 1, priority: int = 0) -> list[Any]:
        wanted = parameters(seed=output, priority=priority)
        return self.step(Submit(request_id=RequestId(name), attempt=1, parameters=wanted))

    def choose(self, index: int) -> None:
        """The next computation that ends is this one."""
        self.computes.append(self.computes.pop(index))

    def running(self) -> list[str]:
        return [work.key[0] for work in self.computes]

    def _perform(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, jobs.CancelCompute):
                assert action.key in [work.key for work in self.computes]
                self.cancelled.add(action.key)
            else:
                super()._perform([action])

    def _check_threads(self) -> None:
        """As for one at a time, for each of them."""
        every = self.computes
        for work in every or [None]:
            self.computes = [work] if work else []
            super()._check_threads()
        self.computes = every
        outputs = [work.output for work in (*self.computes, *self.packs) if work.output is not None]
        assert len(set(outputs)) == len(outputs)
        levels = Counter(work.parameters.priority for work in self.computes)
        assert max(levels.values(), default=0) <= self.concurrency

    def _check_idle(self) -> None:
        """Whatever is loaded computes, unless as many that are as urgent do, or there is no room for its output."""
        super()._check_idle()
        if not self.machine._overlap and (self.packs or self.loads or self.pushes):
            return
        for job in self.machine.jobs.values():
            if job.phase == "loaded":
                wanted = job.parameters
                assert wanted is not None
                ahead = sum(work.parameters.priority >= wanted.priority for work in self.computes)
                assert ahead >= self.concurrency or self.machine.send.largest_free() < wanted.seed * GRANULE


@pytest.fixture
def role() -> Iterator[Parallel]:
    shell = Parallel()
    yield shell
    shell.finish()


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_so_many_compute_at_once_and_no_more(concurrency: int) -> None:
    role = Parallel(concurrency=concurrency)
    for name in "abcde":
        role.submit(name)
    assert role.running() == list("abcde")[:concurrency]
    assert role.machine.heartbeat(0).running == concurrency
    role.finish()


def test_the_next_starts_as_soon_as_any_of_them_has_ended(role: Parallel) -> None:
    for name in "abcd":
        role.submit(name)
    role.choose(1)
    assert names(role.computed()) == ["Staged"]
    assert role.running() == ["a", "c"]
    role.choose(0)
    role.compute_failed()
    assert role.running() == ["c", "d"]


def test_one_whose_output_is_still_to_be_written_leaves_its_place(role: Parallel) -> None:
    for name in "abc":
        role.submit(name)
    role.choose(0)
    role.compute_ended()
    assert role.running() == ["b", "c"]
    assert names(role.packed()) == ["Staged"]


def test_outputs_may_be_written_in_another_order_than_they_were_computed(role: Parallel) -> None:
    role.submit("a")
    role.submit("b")
    role.choose(0)
    role.compute_ended()
    role.compute_ended()
    assert [work.key[0] for work in role.packs] == ["a", "b"]
    role.packs.reverse()
    [first] = role.packed()
    [second] = role.packed()
    assert (first.request_id, second.request_id) == ("b", "a")


def test_each_has_its_output_reserved_before_it_starts(role: Parallel) -> None:
    role.submit("a", output=3)
    role.submit("b", output=5)
    assert [work.output for work in role.computes] == [(0, 3 * GRANULE), (3 * GRANULE, 5 * GRANULE)]
    assert role.machine.send.bytes_by_state()["free"] == 0


def test_one_that_has_no_room_for_its_output_does_not_keep_another_that_has(role: Parallel) -> None:
    role.submit("a", output=5)
    role.submit("b", output=5)
    role.submit("c", output=3)
    assert role.running() == ["a", "c"]
    role.choose(0)
    role.computed()
    role.release("a")
    assert role.running() == ["c", "b"]


def test_one_that_can_never_fit_fails_and_the_next_starts(role: Parallel) -> None:
    role.submit("a")
    [failed] = role.submit("b", output=9)
    assert failed.code == "out_of_memory"
    role.submit("c")
    assert role.running() == ["a", "c"]


def test_a_more_urgent_one_starts_beyond_the_limit_and_a_calmer_one_waits(role: Parallel) -> None:
    role.submit("a")
    role.submit("b")
    role.submit("calm", priority=-1)
    role.submit("urgent", priority=1)
    assert role.running() == ["a", "b", "urgent"]
    role.submit("usual")
    role.choose(2)
    role.computed()
    assert role.running() == ["a", "b"]
    role.choose(0)
    role.computed()
    assert role.running() == ["b", "usual"]


def test_of_those_that_wait_the_most_urgent_starts_first(role: Parallel) -> None:
    for name, priority in (("a", 5), ("b", 5), ("c", 0), ("d", 1), ("e", 0)):
        role.submit(name, priority=priority)
    started = []
    while role.computes:
        started.append(role.running()[0])
        role.choose(0)
        role.computed()
    assert started == ["a", "b", "d", "c", "e"]


def test_one_of_several_is_cancelled_and_the_others_go_on(role: Parallel) -> None:
    role.submit("a")
    role.submit("b")
    assert role.cancel("a") == []
    assert role.cancelled == {("a", 1)}
    role.choose(0)
    assert names(role.compute_failed()) == ["Cancelled"]
    assert names(role.computed()) == ["Staged"]


def test_one_that_is_cancelled_keeps_its_place_until_it_has_ended(role: Parallel) -> None:
    for name in "abc":
        role.submit(name)
    role.cancel("a")
    assert role.running() == ["a", "b"]
    role.choose(0)
    role.compute_failed()
    assert role.running() == ["b", "c"]


def test_loading_goes_on_beside_several_that_compute(role: Parallel) -> None:
    for name in "abcd":
        role.allocate(name)
        role.ready(name)
    for _ in range(3):
        role.loaded()
    assert role.running() == ["a", "b"]
    assert role.tensors == {("c", 1)}
    assert role.loads == []
    role.choose(0)
    role.computed()
    assert role.running() == ["b", "c"]
    assert [load.ready.request_id for load in role.loads] == ["d"]


def test_a_reset_cancels_all_that_compute(role: Parallel) -> None:
    role.submit("a")
    role.submit("b")
    role.reset()
    assert role.cancelled == {("a", 1), ("b", 1)}
    role.compute_failed()
    role.compute_failed()
    assert role.machine.jobs == {}


# ---------------------------------------------------------------- any order


class SideBySide(AnyOrder):
    """The random walk of one at a time, with several, of several priorities, which end in any order."""

    @initialize(
        receive=st.integers(2, 6), send=st.integers(2, 6), grants=st.integers(0, 2), overlap=st.booleans(),
        concurrency=st.integers(2, 3),
    )  # fmt: skip
    def begin(self, receive: int, send: int, grants: int, overlap: bool, concurrency: int) -> None:
        self.role = Parallel(receive, send, grants, overlap=overlap, concurrency=concurrency)
        self.role.joined()
        self.known: list[str] = []
        self.cancels: set[str] = set()

    @rule(output=st.integers(0, 3), priority=st.integers(-1, 1))
    def submit(self, output: int, priority: int) -> None:
        self.role.submit(self._new(), output, priority)

    @precondition(lambda self: self.role.computes)
    @rule(index=st.integers(0, 100))
    def another_is_the_next_to_end(self, index: int) -> None:
        self.role.choose(index % len(self.role.computes))

    @precondition(lambda self: self.role.computes and self.role.computes[-1].output is not None)
    @rule()
    def compute_ends_and_its_output_is_to_be_written(self) -> None:
        self.role.compute_ended()


TestSideBySide = SideBySide.TestCase
TestSideBySide.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


MUTANTS = {
    "one more than the limit computes": ("_may_compute", "ahead < self._concurrency", "ahead <= self._concurrency"),
    "the calmer ones count too": ("_may_compute", "<= _urgency(job)", "<= 100"),
    "one without room keeps the others": (
        "_start_next",
        "sorted(loaded, key=_urgency)",
        "sorted(loaded, key=_urgency)[:1]",
    ),
    "only one computes": ("_may_compute", "ahead < self._concurrency", "ahead < 1"),
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
        run_state_machine_as_test(SideBySide, settings=SHORT)
