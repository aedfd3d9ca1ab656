"""What the cluster is and does: models, health, readiness, metrics, instances, requests on their way."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import msgspec
from litestar import Request, Response, get

from diffcluster import __version__
from diffcluster.errors import ModelNotFoundError, NotFoundError
from diffcluster.ids import Incarnation, RequestId
from diffcluster.messages import ModelFacts
from diffcluster.router.http.schemas import Model, ModelList, VideoModel
from diffcluster.router.metrics import exposition
from diffcluster.router.snapshot import Snapshot
from diffcluster.router.state import Instance
from diffcluster.router.state import Request as Picture

__all__ = ["cluster", "health", "metrics", "model", "models", "ready", "request_status"]

_STARTED: Final = int(time.time())
_METRICS_TYPE: Final = "text/plain; version=1.0.0"  # the framework adds the charset


async def _snapshot(request: Request[Any, Any, Any]) -> Snapshot:
    return await asyncio.wrap_future(request.app.state.server.snapshot())


def _model(facts: ModelFacts) -> Model:
    return Model(
        id=facts.id,
        created=_STARTED,
        pipeline=facts.pipeline,
        revision=facts.revision,
        tasks=facts.tasks,
        size=f"{facts.width}x{facts.height}",
        size_multiple=facts.size_multiple,
        max_pixels=facts.max_pixels,
        num_inference_steps=facts.num_inference_steps,
        max_inference_steps=facts.max_inference_steps,
        guidance_scale=facts.guidance_scale,
        strength=facts.strength,
        max_input_images=facts.max_input_images,
        schedulers=facts.schedulers,
        video=None if facts.video is None else VideoModel(**msgspec.structs.asdict(facts.video)),
        extra={argument.name: (argument.minimum, argument.maximum) for argument in facts.extras},
    )


@get("/v1/models", tags=["models"])
async def models(request: Request[Any, Any, Any]) -> ModelList:
    """All models that roles have registered."""
    return ModelList(data=[_model(facts) for facts in (await _snapshot(request)).models.values()])


@get("/v1/models/{model_id:path}", tags=["models"])
async def model(request: Request[Any, Any, Any], model_id: str) -> Model:
    """One model; its id may hold slashes."""
    name = model_id.removeprefix("/")
    facts = (await _snapshot(request)).models.get(name)
    if facts is None:
        raise ModelNotFoundError(f"no role serves a model called {name!r}", param="model")
    return _model(facts)


def _counts(snapshot: Snapshot) -> dict[str, int]:
    roles = [instance.role for instance in snapshot.instances.values()]
    return {role: roles.count(role) for role in dict.fromkeys(roles)}


@get("/health", tags=["cluster"])
async def health(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """The router lives. `status` is `degraded` while a role is missing."""
    snapshot = await _snapshot(request)
    status = "degraded" if snapshot.missing() else "ok"
    return {"status": status, "version": __version__, "instances": _counts(snapshot)}


@get("/ready", tags=["cluster"])
async def ready(request: Request[Any, Any, Any]) -> Response[dict[str, Any]]:
    """200 when every role of a route has an instance that takes work, else 503 and what is missing."""
    snapshot = await _snapshot(request)
    missing = snapshot.missing()
    body = {"ready": not missing, "missing": missing, "instances": _counts(snapshot)}
    return Response(body, status_code=503 if missing else 200, headers={"Retry-After": "1"} if missing else {})


@get("/metrics", tags=["cluster"], media_type="text/plain")
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Prometheus metrics."""
    return Response(exposition(await _snapshot(request)), media_type=_METRICS_TYPE)


@get("/v1/cluster", tags=["cluster"])
async def cluster(request: Request[Any, Any, Any]) -> dict[str, Any]:
    """Instances, queues, and the requests on their way."""
    snapshot = await _snapshot(request)
    return {
        "version": __version__,
        "ready": not snapshot.missing(),
        "control_port": request.app.state.server.control_port,
        "instances": [_instance(i, instance, snapshot) for i, instance in snapshot.instances.items()],
        "queues": dict(snapshot.queues),
        "requests": [_picture(picture, snapshot) for picture in snapshot.requests.values()],
        "ended": dict(snapshot.totals.ended),
    }


def _instance(incarnation: Incarnation, instance: Instance, snapshot: Snapshot) -> dict[str, Any]:
    register, beat = instance.register, instance.heartbeat
    return {
        "name": register.name,
        "role": register.role,
        "incarnation": incarnation,
        "model": register.model.id,
        "revision": register.model.revision,
        "host": register.host,
        "pid": register.pid,
        "device": register.device,
        "dtype": register.dtype,
        "threads": register.threads,
        "components": register.components,
        "parameter_bytes": sum(register.components.values()),
        "resident_bytes": beat.resident_bytes if beat else None,
        "engines": [session.kind for session in register.sessions],
        "slot_bytes": register.slot_bytes,
        "receive_free": beat.receive_free if beat else None,
        "receive_largest": beat.receive_largest if beat else None,
        "receive_quarantined": beat.receive_quarantined if beat else None,
        "send_free": beat.send_free if beat else None,
        "grants": len(instance.grants),
        "granted_bytes": sum(slot.nbytes for slot in instance.grants),
        "links": {
            snapshot.instances[receiver].name: engine
            for receiver, engine in instance.links.items()
            if receiver in snapshot.instances
        },
        "outstanding": len(instance.busy),
        "max_outstanding": register.max_outstanding,
        "retained": len(instance.retained),
        "draining": instance.draining,
        "uptime_s": round(snapshot.now - instance.registered_at, 3),
        "last_seen_s": round(snapshot.now - instance.last_seen, 3),
    }


def _picture(picture: Picture, snapshot: Snapshot) -> dict[str, Any]:
    holder = snapshot.instances.get(picture.holder) if picture.holder else None
    return {
        "id": picture.id,
        "model": picture.parameters.model,
        "phase": picture.phase,
        "stage": picture.route[picture.stage] if picture.route else None,
        "instance": holder.name if holder else None,
        "attempt": picture.attempt,
        "step": picture.step,
        "steps": picture.parameters.num_inference_steps,
        "age_s": round(snapshot.now - picture.submitted_at, 3),
    }


@get("/v1/requests/{request_id:str}", tags=["cluster"])
async def request_status(request: Request[Any, Any, Any], request_id: str) -> dict[str, Any]:
    """Where a request is: by its id, or by the `x-request-id` it was sent with, while it runs."""
    snapshot = await _snapshot(request)
    ids = request.app.state.watched.get(request_id, [RequestId(request_id)])
    pictures = [_picture(snapshot.requests[i], snapshot) for i in ids if i in snapshot.requests]
    ended = [{"id": i, "phase": "ended", "outcome": snapshot.ended[i].outcome} for i in ids if i in snapshot.ended]
    if not pictures and not ended:
        raise NotFoundError(f"there is no request {request_id!r}, or it ended long ago")
    return {"id": request_id, "pictures": ended + pictures}
