"""Settings: where a value comes from, and that a wrong one is named by its dotted path."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffcluster.config import RoleConfig, RouterConfig, describe, load
from diffcluster.errors import ConfigError


def _file(folder: Path, text: str) -> Path:
    path = folder / "diffcluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_anything_the_defaults_hold() -> None:
    assert load(RouterConfig, "router") == RouterConfig()
    assert load(RoleConfig, "role") == RoleConfig()


@pytest.mark.parametrize(
    ("flags", "environ", "in_file", "expected"),
    [
        ({"port": 1}, {"DIFFCLUSTER_ROUTER_PORT": "2"}, "port = 3", 1),
        ({"port": None}, {"DIFFCLUSTER_ROUTER_PORT": "2"}, "port = 3", 2),
        ({}, {}, "port = 3", 3),
        ({}, {}, "", 8000),
    ],
)
def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    flags: dict[str, object], environ: dict[str, str], in_file: str, expected: int, tmp_path: Path
) -> None:
    file = _file(tmp_path, f"[router]\n{in_file}\n")
    assert load(RouterConfig, "router", file=file, environ=environ, flags=flags).port == expected


def test_each_process_reads_its_own_table_and_variables(tmp_path: Path) -> None:
    file = _file(tmp_path, '[router]\nhost = "::1"\n[role]\nmodel = "sd"\n')
    environ = {"DIFFCLUSTER_ROLE_THREADS": "2", "DIFFCLUSTER_ROUTER_PORT": "0", "PATH": "/bin"}
    role = load(RoleConfig, "role", file=file, environ=environ)
    assert (role.model, role.threads) == ("sd", 2)
    assert load(RouterConfig, "router", file=file, environ=environ).host == "::1"


def test_a_role_variable_is_not_taken_for_the_routers() -> None:
    assert load(RouterConfig, "router", environ={"DIFFCLUSTER_ROLE_NO_SUCH": "1"}) == RouterConfig()


@pytest.mark.parametrize(
    ("group", "section", "name", "value"),
    [
        (RouterConfig, "router", "port", 65536),
        (RouterConfig, "router", "port", "many"),
        (RouterConfig, "router", "heartbeat_s", 0),
        (RouterConfig, "router", "log_level", "loud"),
        (RoleConfig, "role", "router", "127.0.0.1:5550"),
        (RoleConfig, "role", "name", "-x"),
        (RoleConfig, "role", "receive_bytes", 1),
        (RoleConfig, "role", "engine", "rdma"),
    ],
)
def test_a_wrong_value_is_named_by_its_dotted_path(group: type, section: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load(group, section, flags={name: value})
    assert caught.value.path == f"{section}.{name}"
    assert repr(value) in str(caught.value)


def test_a_wrong_value_in_the_environment_is_named_likewise() -> None:
    with pytest.raises(ConfigError, match=r"^router\.port: .*'x'"):
        load(RouterConfig, "router", environ={"DIFFCLUSTER_ROUTER_PORT": "x"})


def test_an_unknown_variable_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^DIFFCLUSTER_ROUTER_PROT: there is no setting router\.prot"):
        load(RouterConfig, "router", environ={"DIFFCLUSTER_ROUTER_PROT": "1"})


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("[router]\nprot = 1\n", "router.prot"),
        ("[router]\nport = 99999\n", "router.port"),
        ("router = 1\n", "router"),
    ],
)
def test_a_wrong_setting_in_the_file_is_named(text: str, path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RouterConfig, "router", file=_file(tmp_path, text))
    assert caught.value.path == path


def test_an_unknown_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"denoiser: is no group of settings"):
        load(RouterConfig, "router", file=_file(tmp_path, "[denoiser]\n"))


@pytest.mark.parametrize("content", [b"[router\n", b"[router]\nport =\n", b"host = \xff\n"])
def test_a_file_that_is_no_toml_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml: is not TOML"):
        load(RouterConfig, "router", file=path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(RouterConfig, "router", file=tmp_path / "none.toml")


@pytest.mark.parametrize("group", [RouterConfig, RoleConfig])
def test_each_setting_is_described_and_its_default_is_valid(group: type) -> None:
    rows = describe(group)
    assert [name for name, _, _ in rows] == list(group.__struct_fields__)
    assert all(text.endswith(".") for _, _, text in rows)
    load(group, "x", flags={name: default for name, default, _ in rows})
