"""Pictures of the embedded model: Noto emoji on a coloured ground, at any place and size."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.demo.captions import COLOURS, Subject, View

__all__ = ["FONT", "SIZE", "Renderer"]

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")  # Debian: fonts-noto-color-emoji
SIZE = 128
_STRIKE = 109  # the one bitmap size that the font holds


class Renderer:
    """Draws subjects; the glyph bitmaps are kept at a ladder of sizes."""

    def __init__(self, subjects: list[Subject], font: Path = FONT) -> None:
        self.subjects = subjects
        self.scales = tuple(round(0.88 + 0.03 * i, 2) for i in range(5))
        truetype = ImageFont.truetype(str(font), _STRIKE)
        glyphs = [_glyph(subject.glyph, truetype) for subject in subjects]
        self._bitmaps = [[_fit(glyph, round(scale * SIZE)) for scale in self.scales] for glyph in glyphs]

    def sample(self, rng: random.Random, index: int, spread: float = 1.0) -> tuple[np.ndarray, View]:
        """A random view of subject `index`: uint8 array of shape (SIZE, SIZE, 3), and what it shows.

        `spread`, 0..1, bounds how far sizes go below the full one, and so how far from the middle a subject stands.
        """
        last = len(self.scales) - 1
        scale = rng.randint(round((1 - spread) * last), last)
        colour = "white" if rng.random() < 0.2 else rng.choice(list(COLOURS))
        flip = self.subjects[index].mirrors and rng.random() < 0.5
        rgb = tuple(min(255, max(0, channel + rng.randint(-8, 8))) for channel in COLOURS[colour])
        slack = SIZE - round(self.scales[scale] * SIZE)
        at = (rng.randint(0, slack), rng.randint(0, slack))
        return self.draw(index, scale, flip, rgb, at), View(colour, self.scales[scale])

    def draw(self, index: int, scale: int, flip: bool, rgb: tuple[int, ...], at: tuple[int, int]) -> np.ndarray:
        """Subject `index` at `self.scales[scale]` on ground `rgb`, its corner at `at` (x, y)."""
        bitmap = self._bitmaps[index][scale]
        if flip:
            bitmap = bitmap[:, ::-1]
        side = bitmap.shape[0]
        canvas = np.empty((SIZE, SIZE, 3), np.float32)
        canvas[:] = rgb
        x, y = at
        alpha = bitmap[..., 3:].astype(np.float32) / 255
        window = canvas[y : y + side, x : x + side]
        window[:] = window * (1 - alpha) + bitmap[..., :3] * alpha
        return canvas.round().astype(np.uint8)


def _glyph(text: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    canvas = Image.new("RGBA", (160, 160), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((10, 10), text, font=font, embedded_color=True)
    box = canvas.getbbox()
    if box is None:
        raise ValueError(f"the font draws nothing for {text!r}")
    return canvas.crop(box)


def _fit(glyph: Image.Image, side: int) -> np.ndarray:
    """`glyph` scaled into a square of `side` pixels, centred: uint8 (side, side, 4)."""
    ratio = side / max(glyph.size)
    size = (max(1, round(glyph.width * ratio)), max(1, round(glyph.height * ratio)))
    square = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    square.paste(glyph.resize(size, Image.Resampling.LANCZOS), ((side - size[0]) // 2, (side - size[1]) // 2))
    return np.asarray(square)
