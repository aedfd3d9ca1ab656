"""All settings: frozen groups whose fields say what they mean, in which unit, and between which bounds.

A value comes from the first that gives it: the command's flag, the environment (`DIFFCLUSTER_ROUTER_PORT`,
`DIFFCLUSTER_ROLE_DEVICE`), the TOML file (`[router]`, `[role]`), the default here. A wrong value is a `ConfigError`
with its dotted path. The CLI makes its flags, and docs/configuration.md its tables, from these structs.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from diffcluster.errors import ConfigError
from diffcluster.ids import NAME_PATTERN

__all__ = ["PREFIX", "LogLevel", "RoleConfig", "RouterConfig", "describe", "load"]

PREFIX: Final = "DIFFCLUSTER_"
LogLevel = Literal["debug", "info", "warning", "error"]
Port = Annotated[int, Meta(ge=0, le=65535)]
_Group = TypeVar("_Group", bound=Struct)


def _doc(description: str, **bounds: Any) -> Meta:
    return Meta(description=description, **bounds)


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the router."""

    host: Annotated[str, _doc("Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, _doc("Port of the HTTP server; 0 takes a free one and prints it.", ge=0, le=65535)] = 8000
    control_host: Annotated[str, _doc("Address that roles connect to. Roles are trusted: keep it private.")] = (
        "127.0.0.1"
    )
    control_port: Annotated[int, _doc("Port that roles connect to; 0 takes a free one.", ge=0, le=65535)] = 5550
    bulk_port: Annotated[
        int, _doc("Port for finished files, told to roles when they register; 0 takes a free one.", ge=0, le=65535)
    ] = 0
    heartbeat_s: Annotated[
        float, _doc("Seconds between heartbeats. Three that are missing mean that a side is lost.", gt=0, le=60)
    ] = 1.0
    request_timeout_s: Annotated[
        float, _doc("Seconds a request may take, queueing included, unless it brings a deadline of its own.", gt=0)
    ] = 600.0
    max_requests: Annotated[
        int, _doc("Pictures that may be queued or running at one time; more are refused with 429.", ge=1)
    ] = 1000
    max_losses: Annotated[
        int, _doc("Instances that may die under one request before it is taken for the cause and fails.", ge=1, le=100)
    ] = 2
    max_pixels: Annotated[int, _doc("Largest width x height, whatever a model allows. Pixels.", ge=1)] = 4_194_304
    max_images: Annotated[int, _doc("Largest `n` of one HTTP request.", ge=1, le=100)] = 10
    max_body_bytes: Annotated[int, _doc("Largest body of an HTTP request without pictures. Bytes.", ge=1024)] = (
        1_048_576
    )
    max_upload_bytes: Annotated[
        int, _doc("Largest body of an HTTP request that brings pictures. Bytes.", ge=1024, le=2**30)
    ] = 64 << 20
    max_input_pixels: Annotated[
        int, _doc("Largest width x height of a picture that a client sends. Pixels.", ge=1, le=2**28)
    ] = 16_777_216
    max_input_bytes: Annotated[
        int, _doc("Clients' pictures that are kept for requests on their way; more are refused with 429. Bytes.", ge=1)
    ] = 1 << 30
    max_videos: Annotated[
        int, _doc("Videos that are kept or in the making; the oldest finished ones make room for new ones.", ge=1)
    ] = 100
    max_video_bytes: Annotated[int, _doc("Finished videos that are kept in memory. Bytes.", ge=1)] = 1 << 30
    log_level: Annotated[LogLevel, _doc("Least severe log lines that are printed.")] = "info"


class RoleConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of an encoder, denoiser, decoder or monolithic process."""

    router: Annotated[str, _doc("Control address of the router.", pattern=r"^tcp://.+:[0-9]+$")] = (
        "tcp://127.0.0.1:5550"
    )
    model: Annotated[
        str, _doc("Directory of a diffusers pipeline, or `demo` for the embedded model.", min_length=1)
    ] = "demo"
    model_id: Annotated[
        str, _doc("Name of the model in the API; the directory's name if left empty.", max_length=256)
    ] = ""
    name: Annotated[
        str,
        _doc("Name of this instance; made from the role, host and pid if left empty.", pattern=rf"^$|{NAME_PATTERN}"),
    ] = ""
    device: Annotated[
        str, _doc("Torch device such as `cpu` or `cuda:1`; `auto` takes the accelerator if there is one.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _doc("Type of all components' weights; `auto` is float32 on CPU and bfloat16 on an accelerator."),
    ] = "auto"
    threads: Annotated[
        int,
        _doc(
            "CPU threads for computing; 0 takes OMP_NUM_THREADS, else all cores this process may use, as plain "
            "diffusers does. Another number can change the last bits of a picture.",
            ge=0,
        ),
    ] = 0
    engine: Annotated[
        Literal["auto", "shm", "tcp", "mooncake"],
        _doc(
            "How tensors are received: `auto` offers shared memory and TCP, and peers on one host take the first; "
            "`mooncake` needs its library. What is asked for and cannot be had is an error."
        ),
    ] = "auto"
    transfer_host: Annotated[str, _doc("Address that the TCP engine binds; the wildcard needs `advertise_host`.")] = (
        "127.0.0.1"
    )
    advertise_host: Annotated[
        str, _doc("Address that peers are told to connect to; `transfer_host` if left empty.")
    ] = ""
    receive_bytes: Annotated[int, _doc("Size of the region that peers write into. Bytes.", ge=4096, le=2**40)] = (
        64 << 20
    )
    receive_memory: Annotated[
        Literal["host", "device"],
        _doc(
            "Where that region lies: pinned memory of the host, or memory of the accelerator, into which peers write "
            "directly (GPUDirect; only with `mooncake` by RDMA)."
        ),
    ] = "host"
    send_bytes: Annotated[
        int, _doc("Size of the region that holds results until the next stage has finished. Bytes.", ge=4096, le=2**40)
    ] = 64 << 20
    max_outstanding: Annotated[
        int, _doc("Requests that the router may give to this instance at one time.", ge=1, le=10_000)
    ] = 16
    max_batch_size: Annotated[
        int,
        _doc(
            "Requests that compute side by side, joined at each step as far as they fit together. With 1, one comes "
            "after another.",
            ge=1,
            le=1000,
        ),
    ] = 8
    exact: Annotated[
        Literal["auto", "on", "off"],
        _doc(
            "Join requests only where no bit of any picture changes, which is found out for every size of batch when "
            "it first occurs. Off, pictures may differ in the last bits from those computed alone. `auto`: on a CPU; "
            "accelerators choose other kernels for larger batches, so that there hardly anything would be joined."
        ),
    ] = "auto"
    warm_up: Annotated[
        Literal["auto", "full", "small", "off"],
        _doc(
            "What a role computes before it takes requests: blank ones at the model's own size, alone and joined "
            "(`full`), or one small one. `auto`: full on an accelerator, small on a CPU."
        ),
    ] = "auto"
    compile: Annotated[
        Literal["", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        _doc("Compile the denoiser by `torch.compile` in this mode, at the warm-up; compiled code is kept on disk."),
    ] = ""
    attention_backend: Annotated[str, _doc("Attention of the denoiser, by diffusers' name, such as `flash`.")] = ""
    quantization: Annotated[
        str,
        _doc(
            "How weights are quantized when they are loaded: a backend of diffusers and its arguments as JSON, such as "
            '`bitsandbytes_4bit {"load_in_4bit": true}`; `components` among them names others than the denoiser.'
        ),
    ] = ""
    offload: Annotated[
        Literal["", "block_level", "leaf_level"],
        _doc("Keep weights in host memory, and bring them to the accelerator group by group."),
    ] = ""
    step_cache: Annotated[
        str,
        _doc(
            "Reuse what changes little from step to step: a cache configuration of diffusers and its arguments as "
            'JSON, such as `FirstBlockCacheConfig {"threshold": 0.1}`. Requests then compute one after another.'
        ),
    ] = ""
    batch_delay_s: Annotated[
        float, _doc("Seconds that a request's first step may wait for others to join. Seldom needed.", ge=0, le=60)
    ] = 0.0
    transfer_timeout_s: Annotated[float, _doc("Seconds one transfer may take.", gt=0, le=3600)] = 30.0
    transfer_window: Annotated[
        int,
        _doc("Transfers to one peer that may be under way at one time, each on a connection of its own.", ge=1, le=64),
    ] = 2
    grants: Annotated[
        int,
        _doc("Receive slots to lease ahead, so that a hand-off need not ask for one; 0 turns this off.", ge=0, le=64),
    ] = 2
    checksum: Annotated[
        bool, _doc("Take an XXH3 checksum of all that is handed on; the receiver compares it before it loads.")
    ] = False
    overlap: Annotated[
        bool,
        _doc("Load the next request and push the last one while one computes. Off: to measure what that is worth."),
    ] = True
    quarantine_s: Annotated[
        float,
        _doc("Seconds before a slot that someone may still write is used again; above every transfer time-out.", gt=0),
    ] = 120.0
    drain_s: Annotated[float, _doc("Seconds to finish work after SIGTERM before leaving anyway.", ge=0)] = 30.0
    log_level: Annotated[LogLevel, _doc("Least severe log lines that are printed.")] = "info"


def load(
    group: type[_Group],
    section: str,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> _Group:
    """The settings of `section`, such as `router`. `flags` that are None were not given.

    Raises:
        ConfigError: a value is wrong, or a name is unknown.
    """
    values: dict[str, object] = {}
    if file is not None:
        values.update(_from_file(file, section))
    values.update(_from_environ(group, section, environ or {}))
    values.update({name: value for name, value in (flags or {}).items() if value is not None})
    try:
        return msgspec.convert(values, group, strict=False)
    except msgspec.ValidationError as error:
        raise _config_error(section, error, values) from error


def describe(group: type[Struct]) -> list[tuple[str, Any, str]]:
    """(field, default, description) of each setting in `group`."""
    hints = get_type_hints(group, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(group):
        meta = next(part for part in hints[field.name].__metadata__ if isinstance(part, Meta))
        rows.append((field.name, field.default, meta.description or ""))
    return rows


def _from_file(file: Path, section: str) -> dict[str, object]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"is not TOML: {error}") from error
    unknown = set(tables) - {"router", "role"}
    if unknown:
        raise ConfigError(f"{file}: {min(unknown)}", "is no group of settings; there are [router] and [role]")
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(section, f"must be a table, not {table!r}")
    return table


def _from_environ(group: type[Struct], section: str, environ: Mapping[str, str]) -> dict[str, object]:
    prefix = f"{PREFIX}{section.upper()}_"
    values: dict[str, object] = {}
    for variable, value in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in group.__struct_fields__:
            raise ConfigError(variable, f"there is no setting {section}.{name}")
        values[name] = value
    return values


def _config_error(section: str, error: msgspec.ValidationError, values: Mapping[str, object]) -> ConfigError:
    """Turn msgspec's `... - at `$.port`` into a dotted path, with the value that was wrong."""
    text = str(error)
    at = re.search(r" - at `\$\.?(.*)`$", text)
    if at is None:
        unknown = re.search(r"unknown field `(.*)`", text)
        return ConfigError(
            f"{section}.{unknown[1]}" if unknown else section, "there is no such setting" if unknown else text
        )
    name = at[1]
    return ConfigError(f"{section}.{name}", f"{text[: at.start()]}, got {values.get(name)!r}")
