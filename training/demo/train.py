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
from diffusers import AutoencoderTiny, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from torch.nn import functional
from transformers import CLIPTextModel, CLIPTokenizer

from training.demo import build, captions, render

__all__ = ["main"]

_CAPTION_DROPOUT = 0.1
_EMA = 0.998
_BLOCK = 8
"""Pixels a side of what one latent is of."""
_RATE = 1.2e-3
_TEXT_RATE = 4e-3
_WARM_UP_STEPS = 150
_MOVE_FROM, _MOVE_UNTIL = 0.5, 0.7
"""Shares of the time between which sizes and places go from one to `_SPREAD`; a given UNet moves at once."""
_SPREAD = 0.5


def main() -> None:
    """Parse arguments, then train in `--processes` processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint and of the pipeline")
    parser.add_argument(
        "--minutes", type=float, default=90, help="wall time for the UNet, minutes (default %(default)s)"
    )
    parser.add_argument("--decoder-minutes", type=float, default=6, help="the same for the autoencoder's decoder")
    parser.add_argument("--text-minutes", type=float, default=5, help="the same for the text encoder")
    parser.add_argument("--unet", type=Path, help="begin with this UNet, instead of a random one")
    parser.add_argument(
        "--rate", type=float, default=_RATE, help="highest learning rate of the UNet (default %(default)s)"
    )
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

    def labelled(self, count: int) -> tuple[list[str], list[torch.Tensor]]:
        """`count` captions, and what each says: subject; ground, or none; small, big or neither."""
        texts, labels = [], []
        colours = list(captions.COLOURS)
        for _ in range(count):
            index = self.rng.randrange(len(self.subjects))
            view = captions.View(self.rng.choice(colours), self.rng.choice(self.renderer.scales))
            texts.append(captions.caption(self.rng, self.subjects[index], view))
            labels.append((index, *captions.said(texts[-1], view)))
        return texts, list(torch.tensor(labels).T)

    def pictures(self, count: int, spread: float = 1.0) -> tuple[np.ndarray, list[str]]:
        """`count` pictures (uint8, N x 128 x 128 x 3) and a caption of each. `spread`: see `Renderer.sample`."""
        images, texts = [], []
        for _ in range(count):
            if not self._deck:
                self._deck = self.rng.sample(range(len(self.subjects)), len(self.subjects))
            index = self._deck.pop()
            image, view = self.renderer.sample(self.rng, index, spread)
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


def _tokenizer(data: Data, arguments: argparse.Namespace) -> CLIPTokenizer:
    """Learnt once and kept: a text encoder understands no other, and a change of the captions would make another."""
    saved = arguments.out / "tokenizer"
    if dist.get_rank() == 0 and not saved.exists():
        build.tokenizer(captions.corpus(data.subjects, random.Random(0), 40_000)).save_pretrained(saved)
    dist.barrier()
    return CLIPTokenizer.from_pretrained(saved)


def _trained_text(data: Data, tokenizer: CLIPTokenizer, arguments: argparse.Namespace) -> CLIPTextModel:
    """The text encoder, learnt from captions alone: from the mean of its output, heads name subject, ground and size.

    This takes minutes where learning it through the UNet takes hours, and hundreds of thousands of wordings are what
    teaches it which words to ignore.
    """
    saved = arguments.out / "text"
    if saved.exists():
        return CLIPTextModel.from_pretrained(saved)
    text = build.text_encoder(len(tokenizer), tokenizer.eos_token_id)
    width = text.config.hidden_size
    heads = nn.ModuleList([nn.Linear(width, n) for n in (len(data.subjects), len(captions.COLOURS) + 1, 3)])
    _share([text, heads])
    parameters = [*text.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, betas=(0.9, 0.99), weight_decay=1e-2)
    started, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        texts, targets = data.labelled(64)
        embeds = text(_tokens(tokenizer, texts)).last_hidden_state.mean(1)
        scores = [head(embeds) for head in heads]
        loss = sum(functional.cross_entropy(score, target) for score, target in zip(scores, targets, strict=True))
        optimizer.zero_grad()
        loss.backward()
        _average_gradients([text, heads])
        step += 1
        share = _elapsed_share(started, arguments.text_minutes)
        for group in optimizer.param_groups:
            group["lr"] = _TEXT_RATE / _RATE * _rate(step, share)
        optimizer.step()
        if dist.get_rank() == 0 and (step % 50 == 0 or share >= 1):
            right = (scores[0].argmax(1) == targets[0]).float().mean()
            print(f"text step {step} loss {loss.item():.3f} subjects right {right:.1%}", flush=True)
    if dist.get_rank() == 0:
        _print_held_out(data, tokenizer, text, heads[0])
        text.save_pretrained(saved)
    dist.barrier()
    return text


@torch.no_grad()
def _print_held_out(data: Data, tokenizer: CLIPTokenizer, text: CLIPTextModel, head: nn.Module) -> None:
    for wording in captions.HELD_OUT:
        texts = [wording.format(x=s.names[0], bare=captions.bare(s.names[0])) for s in data.subjects]
        found = head(text(_tokens(tokenizer, texts)).last_hidden_state.mean(1)).argmax(1)
        print(f"{(found == torch.arange(len(texts))).float().mean():.1%} right in: {wording}", flush=True)


def _tokens(tokenizer: CLIPTokenizer, texts: list[str]) -> torch.Tensor:
    return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids


@torch.no_grad()
def _folded(encoder: nn.Module) -> nn.Conv2d:
    """`encoder`, which is affine and looks at blocks of 8x8 pixels alone, as one convolution: much faster."""
    nothing = encoder(torch.zeros(1, 3, _BLOCK, _BLOCK))
    single = encoder(torch.eye(3 * _BLOCK * _BLOCK).view(-1, 3, _BLOCK, _BLOCK))
    folded = nn.Conv2d(3, nothing.shape[1], _BLOCK, stride=_BLOCK)
    folded.weight.copy_((single - nothing).flatten(1).T.view_as(folded.weight))
    folded.bias.copy_(nothing.flatten())
    return folded


class Trainer:
    """The UNet, over a text encoder that stays as it is."""

    def __init__(self, data: Data, vae: AutoencoderTiny, arguments: argparse.Namespace) -> None:
        self.data, self.vae, self.arguments = data, vae.eval(), arguments
        self.tokenizer = _tokenizer(data, arguments)
        self.text = _trained_text(data, self.tokenizer, arguments).eval()
        self.unet = build.unet()
        self.scheduler = build.scheduler()
        self.step, self.spent, self.share = 0, 0.0, 0.0
        _share([self.unet])
        self.average = copy.deepcopy(self.unet)
        self.encoder = _folded(self.vae.encoder)
        self.optimizer = torch.optim.AdamW(
            self.unet.parameters(), lr=_RATE, betas=(0.9, 0.99), weight_decay=1e-2, fused=True
        )
        self._resume()
        self.nothing = self._embeds([""])

    def run(self) -> None:
        """Train until the time is up."""
        started, begun, losses = time.monotonic() - self.spent, time.monotonic(), []
        while self.share < 1:
            losses.append(self._train_step())
            self.step += 1
            self.share = _elapsed_share(started, self.arguments.minutes)
            if dist.get_rank() == 0 and self.step % 25 == 0:
                pace = (time.monotonic() - begun) / len(losses)
                recent = sum(losses[-100:]) / len(losses[-100:])
                print(f"step {self.step} loss {recent:.4f} {pace:.2f} s/step {self.share:.0%}", flush=True)
            if self.step % self.arguments.every == 0 or self.share >= 1:
                self.spent = time.monotonic() - started
                self._save()
            for group in self.optimizer.param_groups:
                group["lr"] = self.arguments.rate / _RATE * _rate(self.step, self.share)

    def _train_step(self) -> float:
        # Shapes are learnt much faster where they always stand at one place; then they learn to move.
        moved = 1.0 if self.arguments.unet else (self.share - _MOVE_FROM) / (_MOVE_UNTIL - _MOVE_FROM)
        spread = _SPREAD * min(1.0, max(0.0, moved))
        images, texts = self.data.pictures(self.arguments.batch, spread)
        loss = self._loss(_to_tensor(images), texts)
        self.optimizer.zero_grad()
        loss.backward()
        _average_gradients([self.unet])
        nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        self._follow()
        return loss.item()

    @torch.no_grad()
    def _embeds(self, texts: list[str]) -> torch.Tensor:
        return self.text(_tokens(self.tokenizer, texts)).last_hidden_state

    def _loss(self, pixels: torch.Tensor, texts: list[str]) -> torch.Tensor:
        with torch.no_grad():
            latents = self.encoder(pixels) * self.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        # Biased towards noise, where the text decides what the picture is of.
        timesteps = (torch.rand(len(latents)).pow(0.75) * self.scheduler.config.num_train_timesteps).long()
        noisy = self.scheduler.add_noise(latents, noise, timesteps)
        target = self.scheduler.get_velocity(latents, noise, timesteps)
        dropped = torch.rand(len(texts)) < _CAPTION_DROPOUT
        nothing = self.nothing.expand(len(texts), -1, -1)
        embeds = torch.where(dropped[:, None, None], nothing, self._embeds(texts))
        return functional.mse_loss(self.unet(noisy, timesteps, embeds).sample, target)

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the averaged weights, which are what is shipped, towards the trained ones."""
        decay = min(_EMA, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.unet.parameters()), 1 - decay)

    def _resume(self) -> None:
        path = self.arguments.out / "checkpoint.pt"
        if not path.exists():
            if self.arguments.unet is not None:
                self.unet.load_state_dict(UNet2DConditionModel.from_pretrained(self.arguments.unet).state_dict())
                self.average = copy.deepcopy(self.unet)
            return
        state = torch.load(path, weights_only=True)
        self.step, self.spent = state["step"], state["spent"]
        self.unet.load_state_dict(state["unet"])
        self.average.load_state_dict(state["average"])
        if state["optimizer"] is not None:
            self.optimizer.load_state_dict(state["optimizer"])

    def _save(self) -> None:
        if dist.get_rank() != 0:
            return
        state = {
            "step": self.step,
            "spent": self.spent,
            "unet": self.unet.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        temporary = self.arguments.out / "checkpoint.tmp"
        torch.save(state, temporary)
        temporary.replace(self.arguments.out / "checkpoint.pt")
        export(self.arguments.out / "pipeline", self.vae, self.tokenizer, self.text, self.average)


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
