"""Forms: parts to fields of the right type and to files, whatever a client calls them."""

from __future__ import annotations

from typing import Any

import pytest

from diffcluster.errors import InvalidRequestError
from diffcluster.router.http.forms import Form, is_form, read_form
from diffcluster.router.http.schemas import EditRequest, VideoRequest
from diffcluster.router.http.uploads import read_edit, read_video

KIND = "multipart/form-data; boundary=xyz"
Part = tuple[str, str | None, bytes | str]


def body(*parts: Part) -> bytes:
    """(name, file name or None, content) each."""
    made = b""
    for name, filename, content in parts:
        file = "" if filename is None else f'; filename="{filename}"'
        made += f'--xyz\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        made += (content.encode() if isinstance(content, str) else content) + b"\r\n"
    return made + b"--xyz--\r\n"


def form(*parts: Part) -> Form:
    return read_form(KIND, body(*parts), frozenset({"image", "mask"}))


def edit(**fields: str) -> EditRequest:
    parts: list[Part] = [(name, None, text) for name, text in ({"prompt": "x"} | fields).items()]
    return form(*parts).request(EditRequest)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [("n", "2", 2), ("seed", "42", 42), ("seed", str(2**63 - 1), 2**63 - 1), ("strength", "0.5", 0.5),
     ("strength", ".5", 0.5), ("strength", "1", 1.0), ("guidance_scale", "7e0", 7.0), ("stream", "true", True),
     ("stream", "False", False), ("num_inference_steps", "4", 4), ("size", "64x64", "64x64"), ("priority", "-3", -3),
     ("negative_prompt", "", ""), ("negative_prompt", "42", "42"), ("quality", "7", "7"),
     ("output_format", "webp", "webp"), ("extra", '{"eta": 0.5}', {"eta": 0.5}),
     ("prompt", "null", "null"), ("prompt", "🍕 بيتزا", "🍕 بيتزا")],
)  # fmt: skip
def test_text_becomes_what_the_field_is(field: str, text: str, value: object) -> None:
    assert getattr(edit(**{field: text}), field) == value


@pytest.mark.parametrize(
    ("field", "text"),
    [("n", "2.0"), ("n", "two"), ("n", ""), ("n", "0x2"), ("n", "２"), ("seed", "1e3"), ("strength", "nan"),
     ("strength", "inf"), ("strength", "half"), ("strength", "0,5"), ("stream", "1"), ("stream", "yes"),
     ("output_format", "gif"), ("output_format", "PNG"), ("extra", "{"), ("extra", "[]"), ("extra", '{"eta": "x"}'),
     ("nope", "1"), ("style", "vivid")],
)  # fmt: skip
def test_text_that_is_not_what_the_field_is_names_the_field(field: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        edit(**{field: text})
    assert caught.value.param == field


def test_nested_fields() -> None:
    assert form(("prompt", None, "x"), ("extra[eta]", None, "0.5"), ("extra[b]", None, "1")).request(
        EditRequest
    ).extra == {"eta": 0.5, "b": 1.0}


@pytest.mark.parametrize(
    ("parts", "param"),
    [([("prompt", None, "x"), ("prompt", None, "y")], "prompt"), ([("size", None, "x")], "prompt"),
     ([("prompt", None, b"\xff")], "prompt"), ([("prompt", None, b"\xed\xa0\x80")], "prompt"),
     ([("prompt", None, "x"), ("extra", None, "{}"), ("extra[eta]", None, "1")], None),
     ([("prompt", None, "x"), ("prompt[a]", None, "1")], "prompt"), ([("file", "a.png", b"x")], "file"),
     ([("prompt", "prompt.txt", "x")], "prompt")],
)  # fmt: skip
def test_forms_that_cannot_be(parts: list[Part], param: str | None) -> None:
    if param is None:
        assert form(*parts).request(EditRequest).extra == {"eta": 1.0}
        return
    with pytest.raises(InvalidRequestError) as caught:
        form(*parts).request(EditRequest)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "content"),
    [(KIND, b""), (KIND, b"x"), (KIND, body()[:-4]), (KIND, body(("a", None, "x"))[:-8]),
     ("multipart/form-data", body()), ("multipart/form-data; boundary=", body()),
     ("multipart/form-data; boundary=other", body(("a", None, "x"))),
     (KIND, b"--xyz\r\n\r\nno header\r\n--xyz--\r\n"), (KIND, body(*[("a", None, "x")] * 201)),
     (KIND, body(("a" * 10_000, None, "x")))],
)  # fmt: skip
def test_bodies_that_are_no_form(kind: str, content: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_form(kind, content, frozenset())


def test_content_types() -> None:
    assert is_form(KIND)
    assert is_form("Multipart/Form-Data")
    assert not is_form("application/json")


# ---------------------------------------------------------------- pictures


def test_all_names_of_pictures_in_order() -> None:
    upload = read_edit(
        KIND,
        body(("image[]", "1", b"one"), ("prompt", None, "x"), ("image", "2", b"two"), ("image[]", "3", b"three"),
             ("mask", "m", b"mask")),
    )  # fmt: skip
    assert (upload.images, upload.mask, upload.param) == ([b"one", b"two", b"three"], b"mask", "image")


def test_a_picture_may_be_text() -> None:
    upload = read_edit(KIND, body(("image", None, "QUJD"), ("prompt", None, "x")))
    assert upload.images == ["QUJD"]


@pytest.mark.parametrize(
    ("fields", "images", "param"),
    [('"image": "a"', ["a"], "image"), ('"image": ["a", "b"]', ["a", "b"], "image"),
     ('"image": {"image_url": "a"}', ["a"], "image"), ('"images": [{"image_url": "a"}, "b"]', ["a", "b"], "images"),
     ('"images": null, "image": "a"', ["a"], "image"), ('"image": []', [], "image")],
)  # fmt: skip
def test_all_forms_of_json(fields: str, images: list[Any], param: str) -> None:
    upload = read_edit("application/json", f'{{"prompt": "x", {fields}, "mask": {{"image_url": "m"}}}}'.encode())
    assert (upload.images, upload.mask, upload.param) == (images, "m", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [('"image": 7', "image"), ('"image": [7]', "image"), ('"images": "a"', "images"), ('"mask": ["m"]', "mask"),
     ('"image": "a", "images": ["b"]', "images"), ('"images": [{"file_id": "f"}]', "images"),
     ('"images": [{"image_url": "u", "detail": 1}]', "images")],
)  # fmt: skip
def test_json_that_cannot_be(fields: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_edit("application/json", f'{{"prompt": "x", {fields}}}'.encode())
    assert caught.value.param == param


def test_two_masks() -> None:
    with pytest.raises(InvalidRequestError, match="one only"):
        read_edit(KIND, body(("prompt", None, "x"), ("mask", "a", b"x"), ("mask", "b", b"x")))


def test_videos() -> None:
    upload = read_video(KIND, body(("prompt", None, "x"), ("seconds", None, "4"), ("input_reference", "a", b"x")))
    assert (upload.body.seconds, upload.images, upload.param) == ("4", [b"x"], "input_reference")
    assert read_video("application/json", b'{"prompt": "x", "seconds": 4}').body == VideoRequest(
        prompt="x", seconds=4.0
    )
