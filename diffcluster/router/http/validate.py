"""From a body to the parameters of pictures: every check that can be made before a role is touched. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from diffcluster.errors import InvalidRequestError, ModelNotFoundError
from diffcluster.messages import GenerationParameters, ModelFacts
from diffcluster.router.http.schemas import ImageRequest

if TYPE_CHECKING:
    from diffcluster.config import RouterConfig

__all__ = ["choose_model", "image_parameters", "parse"]

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


def _invalid(error: msgspec.ValidationError) -> InvalidRequestError:
    text = str(error)
    unknown = re.search(r"unknown field `(.*?)`", text)
    missing = re.search(r"missing required field `(.*?)`", text)
    at = re.search(r" - at `\$\.?(.*?)`$", text)
    if unknown:
        return InvalidRequestError(f"there is no field {unknown[1]!r}", param=unknown[1])
    if missing:
        return InvalidRequestError(f"{missing[1]} is required", param=missing[1])
    if at and at[1]:
        return InvalidRequestError(f"{at[1]}: {text[: at.start()]}", param=re.split(r"[.\[]", at[1])[0])
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


def image_parameters(
    request: ImageRequest, facts: ModelFacts, config: RouterConfig, draw_seed: Callable[[int], int]
) -> list[GenerationParameters]:
    """The parameters of each picture of `request`. `draw_seed(n)` draws one that leaves room for n - 1 more.

    Raises:
        InvalidRequestError: a field that cannot be; `param` names it.
    """
    count = _within("n", request.n, 1, 1, config.max_images)
    width, height = _size(request.size, facts, min(facts.max_pixels, config.max_pixels))
    steps = _within(
        "num_inference_steps", request.num_inference_steps, facts.num_inference_steps, 1, facts.max_inference_steps
    )
    guidance = _number("guidance_scale", request.guidance_scale, facts.guidance_scale, 0.0, _MAX_GUIDANCE)
    seed = _within("seed", request.seed, -1, 0, _MAX_SEED - count + 1)
    if request.seed is None:
        seed = draw_seed(count)
    if request.background == "transparent":
        raise InvalidRequestError("background: a transparent background is not supported", param="background")
    _within("partial_images", request.partial_images, 0, 0, 3)
    first = GenerationParameters(
        model=facts.id,
        prompt=_prompt("prompt", request.prompt, blank_allowed=False),
        negative_prompt=_prompt("negative_prompt", request.negative_prompt or "", blank_allowed=True),
        width=width,
        height=height,
        num_inference_steps=steps,
        guidance_scale=guidance,
        seed=seed,
        output_format=request.output_format or "png",
        output_compression=_within("output_compression", request.output_compression, 100, 0, 100),
        extra=_extra(request.extra or {}, facts),
    )
    return [msgspec.structs.replace(first, seed=seed + k) for k in range(count)]


def deadline(requested: float | None, config: RouterConfig) -> float:
    """Seconds that a request may take."""
    return _number("deadline_s", requested, config.request_timeout_s, 0.001, config.request_timeout_s)


def _prompt(name: str, text: str, *, blank_allowed: bool) -> str:
    if len(text) > _MAX_PROMPT:
        raise InvalidRequestError(f"{name}: {len(text)} characters; at most {_MAX_PROMPT} are taken", param=name)
    if not blank_allowed and not text.strip():
        raise InvalidRequestError(f"{name}: must not be blank", param=name)
    return text


def _within(name: str, value: int | None, default: int, minimum: int, maximum: int) -> int:
    if value is None:
        return default
    if not minimum <= value <= maximum:
        raise InvalidRequestError(f"{name}: {value} is not in {minimum}..{maximum}", param=name)
    return value


def _number(name: str, value: float | None, default: float, minimum: float, maximum: float) -> float:
    if value is None:
        return default
    if not (math.isfinite(value) and minimum <= value <= maximum):
        raise InvalidRequestError(f"{name}: {value} is not in {minimum}..{maximum}", param=name)
    return float(value)


def _size(size: str | None, facts: ModelFacts, max_pixels: int) -> tuple[int, int]:
    if size is None or size == "auto":
        return facts.width, facts.height
    match = _SIZE.fullmatch(size)
    if match is None:
        raise InvalidRequestError(
            f"size: {size[:50]!r} is not WIDTHxHEIGHT, such as {facts.width}x{facts.height}", param="size"
        )
    width, height = int(match[1]), int(match[2])
    if width * height > max_pixels:
        raise InvalidRequestError(
            f"size: {size} has {width * height} pixels; at most {max_pixels} are made", param="size"
        )
    nearest = tuple(max(1, round(side / facts.size_multiple)) * facts.size_multiple for side in (width, height))
    if (width, height) != nearest:
        text = f"size: both sides must be multiples of {facts.size_multiple}; the nearest is {nearest[0]}x{nearest[1]}"
        raise InvalidRequestError(f"{text}, not {size}", param="size")
    return width, height


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
