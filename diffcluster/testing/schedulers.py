"""Schedulers of the real families, with their settings."""

from __future__ import annotations

from typing import Any, Final

import diffusers

__all__ = ["cogvideox_ddim", "dpm", "dpm_flow", "euler", "flow", "pndm", "unipc_flow"]

_STABLE_DIFFUSION: Final[dict[str, Any]] = {
    "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
}  # fmt: skip


def pndm() -> Any:
    """Of Stable Diffusion 1.5: calls the denoiser once more than there are steps."""
    return diffusers.PNDMScheduler(**_STABLE_DIFFUSION, skip_prk_steps=True, set_alpha_to_one=False)


def euler() -> Any:
    """Of Stable Diffusion XL."""
    return diffusers.EulerDiscreteScheduler(**_STABLE_DIFFUSION, timestep_spacing="leading")


def dpm() -> Any:
    """Of PixArt-Sigma."""
    return diffusers.DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=0.0001, beta_end=0.02)


def dpm_flow(shift: float) -> Any:
    """Of Sana."""
    return diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def unipc_flow(shift: float) -> Any:
    """Of Wan."""
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def flow(shift: float = 1.0, *, dynamic: bool = False, shift_terminal: float | None = None) -> Any:
    """Of rectified flow models; a `dynamic` shift grows with the number of latent pixels."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        shift=shift, use_dynamic_shifting=dynamic, shift_terminal=shift_terminal
    )


def cogvideox_ddim() -> Any:
    """Of CogVideoX."""
    return diffusers.CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        set_alpha_to_one=True,
        snr_shift_scale=3.0,
        timestep_spacing="trailing",
    )
