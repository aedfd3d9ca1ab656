"""Every family of models: does a cluster draw what the plain pipeline draws, and what do joined requests change?

    python -m bench.model_matrix [--quick] [--json FILE]

For each task of each tiny model a real cluster of three processes, in float32 and in bfloat16, is asked for a picture,
for two (picture k has the seed plus k; of videos two at one time), with a negative prompt, and without guidance. All
must equal, in every pixel, what the plain pipeline makes in this process with as many threads. `-`: the pipeline takes
no such argument. Then four requests of different lengths are sent at once, `together`, and compared in the same way;
`calls` is how many calls of the denoiser each of its calls stood for, and why not more.

How far a joined request is from a lone one cannot be seen in pixels, so it is measured on latents, in this process:
four requests that come and go at different steps, by the compute loop of a role, exact and not; of the largest value.

`--quick` starts no processes: the three roles' parts of each model run in this one, in float32, for one lone request
and one joined pair, not exact, of each model's first task. Qwen-Image-Edit then scales its pictures to a smaller size.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import torch
from PIL import Image, ImageSequence

from bench.command import alone
from bench.report import Claim, Result
from diffcluster.client import Client
from diffcluster.config import RoleConfig
from diffcluster.ids import RequestId, Role
from diffcluster.local import LocalCluster, Plan
from diffcluster.messages import GenerationParameters, Progress
from diffcluster.roles.batching import Policy
from diffcluster.roles.compute import ComputeLoop, Work
from diffcluster.roles.costs import CostModel
from diffcluster.roles.device import CpuDevice
from diffcluster.roles.pipelines import PipelineAdapter, Target, load
from diffcluster.roles.pipelines.directory import ModelDirectory
from diffcluster.roles.stages import DenoiserStage
from diffcluster.testing import TINY_MODELS, make_tiny_model
from tests.pipelines.kit import (
    PIPELINES,
    Bundle,
    arrays,
    crossed,
    plain,
    request,
    same,
    takes_negative,
    task,
    with_pictures,
)

__all__ = ["measure"]

_BOUND: Final = 1e-4
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HEARTBEAT_S: Final = 0.5
_ROUTER: Final = ("--port", "0", "--control-port", "0", "--log-level", "error", "--heartbeat-s", str(_HEARTBEAT_S))
_ROLE: Final = ("--device", "cpu", "--threads", "1", "--log-level", "error")
_ROLES: Final[dict[Role, int]] = {"encoder": 1, "denoiser": 1, "decoder": 1}
_PROMPTS: Final = ("a red apple", "a cat on a table", "a blue rocket over the sea", "a house")
_STEPS: Final = (5, 6, 8, 4)
_WHYS: Final = 2
"""Reasons that are shown."""


@dataclass
class _Asked:
    """A request, and what belongs to it."""

    wanted: GenerationParameters
    files: tuple[bytes, ...] = ()
    images: list[Image.Image] = field(default_factory=list)


@dataclass
class _Row:
    """Of one task of one model. `equal`: by case, for each type of numbers; None where there is no such case."""

    model: str
    task: str
    equal: dict[str, list[bool | None]] = field(default_factory=dict)
    differs: dict[str, float] = field(default_factory=dict)
    joined: dict[str, float] = field(default_factory=dict)
    why: str = ""
    failed: str = ""
    seconds: float = 0.0


# The plain pipeline is the class that the directory names, unless it is told of another.
PIPELINES.update({("ltx", "image_to_video"): "LTXImageToVideoPipeline", ("ltx-i2v", "text_to_video"): "LTXPipeline"})
_CASES: Final = ("lone", "n=2", "negative", "no guidance", "together")


def measure(quick: bool) -> Result:
    """All models, one after another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the roles are told; and more are slower for models as small as these
    rows: list[_Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="diffcluster-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for name in TINY_MODELS:
                path = make_tiny_model(name, Path(folder) / name)
                rows += [_in_this_process(name, path)] if quick else _in_clusters(name, path)
    finally:
        torch.set_num_threads(before)
    columns = ("model, task", *_CASES, "latents differ", "calls", "why not more", "s")
    return Result(columns, list(map(_shown, rows)), _claims(rows))


def _shown(row: _Row) -> tuple[str, ...]:
    cells = [", ".join(map(_word, row.equal.get(case, []))) for case in _CASES]
    differs = ", ".join(f"{name} {value:.1e}" if value else f"{name} 0" for name, value in row.differs.items())
    joined = ", ".join(f"{name} {value:.1f}" for name, value in row.joined.items())
    return f"{row.model} {row.task}", *cells, differs, joined, row.failed or row.why, f"{row.seconds:.1f}"


def _word(equal: bool | None) -> str:
    return "-" if equal is None else "=" if equal else "DIFFERS"


def _claims(rows: Sequence[_Row]) -> list[Claim]:
    unequal = sum(value is False for row in rows for values in row.equal.values() for value in values)
    exact = max(row.differs.get("exact", 0.0) for row in rows)
    worst = max(max(row.differs.values(), default=0.0) for row in rows)
    unnamed = sum(max(row.joined.values(), default=0.0) <= 1 and not row.why for row in rows)
    return [
        Claim("pictures that differ from the plain pipeline's", unequal, "0", unequal == 0),
        Claim("difference of joined latents, exact", exact, "0", exact == 0),
        Claim("difference of joined latents", worst, f"<= {_BOUND}", worst <= _BOUND),
        Claim("tasks whose requests are not joined for no reason", unnamed, "0", unnamed == 0),
    ]


# ---------------------------------------------------------------- what is asked


def _asked(name: str, facts: Any, kind: Any, **fields: Any) -> _Asked:
    if kind in ("image_to_image", "inpaint"):
        fields["strength"] = 0.7
    if kind == "edit":  # smaller pictures are refused
        fields["width"], fields["height"] = (-(-side // facts.size_multiple) * facts.size_multiple for side in (64, 96))
    wanted = request(name, facts, task=kind, output_format="png", **fields)
    if kind in ("text_to_image", "text_to_video"):
        return _Asked(wanted)
    return _Asked(*with_pictures(wanted))


def _cases(name: str, facts: Any, kind: Any) -> dict[str, list[_Asked]]:
    """By case. A case without requests is none for this model."""
    ask = lambda **fields: _asked(name, facts, kind, **fields)  # noqa: E731
    negative = [ask(negative_prompt="blurry, ugly")] if takes_negative(facts.pipeline) else []
    return {
        "lone": [ask()],
        "n=2": [ask(seed=20), ask(seed=21)],
        "negative": negative,
        "no guidance": [ask(guidance_scale=1.0)],
        "together": _mixed(ask, facts),
    }


def _mixed(ask: Callable[..., _Asked], facts: Any) -> list[_Asked]:
    guidance = max(2.0, facts.guidance_scale)
    return [
        ask(
            prompt=prompt, num_inference_steps=steps, seed=30 + k, guidance_scale=guidance + k / 2,
            negative_prompt="ugly" if k % 2 else "",
        )
        for k, (prompt, steps) in enumerate(zip(_PROMPTS, _STEPS, strict=True))
    ]  # fmt: skip


# ---------------------------------------------------------------- real clusters


def _in_clusters(name: str, path: Path) -> list[_Row]:
    """Both clusters of the model are started at once."""
    with ExitStack() as stack:
        clusters = {
            dtype: stack.enter_context(
                LocalCluster(Plan(_ROLES, [*_ROLE, "--model", str(path), "--dtype", dtype], _ROUTER))
            )
            for dtype in _DTYPES
        }
        facts = _part(path, "encoder").facts
        rows = {kind: _Row(name, kind) for kind in facts.tasks}
        with _smaller_edits(name):
            for kind, row in rows.items():  # while the processes start
                _measure_latents(row, path, _cases(name, facts, kind)["together"])
        for dtype, cluster in clusters.items():
            cluster.wait_ready()
            for kind, row in rows.items():
                started = time.monotonic()
                _compare(_Cluster(cluster.url), row, path, _cases(name, facts, kind), _DTYPES[dtype])
                row.seconds += time.monotonic() - started
    return list(rows.values())


class _Cluster:
    """What is asked of a cluster."""

    def __init__(self, url: str) -> None:
        self._url = url

    def make(self, asked: _Asked, count: int = 1) -> list[list[np.ndarray]]:
        """The pictures of a request, or the frames of a video."""
        wanted = asked.wanted
        fields: dict[str, Any] = {
            name: getattr(wanted, name) for name in ("seed", "num_inference_steps", "guidance_scale", "output_format")
        }
        fields["size"] = f"{wanted.width}x{wanted.height}"
        if wanted.negative_prompt:
            fields["negative_prompt"] = wanted.negative_prompt
        with Client(self._url) as client:
            if wanted.task.endswith("video"):
                video = client.video(wanted.prompt, *asked.files, num_frames=wanted.num_frames, **fields)
                return [_frames(video.content)]
            fields["n"] = count
            if not asked.files:
                return [_frames(image.content) for image in client.generate(wanted.prompt, **fields)]
            if wanted.task in ("image_to_image", "inpaint"):
                fields["strength"] = wanted.strength
            images = client.edit(wanted.prompt, asked.files[:1], *asked.files[1:], **fields)
            return [_frames(image.content) for image in images]

    def counts(self) -> Counter[str]:
        """Of the denoiser, so far."""
        threading.Event().wait(2.5 * _HEARTBEAT_S)  # they come with heartbeats
        text = httpx.get(f"{self._url}/metrics", trust_env=False).text
        counts: Counter[str] = Counter()
        for name, labels, value in re.findall(r"^diffcluster_(\w+)_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            if 'role="denoiser"' in labels and name in ("module_calls", "module_call_requests", "batch_decisions"):
                reason = re.search(r'reason="(.*?)"', labels)
                counts[reason[1] if reason else name] += int(float(value))
        return counts


def _frames(content: bytes) -> list[np.ndarray]:
    with Image.open(io.BytesIO(content)) as image:
        return [np.array(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


def _compare(cluster: _Cluster, row: _Row, path: Path, cases: dict[str, list[_Asked]], dtype: torch.dtype) -> None:
    before: Counter[str] = Counter()
    for case, requests in cases.items():
        if case == "together":
            before = cluster.counts()
        try:
            equal = _equal(cluster, path, case, requests, dtype)
        except Exception as error:  # noqa: BLE001 - the others are to be seen all the same
            equal, row.failed = False, f"{case}: {error}"
        row.equal.setdefault(case, []).append(equal)
    if dtype == torch.float32:
        gained = cluster.counts() - before
        row.joined["exact"] = gained["module_call_requests"] / max(1, gained["module_calls"])
        row.why = _why(gained)


def _equal(cluster: _Cluster, path: Path, case: str, requests: Sequence[_Asked], dtype: torch.dtype) -> bool | None:
    if not requests:
        return None
    made = _made(cluster, case, requests)
    pairs = zip(requests, made, strict=True)
    return all(same(frames, plain(path, one.wanted, one.images, dtype)) for one, frames in pairs)


def _made(cluster: _Cluster, case: str, requests: Sequence[_Asked]) -> list[list[np.ndarray]]:
    if case == "n=2" and not requests[0].wanted.task.endswith("video"):
        return cluster.make(requests[0], len(requests))
    with ThreadPoolExecutor(max(1, len(requests))) as pool:
        return [frames for made in pool.map(cluster.make, requests) for frames in made]


def _why(gained: Counter[str]) -> str:
    """The reasons that were given most often."""
    reasons = [(name, count) for name, count in gained.most_common() if not name.startswith("module")]
    return ", ".join(f"{name} {count}" for name, count in reasons[:_WHYS])


# ---------------------------------------------------------------- in this process


@functools.lru_cache(maxsize=4)
def _part(path: Path, role: Role, exact: Any = "on") -> PipelineAdapter:
    target = Target(role, torch.device("cpu"), torch.float32, RoleConfig(exact=exact))
    return load(ModelDirectory(path), target)


def _in_this_process(name: str, path: Path) -> _Row:
    started = time.monotonic()
    encoder, denoiser, decoder = (_part(path, role) for role in ("encoder", "denoiser", "decoder"))
    kind = encoder.facts.tasks[0]
    row = _Row(name, kind)
    with _smaller_edits(name):
        cases = _cases(name, encoder.facts, kind)
        [lone] = cases["lone"]
        with torch.inference_mode():
            encoded = crossed(encoder.encode(task(lone.wanted, inputs=lone.files)))
            denoised = crossed(denoiser.denoise(task(lone.wanted, encoded)))
            made = arrays(decoder.decode(task(lone.wanted, denoised)))
        row.equal["lone"] = [same(made, plain(path, lone.wanted, lone.images, torch.float32))]
        _measure_latents(row, path, cases["together"][:2], exactly=False)
    row.seconds = time.monotonic() - started
    return row


@contextmanager
def _smaller_edits(name: str) -> Iterator[None]:
    """Within it Qwen-Image-Edit does not scale what it edits to a million pixels."""
    if name != "qwen-image-edit":
        yield
        return
    module: Any = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit")
    scaled = module.calculate_dimensions
    module.calculate_dimensions = lambda area, ratio: scaled(area / 64, ratio)
    try:
        yield
    finally:
        module.calculate_dimensions = scaled


def _measure_latents(row: _Row, path: Path, requests: Sequence[_Asked], *, exactly: bool = True) -> None:
    """How far joined ones are from lone ones."""
    encoder = _part(path, "encoder")
    with torch.inference_mode():
        bundles = [encoder.encode(task(one.wanted, inputs=one.files)) for one in requests]
    for name, exact in (("exact", "on"), ("not exact", "off"))[not exactly :]:
        denoiser = _part(path, "denoiser", exact)
        with torch.inference_mode():
            lone = [denoiser.denoise(task(one.wanted, made)) for one, made in zip(requests, bundles, strict=True)]
        loop = _Loop(denoiser, exact=exact == "on")
        outputs = loop.run([one.wanted for one in requests], bundles)
        row.differs[name] = max(map(_distance, outputs, lone))
        row.joined[name] = loop.joined()
        row.why = row.why or loop.why()


def _distance(tensors: dict[str, torch.Tensor], lone: Bundle) -> float:
    """The largest difference, of the largest value."""
    furthest = 0.0
    for name, tensor in lone[0].items():
        difference = (tensors[name].double() - tensor.double()).abs().max().item()
        furthest = max(furthest, difference / (tensor.double().abs().max().item() or 1.0))
    return furthest


class _Eager(CostModel):
    """Joins whatever can be: it is the difference that is asked for, not the gain."""

    def worthwhile(self, *_: Any) -> bool:
        return True


class _Loop:
    """A denoiser's compute loop, to which one more request comes after every second step."""

    def __init__(self, denoiser: PipelineAdapter, *, exact: bool) -> None:
        policy = Policy(max_size=len(_STEPS), exact=exact)
        self._loop = ComputeLoop(DenoiserStage(denoiser), CpuDevice(), self, self._note, policy)  # type: ignore[arg-type]
        self._loop.steps.costs = _Eager()
        self._later: list[Work] = []
        self._reports = 0
        self._outputs: dict[str, dict[str, torch.Tensor]] = {}

    def stage(self, output: Any) -> None:
        """As a stager."""
        self._outputs[output.key[0]] = output.tensors

    def run(self, wanted: Sequence[GenerationParameters], bundles: Sequence[Bundle]) -> list[dict[str, torch.Tensor]]:
        """The latents of each."""
        works = [
            Work((RequestId(f"r{k}"), 1), one, dict(tensors), scalars, np.zeros(1, np.uint8), threading.Event())
            for k, (one, (tensors, scalars)) in enumerate(zip(wanted, bundles, strict=True))
        ]
        self._later = works[1:]
        self._loop.submit(works[0])
        self._loop.run()
        self._loop.close()
        return [self._outputs[work.key[0]] for work in works]

    def joined(self) -> float:
        """Requests in each call."""
        totals = self._loop.steps.totals
        return totals["requests"] / totals["calls"]

    def why(self) -> str:
        """Why there were no more."""
        totals = self._loop.steps.totals
        return _why(Counter({key.removeprefix("reason:"): n for key, n in totals.items() if key.startswith("reason:")}))

    def _note(self, report: Any) -> None:
        if isinstance(report, Progress):
            self._reports += 1
            if self._later and self._reports % 2 == 0:
                self._loop.submit(self._later.pop(0))
                if not self._later:
                    self._loop.submit(None)


if __name__ == "__main__":
    sys.exit(alone("model_matrix", measure))
