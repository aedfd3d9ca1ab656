"""Videos in memory: their states, their number, their bytes, their pages."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from diffcluster.errors import ConflictError, InvalidRequestError, NotFoundError, QueueFullError, WorkerFailedError
from diffcluster.router.http.jobs import VideoJob, VideoJobs
from diffcluster.router.state import Request
from tests.support import REQUEST, parameters

ASKED = parameters(num_frames=9, fps=8, output_format="mp4", num_inference_steps=4)


def store(most: int = 10, most_bytes: int = 1000) -> VideoJobs:
    numbers = count(1)
    return VideoJobs(most, most_bytes, lambda: f"v{next(numbers)}")


def made(jobs: VideoJobs, nbytes: int = 10, now: int = 5) -> VideoJob:
    job = jobs.add(ASKED, now)
    job.finish(("video/mp4", b"x" * nbytes), {"total_s": 1.0}, now)
    jobs.trim()
    return job


def request(phase: Any, step: int = 0) -> Request:
    return Request(REQUEST, ASKED, 0.0, 9.0, phase=phase, step=step)


def test_the_way_of_a_video() -> None:
    job = store().add(ASKED, 3)
    shown = job.shown()
    assert (shown.status, shown.progress, shown.created_at, shown.completed_at) == ("queued", 0, 3, None)
    assert (shown.seconds, shown.size, shown.object) == ("1.125", "64x64", "video")
    with pytest.raises(ConflictError, match="queued"):
        job.content()
    job.seen(request("queued"))
    assert job.status == "queued"
    job.seen(request("running", 1))
    assert (job.status, job.progress) == ("in_progress", 25)
    job.seen(request("queued", 0))
    assert (job.status, job.progress) == ("in_progress", 25)
    job.seen(request("running", 4))
    assert job.progress == 99
    job.finish(("video/mp4", b"x"), {}, 9)
    job.seen(request("running", 1))
    assert (job.shown().status, job.shown().progress, job.shown().completed_at) == ("completed", 100, 9)
    assert job.content() == ("video/mp4", b"x")


def test_a_video_that_fails() -> None:
    job = store().add(ASKED, 3)
    job.fail(WorkerFailedError("it broke"), 4)
    shown = job.shown()
    assert shown.error is not None
    assert (shown.status, shown.error.code, shown.error.message) == ("failed", "worker_error", "it broke")
    assert shown.completed_at is None
    with pytest.raises(ConflictError, match="it broke"):
        job.content()


def test_what_has_ended_makes_room() -> None:
    jobs = store(most=2)
    first, second = made(jobs), jobs.add(ASKED, 0)
    third = jobs.add(ASKED, 0)
    with pytest.raises(NotFoundError):
        jobs.get(first.id)
    with pytest.raises(QueueFullError):
        jobs.add(ASKED, 0)
    assert [jobs.get(job.id) for job in (second, third)] == [second, third]


def test_the_oldest_bytes_make_room() -> None:
    jobs = store(most_bytes=25)
    first, second, third = made(jobs, now=1), made(jobs, now=2), made(jobs, now=3)
    with pytest.raises(NotFoundError):
        jobs.get(first.id)
    assert jobs.get(second.id).content() == jobs.get(third.id).content()
    large = made(jobs, 100, now=4)
    assert jobs.get(large.id) is large
    with pytest.raises(NotFoundError):
        jobs.get(third.id)


def test_pages() -> None:
    jobs = store()
    for _ in range(5):
        jobs.add(ASKED, 0)

    def page(after: str | None, limit: int, newest_first: bool) -> tuple[list[str], bool]:
        found, more = jobs.page(after, limit, newest_first=newest_first)
        return [job.id for job in found], more

    assert page(None, 2, True) == (["v5", "v4"], True)
    assert page("v4", 3, True) == (["v3", "v2", "v1"], False)
    assert page(None, 9, False) == (["v1", "v2", "v3", "v4", "v5"], False)
    assert page("v5", 9, False) == ([], False)
    with pytest.raises(InvalidRequestError):
        page("v9", 1, True)


def test_removing() -> None:
    jobs = store()
    job = jobs.add(ASKED, 0)
    jobs.remove(job.id)
    for act in (jobs.get, jobs.remove):
        with pytest.raises(NotFoundError):
            act(job.id)
