"""/v1/videos: OpenAI's Videos API. Tasks of the event loop wait for the videos, which are kept in memory."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from litestar import Request, Response, delete, get, post

from diffcluster.errors import InvalidRequestError, RequestError
from diffcluster.router.http.batch import draw_seed, model_of, timings
from diffcluster.router.http.images import described
from diffcluster.router.http.jobs import VideoJob, VideoJobs
from diffcluster.router.http.schemas import Video, VideoDeleted, VideoList, VideoRequest
from diffcluster.router.http.tasks import check_count, video_parameters, video_task
from diffcluster.router.http.uploads import content_type, read_video
from diffcluster.router.http.validate import deadline

if TYPE_CHECKING:
    from concurrent.futures import Future

    from diffcluster.config import RouterConfig
    from diffcluster.messages import GenerationParameters
    from diffcluster.router.server import DiffusionServer, Result

__all__ = ["VideoMaker", "content", "create", "listed", "remove", "video"]

_MAX_LIMIT: Final = 100
_LIMIT: Final = re.compile(r"[0-9]{1,3}", re.ASCII)
_ENDINGS: Final = {"video/mp4": "mp4", "image/png": "png", "image/webp": "webp"}


class VideoMaker:
    """The videos, and the tasks that wait for those in the making. Of the event loop."""

    def __init__(self, server: DiffusionServer, config: RouterConfig) -> None:
        self._server = server
        self.jobs = VideoJobs(config.max_videos, config.max_video_bytes, lambda: f"video_{uuid.uuid4().hex}")
        self._making: dict[str, tuple[VideoJob, asyncio.Task[None]]] = {}

    async def start(self, parameters: GenerationParameters, deadline_s: float, inputs: tuple[bytes, ...]) -> VideoJob:
        """Have a video made. Raises `QueueFullError` if too much waits already."""
        job = self.jobs.add(parameters, int(time.time()))
        try:
            job.request_id, future = self._server.submit(parameters, deadline_s, inputs)
            await self.look([job])  # the server has come to it by then, and refused it if it had to
            if future.done():
                future.result()
        except BaseException:
            self.jobs.remove(job.id)
            if job.request_id is not None:
                self._server.cancel(job.request_id, "its client has left")
            raise
        task = asyncio.create_task(self._finish(job, future))
        self._making[job.id] = job, task
        task.add_done_callback(lambda _: self._making.pop(job.id))
        return job

    async def _finish(self, job: VideoJob, future: Future[Result]) -> None:
        try:
            result = await asyncio.wrap_future(future)
        except RequestError as error:
            job.fail(error, int(time.time()))
        else:
            job.finish(result.files[0], timings(result), int(time.time()))
            self.jobs.trim()

    async def look(self, jobs: list[VideoJob]) -> None:
        """Bring what is known of these up to date."""
        if not any(job.active for job in jobs):
            return
        snapshot = await asyncio.wrap_future(self._server.snapshot())
        for job in jobs:
            request = snapshot.requests.get(job.request_id) if job.request_id else None
            if request is not None:
                job.seen(request)

    def remove(self, video_id: str) -> None:
        """Forget a video, and stop making it."""
        self.jobs.remove(video_id)
        self._give_up(video_id, "the video was deleted")

    def _give_up(self, video_id: str, reason: str) -> None:
        job, task = self._making.get(video_id, (None, None))
        if job is not None and job.request_id is not None and task is not None:
            self._server.cancel(job.request_id, reason)
            task.cancel()

    async def stop(self) -> None:
        """Give up all that are in the making."""
        tasks = [task for _, task in self._making.values()]
        for video_id in list(self._making):
            self._give_up(video_id, "the router is stopping")
        await asyncio.gather(*tasks, return_exceptions=True)


@post(
    "/v1/videos",
    status_code=200,
    operation_class=described(VideoRequest, "application/json", "multipart/form-data"),
    tags=["videos"],
)
async def create(request: Request[Any, Any, Any]) -> Video:
    """Begin to make a video; GET /v1/videos/{id} says how far it is."""
    app = request.app.state
    kind = content_type(request)
    with app.uploads.reading(request):
        upload = await app.uploads.on_thread(read_video, kind, await request.body())
        facts = model_of(request, upload.body.model)
        task = video_task(facts, reference=bool(upload.images))
        if upload.images:
            check_count(upload.param, len(upload.images), facts)
        pictures = await app.uploads.on_thread(upload.pictures, app.config.max_input_pixels)
    body = upload.body
    parameters = video_parameters(body, facts, app.config, task, [picture.info for picture in pictures], draw_seed)
    seconds = deadline(body.deadline_s, app.config)
    job = await app.videos.start(parameters, seconds, tuple(picture.content for picture in pictures))
    shown: Video = job.shown()
    return shown


@get("/v1/videos", tags=["videos"])
async def listed(request: Request[Any, Any, Any]) -> VideoList:
    """Videos, newest first unless `order` is `asc`; `after` and `limit` choose a page."""
    maker: VideoMaker = request.app.state.videos
    asked = request.query_params
    limit, order = asked.get("limit", "20"), asked.get("order", "desc")
    if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= _MAX_LIMIT:
        raise InvalidRequestError(f"limit: must be 1 to {_MAX_LIMIT}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("order: must be asc or desc", param="order")
    jobs, more = maker.jobs.page(asked.get("after"), int(limit), newest_first=order == "desc")
    await maker.look(jobs)
    data = [job.shown() for job in jobs]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return VideoList(data=data, first_id=first, last_id=last, has_more=more)


@get("/v1/videos/{video_id:str}", tags=["videos"])
async def video(request: Request[Any, Any, Any], video_id: str) -> Video:
    """How far a video is."""
    maker: VideoMaker = request.app.state.videos
    job = maker.jobs.get(video_id)
    await maker.look([job])
    return job.shown()


@get("/v1/videos/{video_id:str}/content", tags=["videos"], media_type="application/octet-stream")
async def content(request: Request[Any, Any, Any], video_id: str) -> Response[bytes]:
    """The file of a video that is completed."""
    maker: VideoMaker = request.app.state.videos
    variant = request.query_params.get("variant", "video")
    if variant != "video":
        raise InvalidRequestError("variant: only `video` is made", param="variant")
    media_type, data = maker.jobs.get(video_id).content()
    name = f"{video_id}.{_ENDINGS.get(media_type, 'bin')}"
    return Response(data, media_type=media_type, headers={"content-disposition": f'attachment; filename="{name}"'})


@delete("/v1/videos/{video_id:str}", status_code=200, tags=["videos"])
async def remove(request: Request[Any, Any, Any], video_id: str) -> VideoDeleted:
    """Forget a video; if it is in the making, that is given up."""
    maker: VideoMaker = request.app.state.videos
    maker.remove(video_id)
    return VideoDeleted(id=video_id)
