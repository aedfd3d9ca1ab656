"""Measures the embedded model: does it draw what a caption names, and do seed and colour words do something?

    python -m training.demo.evaluate --model build/demo/pipeline --out sheet.png --json numbers.json

Nobody can look at 1,500 pictures after each training run, so a picture is judged by the training image nearest to it:
the least mean squared error over each subject, size, place and mirroring that `render.py` can draw, on the picture's
own ground, both slightly blurred. Without the blur, real pictures of fine patterns (popcorn, a lollipop) that went
through the autoencoder look nearer to something smooth. A caption is right when the nearest image shows its subject.
The wordings in `captions.HELD_OUT` never occur in training and are counted on their own. The same judge also sees real
training images after a round through the autoencoder; that share says how far the other numbers can be trusted. The
contact sheet is for a person's eye.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

from training.demo import captions, render

__all__ = ["VISIBLE", "Gallery", "Match", "main"]

VISIBLE = 10.0
"""Mean absolute difference (0..255) from which two pictures count as visibly different.

Training images that differ in nothing but the ground's jitter of 8 levels differ by 3 on average and by 10 at most.
Those of one subject on one ground at two random places and sizes differ by 26 on average, nine in ten by over 10."""

TRAINED_BOUND = 0.98
HELD_OUT_BOUND = 0.85

_BATCH = 16
_COARSE = 4  # pixels a side of a block whose mean the first search compares; its places are as far apart
_BLUR = 2.5  # pixels; detail that the autoencoder cannot carry must not count against a subject that has much of it
_FINALISTS = 16
_ROW = 19
_TILE = 64
_GAP = 2
_COLOURS = tuple(captions.COLOURS)


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """The training image nearest to a picture. `error` is the mean squared error after the blur, of 255 squared."""

    subject: int
    scale: int
    ground: tuple[int, int, int]
    error: float


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A picture to make, and the subject that it should show."""

    caption: str
    seed: int
    subject: int


@dataclasses.dataclass(slots=True)
class Judged:
    """What became of some requests."""

    right: int
    total: int
    wrong: list[tuple[str, str]]

    @property
    def share(self) -> float:
        return self.right / self.total


class _Templates:
    """Glyphs as spectra of (premultiplied red, green, blue, alpha), means of blocks of `block` pixels, maybe blurred.

    A glyph (p, a) on ground g, taken relative to g, is p - g a, and the picture relative to g is d. The error is
    |d|^2 - 2 <d, p - g a> + |p - g a|^2: one correlation gives it for all places, and no place wraps around.
    """

    def __init__(self, bitmaps: list[np.ndarray], block: int, blur: float = 0.0) -> None:
        self.block = block
        self.side = render.SIZE // block
        self._low_pass = _low_pass(self.side, blur)
        glyphs, self._spectra = self._blurred(torch.stack([_premultiplied(bitmap, block) for bitmap in bitmaps]))
        self._spectra = self._spectra.conj()
        colour, alpha = glyphs[:, :3].flatten(2), glyphs[:, 3:].flatten(2)
        self._colour_energy = colour.square().sum((1, 2))
        self._cross = (colour * alpha).sum(2)
        self._alpha_energy = alpha.square().sum((1, 2))
        slack = torch.tensor([(render.SIZE - bitmap.shape[0]) // block for bitmap in bitmaps])
        inside = torch.arange(self.side)[None] <= slack[:, None]
        self._outside = ~(inside[:, :, None] & inside[:, None, :])

    def errors(self, picture: torch.Tensor, ground: torch.Tensor) -> torch.Tensor:
        """Least mean squared error of each glyph over all places; `picture` (3, SIZE, SIZE), both in 0..1."""
        relative, colours = self._blurred(_blocks(picture, self.block) - ground[:, None, None])
        channels = torch.cat([colours, -(ground[:, None, None] * colours).sum(0, keepdim=True)])
        spectrum = (self._spectra * channels).sum(1)
        correlation = torch.fft.irfft2(spectrum, s=(self.side, self.side))
        best = correlation.masked_fill_(self._outside, -torch.inf).amax((1, 2))
        energy = self._colour_energy - 2 * self._cross @ ground + self._alpha_energy * ground.square().sum()
        errors: torch.Tensor = (relative.square().sum() - 2 * best + energy) / relative.numel()
        return errors

    def _blurred(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`pictures` after the low pass, and their spectra."""
        spectra = torch.fft.rfft2(pictures) * self._low_pass
        return torch.fft.irfft2(spectra, s=(self.side, self.side)), spectra


class Gallery:
    """All training images that there can be, searched for the one nearest to a picture."""

    def __init__(self, subjects: list[captions.Subject], renderer: render.Renderer) -> None:
        self._mirrors = torch.tensor([subject.mirrors for subject in subjects])
        self._bitmaps = renderer._bitmaps
        # Every other size is enough to tell who is worth a closer look; the closer look has them all.
        self._coarse_scales = range(0, len(renderer.scales), 2)
        self._coarse = _Templates([row[s] for row in self._bitmaps for s in self._coarse_scales], _COARSE)

    def nearest(self, image: np.ndarray) -> Match:
        """The best match of `image` (uint8, SIZE x SIZE x 3): by block means, then of the best few by pixels."""
        picture = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
        views = (picture, picture.flip(2))
        matches = []
        for ground in _grounds(image):
            level = torch.from_numpy(ground).float().div(255)
            coarse = torch.stack([self._coarse_errors(view, level, mirrored) for mirrored, view in enumerate(views)])
            for subject in coarse.amin((0, 2)).argsort()[:_FINALISTS].tolist():
                mirrored, place = divmod(int(coarse[:, subject].argmin()), len(self._coarse_scales))
                error, scale = self._closer(views[mirrored], level, subject, self._coarse_scales[place])
                matches.append(Match(subject, scale, tuple(ground.tolist()), 255**2 * error))
        return min(matches, key=lambda match: match.error)

    def _coarse_errors(self, view: torch.Tensor, ground: torch.Tensor, mirrored: int) -> torch.Tensor:
        """(subjects, sizes), infinite where a subject does not occur that way round."""
        errors = self._coarse.errors(view, ground).view(len(self._bitmaps), -1)
        return errors.masked_fill(~self._mirrors[:, None], torch.inf) if mirrored else errors

    def _closer(self, view: torch.Tensor, ground: torch.Tensor, subject: int, scale: int) -> tuple[float, int]:
        """Least error of `subject` at sizes near `scale` and at every place, and its size."""
        scales = range(max(0, scale - 1), min(len(self._bitmaps[subject]), scale + 2))
        errors = _Templates([self._bitmaps[subject][s] for s in scales], 1, _BLUR).errors(view, ground)
        return float(errors.min()), scales[int(errors.argmin())]


def _low_pass(side: int, blur: float) -> torch.Tensor:
    """The spectrum of a Gaussian of deviation `blur` pixels."""
    squares = torch.fft.fftfreq(side)[:, None].square() + torch.fft.rfftfreq(side).square()
    return torch.exp(-2 * (torch.pi * blur) ** 2 * squares)


def _premultiplied(bitmap: np.ndarray, block: int) -> torch.Tensor:
    """`bitmap` (uint8, side x side x 4) in the corner of an empty picture: (4, SIZE / block, SIZE / block), 0..1."""
    rgba = torch.from_numpy(np.array(bitmap)).permute(2, 0, 1).float().div(255)
    rgba[:3] *= rgba[3:]
    canvas = torch.zeros(4, render.SIZE, render.SIZE)
    canvas[:, : rgba.shape[1], : rgba.shape[2]] = rgba
    return _blocks(canvas, block)


def _blocks(picture: torch.Tensor, block: int) -> torch.Tensor:
    return torch.nn.functional.avg_pool2d(picture[None], block)[0] if block > 1 else picture


def _grounds(image: np.ndarray) -> list[np.ndarray]:
    """Colours (uint8) that may be the ground: the border's and the corners' medians, its two commonest colours."""
    border = np.concatenate([image[:2].reshape(-1, 3), image[-2:].reshape(-1, 3),
                             image[2:-2, :2].reshape(-1, 3), image[2:-2, -2:].reshape(-1, 3)])  # fmt: skip
    corners = image[np.ix_([0, 1, 2, -3, -2, -1], [0, 1, 2, -3, -2, -1])].reshape(-1, 3)
    cells, members, counts = np.unique(border // 32, axis=0, return_inverse=True, return_counts=True)
    common = [c for c in np.argsort(counts)[::-1][: min(2, len(cells))] if counts[c] >= 0.15 * len(border)]
    pools = [border, corners, *(border[members.reshape(-1) == cell] for cell in common)]
    found: list[np.ndarray] = []
    for pool in pools:
        median = np.median(pool, axis=0).round().astype(np.uint8)
        if all(np.abs(median.astype(int) - other).max() > 6 for other in found):
            found.append(median)
    return found


def nearest_colour(rgb: tuple[int, int, int]) -> str:
    """The name in `captions.COLOURS` that is nearest to `rgb`."""
    return min(_COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(captions.COLOURS[name], rgb, strict=True)))


class Painter:
    """Makes pictures with a plain pipeline; a request's seed alone decides its noise, whatever the batch."""

    def __init__(self, model: Path, steps: int, guidance: float) -> None:
        self.pipeline = StableDiffusionPipeline.from_pretrained(model)
        self.pipeline.set_progress_bar_config(disable=True)
        self.steps, self.guidance = steps, guidance

    def paint(self, requests: list[Request]) -> np.ndarray:
        """uint8, N x SIZE x SIZE x 3."""
        batches = [self._batch(requests[i : i + _BATCH]) for i in range(0, len(requests), _BATCH)]
        return np.concatenate(batches)

    def _batch(self, requests: list[Request]) -> np.ndarray:
        output = self.pipeline(
            [request.caption for request in requests],
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in requests],
            output_type="np",
        )
        return _to_bytes(output.images)

    @torch.no_grad()
    def round_trip(self, images: np.ndarray) -> np.ndarray:
        """`images` encoded and decoded by the pipeline's autoencoder."""
        vae, processor = self.pipeline.vae, self.pipeline.image_processor
        parts = []
        for start in range(0, len(images), _BATCH):
            pixels = torch.from_numpy(images[start : start + _BATCH]).permute(0, 3, 1, 2).float().div(127.5).sub(1)
            decoded = vae.decode(vae.encode(pixels).latents).sample
            parts.append(processor.postprocess(decoded, output_type="np"))
        return _to_bytes(np.concatenate(parts))


def _to_bytes(images: np.ndarray) -> np.ndarray:
    """0..1 to uint8, as `output_type="pil"` does it."""
    scaled: np.ndarray = (images * 255).round().astype(np.uint8)
    return scaled


class Evaluation:
    """The measurements, one method each; `quick` takes a subset of the subjects for each of them."""

    def __init__(self, painter: Painter, *, per_wording: int | None, quick: bool) -> None:
        self.painter, self.quick = painter, quick
        self.subjects = captions.load_subjects()
        self.renderer = render.Renderer(self.subjects)
        self.gallery = Gallery(self.subjects, self.renderer)
        self.per_wording = per_wording or (16 if quick else len(self.subjects))

    def real(self) -> Judged:
        """Random training images after a round through the autoencoder: measures the judge, not the model."""
        indices = self._spread(48 if self.quick else len(self.subjects))
        rng = Random(0)
        images = np.stack([self.renderer.sample(rng, index)[0] for index in indices])
        requests = [Request("(a training image) " + self.subjects[index].names[0], 0, index) for index in indices]
        return self._judge(requests, self.painter.round_trip(images))

    def trained(self) -> tuple[Judged, np.ndarray]:
        """Captions from training's templates, every fourth with a colour; also the pictures, for the sheet."""
        indices = self._spread(48 if self.quick else len(self.subjects))
        requests = [Request(self._trained_caption(index), 1_000 + index, index) for index in indices]
        images = self.painter.paint(requests)
        return self._judge(requests, images), images

    def held_out(self, wording: int) -> Judged:
        """Captions in the wording `captions.HELD_OUT[wording]`."""
        indices = self._spread(self.per_wording)
        template, seed = captions.HELD_OUT[wording], 10_000 * (1 + wording)
        requests = [Request(self._filled(template, index), seed + index, index) for index in indices]
        return self._judge(requests, self.painter.paint(requests))

    def seeds(self) -> np.ndarray:
        """For each of some prompts, the mean absolute difference between its pictures of seeds 0 and 1."""
        prompts = [(self._filled(_template(index), index), index) for index in self._spread(8 if self.quick else 20)]
        first, second = (self.painter.paint([Request(text, seed, index) for text, index in prompts]) for seed in (0, 1))
        differences: np.ndarray = np.abs(first.astype(np.float32) - second).mean((1, 2, 3))
        return differences

    def grounds(self) -> Judged:
        """Is the ground of 'X on a COLOUR background' that colour? Each colour comes up equally often."""
        requests, wanted = [], []
        for place, index in enumerate(self._spread(len(_COLOURS) * (2 if self.quick else 8))):
            colour = _COLOURS[place % len(_COLOURS)]
            requests.append(Request(self.subjects[index].names[0] + _on(colour), 90_000 + index, index))
            wanted.append(colour)
        found = [nearest_colour(self.gallery.nearest(image).ground) for image in self.painter.paint(requests)]
        trio = zip(requests, wanted, found, strict=True)
        wrong = [(request.caption, f"{got} ground") for request, colour, got in trio if colour != got]
        return Judged(len(requests) - len(wrong), len(requests), wrong)

    def rows(self) -> list[np.ndarray]:
        """For the sheet: one prompt in many seeds, and one prompt on each colour."""
        index = next(i for i, subject in enumerate(self.subjects) if subject.names[0] == "a fox")
        name = self.subjects[index].names[0]
        seeds = [Request(name, seed, index) for seed in range(_ROW)]
        colours = [Request(name + _on(colour), 0, index) for colour in _COLOURS]
        return [self.painter.paint(seeds), self.painter.paint(colours)]

    def _spread(self, count: int) -> list[int]:
        """`count` subjects, evenly spread over the list."""
        total = len(self.subjects)
        count = min(count, total)
        return [i * total // count for i in range(count)]

    def _filled(self, template: str, index: int) -> str:
        name = self.subjects[index].names[0]
        return template.format(x=name, bare=captions.bare(name))

    def _trained_caption(self, index: int) -> str:
        text = self._filled(_template(index), index)
        return text + _on(_COLOURS[index // 4 % len(_COLOURS)]) if index % 4 == 0 else text

    def _judge(self, requests: list[Request], images: np.ndarray) -> Judged:
        found = [self.gallery.nearest(image).subject for image in images]
        pairs = zip(requests, found, strict=True)
        wrong = [(request.caption, self.subjects[got].names[0]) for request, got in pairs if got != request.subject]
        return Judged(len(requests) - len(wrong), len(requests), wrong)


def _template(index: int) -> str:
    """A trained template for subject `index`; 7 has no factor in common with their number, so all come up."""
    return captions.TEMPLATES[7 * index % len(captions.TEMPLATES)]


def _on(colour: str) -> str:
    return f" on {'an' if colour[0] in 'aeiou' else 'a'} {colour} background"


def sheet(rows: list[np.ndarray]) -> Image.Image:
    """Pictures as tiles of 64 pixels, at most 19 in a row."""
    lines = [row[i : i + _ROW] for row in rows for i in range(0, len(row), _ROW)]
    pitch = _TILE + _GAP
    canvas = Image.new("RGB", (_ROW * pitch + _GAP, len(lines) * pitch + _GAP), (90, 90, 90))
    for y, line in enumerate(lines):
        for x, image in enumerate(line):
            tile = Image.fromarray(image).resize((_TILE, _TILE), Image.Resampling.LANCZOS)
            canvas.paste(tile, (_GAP + x * pitch, _GAP + y * pitch))
    return canvas


def _claim(name: str, value: float, bound: float) -> dict[str, object]:
    return {"name": name, "value": round(value, 4), "bound": bound, "holds": value >= bound}


def _print_wrong(wrong: dict[str, list[tuple[str, str]]]) -> None:
    for name, pairs in wrong.items():
        if pairs:
            print(f"\nwrong: {name}")
        for caption, got in pairs:
            print(f"  {caption} -> {got}")


def _measure(evaluation: Evaluation, out: Path) -> dict[str, object]:
    """All measurements: prints them, writes the sheet to `out`, and gives back what `--json` holds."""
    started = time.monotonic()
    wrong: dict[str, list[tuple[str, str]]] = {}

    def say(name: str, judged: Judged) -> float:
        wrong[name] = judged.wrong
        print(f"{judged.share:7.1%}  {judged.right:4}/{judged.total:<4} {name}", flush=True)
        return judged.share

    real = say("judge on real pictures", evaluation.real())
    judged, images = evaluation.trained()
    trained = say("trained templates", judged)
    wordings = {text: say(f"held out: {text}", evaluation.held_out(i)) for i, text in enumerate(captions.HELD_OUT)}
    held_out = sum(wordings.values()) / len(wordings)
    print(f"{held_out:7.1%}            held out, mean", flush=True)
    colours = say("ground colour", evaluation.grounds())
    differences = evaluation.seeds()
    visible = float((differences >= VISIBLE).mean())
    print(f"{visible:7.1%}            seeds 0 and 1 differ visibly (mean difference {differences.mean():.1f} of 255)")
    sheet([images, *evaluation.rows()]).save(out)
    _print_wrong(wrong)
    return {
        "steps": evaluation.painter.steps,
        "guidance": evaluation.painter.guidance,
        "quick": evaluation.quick,
        "seconds": round(time.monotonic() - started, 1),
        "judge_on_real_pictures": real,
        "trained_templates": trained,
        "held_out": wordings,
        "held_out_mean": held_out,
        "ground_colour": colours,
        "seed_difference_mean": float(differences.mean()),
        "seed_difference_least": float(differences.min()),
        "seed_visible_share": visible,
        "seed_visible_threshold": VISIBLE,
        "wrong": {name: [list(pair) for pair in pairs] for name, pairs in wrong.items()},
        "claims": [
            _claim("captions in trained templates drawn right", trained, TRAINED_BOUND),
            _claim("captions in held-out wordings drawn right", held_out, HELD_OUT_BOUND),
        ],
    }


def main() -> None:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="pipeline directory")
    parser.add_argument("--out", type=Path, required=True, help="contact sheet to write, PNG")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default %(default)s)")
    parser.add_argument("--guidance", type=float, default=7.5, help="guidance scale (default %(default)s)")
    parser.add_argument("--per-wording", type=int, help="subjects for each held-out wording (default: all)")
    parser.add_argument("--quick", action="store_true", help="a subset of the subjects for everything")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    painter = Painter(arguments.model, arguments.steps, arguments.guidance)
    evaluation = Evaluation(painter, per_wording=arguments.per_wording, quick=arguments.quick)
    report = _measure(evaluation, arguments.out)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
