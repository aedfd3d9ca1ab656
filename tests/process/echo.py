"""Role processes whose stages do nothing to a picture but take time, so that it can be seen what reached them.

    python -m tests.process.echo encoder --router tcp://127.0.0.1:5550 --model-id echo --step-ms 5

The result is all inputs side by side, at the size and in the order in which they came; without inputs, one colour made
of the seed. A prompt with the word `slow` makes the encoder take two seconds.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import click
import numpy as np
import torch
from PIL import Image

from diffcluster import logs
from diffcluster.cli.options import config_options, load
from diffcluster.config import RoleConfig
from diffcluster.errors import WorkerFailedError
from diffcluster.ids import ROLES, Role
from diffcluster.local import LocalCluster, Plan
from diffcluster.messages import GenerationParameters, InputImage, ModelFacts, VideoFacts
from diffcluster.roles import runtime
from diffcluster.roles.device import CpuDevice
from diffcluster.roles.media import encode_image, encode_video
from diffcluster.roles.stage import Output, Task
from diffcluster.tensors import aligned
from tests.process.conftest import ANY_PORT, QUIET, Server, eventually

SLOW_S: Final = 2.0
COLOUR: Final = "colour"
VIDEO: Final = VideoFacts(num_frames=5, frame_multiple=4, max_frames=33, fps=8)


def facts(model: str) -> ModelFacts:
    """`echo` edits by strength, `echo-edit` by instruction, `echo-video` makes videos, `echo-frames` from a picture."""
    special: dict[str, dict[str, Any]] = {
        "echo": {"tasks": ("text_to_image", "image_to_image", "inpaint"), "max_input_images": 16},
        "echo-edit": {"tasks": ("edit",), "max_input_images": 2},
        "echo-video": {"tasks": ("text_to_video", "image_to_video"), "video": VIDEO},
        "echo-frames": {"tasks": ("image_to_video",), "video": VIDEO},
    }
    values: dict[str, Any] = {
        "id": model, "revision": "1", "pipeline": "Echo", "width": 64, "height": 48, "size_multiple": 8,
        "max_pixels": 1 << 20, "num_inference_steps": 4, "max_inference_steps": 1000, "guidance_scale": 1.0,
        "strength": 0.5, "schedulers": ("EulerDiscreteScheduler", "DDIMScheduler"),
    }  # fmt: skip
    return ModelFacts(**values | special[model])


def pixels_of(info: InputImage, content: bytes) -> torch.Tensor:
    """A picture as it came; it must be what was announced."""
    with Image.open(io.BytesIO(content)) as image:
        found = (image.format, image.mode, *image.size, len(content))
        wanted = ("PNG", "L" if info.kind == "mask" else "RGB", info.width, info.height, info.nbytes)
        if found != wanted:
            raise WorkerFailedError(f"announced as {wanted}, but it is {found}")
        return torch.from_numpy(np.array(image.convert("RGB")))


class EchoStage:
    """One role's part."""

    def __init__(self, role: Role, model: str, step_s: float) -> None:
        self.facts, self.components = facts(model), {"echo": 0}
        self._role, self._step_s = role, step_s
        self._never = threading.Event()

    def warm_up(self, *, small: bool) -> None:
        """Nothing takes longer the first time."""

    def output_bytes(self, parameters: GenerationParameters) -> int:
        """All inputs, one tensor each; else a colour."""
        if self._role not in ("encoder", "denoiser"):
            return 0
        return sum(aligned(3 * info.width * info.height) for info in parameters.inputs) or aligned(3)

    def run(self, task: Task) -> Output:
        """The stage, or all of them."""
        tensors = task.tensors
        if self._role in ("encoder", "monolithic"):
            tensors = self._encode(task)
        if self._role in ("denoiser", "monolithic"):
            self._denoise(task)
        if self._role in ("decoder", "monolithic"):
            return Output(files=[self._file(task.parameters, tensors)])
        return Output(tensors=tensors)

    def _encode(self, task: Task) -> dict[str, torch.Tensor]:
        if "slow" in task.parameters.prompt:
            self._never.wait(SLOW_S)
        announced = task.parameters.inputs
        if len(task.inputs) != len(announced):
            raise WorkerFailedError(f"{len(task.inputs)} inputs came, {len(announced)} were announced")
        seed = task.parameters.seed
        colour = torch.tensor([seed % 256, seed // 256 % 256, 7], dtype=torch.uint8)
        pairs = zip(announced, task.inputs, strict=True)
        return {f"input{k:02}": pixels_of(*pair) for k, pair in enumerate(pairs)} or {COLOUR: colour}

    def _denoise(self, task: Task) -> None:
        steps = task.parameters.num_inference_steps
        for step in range(steps):
            self._never.wait(self._step_s)
            task.progress(step + 1, steps)

    def _file(self, parameters: GenerationParameters, tensors: dict[str, torch.Tensor]) -> tuple[str, bytes]:
        if COLOUR in tensors:
            wide = Image.new("RGB", (parameters.width, parameters.height), tuple(tensors[COLOUR].tolist()))
        else:
            pictures = [Image.fromarray(tensors[name].cpu().numpy()) for name in sorted(tensors)]
            wide = Image.new("RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)))
            for k, picture in enumerate(pictures):
                wide.paste(picture, (sum(p.width for p in pictures[:k]), 0))
        if self.facts.video is None:
            return encode_image(wide, parameters)
        return encode_video([wide.rotate(90 * k) for k in range(parameters.num_frames)], parameters)


@click.command()
@click.argument("role", type=click.Choice(ROLES))
@click.option("--step-ms", type=float, default=2.0)
@config_options(RoleConfig, "role")
def main(role: Role, step_ms: float, **flags: Any) -> None:
    """Serve until told to leave."""
    config = load(RoleConfig, "role", flags)
    logs.setup(config.log_level, role)
    torch.set_num_threads(1)
    stage = EchoStage(role, config.model_id, step_ms / 1000)
    sys.exit(runtime.serve(role, config, stage, CpuDevice(), torch.float32))


# ---------------------------------------------------------------- for the tests


class Echo(Server):
    """A router and echo roles."""

    def __init__(self, cluster: LocalCluster, processes: dict[str, subprocess.Popen[bytes]]) -> None:
        super().__init__(cluster.url)
        self.router_pid = cluster.pids["router"]
        self.processes = processes


@contextmanager
def echo_cluster(model: str, names: Sequence[str], router: Sequence[str] = (), step_ms: float = 2.0) -> Iterator[Echo]:
    """Roles called like `encoder-1`, as many as there are names; ended with the block."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(Plan({}, (), [*ANY_PORT, *QUIET, *router])))
        port = Server(cluster.url).cluster()["control_port"]
        processes = {name: stack.enter_context(_role(model, name, port, step_ms)) for name in names}
        server = Echo(cluster, processes)
        eventually(lambda: _started(server) == set(names), timeout=180)
        yield server


def _started(server: Echo) -> set[str]:
    """The roles that are there; none of them may have ended."""
    assert [process.poll() for process in server.processes.values()] == [None] * len(server.processes)
    return set(server.instances())


@contextmanager
def _role(model: str, name: str, port: int, step_ms: float) -> Iterator[subprocess.Popen[bytes]]:
    role = name.partition("-")[0]
    command = [sys.executable, "-m", "tests.process.echo", role, "--router", f"tcp://127.0.0.1:{port}", *QUIET]
    command += ["--name", name, "--model-id", model, "--step-ms", str(step_ms), "--max-outstanding", "16"]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()


if __name__ == "__main__":
    main()
