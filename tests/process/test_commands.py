"""The command line: what it starts it ends, and what it cannot start it says why."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.process.conftest import (
    ANY_PORT,
    DEMO,
    QUIET,
    Server,
    command,
    eventually,
    marked,
    pixels,
    read_until,
    run,
    running,
)  # fmt: skip

COMMANDS = ["up", "generate", "status", "model-path", "router", "encoder", "denoiser", "decoder", "monolithic"]
ONE_ROLE = ("--encoders", "0", "--denoisers", "0", "--decoders", "0", "--monolithics", "1", "--port", "0")
NOWHERE = "tcp://127.0.0.1:1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def mark() -> Iterator[str]:
    """A word for the environment of a command: whatever bears it must have ended with the test."""
    word = uuid.uuid4().hex
    yield word
    assert marked(word) == []


def environment(mark: str) -> dict[str, str]:
    return os.environ | {"TEST_MARK": mark}


# ---------------------------------------------------------------- help and information


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: python -m diffcluster {name}")
    assert done.stderr == ""


def test_help_lists_every_command() -> None:
    done = run("--help")
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)
    assert run("--version").returncode == 0


def test_a_command_that_is_none() -> None:
    done = run("nope")
    assert done.returncode == 2
    assert "nope" in done.stderr


def test_model_path() -> None:
    assert run("model-path", "demo").stdout.strip() == run("model-path").stdout.strip() == str(DEMO)
    done = run("model-path", "nope")
    assert done.returncode == 1
    assert done.stderr == "diffcluster: there is no embedded model called 'nope'; there is demo\n"


def test_status(server: Server) -> None:
    done = run("status", "--url", server.url)
    assert done.returncode == 0
    words = ("encoder-1", "denoiser-1", "denoiser-2", "decoder-1", "text_encoder", "unet", "vae")
    assert all(word in done.stdout for word in words)
    assert f"{server.url}: ready; waiting requests: none" in done.stdout


def test_proxies_are_not_used(server: Server) -> None:
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")
    done = run("status", "--url", server.url, env=os.environ | proxies)
    assert done.returncode == 0, done.stderr


def test_status_without_a_router() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = run("status", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "does not answer" in done.stderr
    assert done.stderr.count("\n") == 1


# ---------------------------------------------------------------- generate


def test_generate_starts_a_cluster_for_one_picture(tmp_path: Path, mark: str) -> None:
    out = tmp_path / "pizza.png"
    flags = ("--out", str(out), "--seed", "7", "--steps", "2")
    done = run("generate", "a slice of pizza", *flags, env=environment(mark), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert pixels(out.read_bytes()).shape == (128, 128, 3)
    assert f"{out}  (seed 7," in done.stdout.replace("\n", "")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.JPG", b"\xff\xd8"), ("a.webp", b"RIFF")])
def test_generate_by_a_running_cluster(server: Server, tmp_path: Path, name: str, magic: bytes) -> None:
    out = tmp_path / name
    flags = ("--seed", "7", "--steps", "2", "--guidance", "3", "--negative-prompt", "dog", "--size", "64x96")
    done = run("generate", "a slice of pizza", "--out", str(out), "--url", server.url, *flags)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(magic)
    if name == "a.png":
        fields = {"guidance_scale": 3, "negative_prompt": "dog", "size": "64x96"}
        assert out.read_bytes() == server.picture(**fields)


def test_generate_says_what_the_router_refused(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    done = run("generate", "x", "--out", str(out), "--url", server.url, "--size", "65x64")
    assert done.returncode == 1
    assert done.stderr.startswith("diffcluster: size: ")
    assert not out.exists()


def test_generate_to_an_unknown_kind_of_file(server: Server, tmp_path: Path) -> None:
    done = run("generate", "x", "--out", str(tmp_path / "a.gif"), "--url", server.url)
    assert done.returncode == 2
    assert "a.gif" in done.stderr


# ---------------------------------------------------------------- what cannot start


@pytest.mark.parametrize("flag", ["--port", "--control-port", "--bulk-port"])
def test_a_busy_port_is_named(taken: int, flag: str) -> None:
    done = run("router", *ANY_PORT, flag, str(taken))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert str(taken) in done.stderr
    assert f"router.{flag.removeprefix('--').replace('-', '_')}" in done.stderr


def test_up_on_a_busy_port(taken: int, mark: str) -> None:
    done = run("up", *ONE_ROLE, "--port", str(taken), env=environment(mark))
    assert done.returncode == 1
    assert f"port {taken} of 127.0.0.1 is in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("router", "--port", "70000"), "router.port"),
        (("router", "--heartbeat-s", "0"), "router.heartbeat_s"),
        (("encoder", "--router", "localhost"), "role.router"),
        (("encoder", "--receive-bytes", "many"), "role.receive_bytes"),
        (("decoder", "--name", "a b"), "role.name"),
        (("denoiser", "--engine", "pigeon"), "role.engine"),
    ],
)
def test_a_wrong_setting_is_named(arguments: tuple[str, ...], path: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"diffcluster: {path}: ")
    assert done.stderr.count("\n") == 1


UNET = "unet/diffusion_pytorch_model.safetensors"


def index(**changes: object) -> Callable[[Path], object]:
    """Change what model_index.json says."""

    def change(model: Path) -> None:
        file = model / "model_index.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def cut(file: str, end: int) -> Callable[[Path], object]:
    """Leave only the beginning of a file."""
    return lambda model: (model / file).write_bytes((model / file).read_bytes()[:end])


BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "is no directory"),
    "no-index": (lambda model: (model / "model_index.json").unlink(), "model_index.json: "),
    "index-no-json": (cut("model_index.json", -20), "model_index.json: "),
    "unsupported": (index(_class_name="FluxPipeline"), "FluxPipeline"),
    "no-class": (index(unet=["diffusers", "NoSuchModel"]), "unet: "),
    "no-weights": (lambda model: (model / UNET).unlink(), "unet: "),
    "truncated": (cut(UNET, -1000), "unet: "),
    "pickle-only": (lambda model: (model / UNET).rename((model / UNET).with_suffix(".bin")), "unet: "),
    "no-folder": (lambda model: shutil.rmtree(model / "unet"), "unet: "),
}
"""How a model may be broken, and what the denoiser must say of it."""


def broken(folder: Path, how: str) -> Path:
    """A copy of the model that is broken in the way that `how` names."""
    model = folder / how
    shutil.copytree(DEMO, model)
    BREAK[how][0](model)
    return model


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    """How a denoiser ended on each broken model. Two at a time: they only wait for their imports."""
    folder = tmp_path_factory.mktemp("broken")

    def start(how: str) -> subprocess.CompletedProcess[str]:
        model = broken(folder, how)
        return run("denoiser", "--model", str(model), "--router", NOWHERE, *QUIET, cwd=folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(BREAK, pool.map(start, BREAK), strict=True))


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_model_is_named(refusals: dict[str, subprocess.CompletedProcess[str]], how: str) -> None:
    done = refusals[how]
    assert done.returncode == 1
    assert done.stderr.startswith("diffcluster: "), done.stderr
    assert BREAK[how][1] in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


def test_up_ends_when_a_role_cannot_start(tmp_path: Path, mark: str) -> None:
    model = broken(tmp_path, "no-weights")
    done = run("up", "--model", str(model), "--port", "0", env=environment(mark))
    assert done.returncode == 1
    assert "diffcluster: unet: " in done.stderr
    assert done.stderr.splitlines()[-1] == "diffcluster: denoiser-1 could not start: exit status 1; its log says why"
    assert "Traceback" not in done.stderr


def test_a_role_that_is_killed_while_it_loads(mark: str) -> None:
    with running("up", *ONE_ROLE, env=environment(mark)) as process:
        role = eventually(lambda: children(process, "monolithic"))[0]
        role.kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"monolithic-1 could not start: killed by signal 9 (out of memory?)" in stderr
    assert b"Traceback" not in stderr


# ---------------------------------------------------------------- the end of `up`


def children(process: subprocess.Popen[bytes], name: str = "") -> list[psutil.Process]:
    """Children of `process`, of the subcommand `name`."""
    found = []
    for child in psutil.Process(process.pid).children():
        line = child.cmdline()
        if "diffcluster" in line and (not name or name in line):
            found.append(child)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_up_and_all_its_children(number: signal.Signals, mark: str) -> None:
    with running("up", *ONE_ROLE, env=environment(mark)) as process:
        read_until(process, "ready: http://")
        processes = children(process)
        assert len(processes) == 2
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert stdout == b"ended\n"
    assert b"Traceback" not in stderr
    assert not any(child.is_running() for child in processes)


def test_a_signal_before_anything_is_ready(mark: str) -> None:
    with running("up", *ONE_ROLE, env=environment(mark)) as process:
        eventually(lambda: children(process, "monolithic"))
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert stdout == b"ended\n"
    assert b"Traceback" not in stderr


def test_up_serves_starts_again_what_dies_and_takes_its_children_along(mark: str) -> None:
    with running("up", *ONE_ROLE, env=environment(mark)) as process:
        server = Server(read_until(process, r"ready: (http://\S+)\n")[1])
        before = server.picture()
        pid = server.pids()["monolithic-1"]
        psutil.Process(pid).kill()
        eventually(lambda: server.pids().get("monolithic-1", pid) != pid, timeout=60)
        assert server.picture() == before
        processes = children(process)
        assert len(processes) == 2
        process.kill()
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert alive == []
        process.communicate(timeout=10)
    assert marked(mark) == []


# ---------------------------------------------------------------- limits of the machine


@pytest.mark.parametrize("arguments", [("router", *ANY_PORT), ("denoiser", "--router", NOWHERE)])
def test_too_few_descriptors_are_an_error_at_the_start(arguments: tuple[str, ...]) -> None:
    few = shlex.join(["ulimit", "-n", "128"]) + "; exec " + shlex.join(command(*arguments))
    done = subprocess.run(["bash", "-c", few], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "RLIMIT_NOFILE: this process may open 128 files at one time" in done.stderr


def test_an_engine_that_cannot_be_had_is_an_error_and_no_other_one_is_taken() -> None:
    """Its library is hidden, as where it is not installed."""
    hidden = "import sys; sys.modules['mooncake'] = None; sys.argv[1:] = %r; from diffcluster.cli import main; main()"
    arguments = ["denoiser", "--engine", "mooncake", "--router", NOWHERE]
    done = subprocess.run(
        [sys.executable, "-c", hidden % (arguments,)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "role.engine" in done.stderr
    assert "mooncake" in done.stderr
