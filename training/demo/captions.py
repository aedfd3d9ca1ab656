"""Captions of the embedded model: what a picture shows, said in many ways.

The text encoder is small, so what it must learn is which words to ignore. Half of a caption is therefore
noise on purpose: templates, adjectives, places, invented words and dropped words, around one name that matters.
`HELD_OUT` are wordings that never occur in training; `evaluate.py` measures how far the model copes with them.
"""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

__all__ = ["COLOURS", "HELD_OUT", "TEMPLATES", "Subject", "View", "caption", "corpus", "load_subjects", "said"]

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (20, 20, 20),
    "grey": (150, 150, 150),
    "red": (214, 48, 49),
    "orange": (245, 148, 30),
    "yellow": (250, 220, 80),
    "green": (60, 170, 80),
    "blue": (50, 110, 220),
    "purple": (130, 70, 180),
    "pink": (250, 160, 195),
    "brown": (130, 85, 50),
}

SMALL, BIG = 0.9, 0.98
"""Scales below and above which a subject may be called small or big."""

TEMPLATES = (
    "{x}",
    "{bare}",
    "{x}.",
    "a picture of {x}",
    "a photo of {x}",
    "a photograph of {x}",
    "a drawing of {x}",
    "an illustration of {x}",
    "a painting of {x}",
    "an image of {x}",
    "an icon of {x}",
    "an emoji of {x}",
    "a sketch of {x}",
    "a cartoon of {x}",
    "clip art of {x}",
    "a sticker of {x}",
    "a close up of {x}",
    "a render of {x}, 3d",
    "{bare} emoji",
    "{bare} icon",
    "{bare}, digital art",
    "{bare}, high quality, 4k",
    "draw {x}",
    "draw me {x}",
    "show me {x}",
    "make {x}",
    "i want {x}",
    "i would like to see {x} please",
    "can you draw {x} for me?",
    "this is {x}",
    "here is {x}",
    "there is {x} here",
    "one {bare}",
    "the {bare}",
    "my {bare}",
    "look, {x}!",
    "just {x}",
    "{x} and nothing else",
    "{x} in the middle of the picture",
    "generate an image with {x} in it",
    "a nice little picture that shows {x}",
)

HELD_OUT = (
    "please paint {x} for my daughter",
    "could anyone tell us what {x} looks like",
    "an oil canvas depicting {x}, masterpiece, very detailed",
    "grandmother's favourite {bare}",
    "{x} seen through a dusty window late at night",
)

_ADJECTIVES = """beautiful cute funny small-town shiny old new modern simple lovely pretty strange weird happy-looking
colourful colorful bright dark soft hard wonderful amazing realistic detailed abstract minimal flat famous classic
fresh tasty delicious juicy hot cold warm wet dry clean dirty round square tall short long wide thin thick heavy light
young tiny-looking cheap expensive fancy plain cheerful calm quiet loud fast slow wild friendly brave clever
magical mysterious ancient vintage retro wooden plastic glass metal paper fluffy furry smooth rough sweet sour
nice good great perfect best single lonely proud elegant cosy charming adorable glossy neon pastel painted
hand-drawn floating sitting standing running jumping dancing resting glowing sparkling broken-down""".split()

_PLACES = """on a table|in a kitchen|in the garden|in a forest|on the beach|in the street|in a city|in the park|
on a hill|by the river|under the sky|in space|in a room|on a shelf|on the floor|in a field|at school|at the office|
in the snow|in summer|in winter|at sunset|in the morning|in the evening|on a sunny day|in the rain|in a museum|
in a shop|on a plate|in a bowl|in a basket|on grass|on a mountain|in a village|near a lake|next to a wall|at the market|
in a dream|on stage|in the desert|on an island|in a studio|on a road|at a party|for breakfast|for dinner|for a child|
for kids|for my friend|for a poster|for a website|in the style of a comic|in watercolour|in pencil|in pixel art|
with soft light|with a long shadow|with bright colours|from above|from the side|in the corner|in the distance|
by a famous artist|trending now|in high resolution|with great detail|as a logo|as a toy|as a gift idea|
made of clay|made of paper|seen from the front|ready to go|without text|without people|isolated""".replace(
    "\n", ""
).split("|")

_OPENERS = (
    """please|hello|ok|hey|today|now|so|well|quickly|maybe|a|the|some|very|really|quite|our|your|his|her|their""".split(
        "|"
    )
)


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """One thing that can be drawn. `names[0]` is canonical; each name carries its own article."""

    glyph: str
    names: tuple[str, ...]
    mirrors: bool


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """How a subject stands in its picture. `scale` is the share of the width that it takes."""

    colour: str
    scale: float


def load_subjects(path: Path | None = None) -> list[Subject]:
    """Read `subjects.txt`."""
    text = (path or Path(__file__).with_name("subjects.txt")).read_text(encoding="utf-8")
    subjects = []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        glyph, names = line.split(" ", 1)
        subjects.append(Subject(glyph.removesuffix("^"), tuple(names.split("|")), not glyph.endswith("^")))
    return subjects


def bare(name: str) -> str:
    """`name` without its article."""
    for article in ("a ", "an ", "the "):
        if name.startswith(article):
            return name[len(article) :]
    return name


def _invented(rng: random.Random) -> str:
    letters = "aaabcddeeeefghiiijklmnnooopqrrssttuuvwxyz'"
    return "".join(rng.choice(letters) for _ in range(rng.randint(2, 9)))


def _described(rng: random.Random, name: str, view: View) -> str:
    """The noun phrase, with adjectives and a size word now and then."""
    words = [rng.choice(_ADJECTIVES) for _ in range(rng.choices((0, 1, 2), (7, 3, 1))[0])]
    if view.scale < SMALL and rng.random() < 0.5:
        words.append(rng.choice(("small", "tiny", "little")))
    if view.scale > BIG and rng.random() < 0.5:
        words.append(rng.choice(("big", "large", "huge")))
    rng.shuffle(words)
    if not words:
        return name
    article = "an" if words[0][0] in "aeiou" else "a"
    has_article = name != bare(name)
    return " ".join([*([article] if has_article else []), *words, bare(name)])


def _background(rng: random.Random, colour: str) -> str:
    form = rng.choice(
        (
            "on a {c} background",
            "on {c}",
            "with a {c} background",
            "against a {c} background",
            "{c} background",
            "on a {c} wall",
            "with {c} behind it",
            "in front of a {c} wall",
            "on a {c} backdrop",
        )
    )
    return form.replace("a orange", "an orange").format(c=colour)


def _noise(rng: random.Random, text: str) -> str:
    """Drop, insert and invent words, but keep `text`'s own words in order."""
    words = []
    for word in text.split():
        if rng.random() < 0.05 and word in _IGNORABLE:
            continue
        if rng.random() < 0.03:
            words.append(rng.choice((_invented(rng), rng.choice(_ADJECTIVES), rng.choice(_OPENERS))))
        words.append(word)
    return " ".join(words) or text


_IGNORABLE = frozenset(word for template in TEMPLATES for word in template.split() if "{" not in word)


def caption(rng: random.Random, subject: Subject, view: View) -> str:
    """One way of many to say what `view` of `subject` shows. What is left out, such as the colour, the seed decides."""
    name = rng.choice(subject.names) if rng.random() < 0.5 else subject.names[0]
    phrase = _described(rng, name, view) if rng.random() < 0.45 else name
    text = rng.choice(TEMPLATES if rng.random() < 0.6 else TEMPLATES[:2]).format(x=phrase, bare=bare(phrase))
    tails = []
    if rng.random() < 0.3:
        tails.append(rng.choice(_PLACES))
    if rng.random() < 0.35:
        tails.append(_background(rng, view.colour))
    rng.shuffle(tails)
    text = " ".join([text, *tails]) if rng.random() < 0.8 else ", ".join([text, *tails])
    if rng.random() < 0.25:
        extra = " ".join(_invented(rng) for _ in range(rng.randint(1, 5)))
        text = f"{text} {extra}" if rng.random() < 0.5 else f"{extra} {text}"
    if rng.random() < 0.12:
        text = f"{rng.choice(_OPENERS)} {text}"
    return _noise(rng, text) if rng.random() < 0.5 else text


def said(text: str, view: View) -> tuple[int, int]:
    """What `text`, a caption of `view`, says of its ground and size.

    The ground is an index into COLOURS, or len(COLOURS); the size 1 for small, 2 for big, else 0.
    """
    words = set(text.replace(",", " ").replace(".", " ").split())
    size = 2 if words & {"big", "large", "huge"} else 0
    if words & {"small", "tiny", "little"} and view.scale < SMALL:
        size = 1
    # A colour is also part of some names; only a ground is told by these words.
    before, after = r"\b(on|with|against)( an?)? ", " (background|backdrop|wall)"
    ground = re.search(rf"{before}{view.colour}\b|\b{view.colour}{after}", text) is not None
    return list(COLOURS).index(view.colour) if ground else len(COLOURS), size


def corpus(subjects: list[Subject], rng: random.Random, size: int) -> list[str]:
    """Captions to learn the tokenizer from; each name, colour and filler occurs at least once."""
    lines = [name for subject in subjects for name in subject.names for _ in range(20)]
    lines += [*_ADJECTIVES, *_PLACES, *_OPENERS, *COLOURS] * 5
    for _ in range(size):
        view = View(rng.choice(list(COLOURS)), rng.uniform(0.6, 1.0))
        lines.append(caption(rng, rng.choice(subjects), view))
    return lines
