"""The compute loop: requests join and leave at any step, an error is one request's, and each ends exactly once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffcluster.errors import NanOutputError
from diffcluster.ids import RequestId
from diffcluster.messages import Progress
from diffcluster.roles.batching import Policy, choose
from diffcluster.roles.compute import ComputeLoop, ComputeResult, Work
from diffcluster.roles.costs import CostModel
from diffcluster.roles.device import CpuDevice
from diffcluster.roles.jobs import Computed, ComputeEnded, ComputeFailed
from diffcluster.roles.joining import JoinRules
from diffcluster.roles.meeting import meeting
from diffcluster.roles.stage import Output, Task
from tests.support import facts, parameters

WIDTH = 7


class Net:
    """A stage that calls a module once for each step. A request is known by its seed, which its tensors carry."""

    def __init__(self) -> None:
        self.facts, self.components = facts(), {}
        self.module = meeting("net", self.forward, JoinRules(names=("x", "t")))
        self.calls: list[list[int]] = []
        """Seeds of the samples in each call, also of those that failed."""
        self.before: Callable[[list[int]], None] = lambda seeds: None
        self.weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seeds = [int(seed) for seed in x[:, 0]]
        self.calls.append(seeds)
        self.before(seeds)
        moved = torch.tanh(x @ self.weight + t.reshape(-1, 1))
        return torch.cat([x[:, :1], moved[:, 1:]], dim=1)

    def run(self, task: Task) -> Output:
        wanted = task.parameters
        x = torch.linspace(0, 1, WIDTH).repeat(int(wanted.extra.get("samples", 1)), 1)
        x[:, 0] = wanted.seed
        for step in range(wanted.num_inference_steps):
            x = self.module(x, torch.tensor(float(step)))
            task.progress(step + 1, wanted.num_inference_steps)
        if not torch.isfinite(x).all():
            raise NanOutputError("NaN")
        return Output({"x": x})

    def alone(self, work: Work) -> torch.Tensor:
        """What `work` comes to without a loop."""
        plain = Net()
        return plain.run(Task(work.parameters, {}, {}, lambda *_: None)).tensors["x"]

    def times(self, seed: int) -> int:
        """In how many calls it took part."""
        return sum(seed in seeds for seeds in self.calls)


class Eager(CostModel):
    """Measured times would decide who is joined, differently each time."""

    def worthwhile(self, *_: Any) -> bool:
        return True


class Device(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.freed = 0

    def free_unused(self) -> None:
        self.freed += 1


class Bench:
    """A loop, whose reports and outputs are kept. `on_progress` may submit and cancel."""

    def __init__(self, policy: Policy | None = None, stage: Any = None) -> None:
        self.net, self.device = Net(), Device()
        self.reports: list[Any] = []
        self.outputs: dict[str, list[dict[str, torch.Tensor]]] = {}
        self.on_progress: Callable[[str, int], None] = lambda name, step: None
        self.loop = ComputeLoop(stage or self.net, self.device, self, self._note, policy or Policy())
        self.loop.steps.costs = Eager()

    def stage(self, output: Any) -> None:
        """As a stager."""
        self.outputs.setdefault(output.key[0], []).append(output.tensors)

    def _note(self, report: Any) -> None:
        self.reports.append(report)
        if isinstance(report, Progress):
            self.on_progress(report.request_id, report.step)

    def run(self, *works: Work) -> None:
        for work in (*works, None):
            self.loop.submit(work)
        self.loop.run()

    def failed(self) -> dict[str, str]:
        """Code of each request that failed."""
        events = [report.event for report in self.reports if isinstance(report, ComputeResult)]
        return {event.key[0]: event.code for event in events if isinstance(event, ComputeFailed)}

    def ends(self) -> Counter[str]:
        """How often each request ended."""
        results = [report.event.key[0] for report in self.reports if isinstance(report, ComputeResult)]
        return Counter(results) + Counter({name: len(outputs) for name, outputs in self.outputs.items()})

    def made(self, work: Work) -> torch.Tensor:
        [tensors] = self.outputs[work.key[0]]
        return tensors["x"]

    def check(self, *works: Work) -> None:
        """Those, and no others, have the results that they would have alone."""
        assert set(self.outputs) == {work.key[0] for work in works}
        for work in works:
            torch.testing.assert_close(self.made(work), self.net.alone(work))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.loop.close()


@pytest.fixture
def one_at_a_time() -> Iterator[Bench]:
    made = Bench(Policy(max_size=1))
    yield made
    made.loop.close()


def work(seed: int, steps: int = 4, *, samples: int = 1, target: bool = True, **fields: Any) -> Work:
    wanted = parameters(seed=seed, num_inference_steps=steps, extra={"samples": samples}, **fields)
    place = np.zeros(1, np.uint8) if target else None
    return Work((RequestId(f"r{seed}"), 1), wanted, {}, {}, place, threading.Event())


def sizes(bench: Bench) -> list[int]:
    return [len(seeds) for seeds in bench.net.calls]


# ---------------------------------------------------------------- joining and leaving


def test_requests_that_come_together_are_computed_together_and_each_leaves_when_it_is_done(bench: Bench) -> None:
    works = [work(seed, steps) for seed, steps in ((1, 2), (2, 5), (3, 3))]
    bench.run(*works)
    bench.check(*works)
    assert bench.net.calls == [[1, 2, 3], [1, 2, 3], [2, 3], [2], [2]]


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_request_joins_one_that_runs_at_any_step(bench: Bench, step: int) -> None:
    first, second = work(1, 5), work(2, 5)
    bench.on_progress = lambda name, done: bench.loop.submit(second) if (name, done) == ("r1", step) else None
    bench.run(first)
    bench.check(first, second)
    assert bench.net.calls == [[1]] * step + [[1, 2]] * (5 - step) + [[2]] * step


def test_requests_with_several_samples_get_back_their_own(bench: Bench) -> None:
    works = [work(1, samples=2), work(2), work(3, samples=3)]
    bench.run(*works)
    bench.check(*works)
    assert bench.net.calls[0] == [1, 1, 2, 3, 3, 3]


def test_a_lone_request_is_computed_bit_for_bit_as_without_a_loop(bench: Bench) -> None:
    lone = work(1, 9)
    bench.run(lone)
    assert torch.equal(bench.made(lone), bench.net.alone(lone))


def test_no_more_than_the_largest_number_compute_together(one_at_a_time: Bench) -> None:
    works = [work(1), work(2), work(3)]
    one_at_a_time.run(*works)
    one_at_a_time.check(*works)
    assert set(sizes(one_at_a_time)) == {1}


def test_a_stage_that_calls_no_module_ends_at_once(bench: Bench) -> None:
    nothing, other = work(1, 0), work(2)
    bench.run(nothing, other)
    bench.check(nothing, other)
    assert bench.net.times(1) == 0


def test_progress_is_reported_after_each_step_of_each_request(bench: Bench) -> None:
    bench.run(work(1, 2), work(2, 3))
    steps = [(report.request_id, report.step, report.steps) for report in bench.reports if isinstance(report, Progress)]
    assert sorted(steps) == [("r1", 1, 2), ("r1", 2, 2), ("r2", 1, 3), ("r2", 2, 3), ("r2", 3, 3)]


# ---------------------------------------------------------------- how it is handed on


def test_tensors_go_to_the_stager_after_the_machine_heard_that_computing_has_ended(bench: Bench) -> None:
    bench.run(work(1, 1))
    assert [type(report) for report in bench.reports] == [Progress, ComputeEnded]
    assert list(bench.outputs) == ["r1"]


def test_files_are_reported_with_their_bytes(bench: Bench) -> None:
    bench.net.run = lambda task: Output(files=[("image/png", b"abc")])
    bench.run(work(1, target=False))
    [result] = bench.reports
    assert isinstance(result.event, Computed)
    assert [(file.media_type, file.nbytes) for file in result.event.files] == [("image/png", 3)]
    assert result.files == (b"abc",)
    assert bench.outputs == {}


# ---------------------------------------------------------------- one that fails


def failing(seed: int, call: int, error: BaseException) -> Callable[[list[int]], None]:
    """The module raises `error` as often as it is called with `seed`, from its `call`-th time on."""
    seen = 0

    def before(seeds: list[int]) -> None:
        nonlocal seen
        seen += seed in seeds
        if seed in seeds and seen >= call:
            raise error

    return before


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), AssertionError()])
def test_one_that_raises_fails_alone(bench: Bench, error: BaseException, call: int) -> None:
    works = [work(1), work(2), work(3)]
    bench.net.before = failing(2, call, error)
    bench.run(*works)
    assert bench.failed() == {"r2": "worker_error"}
    bench.check(works[0], works[2])


def test_after_one_that_raised_the_others_compute_together_again(bench: Bench) -> None:
    bench.net.before = failing(2, 2, ValueError("no"))
    bench.run(work(1), work(2), work(3))
    assert bench.net.calls == [[1, 2, 3], [1, 2, 3], [1], [2], [3], [1, 3], [1, 3]]


def test_the_reason_of_a_failure_says_what_was_raised(bench: Bench) -> None:
    bench.net.before = failing(1, 1, ValueError("the reason"))
    bench.run(work(1))
    [result] = [report for report in bench.reports if isinstance(report, ComputeResult)]
    assert result.event.reason == "ValueError: the reason"


def test_an_error_between_two_calls_is_the_requests_own(bench: Bench) -> None:
    def run(task: Task) -> Output:
        if task.parameters.seed == 2:
            bench.net.module(torch.full((1, WIDTH), 2.0), torch.tensor(0.0))
            raise RuntimeError("in the pipeline")
        return Net.run(bench.net, task)

    bench.net.run = run
    works = [work(1), work(2)]
    bench.run(*works)
    assert bench.failed() == {"r2": "worker_error"}
    bench.check(works[0])


def test_one_that_comes_out_as_nan_fails_alone(bench: Bench) -> None:
    forward = bench.net.forward

    def poisoned(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = forward(x, t)
        y[x[:, 0] == 2, 1:] = float("nan")
        return y

    bench.net.module = meeting("net", poisoned, JoinRules(names=("x", "t")))
    works = [work(1), work(2), work(3)]
    bench.run(*works)
    assert bench.failed() == {"r2": "nan_output"}
    bench.check(works[0], works[2])


def test_a_call_that_fails_only_as_a_joined_one_is_made_alone_and_never_joined_again(bench: Bench) -> None:
    def before(seeds: list[int]) -> None:
        if len(seeds) > 1:
            raise RuntimeError("shapes do not match")

    bench.net.before = before
    works = [work(1), work(2)]
    bench.run(*works)
    bench.check(*works)
    assert sizes(bench) == [2] + [1] * 8


# ---------------------------------------------------------------- memory


def room_for(samples: int) -> Callable[[list[int]], None]:
    def before(seeds: list[int]) -> None:
        if len(seeds) > samples:
            raise torch.OutOfMemoryError(f"{len(seeds)} samples")

    return before


def test_what_does_not_fit_is_made_in_parts_and_never_again_as_large(bench: Bench) -> None:
    bench.net.before = room_for(3)
    works = [work(seed) for seed in range(1, 7)]
    bench.run(*works)
    bench.check(*works)
    too_large = [size for size in sizes(bench) if size > 3]
    assert len(too_large) == len(set(too_large)), "a size that did not fit was tried again"
    assert bench.device.freed == len(too_large)
    assert max(sizes(bench)[len(too_large) :]) == 3


def test_what_does_not_fit_is_halved(bench: Bench) -> None:
    bench.net.before = room_for(2)
    bench.run(*[work(seed) for seed in range(1, 9)])
    assert sizes(bench)[:3] == [8, 4, 2]


def test_a_request_that_does_not_fit_alone_fails_alone(bench: Bench) -> None:
    bench.net.before = room_for(3)
    works = [work(1, samples=4), work(2), work(3)]
    bench.run(*works)
    assert bench.failed() == {"r1": "out_of_memory"}
    bench.check(works[1], works[2])


def test_python_out_of_memory_counts_as_the_devices(bench: Bench) -> None:
    bench.net.before = failing(1, 1, MemoryError())
    bench.run(work(1))
    assert bench.failed() == {"r1": "out_of_memory"}


def test_what_a_call_that_did_not_fit_had_allocated_is_let_go_before_memory_is_freed(bench: Bench) -> None:
    """Else the traceback keeps the tensors of its frames, and there is nothing to be freed."""
    alive: list[bool] = []
    held: list[Any] = []

    def forward(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            activation = Activation()
            held.append(activation.alive)
            raise torch.OutOfMemoryError
        return x

    bench.device.free_unused = lambda: alive.append(held[-1]())
    bench.net.module = meeting("net", forward, JoinRules(names=("x", "t")))
    bench.run(work(1), work(2))
    assert alive == [False]


class Activation:
    def __init__(self) -> None:
        import weakref

        here = weakref.ref(self)
        self.alive = lambda: here() is not None


# ---------------------------------------------------------------- cancelling


def test_one_that_is_cancelled_before_it_starts_is_never_computed(bench: Bench) -> None:
    ran: list[int] = []
    run = bench.net.run

    def noting(task: Task) -> Output:
        ran.append(task.parameters.seed)
        return run(task)

    bench.net.run = noting
    works = [work(1), work(2)]
    works[0].cancelled.set()
    bench.run(*works)
    assert bench.failed() == {"r1": "cancelled"}
    assert ran == [2]
    bench.check(works[1])


@pytest.mark.parametrize("step", [1, 3, 5])
def test_one_that_is_cancelled_after_a_step_makes_no_other(bench: Bench, step: int) -> None:
    works = [work(1, 6), work(2, 6)]
    bench.on_progress = lambda name, done: works[0].cancelled.set() if (name, done) == ("r1", step) else None
    bench.run(*works)
    assert bench.failed() == {"r1": "cancelled"}
    assert bench.net.times(1) == step
    bench.check(works[1])


@pytest.mark.parametrize("step", [1, 3, 6])
def test_one_that_is_cancelled_while_it_makes_a_step_makes_no_other(bench: Bench, step: int) -> None:
    works = [work(1, 6), work(2, 6)]

    def before(seeds: list[int]) -> None:
        if bench.net.times(1) == step:
            works[0].cancelled.set()

    bench.net.before = before
    bench.run(*works)
    assert bench.failed() == {"r1": "cancelled"}
    assert bench.net.times(1) == step
    bench.check(works[1])


def test_one_that_is_cancelled_changes_no_bit_of_its_neighbours(bench: Bench) -> None:
    works = [work(1, 8), work(2, 8), work(3, 8)]
    bench.on_progress = lambda name, done: works[1].cancelled.set() if (name, done) == ("r2", 3) else None
    bench.run(*works)
    other = Bench()
    same = [work(1, 8), work(2, 3), work(3, 8)]
    other.run(*same)
    other.loop.close()
    assert bench.net.calls == other.net.calls
    assert bench.failed() == {"r2": "cancelled"}
    for seed in (0, 2):
        assert torch.equal(bench.made(works[seed]), other.made(same[seed]))


# ---------------------------------------------------------------- who is first


def order(bench: Bench) -> list[int]:
    return [seed for [seed] in bench.net.calls]


def test_a_more_urgent_request_goes_first_from_the_next_step_on(one_at_a_time: Bench) -> None:
    calm, urgent = work(1, 4), work(2, 3, priority=1)
    loop = one_at_a_time.loop
    one_at_a_time.on_progress = lambda name, done: loop.submit(urgent) if (name, done) == ("r1", 2) else None
    one_at_a_time.run(calm)
    assert order(one_at_a_time) == [1, 1, 2, 2, 2, 1, 1]
    one_at_a_time.check(calm, urgent)


def test_of_two_that_are_as_urgent_the_one_with_less_time_goes_first(one_at_a_time: Bench) -> None:
    one_at_a_time.run(work(1, 2), work(2, 2, deadline_s=100.0), work(3, 2, deadline_s=50.0))
    assert order(one_at_a_time) == [3, 3, 2, 2, 1, 1]


# ---------------------------------------------------------------- waiting for company


def test_a_lone_request_waits_for_company_if_it_is_told_to() -> None:
    bench = Bench(Policy(max_size=2, delay_s=200.0))
    first, second = work(1), work(2)
    started = threading.Event()
    run = bench.net.run

    def noting(task: Task) -> Output:
        started.set()
        return run(task)

    def company() -> None:
        assert started.wait(60)
        bench.loop.submit(second)
        bench.loop.submit(None)

    bench.net.run = noting
    other = threading.Thread(target=company)
    other.start()
    bench.loop.submit(first)
    bench.loop.run()
    other.join()
    bench.loop.close()
    assert bench.net.calls == [[1, 2]] * 4


def test_a_lone_request_waits_no_longer_than_its_delay_and_sleeps_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[float] = []

    def choosing(*args: Any) -> Any:
        turns.append(args[3])
        return choose(*args)

    monkeypatch.setattr("diffcluster.roles.compute.choose", choosing)
    bench = Bench(Policy(max_size=2, delay_s=0.02))
    lone = work(1)
    bench.run(lone)
    bench.loop.close()
    bench.check(lone)
    assert bench.loop.steps.totals["reason:delay"] == 4
    assert len(turns) < 40


# ---------------------------------------------------------------- the end, and what is counted


def test_the_loop_ends_only_when_what_runs_has_ended(bench: Bench) -> None:
    works = [work(1, 3), work(2, 9)]
    bench.run(*works)
    bench.check(*works)


def test_what_comes_after_a_loop_has_closed_is_refused_and_reported(bench: Bench) -> None:
    bench.run()
    bench.loop.close()
    bench.loop.submit(work(1))
    assert bench.failed() == {"r1": "worker_error"}


def test_calls_requests_and_reasons_are_counted() -> None:
    bench = Bench(Policy(max_size=2))
    bench.run(work(1, 2), work(2, 2), work(3, 1))
    bench.loop.close()
    assert bench.net.calls == [[1, 2], [1, 2], [3]]
    totals = bench.loop.steps.totals
    counted = {name: totals.get(name) for name in ("calls", "requests", "reason:max_size", "reason:ready")}
    assert counted == {"calls": 3, "requests": 5, "reason:max_size": 2, "reason:ready": 1}


def test_calls_of_different_modules_are_counted_as_incompatible(bench: Bench) -> None:
    other = meeting("other", bench.net.forward, JoinRules(names=("x", "t")))

    def run(task: Task) -> Output:
        module = other if task.parameters.seed == 2 else bench.net.module
        return Output({"x": module(torch.full((1, WIDTH), float(task.parameters.seed)), torch.tensor(0.0))})

    bench.net.run = run
    bench.run(work(1), work(2))
    assert bench.net.calls == [[1], [2]]
    assert bench.loop.steps.totals["reason:incompatible:module"] == 1


FATES = ("well", "raises", "exits", "too large", "nothing", "cancelled before", "cancelled later", "not a number")


@settings(max_examples=60)
@given(
    plan=st.lists(st.tuples(st.sampled_from(FATES), st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=7),
    limit=st.integers(1, 4),
)
def test_each_request_ends_exactly_once_and_as_it_would_have_alone(
    plan: list[tuple[str, int, int]], limit: int
) -> None:
    """Requests of all fates; each comes when the one before has made so many steps, or ended."""
    bench = Bench(Policy(max_size=limit))
    works = [
        work(seed, 0 if fate == "nothing" else steps, samples=9 if fate == "too large" else 1)
        for seed, (fate, steps, _) in enumerate(plan)
    ]
    fates = {f"r{seed}": fate for seed, (fate, _, _) in enumerate(plan)}
    errors = {"raises": ValueError("no"), "exits": SystemExit(1)}

    def before(seeds: list[int]) -> None:
        for seed in seeds:
            if fates[f"r{seed}"] in errors:
                raise errors[fates[f"r{seed}"]]
        if len(seeds) > 8:
            raise torch.OutOfMemoryError

    def run(task: Task) -> Output:
        output = Net.run(bench.net, task)
        if fates[f"r{task.parameters.seed}"] == "not a number":
            raise NanOutputError("NaN")
        return output

    def on_progress(name: str, step: int) -> None:
        if fates[name] == "cancelled later":
            works[int(name[1:])].cancelled.set()
        while waiting and (waiting[0][1] <= step or name != f"r{waiting[0][0].parameters.seed - 1}"):
            bench.loop.submit(waiting.pop(0)[0])

    bench.net.before, bench.net.run, bench.on_progress = before, run, on_progress
    waiting = [(made, after) for made, (_, _, after) in zip(works, plan, strict=True)]
    for made in works:
        if fates[made.key[0]] == "cancelled before":
            made.cancelled.set()
    together = [made for made, after in waiting if after == 0]
    waiting = [(made, after) for made, after in waiting if after]
    bench.run(*together)
    late, waiting = waiting, []
    bench.run(*[made for made, _ in late])  # nobody was left whose progress would have brought them
    bench.loop.close()
    assert bench.ends() == dict.fromkeys(fates, 1)
    codes = {
        "raises": "worker_error", "exits": "worker_error", "too large": "out_of_memory", "not a number": "nan_output",
        "cancelled before": "cancelled", "cancelled later": "cancelled",
    }  # fmt: skip
    expected = {
        made.key[0]: codes[fates[made.key[0]]]
        for made in works
        if fates[made.key[0]] in codes and not _ends_at_its_last_step(made, fates)
    }
    assert bench.failed() == expected
    bench.check(*[made for made in works if made.key[0] not in expected])


def _ends_at_its_last_step(made: Work, fates: dict[str, str]) -> bool:
    """Cancelled after its last step there is nothing left to be stopped."""
    return fates[made.key[0]] == "cancelled later" and made.parameters.num_inference_steps == 1
