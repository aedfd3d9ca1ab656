"""diffcluster: diffusion models served by encoder, denoiser and decoder processes."""

__version__ = "0.1.0"
__all__ = ["__version__"]
