"""From a body to the parameters of pictures: every check that can be made before a role is touched. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from diffcluster.errors import InvalidRequestError, ModelNotFoundError
from diffcluster.messages import GenerationParameters, ModelFacts, TaskKind
from diffcluster.router.http.schemas import Asked

if TYPE_CHECKING:
    from diffcluster.config import RouterConfig

__all__ = [
    "choose_model",
    "choose_seed",
    "choose_size",
    "common_parameters",
    "convert",
    "deadline",
    "number",
    "parse",
    "within",
]

_SIZE: Final = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.ASCII)
_MAX_PROMPT: Final = 32_000
_MAX_SEED: Final = 2**63 - 1
_MAX_GUIDANCE: Final = 1000.0
_Body = TypeVar("_Body")


def parse(body: bytes, kind: type[_Body]) -> _Body:
    """`body`, which is JSON, as `kind`.

    Raises:
        InvalidRequestError: with the field that is wrong as its `param`.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error


def convert(values: dict[str, Any], kind: type[_Body]) -> _Body:
    """The same for fields that have been read already."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: msgspec.ValidationError) -> InvalidRequestError:
    text = str(error)
    unknown = re.search(r"unknown field `(.*?)`", text)
    missing = re.search(r"missing required field `(.*?)`", text)
    at = re.search(r" - at `\$\.?(.*?)`$", text)
    if at and at[1]:
        return InvalidRequestError(f"{at[1]}: {text[: at.start()]}", param=re.split(r"[.\[]", at[1])[0])
    if unknown:
        return InvalidRequestError(f"there is no field {unknown[1]!r}", param=unknown[1])
    if missing:
        return InvalidRequestError(f"{missing[1]} is required", param=missing[1])
    return InvalidRequestError(text)


def choose_model(name: str | None, models: Mapping[str, ModelFacts]) -> ModelFacts:
    """The model called `name`; the only one if none is named. `models` must not be empty.

    Raises:
        ModelNotFoundError: no role serves it.
        InvalidRequestError: none is named, and there are several.
    """
    if name is None:
        if len(models) > 1:
            raise InvalidRequestError(f"model is required: there are {', '.join(sorted(models))}", param="model")
        return next(iter(models.values()))
    if name not in models:
        raise ModelNotFoundError(f"no role serves a model called {name!r}", param="model")
    return models[name]


def common_parameters(
    request: Asked, facts: ModelFacts, config: RouterConfig, task: TaskKind, size: tuple[int, int], seed: int
) -> GenerationParameters:
    """What is said in the same way of pictures and videos.

    Raises:
        InvalidRequestError: a field that cannot be; `param` names it.
    """
    steps = within(
        "num_inference_steps", request.num_inference_steps, facts.num_inference_steps, 1, facts.max_inference_steps
    )
    return GenerationParameters(
        model=facts.id,
        prompt=_prompt("prompt", request.prompt, blank_allowed=False),
        negative_prompt=_prompt("negative_prompt", request.negative_prompt or "", blank_allowed=True),
        width=size[0],
        height=size[1],
        num_inference_steps=steps,
        guidance_scale=number("guidance_scale", request.guidance_scale, facts.guidance_scale, 0.0, _MAX_GUIDANCE),
        seed=seed,
        output_compression=within("output_compression", request.output_compression, 100, 0, 100),
        extra=_extra(request.extra or {}, facts),
        task=task,
        scheduler=_scheduler(request.scheduler, facts),
        priority=within("priority", request.priority, 0, -100, 100),
        deadline_s=None if request.deadline_s is None else deadline(request.deadline_s, config),
    )


def choose_seed(requested: int | None, count: int, draw_seed: Callable[[int], int]) -> int:
    """The seed of the first of `count`; `draw_seed(count)` draws one that leaves room for the others."""
    seed = within("seed", requested, 0, 0, _MAX_SEED - count + 1)
    return draw_seed(count) if requested is None else seed


def deadline(requested: float | None, config: RouterConfig) -> float:
    """Seconds that a request may take."""
    return number("deadline_s", requested, config.request_timeout_s, 0.001, config.request_timeout_s)


def _prompt(name: str, text: str, *, blank_allowed: bool) -> str:
    if len(text) > _MAX_PROMPT:
        raise InvalidRequestError(f"{name}: {len(text)} characters; at most {_MAX_PROMPT} are taken", param=name)
    if not blank_allowed and not text.strip():
        raise InvalidRequestError(f"{name}: must not be blank", param=name)
    return text


def within(name: str, value: int | None, default: int, minimum: int, maximum: int) -> int:
    """`value` if it is between the bounds, `default` if it was left out; raises `InvalidRequestError`."""
    if value is None:
        return default
    if not minimum <= value <= maximum:
        raise InvalidRequestError(f"{name}: {value} is not in {minimum}..{maximum}", param=name)
    return value


def number(name: str, value: float | None, default: float, minimum: float, maximum: float) -> float:
    """The same for numbers that may have fractions."""
    if value is None:
        return default
    if not (math.isfinite(value) and minimum <= value <= maximum):
        raise InvalidRequestError(f"{name}: {value} is not in {minimum}..{maximum}", param=name)
    return float(value)


def choose_size(
    requested: str | None, facts: ModelFacts, config: RouterConfig, source: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Width and height in pixels: what was asked for, else near `source`, else the model's own.

    Raises:
        InvalidRequestError: the model, or this router, makes no picture of that size.
    """
    if requested is None or requested == "auto":
        width, height = _nearest(source, facts) if source else (facts.width, facts.height)
    else:
        width, height = _size(requested, facts)
    max_pixels = min(facts.max_pixels, config.max_pixels)
    if width * height > max_pixels:
        text = f"size: {width}x{height} has {width * height} pixels; at most {max_pixels} are made"
        raise InvalidRequestError(text, param="size")
    if (width, height) != (nearest := _nearest((width, height), facts)):
        text = f"size: both sides must be multiples of {facts.size_multiple}; the nearest is {nearest[0]}x{nearest[1]}"
        raise InvalidRequestError(f"{text}, not {requested or 'auto'}", param="size")
    return width, height


def _size(text: str, facts: ModelFacts) -> tuple[int, int]:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidRequestError(
            f"size: {text[:50]!r} is not WIDTHxHEIGHT, such as {facts.width}x{facts.height}", param="size"
        )
    return int(match[1]), int(match[2])


def _nearest(size: tuple[int, int], facts: ModelFacts) -> tuple[int, int]:
    """The nearest size that the model can make, at least one multiple in each direction."""
    width, height = (max(1, round(side / facts.size_multiple)) * facts.size_multiple for side in size)
    return width, height


def _scheduler(name: str | None, facts: ModelFacts) -> str:
    """Empty for the model's own."""
    if name is None:
        return ""
    if name not in facts.schedulers:
        known = ", ".join(facts.schedulers) or "none besides its own"
        raise InvalidRequestError(f"scheduler: {facts.id} has no {name[:64]!r}; it has {known}", param="scheduler")
    return name


def _extra(extra: Mapping[str, float], facts: ModelFacts) -> dict[str, float]:
    declared = {argument.name: argument for argument in facts.extras}
    for name, value in extra.items():
        argument = declared.get(name)
        if argument is None:
            known = ", ".join(declared) or "none"
            raise InvalidRequestError(f"extra.{name}: {facts.id} has no such argument; it has {known}", param="extra")
        if not argument.minimum <= value <= argument.maximum:
            text = f"extra.{name}: {value} is not in {argument.minimum}..{argument.maximum}"
            raise InvalidRequestError(text, param="extra")
    return dict(extra)
