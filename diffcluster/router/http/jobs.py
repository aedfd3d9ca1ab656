"""Videos, made and in the making, in memory: bounded in number and bytes. They do not outlive the router. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from diffcluster.errors import ConflictError, InvalidRequestError, NotFoundError, QueueFullError, RequestError
from diffcluster.ids import RequestId
from diffcluster.messages import GenerationParameters
from diffcluster.router.http.schemas import Video, VideoError
from diffcluster.router.state import Request

__all__ = ["VideoJob", "VideoJobs"]

Status = Literal["queued", "in_progress", "completed", "failed"]


@dataclass
class VideoJob:
    """One video. Times are seconds since 1970."""

    id: str
    parameters: GenerationParameters
    created_at: int
    request_id: RequestId | None = None
    status: Status = "queued"
    progress: int = 0
    ended_at: int | None = None
    error: VideoError | None = None
    file: tuple[str, bytes] | None = None
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether it is still to be made."""
        return self.status in ("queued", "in_progress")

    def seen(self, request: Request) -> None:
        """Note how far its request is. It never goes back, even if the request has to begin again."""
        if not self.active:
            return
        if request.phase != "queued":
            self.status = "in_progress"
        steps = self.parameters.num_inference_steps
        self.progress = max(self.progress, min(99, 100 * request.step // steps))

    def finish(self, file: tuple[str, bytes], timings: dict[str, Any], now: int) -> None:
        """It has been made."""
        self.status, self.progress, self.ended_at, self.file, self.timings = "completed", 100, now, file, timings

    def fail(self, error: RequestError, now: int) -> None:
        """It will not be made."""
        self.status, self.ended_at = "failed", now
        self.error = VideoError(code=error.code, message=error.message)

    def content(self) -> tuple[str, bytes]:
        """Media type and bytes; raises `ConflictError` while there are none."""
        if self.file is None:
            why = self.error.message if self.error else f"{self.progress} % are done"
            raise ConflictError(f"the video is {self.status}, not completed: {why}")
        return self.file

    def shown(self) -> Video:
        """As the API shows it."""
        asked = self.parameters
        return Video(
            id=self.id,
            created_at=self.created_at,
            completed_at=self.ended_at if self.status == "completed" else None,
            model=asked.model,
            prompt=asked.prompt,
            status=self.status,
            progress=self.progress,
            seconds=f"{asked.num_frames / asked.fps:.6g}",
            size=f"{asked.width}x{asked.height}",
            error=self.error,
            num_frames=asked.num_frames,
            fps=asked.fps,
            seed=asked.seed,
            output_format=asked.output_format,
            timings=self.timings,
        )


class VideoJobs:
    """All that are known, oldest first. What has ended makes room for what is new."""

    def __init__(self, most: int, most_bytes: int, draw_id: Callable[[], str]) -> None:
        self._most, self._most_bytes, self._draw_id = most, most_bytes, draw_id
        self._jobs: dict[str, VideoJob] = {}

    def add(self, parameters: GenerationParameters, now: int) -> VideoJob:
        """A new one; raises `QueueFullError` if as many as are kept are still to be made."""
        if len(self._jobs) >= self._most:
            ended = next((job.id for job in self._jobs.values() if not job.active), None)
            if ended is None:
                raise QueueFullError(f"{len(self._jobs)} videos are to be made already")
            del self._jobs[ended]
        job = VideoJob(self._draw_id(), parameters, now)
        self._jobs[job.id] = job
        return job

    def get(self, video_id: str) -> VideoJob:
        """That one; raises `NotFoundError`."""
        job = self._jobs.get(video_id)
        if job is None:
            raise NotFoundError(f"there is no video {video_id[:100]!r}, or it had to make room for newer ones")
        return job

    def remove(self, video_id: str) -> VideoJob:
        """Forget that one; raises `NotFoundError`."""
        job = self.get(video_id)
        del self._jobs[video_id]
        return job

    def trim(self) -> None:
        """Forget the oldest that are finished until the others' bytes are few enough; the newest one stays."""
        finished = [job for job in self._jobs.values() if job.file is not None]
        held = sum(len(job.file[1]) for job in finished if job.file)
        for job in sorted(finished, key=lambda job: job.ended_at or 0)[:-1]:
            if held <= self._most_bytes:
                return
            held -= len(job.file[1]) if job.file else 0
            del self._jobs[job.id]

    def page(self, after: str | None, limit: int, *, newest_first: bool) -> tuple[list[VideoJob], bool]:
        """At most `limit` behind `after`, and whether there are more; raises `InvalidRequestError`."""
        jobs = list(self._jobs.values())
        if newest_first:
            jobs.reverse()
        if after is not None:
            place = next((k for k, job in enumerate(jobs) if job.id == after), None)
            if place is None:
                raise InvalidRequestError(f"after: there is no video {after[:100]!r}", param="after")
            jobs = jobs[place + 1 :]
        return jobs[:limit], len(jobs) > limit
