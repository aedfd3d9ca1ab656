"""Writes the parts of docs/ that the code knows: `python -m docs.generate [--check]`."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from pathlib import Path

from msgspec import Struct

from diffcluster import config, errors, messages
from diffcluster.roles import batching
from diffcluster.roles.pipelines.families import FAMILIES
from diffcluster.router.machine import HANDLERS
from diffcluster.transport.slots import TRANSITIONS

DOCS = Path(__file__).parent


def main() -> int:
    """0 if everything was, or now is, up to date."""
    stale = []
    for path, text in (
        (DOCS / "configuration.md", _configuration()),
        *((DOCS / name, _filled((DOCS / name).read_text(encoding="utf-8"))) for name in ("protocol.md", "models.md")),
    ):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _first_line(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _configuration() -> str:
    parts = [
        "# Configuration",
        "Made from `diffcluster/config.py` by `make docs`. A value comes from the first that gives it: the flag, the "
        "environment variable, the TOML file named by `--config`, the default.",
    ]
    for group, section, who in (
        (config.RouterConfig, "router", "`diffcluster router`"),
        (config.RoleConfig, "role", "the roles"),
    ):
        rows = [
            (
                _flag(name, default),
                f"`{config.PREFIX}{section.upper()}_{name.upper()}`",
                f"`{default!r}`",
                text,
            )
            for name, default, text in config.describe(group)
        ]
        parts.append(f"## `[{section}]`: {who}")
        parts.append(_table(("flag", "environment", "default", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def _flag(name: str, default: object) -> str:
    flag = name.replace("_", "-")
    return f"`--{flag}`, `--no-{flag}`" if isinstance(default, bool) else f"`--{flag}`"


def _messages(union: object) -> str:
    kinds: tuple[type[Struct], ...] = typing.get_args(union)
    rows = [
        (f"`{kind.__name__}`", ", ".join(f"`{f}`" for f in kind.__struct_fields__), _first_line(kind)) for kind in kinds
    ]
    return _table(("message", "fields", "says"), rows)


def _handlers() -> str:
    rows = [
        (f"`{phase}`", f"`{kind.__name__}`", f"`{function.__name__}`") for (kind, phase), function in HANDLERS.items()
    ]
    return _table(("phase of the request", "message that is heard", "by"), rows)


def _slots() -> str:
    rows = [
        (f"`{state}`", ", ".join(f"`{to}`" for to in sorted(after)) or "none") for state, after in TRANSITIONS.items()
    ]
    return _table(("state of a lease", "may become, besides free"), rows)


def _errors() -> str:
    kinds = errors.RequestError.__subclasses__()
    rows = [(f"`{kind.code}`", str(kind.status), _first_line(kind)) for kind in kinds]
    return _table(("code", "HTTP", "meaning"), rows)


def _families() -> str:
    rows = []
    for family in FAMILIES:
        tasks = "<br>".join(f"{task}: `{name}`" for task, name in family.pipelines.items())
        rules = family.rules
        together = f"never: {rules.alone}" if rules.alone else "requests of one size"
        if rules.masks or rules.ragged:
            together += "; prompts of different lengths are padded for it"
        rows.append((family.name, tasks, together))
    return _table(("family", "tasks", "computes together"), rows)


def _reasons() -> str:
    found = re.findall(r"^    ([a-z_]+(?::[A-Z]+)?)  +(.*)$", inspect.getdoc(batching) or "", re.MULTILINE)
    return _table(("reason", "meaning"), [(f"`{reason}`", text) for reason, text in found])


def _filled(text: str) -> str:
    made = {
        "role-to-router": _messages(messages.RoleToRouter),
        "router-to-role": _messages(messages.RouterToRole),
        "handlers": _handlers(),
        "slots": _slots(),
        "errors": _errors(),
        "families": _families(),
        "reasons": _reasons(),
    }
    for name, table in made.items():
        text = re.sub(
            rf"(<!-- made: {name} -->\n).*?(\n<!-- end -->)",
            lambda found, table=table: found[1] + table + found[2],
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
