"""multipart/form-data: parts to the fields and files of a request. Pure."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import multipart

from diffcluster.errors import InvalidRequestError
from diffcluster.router.http.validate import convert, parse

__all__ = ["Form", "is_form", "read_form"]

_MAX_PARTS: Final = 200
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,400}", re.ASCII)
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", re.ASCII)
_BOOLEANS: Final = {"true": True, "false": False}
_NESTED: Final = re.compile(r"(\w+)\[(\w+)\]", re.ASCII)
_Body = TypeVar("_Body")


@dataclass(frozen=True)
class Form:
    """`fields` are the parts of text that are no picture; `files` the others, in order, by name without `[]`."""

    fields: list[tuple[str, str]]
    files: dict[str, list[bytes | str]]

    def request(self, kind: type[_Body]) -> _Body:
        """The fields as `kind`; a field of text that should be a number or a boolean is read as one.

        Raises:
            InvalidRequestError: with the field that is wrong as its `param`.
        """
        kinds = get_type_hints(kind, include_extras=False)
        values: dict[str, Any] = {}
        for name, text in self.fields:
            nested = _NESTED.fullmatch(name)
            outer = nested[1] if nested else name
            if name in values or (nested and not isinstance(values.setdefault(outer, {}), dict)):
                raise InvalidRequestError(f"{outer}: was sent twice", param=outer)
            if nested:
                values[outer][nested[2]] = _read(text, {float})
            else:
                values[name] = _value(name, text, _plain(kinds.get(name, str)))
        return convert(values, kind)


def is_form(content_type: str) -> bool:
    """Whether a body of that type is a form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def read_form(content_type: str, body: bytes, pictures: frozenset[str]) -> Form:
    """Take a body apart. Parts called as in `pictures`, also with `[]`, are files even if they are text.

    Raises:
        InvalidRequestError: it is no form, or a text is not UTF-8.
    """
    _, options = multipart.parse_options_header(content_type)
    form = Form([], {})
    try:
        for name, is_file, content in _parts(options.get("boundary", ""), body):
            bare = name.removesuffix("[]")
            if is_file or bare in pictures:
                form.files.setdefault(bare, []).append(content if is_file else _text(name, content))
            else:
                form.fields.append((name, _text(name, content)))
    except multipart.MultipartError as error:
        raise InvalidRequestError(f"the body is no multipart form: {error}") from error
    for name in set(form.files) - pictures:
        raise InvalidRequestError(f"{name}: there is no file of that name", param=name)
    return form


def _parts(boundary: str, body: bytes) -> Iterator[tuple[str, bool, bytes]]:
    """(name, is a file, content) of each part."""
    segment, content = None, bytearray()
    with multipart.PushMultipartParser(boundary, max_segment_count=_MAX_PARTS, max_header_size=8192) as parser:
        for event in parser.parse(body):
            if isinstance(event, multipart.MultipartSegment):
                segment, content = event, bytearray()
            elif event:
                content += event
            elif segment is not None:
                yield segment.name, segment.filename is not None, bytes(content)


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name}: is not UTF-8", param=name) from error


def _plain(hint: Any) -> set[Any]:
    """The types that an annotation allows, without None."""
    if get_origin(hint) in (Union, types.UnionType):
        return {kind for part in get_args(hint) for kind in _plain(part)} - {type(None)}
    return {get_origin(hint) or hint}


def _value(name: str, text: str, kinds: set[Any]) -> Any:
    """Text as what the field should be; as it is if it cannot be, so that the error names the field."""
    if dict in kinds:
        try:
            return parse(text.encode(), dict[str, Any])
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{name}: {error.message}", param=name) from error
    return text if str in kinds else _read(text, kinds)


def _read(text: str, kinds: set[Any]) -> Any:
    if bool in kinds:
        return _BOOLEANS.get(text.lower(), text)
    if int in kinds and _INTEGER.fullmatch(text):
        return int(text)
    if float in kinds and _NUMBER.fullmatch(text):
        return float(text)
    return text
