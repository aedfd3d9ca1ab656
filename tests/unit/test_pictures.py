"""Pictures that clients send: what can be read becomes 8-bit RGB (a mask: L), and what cannot is refused in words."""

from __future__ import annotations

import base64
import io
import random
import time
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageOps

from diffcluster.errors import InvalidImageError, InvalidRequestError, RequestError
from diffcluster.messages import InputImage
from diffcluster.router.http.pictures import Picture, decode_base64, read_image, read_mask

LIMIT = 1 << 20
Array = npt.NDArray[Any]


def gradient(height: int = 48, width: int = 64) -> Array:
    """Smooth, with a red mark in one corner."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[..., 0] = np.linspace(0, 255, width, dtype=np.uint8)
    picture[..., 1] = np.linspace(0, 255, height, dtype=np.uint8)[:, None]
    picture[: max(1, height // 4), : max(1, width // 4)] = (255, 0, 0)
    return picture


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain() -> bytes:
    return saved(Image.fromarray(gradient()))


def opened(picture: Picture) -> Array:
    with Image.open(io.BytesIO(picture.content)) as image:
        assert (image.format, image.mode) == ("PNG", "RGB" if picture.info.kind == "image" else "L")
        assert image.size == (picture.info.width, picture.info.height)
        assert picture.info.nbytes == len(picture.content)
        return np.asarray(image)


def read(data: bytes) -> Array:
    return opened(read_image("image", data, LIMIT))


def masked(data: bytes, width: int = 64, height: int = 48) -> Array:
    return opened(read_mask("mask", data, LIMIT, InputImage("image", width, height, 1)))


# ---------------------------------------------------------------- what can be read


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_what_loses_nothing_arrives_as_it_was(kind: str) -> None:
    assert np.array_equal(read(saved(Image.fromarray(gradient()), kind)), gradient())


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_what_loses_something_is_near(kind: str) -> None:
    assert np.abs(read(saved(Image.fromarray(gradient()), kind, quality=95)).astype(int) - gradient()).mean() < 6


@pytest.mark.parametrize("size", [(1, 1), (97, 65), (512, 16)])
def test_any_size_keeps_its_size(size: tuple[int, int]) -> None:
    width, height = size
    assert np.array_equal(read(saved(Image.fromarray(gradient(height, width)))), gradient(height, width))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_pictures_are_turned_as_they_say(kind: str, orientation: int) -> None:
    image = Image.fromarray(gradient())
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(image, kind, exif=exif.tobytes(), **({"quality": 95} if kind == "JPEG" else {}))
    with Image.open(io.BytesIO(data)) as turned:
        expected = np.asarray(ImageOps.exif_transpose(turned).convert("RGB"))
    assert np.array_equal(read(data), expected)
    assert expected.shape == ((48, 64, 3) if orientation < 5 else (64, 48, 3))


def test_broken_metadata_does_not_matter() -> None:
    image = Image.fromarray(gradient())
    assert np.array_equal(read(saved(image, icc_profile=b"garbage")), gradient())
    assert np.array_equal(read(saved(image, exif=b"Exif\0\0garbage")), gradient())
    assert np.array_equal(read(plain() + b"trailing junk"), gradient())


def test_the_file_that_goes_on_carries_no_metadata() -> None:
    data = saved(Image.fromarray(gradient()), icc_profile=b"garbage", dpi=(72, 72))
    with Image.open(io.BytesIO(read_image("image", data, LIMIT).content)) as image:
        assert image.info == {}


def test_sixteen_bits_of_grey_are_scaled() -> None:
    values = np.linspace(0, 65535, 48 * 64).astype(np.uint16).reshape(48, 64)
    grey = read(saved(Image.fromarray(values)))
    assert np.array_equal(grey, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2))
    assert len(np.unique(grey)) == 256
    assert np.array_equal(read(saved(Image.fromarray(values), "TIFF")), grey)


def test_sixteen_bits_of_colour_are_scaled() -> None:
    data = b"\x89PNG\r\n\x1a\n"
    values = np.linspace(0, 65535, 8 * 8 * 3).astype(">u2").reshape(8, 24)
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    for kind, content in (
        (b"IHDR", (8).to_bytes(4, "big") * 2 + b"\x10\x02\0\0\0"), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    ):  # fmt: skip
        data += len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
    assert np.array_equal(read(data), (values >> 8).astype(np.uint8).reshape(8, 8, 3))


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr", "HSV"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.fromarray(gradient()).convert(mode)
    kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    if mode == "HSV":
        image, mode = image.convert("RGB"), "RGB"
    assert np.array_equal(read(saved(image, kind)), np.asarray(image.convert("RGB")))


def test_a_cmyk_jpeg() -> None:
    data = saved(Image.fromarray(gradient()).convert("CMYK"), "JPEG", quality=95)
    assert np.abs(read(data).astype(int) - gradient()).mean() < 8


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB with one transparent colour", "L with one transparent value"])
def test_what_is_transparent_is_laid_on_white(mode: str) -> None:
    if mode in ("RGBA", "LA"):
        image = Image.new("RGBA", (4, 2), (200, 0, 0, 0))
        image.putpixel((0, 0), (0, 0, 0, 255))
        data = saved(image.convert(mode))
    else:
        image = Image.new(mode.split()[0], (4, 2), 0)
        image.putpixel((0, 0), (8, 8, 8) if mode.startswith("RGB") else 1)
        if mode == "P":
            image.putpalette([200, 0, 0, 8, 8, 8])
        data = saved(image, transparency=(0, 0, 0) if mode.startswith("RGB") else 0)
    pixels = read(data)
    assert (pixels[1] == 255).all()
    assert (pixels[0, 0] < 10).all()


def test_half_transparent_is_half_white() -> None:
    assert (read(saved(Image.new("RGBA", (2, 2), (0, 0, 0, 128)))) == 127).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (32, 16), colour) for colour in ("red", "blue", "green")]
    options = {} if kind == "TIFF" else {"duration": 100}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    red, green, blue = read(data).reshape(-1, 3).mean(axis=0)
    assert red > 240
    assert green + blue < 10


# ---------------------------------------------------------------- what cannot


def bomb() -> bytes:
    return saved(Image.new("1", (20_000, 20_000)))


SVG = b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/hostname">]><svg>&x;</svg>'
NONE = {
    "empty": b"", "text": b"hello", "html": b"<!doctype html><h1>404</h1>", "svg": SVG, "pdf": b"%PDF-1.7\n",
    "magic alone": b"\x89PNG\r\n\x1a\n", "random": random.Random(1).randbytes(4096),
    "large random": b"\x89PNG\r\n\x1a\n" + random.Random(2).randbytes(6 << 20),
    "truncated png": plain()[: len(plain()) // 2],
    "truncated jpeg": saved(Image.fromarray(gradient(480, 640)), "JPEG")[:3000],
    "bad crc": plain()[:60] + bytes([plain()[60] ^ 255]) + plain()[61:], "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n",
    "float": saved(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
    "32 bits": saved(Image.fromarray(np.full((8, 8), 1 << 20, np.int32)), "TIFF"),
    "negative": saved(Image.fromarray(np.full((8, 8), -1, np.int32)), "TIFF"),
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_what_is_no_picture_is_refused_at_once(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidImageError, match=r"^image: ") as caught:
        read(NONE[name])
    assert (caught.value.param, caught.value.code, caught.value.status) == ("image", "invalid_image", 400)
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(("width", "height"), [(1025, 1024), (16_385, 1), (1, 16_385)])
def test_a_picture_that_is_too_large(width: int, height: int) -> None:
    with pytest.raises(InvalidImageError, match=f"{width}x{height}"):
        read(saved(Image.new("L", (width, height))))


def test_a_picture_is_not_decoded_to_learn_that_it_is_too_large() -> None:
    data = bomb()
    assert len(data) < 1 << 20
    started = time.monotonic()
    with pytest.raises(RequestError):
        read(data)
    assert time.monotonic() - started < 0.2


# ---------------------------------------------------------------- masks


def stripes() -> Array:
    mask = np.zeros((48, 64), np.uint8)
    mask[:, 16:32] = 255
    return mask


def test_white_is_made_anew() -> None:
    mask = stripes()
    assert np.array_equal(masked(saved(Image.fromarray(mask))), mask)
    assert np.array_equal(masked(saved(Image.fromarray(mask).convert("RGB"))), mask)
    assert np.array_equal(masked(saved(Image.fromarray(mask).convert("1"))), mask)


def test_transparent_is_made_anew() -> None:
    image = Image.fromarray(gradient())
    image.putalpha(Image.fromarray(255 - stripes()))
    assert np.array_equal(masked(saved(image)), stripes())


def test_a_soft_mask_stays_soft() -> None:
    soft = np.tile(np.linspace(0, 255, 64, dtype=np.uint8), (48, 1))
    assert np.array_equal(masked(saved(Image.fromarray(soft))), soft)


def test_an_alpha_channel_that_is_opaque_says_nothing() -> None:
    image = Image.fromarray(stripes()).convert("RGBA")
    assert np.array_equal(masked(saved(image)), stripes())


def test_sixteen_bits_of_a_mask_are_scaled() -> None:
    assert np.array_equal(masked(saved(Image.fromarray(stripes().astype(np.uint16) * 257))), stripes())


def test_a_mask_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="48x32, the picture 64x48") as caught:
        masked(saved(Image.new("L", (48, 32))))
    assert caught.value.param == "mask"


# ---------------------------------------------------------------- base64


def spellings(data: bytes) -> dict[str, str]:
    text = base64.b64encode(data).decode()
    return {
        "plain": text,
        "data url": f"data:image/png;base64,{text}",
        "upper case": f"DATA:image/PNG;BASE64,{text}",
        "no type": f"data:;base64,{text}",
        "parameters": f"data:image/png;name=x.png;base64, {text}",
        "lines": "\n".join(text[k : k + 76] for k in range(0, len(text), 76)) + "\r\n",
        "spaces": f"  {text[:10]} {text[10:]}\t",
        "url-safe": base64.urlsafe_b64encode(data).decode(),
        "no padding": text.rstrip("="),
        "url-safe without padding": base64.urlsafe_b64encode(data).decode().rstrip("="),
    }


@pytest.mark.parametrize("length", [0, 1, 2, 3, 1000, 1001, 1002])
@pytest.mark.parametrize("spelling", spellings(b""))
def test_all_spellings_of_base64(spelling: str, length: int) -> None:
    data = bytes(255 - k % 7 for k in range(length))
    assert decode_base64("image", spellings(data)[spelling]) == data


@pytest.mark.parametrize(
    "text",
    ["!", "QUJD!", "QUJD\u00e9", "Q", "QUJDQ", "QU=JD", "QUI==", "QUJD=", "QUJD====", "=", "data:image/png;base64,!",
     "QU\x00JD", "ＱＵＪＤ", "/etc/hostname"],
)  # fmt: skip
def test_what_is_not_base64_is_not_skipped_over(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_base64("image", text)
    assert caught.value.param == "image"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1/x.png", "https://example.org/x.png", "HTTP://x", "file:///etc/hostname", "ftp://x/y",
     " http://[::1]/metrics", "data:image/png,abc", "data:image/svg+xml;utf8,<svg/>", "javascript:alert(1)"],
)  # fmt: skip
def test_no_url_is_fetched(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="nothing is fetched"):
        decode_base64("image", url)
