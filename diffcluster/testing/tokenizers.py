"""Tokenizers that need no network: their vocabulary is learnt from a page of text when they are made.

Words of the page are one token each, everything else is spelt in characters or bytes. The prompts that pipelines wrap
around the user's are on it: some pipelines cut off as many tokens as the real tokenizer makes of their words, and would
cut into the user's prompt, or not reach it, if these were spelt out.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Any, Final

from tokenizers import Regex, pre_tokenizers, processors
from transformers import CLIPTokenizer, GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer, T5Tokenizer

__all__ = ["clip_tokenizer", "gemma_tokenizer", "llama_tokenizer", "qwen_tokenizer", "t5_tokenizer"]

_PAGE: Final = """
Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the objects
and background:

Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how the
user's text instruction should alter or modify the image. Generate a new image that meets the user's requirements while
maintaining consistency with the original input where appropriate.

Describe the video by detailing the following aspects: 1. The main content and theme of the video.2. The color, shape,
size, texture, quantity, text, and spatial relationships of the objects.3. Actions, events, behaviors temporal
relationships, physical movement changes of the objects.4. background environment, light, style and atmosphere.5. camera
angles, movements, and transitions used in the video:

system

user

assistant

think

a an in on at to for with from over under near is are very no not
red green blue yellow orange purple pink brown black white grey bright dark small big old young
cat dog bird fish horse fox bear apple banana pizza tree flower house castle car boat robot rocket moon sun sea mountain
photo picture painting drawing cartoon portrait landscape running sitting flying sleeping bad quality blurry ugly
"""

_WORD: Final = r"\p{N}|\p{L}+|[^\s\p{L}\p{N}]"
_CLIP_WORD: Final = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_QWEN_WORD: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
_BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]
_SPACE: Final = "▁"
_LETTERS: Final = [chr(code) for code in range(33, 127)]
_CHAT: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def _learn(split: list[Any], special: tuple[str, ...], alphabet: list[str], end: str = "") -> dict[str, Any]:
    """Vocabulary and merges of a byte-pair encoding that has every word of the page.

    A word gets merges for what the earlier ones leave apart. Merges apply in their order, so later ones cannot break an
    earlier word. (The trainer of the library breaks ties at random, and models would differ from run to run.)
    """
    splitter = pre_tokenizers.Sequence(split)
    ranks: dict[tuple[str, str], int] = {}
    for paragraph in _PAGE.split("\n\n"):
        text = " ".join(paragraph.split())
        for word, _ in splitter.pre_tokenize_str(text.lower() if end else text):
            pieces = _join([*word[:-1], word[-1] + end], ranks)
            while len(pieces) > 1:
                ranks[pieces[0], pieces[1]] = len(ranks)
                pieces = _join(pieces, ranks)
    tokens = [*special, *alphabet, *(letter + end for letter in alphabet if end), *map("".join, ranks)]
    return {"vocab": {token: number for number, token in enumerate(dict.fromkeys(tokens))}, "merges": list(ranks)}


def _join(pieces: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while True:
        known = [(ranks[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not known:
            return pieces
        place = min(known)[1]
        pieces = [*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :]]


@cache
def _byte_level(word: str, special: tuple[str, ...], end: str = "") -> dict[str, Any]:
    split = [
        pre_tokenizers.Split(Regex(word), "removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return _learn(split, special, sorted(pre_tokenizers.ByteLevel.alphabet()), end)


@cache
def _space_marked(special: tuple[str, ...]) -> dict[str, Any]:
    # Punctuation is split off here and not by the tokenizers themselves, which therefore never join it to a word.
    split = [
        pre_tokenizers.Split(Regex(rf" ?(?:{_WORD})"), "removed", invert=True),
        pre_tokenizers.Metaspace(_SPACE, "never", split=False),
    ]
    return _learn(split, (*special, *_BYTES), [_SPACE, *_LETTERS])


def clip_tokenizer() -> Any:
    """Lower case, 77 tokens; the end of the text pads."""
    learnt = _byte_level(_CLIP_WORD, ("<|startoftext|>", "<|endoftext|>"), "</w>")
    return CLIPTokenizer(**learnt, model_max_length=77)


def t5_tokenizer() -> Any:
    """Words of the page and characters, by their scores; also stands for that of UMT5."""
    words = sorted(set(re.findall(r"[A-Za-z]+", _PAGE)))
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (_SPACE, -2.0)]
    scored += [(letter, -5.0) for letter in _LETTERS] + [(_SPACE + word, -3.0) for word in words]
    return T5Tokenizer(vocab=scored, extra_ids=0, model_max_length=512)


def qwen_tokenizer() -> Any:
    """With the tokens of chats and images, and a chat template that knows `enable_thinking`."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
               "<|video_pad|>")  # fmt: skip
    tokenizer = Qwen2Tokenizer(
        **_byte_level(_QWEN_WORD, special),
        additional_special_tokens=list(special[1:]),
        image_token="<|image_pad|>",  # noqa: S106 - no secret
        model_max_length=2048,
    )
    tokenizer.chat_template = _CHAT
    return tokenizer


def gemma_tokenizer() -> Any:
    """Starts every text with `<bos>`, as the real one does."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    return _start_with(GemmaTokenizer(**_space_marked(special), model_max_length=4096), "<bos>")


def llama_tokenizer() -> Any:
    """With the header tokens of Llama 3, padded on the right."""
    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    special = ("<unk>", "<s>", "</s>", *headers)
    tokenizer = LlamaTokenizer(
        **_space_marked(special),
        additional_special_tokens=headers,
        pad_token="</s>",  # noqa: S106 - no secret
        padding_side="right",
        model_max_length=256,
    )
    return _start_with(tokenizer, "<s>")


def _start_with(tokenizer: Any, token: str) -> Any:
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, tokenizer.convert_tokens_to_ids(token))]
    )
    return tokenizer
