"""Trains the embedded model on the CPU, and writes it as a StableDiffusionPipeline directory.

    python -m training.demo.train --out build/demo --minutes 90

Two processes of one thread each average their gradients over gloo: with two threads in one process, each OpenMP
barrier spins, and anything else on the machine then makes a step several times slower. Progress lies in
`--out`/checkpoint.pt at each `--every` steps; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderTiny, StableDiffusionPipeline
from torch import nn
from torch.nn import functional

from training.demo import build, captions, render

__all__ = ["main"]

_CAPTION_DROPOUT = 0.1
_EMA = 0.998
_RATE = 1.2e-3
_WARM_UP_STEPS = 150


def main() -> None:
    """Parse arguments, then train in `--processes` processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint and of the pipeline")
    parser.add_argument(
        "--minutes", type=float, default=90, help="wall time for the UNet, minutes (default %(default)s)"
    )
    parser.add_argument("--decoder-minutes", type=float, default=6, help="the same for the autoencoder's decoder")
    parser.add_argument("--batch", type=int, default=16, help="pictures per process and step")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoints")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.multiprocessing.spawn(_worker, args=(arguments,), nprocs=arguments.processes)


def _worker(rank: int, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1 + rank)
    store = arguments.out / "rendezvous"
    if rank == 0:
        store.unlink(missing_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    time.sleep(0.5 * rank)  # rank 0 clears what a run before left
    dist.init_process_group("gloo", init_method=f"file://{store.resolve()}", rank=rank, world_size=arguments.processes)
    subjects = captions.load_subjects()
    data = Data(subjects, random.Random(100 * time.time_ns() + rank))
    vae = _trained_autoencoder(data, arguments)
    Trainer(data, vae, arguments).run()
    dist.destroy_process_group()


class Data:
    """An endless stream of pictures and captions; each subject comes up equally often."""

    def __init__(self, subjects: list[captions.Subject], rng: random.Random) -> None:
        self.subjects, self.rng = subjects, rng
        self.renderer = render.Renderer(subjects)
        self._deck: list[int] = []

    def pictures(self, count: int) -> tuple[np.ndarray, list[str]]:
        """`count` pictures (uint8, N x 128 x 128 x 3) and a caption of each."""
        images, texts = [], []
        for _ in range(count):
            if not self._deck:
                self._deck = self.rng.sample(range(len(self.subjects)), len(self.subjects))
            index = self._deck.pop()
            image, view = self.renderer.sample(self.rng, index)
            images.append(image)
            texts.append(captions.caption(self.rng, self.subjects[index], view))
        return np.stack(images), texts


def _to_tensor(images: np.ndarray) -> torch.Tensor:
    """uint8 N x H x W x 3 to float32 N x 3 x H x W in -1..1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def _average_gradients(modules: list[nn.Module]) -> None:
    """All gradients in one flat all-reduce: one round of gloo a step instead of hundreds."""
    gradients = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _share(modules: list[nn.Module]) -> None:
    """Give all processes rank 0's parameters."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, 0)


def _elapsed_share(started: float, minutes: float) -> float:
    """Share of the time budget that is used, 0..1, agreed by all processes."""
    share = torch.tensor([(time.monotonic() - started) / (60 * minutes)])
    dist.broadcast(share, 0)
    return min(1.0, float(share))


def _rate(step: int, share: float) -> float:
    return _RATE * min(1.0, step / _WARM_UP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


def _trained_autoencoder(data: Data, arguments: argparse.Namespace) -> AutoencoderTiny:
    saved = arguments.out / "vae"
    if saved.exists():
        return AutoencoderTiny.from_pretrained(saved)
    vae = build.autoencoder(data.pictures(600)[0])
    _share([vae])
    decoder = vae.decoder
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=_RATE, weight_decay=1e-4)
    started, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        pixels = _to_tensor(data.pictures(4)[0])
        with torch.no_grad():
            latents = vae.encoder(pixels)
            # The denoiser's latents are never exact: the decoder learns to forgive.
            latents = latents + torch.randn_like(latents) * 0.04 * torch.rand(len(latents), 1, 1, 1)
        error = decoder(latents) - pixels
        loss = error.abs().mean() + 2 * error.square().mean()
        optimizer.zero_grad()
        loss.backward()
        _average_gradients([decoder])
        step += 1
        share = _elapsed_share(started, arguments.decoder_minutes)
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, share)
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 0:
            print(f"decoder step {step} {10 * math.log10(4 / float(error.square().mean())):.1f} dB", flush=True)
    if dist.get_rank() == 0:
        vae.save_pretrained(saved)
    dist.barrier()
    return vae


class Trainer:
    """Text encoder and UNet, learnt together."""

    def __init__(self, data: Data, vae: AutoencoderTiny, arguments: argparse.Namespace) -> None:
        self.data, self.vae, self.arguments = data, vae.eval(), arguments
        self.tokenizer = build.tokenizer(captions.corpus(data.subjects, random.Random(0), 40_000))
        self.text = build.text_encoder(len(self.tokenizer), self.tokenizer.eos_token_id)
        self.unet = build.unet()
        self.modules: list[nn.Module] = [self.text, self.unet]
        self.scheduler = build.scheduler()
        self.step, self.spent = 0, 0.0
        _share(self.modules)
        self.averages = [copy.deepcopy(module) for module in self.modules]
        parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=_RATE, betas=(0.9, 0.99), weight_decay=1e-2)
        self._resume()

    def run(self) -> None:
        """Train until the time is up."""
        started, share, begun, losses = time.monotonic() - self.spent, 0.0, time.monotonic(), []
        while share < 1:
            losses.append(self._train_step())
            self.step += 1
            share = _elapsed_share(started, self.arguments.minutes)
            if dist.get_rank() == 0 and self.step % 25 == 0:
                pace = (time.monotonic() - begun) / len(losses)
                recent = sum(losses[-100:]) / len(losses[-100:])
                print(f"step {self.step} loss {recent:.4f} {pace:.2f} s/step {share:.0%}", flush=True)
            if self.step % self.arguments.every == 0 or share >= 1:
                self.spent = time.monotonic() - started
                self._save()
            for group in self.optimizer.param_groups:
                group["lr"] = _rate(self.step, share)

    def _train_step(self) -> float:
        images, texts = self.data.pictures(self.arguments.batch)
        texts = ["" if self.data.rng.random() < _CAPTION_DROPOUT else text for text in texts]
        loss = self._loss(_to_tensor(images), texts)
        self.optimizer.zero_grad()
        loss.backward()
        _average_gradients(self.modules)
        nn.utils.clip_grad_norm_([p for module in self.modules for p in module.parameters()], 1.0)
        self.optimizer.step()
        self._follow()
        return loss.item()

    def _loss(self, pixels: torch.Tensor, texts: list[str]) -> torch.Tensor:
        with torch.no_grad():
            latents = self.vae.encode(pixels).latents * self.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        # Biased towards noise, where the text decides what the picture is of.
        timesteps = (torch.rand(len(latents)).pow(0.75) * self.scheduler.config.num_train_timesteps).long()
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        tokens = self.tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
        embeds = self.text(tokens.input_ids).last_hidden_state
        predicted = self.unet(noisy, timesteps, embeds).sample
        return functional.mse_loss(predicted, self.scheduler.get_velocity(latents, noise, timesteps))

    def _follow(self) -> None:
        """Move the averaged weights, which are what is shipped, towards the trained ones."""
        decay = min(_EMA, (1 + self.step) / (10 + self.step))
        for average, module in zip(self.averages, self.modules, strict=True):
            for old, new in zip(average.parameters(), module.parameters(), strict=True):
                old.data.lerp_(new.data, 1 - decay)

    def _resume(self) -> None:
        path = self.arguments.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.step, self.spent = state["step"], state["spent"]
        for module, saved in zip([*self.modules, *self.averages], state["modules"], strict=True):
            module.load_state_dict(saved)
        self.optimizer.load_state_dict(state["optimizer"])

    def _save(self) -> None:
        if dist.get_rank() != 0:
            return
        modules = [module.state_dict() for module in (*self.modules, *self.averages)]
        state = {"step": self.step, "spent": self.spent, "modules": modules, "optimizer": self.optimizer.state_dict()}
        temporary = self.arguments.out / "checkpoint.tmp"
        torch.save(state, temporary)
        temporary.replace(self.arguments.out / "checkpoint.pt")
        export(self.arguments.out / "pipeline", self.vae, self.tokenizer, *self.averages)


def export(path: Path, vae: AutoencoderTiny, tokenizer: object, text: nn.Module, unet: nn.Module) -> None:
    """Write a pipeline directory: the UNet in float16, the rest in float32.

    transformers loads a text encoder in the dtype of its file, diffusers loads a UNet as float32: this way a plain
    `from_pretrained` without a dtype gives float32 throughout.
    """
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=copy.deepcopy(unet).half(),
        scheduler=build.scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(path, safe_serialization=True)


if __name__ == "__main__":
    main()
